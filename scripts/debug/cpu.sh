#!/usr/bin/env bash
# A few steps of the bundled tiny model on a CPU, in less than a minute: all phases of a run, to debug a fork with.
#   bash scripts/debug/cpu.sh           bash scripts/debug/cpu.sh ppo --precision float64
set -euo pipefail
cd "$(dirname "$0")/../.."
algorithm=grpo own=(--rollout_batch_size 8 --group_size 4 --mini_batch_size 16 --total_episodes 160)
case "${1:-}" in grpo | rloo | ppo | reward_model) algorithm=$1 && shift ;; esac
own+=(--system_prompt "" --reward gsm8k --max_prompt_length 16 --max_response_length 48 --eval_prompts 16)
[ "$algorithm" = reward_model ] && own=(--max_length 64 --batch_size 512 --eval_pairs 64)
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
python "$algorithm.py" --run_name "debug-$algorithm-$(date +%Y%m%d-%H%M%S)" --model assets/tiny --dataset arithmetic \
    "${own[@]}" --micro_batch_tokens 2048 --learning_rate 3e-4 --eval_every 2 --save_every 2 "$@"
