#!/usr/bin/env bash
# On-policy distillation of Qwen3-8B into Qwen3-0.6B on GSM8K, without thoughts, on eight 80 GB GPUs.
# Numbers: the sizes are from no source that reports any; this has not been run here.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ "${VIRTUAL_ENV:-}" ] || PATH="$PWD/.venv/bin:$PATH" # the active environment, else that of scripts/setup.sh
torchrun --nproc_per_node 8 distill.py --model Qwen/Qwen3-0.6B --teacher Qwen/Qwen3-8B \
    --chat_template_kwargs '{"enable_thinking": false}' --dataset openai/gsm8k \
    --reward math --system_prompt "Please reason step by step, and put your final answer within \\boxed{}." \
    --rollout_batch_size 512 --mini_batch_size 256 --passes 8 --learning_rate 1e-5 --lr_schedule linear \
    --max_prompt_length 512 --max_response_length 1024 --rollout_backend vllm "$@"
