#!/usr/bin/env bash
# GRPO of Qwen2.5-7B on two nodes of eight 80 GB GPUs: the first trains while four vLLM servers on the second sample the
# next two steps. Numbers: the sizes are from no source that reports any; this has not been run here.
# VLLM_API_KEY is a key of your choice, exported on both nodes: who has it can run code on the second one.
#   bash scripts/train/grpo_async_two_nodes.sh serve HOST      on the second node, HOST its address in the cluster
#   bash scripts/train/grpo_async_two_nodes.sh train HOST      on the first node
set -euo pipefail
cd "$(dirname "$0")/../.."
[ "${VIRTUAL_ENV:-}" ] || PATH="$PWD/.venv/bin:$PATH" # the active environment, else that of scripts/setup.sh
role=${1:?serve or train} host=${2:?address of the node that serves}
export VLLM_API_KEY=${VLLM_API_KEY:?a key, the same on both nodes}
model=Qwen/Qwen2.5-7B port=${PORT:-8000} servers=()
shift 2
case "$role" in
serve)
    trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
    for ((number = 0; number < ${SERVERS:-4}; number++)); do
        CUDA_VISIBLE_DEVICES=$((2 * number)),$((2 * number + 1)) python scripts/vllm_server.py --model "$model" \
            --host "$host" --port $((port + number)) --tensor_parallel 2 --max_length 4096 "$@" &
    done
    wait
    ;;
train)
    for ((number = 0; number < ${SERVERS:-4}; number++)); do
        servers+=("http://$host:$((port + number))")
        until curl --silent --fail --output /dev/null "${servers[number]}/health"; do sleep 1; done
    done
    torchrun --nproc_per_node 8 grpo.py --model "$model" --shard fsdp \
        --dataset agentica-org/DeepScaleR-Preview-Dataset --eval_dataset HuggingFaceH4/MATH-500 \
        --reward math --rollout_backend server --rollout_servers "${servers[@]}" --async_steps 2 \
        --rollout_correction truncate --rollout_batch_size 128 --group_size 8 --mini_batch_size 1024 \
        --total_episodes 409600 --max_prompt_length 1024 --max_response_length 3072 "$@"
    ;;
*)
    echo "error: '$role' is neither serve nor train" >&2
    exit 2
    ;;
esac
