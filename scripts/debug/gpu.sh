#!/usr/bin/env bash
# A few steps on one GPU of 40 GB, Qwen2.5-0.5B-Instruct on GSM8K with all that a large run does, to see that the machine
# works: vLLM, bf16, checkpoints, evaluation. Minutes; what it learns is not the point.
#   bash scripts/debug/gpu.sh           bash scripts/debug/gpu.sh ppo --group_size 1    .../gpu.sh path/to/fork.py
set -euo pipefail
cd "$(dirname "$0")/../.."
[ "${VIRTUAL_ENV:-}" ] || PATH="$PWD/.venv/bin:$PATH" # the active environment, else that of scripts/setup.sh
script=grpo.py
case "${1:-}" in grpo | rloo | ppo) script=$1.py && shift ;; *.py) script=$1 && shift ;; esac
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" # for a fork in another folder
python "$script" --run_name "debug-$(basename "$script" .py)-$(date +%Y%m%d-%H%M%S)" --model Qwen/Qwen2.5-0.5B-Instruct \
    --rollout_batch_size 8 --group_size 4 --mini_batch_size 16 --total_episodes 128 --max_response_length 256 \
    --eval_every 2 --eval_prompts 16 --eval_samples 1 --save_every 2 "$@"
