#!/usr/bin/env bash
# GRPO of Qwen2.5-7B on one node of eight 80 GB GPUs: six train while a vLLM server on the other two samples the next
# two steps. Numbers: the sizes are from no source that reports any; this has not been run here.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ "${VIRTUAL_ENV:-}" ] || PATH="$PWD/.venv/bin:$PATH" # the active environment, else that of scripts/setup.sh
model=Qwen/Qwen2.5-7B port=${PORT:-8000}
CUDA_VISIBLE_DEVICES=6,7 python scripts/vllm_server.py --model "$model" --port "$port" --tensor_parallel 2 \
    --max_length 4096 &
server=$!
trap 'kill "$server" 2>/dev/null || true' EXIT
until curl --silent --fail --output /dev/null "http://127.0.0.1:$port/health"; do
    kill -0 "$server" # ends the script where the server has ended
    sleep 1
done
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5 torchrun --nproc_per_node 6 grpo.py --model "$model" --shard fsdp \
    --dataset agentica-org/DeepScaleR-Preview-Dataset --eval_dataset HuggingFaceH4/MATH-500 \
    --reward math --rollout_backend server --rollout_servers "http://127.0.0.1:$port" --async_steps 2 \
    --rollout_correction truncate --rollout_batch_size 96 --group_size 8 --mini_batch_size 768 --total_episodes 384000 \
    --max_prompt_length 1024 --max_response_length 3072 "$@"
