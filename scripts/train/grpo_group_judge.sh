#!/usr/bin/env bash
# GRPO of Qwen2.5-7B-Instruct on hh-rlhf's helpful prompts with a judge that ranks the responses of a group, on one node
# of eight 80 GB GPUs. JUDGE_URL=http://host:8000 is an OpenAI-compatible address, such as vLLM's, JUDGE_MODEL its model.
# The mean rank among a policy's own responses never changes, so nothing is evaluated.
# Numbers: the sizes are from no source that reports any; this has not been run here.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ "${VIRTUAL_ENV:-}" ] || PATH="$PWD/.venv/bin:$PATH" # the active environment, else that of scripts/setup.sh
torchrun --nproc_per_node 8 grpo.py --model Qwen/Qwen2.5-7B-Instruct --shard fsdp \
    --dataset trl-lib/hh-rlhf-helpful-base --reward scripts/train/group_judge.py:score --timeout 600 --eval_every 0 \
    --rollout_batch_size 64 --group_size 8 --mini_batch_size 128 --total_episodes 51200 \
    --max_prompt_length 768 --max_response_length 512 --rollout_backend vllm "$@"
