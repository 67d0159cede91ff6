#!/usr/bin/env bash
# A base model on GSM8K, on one 80 GB GPU: two passes over the worked solutions, which teach the form of an answer, then
# GRPO, which gets the flags that you add. The first run is kept, so that the recipe can be started again.
# Numbers: the sizes are from no source that reports any; this has not been run here.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ "${VIRTUAL_ENV:-}" ] || PATH="$PWD/.venv/bin:$PATH" # the active environment, else that of scripts/setup.sh
common=(--dataset openai/gsm8k --reward gsm8k --system_prompt "" --max_prompt_length 512 --max_response_length 512)
python distill.py --model Qwen/Qwen2.5-0.5B --output_dir runs --run_name sft-gsm8k --resume "${common[@]}" \
    --on_policy_share 0 --passes 2 --rollout_batch_size 128 --learning_rate 1e-5 --lr_schedule cosine
python grpo.py --model runs/sft-gsm8k/final "${common[@]}" --rollout_batch_size 128 --group_size 8 \
    --mini_batch_size 512 --total_episodes 119808 --learning_rate 1e-6 "$@"
