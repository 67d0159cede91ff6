#!/usr/bin/env bash
# GRPO of Qwen2.5-32B on the problems of DeepScaleR, held out: MATH-500, on two nodes of eight 80 GB GPUs. FSDP
# cuts weights, gradients and AdamW's moments over all 16: 33 GB a GPU. Four ranks share a vLLM engine. Loss, groups,
# reward, length penalty and weight decay as in DAPO (arXiv:2503.14476), which trained this model with 20,480 tokens per
# response. Its reward is +1 or -1: the weight of 2 makes 2 or 0, whose advantages are the same.
# Numbers: the sizes are from no source that reports any; this has not been run here.
#   bash scripts/train/grpo_qwen2.5_32b_2nodes.sh 0 HOST        on the first node, HOST its address
#   bash scripts/train/grpo_qwen2.5_32b_2nodes.sh 1 HOST        on the second; both need the same --output_dir
set -euo pipefail
cd "$(dirname "$0")/../.."
[ "${VIRTUAL_ENV:-}" ] || PATH="$PWD/.venv/bin:$PATH" # the active environment, else that of scripts/setup.sh
rank=${1:?rank of this node, 0 or 1} host=${2:?address of the first node}
shift 2
torchrun --nnodes 2 --node_rank "$rank" --rdzv_endpoint "$host:${PORT:-29500}" --nproc_per_node 8 \
    grpo.py --model Qwen/Qwen2.5-32B --shard fsdp --loss dapo --kl_coef 0 \
    --dataset agentica-org/DeepScaleR-Preview-Dataset --eval_dataset HuggingFaceH4/MATH-500 --eval_prompts 0 \
    --reward math --reward_weights 2 --weight_decay 0.1 --rollout_backend vllm --vllm_tensor_parallel 4 --kv_cache_gb 12 \
    --rollout_batch_size 128 --group_size 16 --mini_batch_size 512 --total_episodes 614400 --filter_groups refill \
    --max_prompt_length 1024 --max_response_length 8192 --overlong_buffer 2048 --micro_batch_tokens 9216 "$@"
