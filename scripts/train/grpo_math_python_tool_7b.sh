#!/usr/bin/env bash
# GRPO of Qwen2.5-7B-Instruct with a tool that runs Python in the sandbox, on the problems of DeepScaleR, held out:
# MATH-500, on one node of eight 80 GB GPUs. The chat template shows the tool, and what a program prints comes back as
# a message; the answer is read from the last turn.
# Numbers: the sizes are from no source that reports any; this has not been run here.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ "${VIRTUAL_ENV:-}" ] || PATH="$PWD/.venv/bin:$PATH" # the active environment, else that of scripts/setup.sh
torchrun --nproc_per_node 8 grpo.py --model Qwen/Qwen2.5-7B-Instruct --shard fsdp \
    --dataset agentica-org/DeepScaleR-Preview-Dataset --eval_dataset HuggingFaceH4/MATH-500 --eval_prompts 0 \
    --reward math --tools scripts/train/python_tool.py:python --max_turns 6 --timeout 30 \
    --rollout_batch_size 128 --group_size 8 --mini_batch_size 256 --total_episodes 409600 \
    --max_prompt_length 1024 --max_response_length 4096 --rollout_backend vllm "$@"
