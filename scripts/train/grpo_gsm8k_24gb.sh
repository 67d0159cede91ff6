#!/usr/bin/env bash
# GRPO of Qwen2.5-0.5B-Instruct on GSM8K on one 24 GB card: 4 prompts of 4 responses per step, one pass in 1,868 steps.
# Weights stay in float32 here: 16 bytes per parameter, with which 0.5B fits and 1.5B does not.
# Numbers: those sizes come from notes on a GRPO demo for TRL, which report 13 hours on one RTX 4090 and no score; not
# reproduced here, as this has not been run.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ "${VIRTUAL_ENV:-}" ] || PATH="$PWD/.venv/bin:$PATH" # the active environment, else that of scripts/setup.sh
python grpo.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset openai/gsm8k --reward math \
    --rollout_batch_size 4 --group_size 4 --mini_batch_size 16 --total_episodes 29888 \
    --max_prompt_length 256 --max_response_length 768 --micro_batch_tokens 4096 \
    --kv_cache_gb 4 --eval_every 200 "$@"
