#!/usr/bin/env bash
# A few steps of the bundled tiny model on a CPU, in less than a minute: all phases of a run, to debug a fork with.
#   bash scripts/debug/cpu.sh           bash scripts/debug/cpu.sh ppo --precision float64
#   bash scripts/debug/cpu.sh path/to/fork.py      a fork of any of the five scripts
set -euo pipefail
cd "$(dirname "$0")/../.."
[ "${VIRTUAL_ENV:-}" ] || PATH="$PWD/.venv/bin:$PATH" # the active environment, else that of scripts/setup.sh
script=grpo.py
case "${1:-}" in grpo | rloo | ppo | distill | reward_model) script=$1.py && shift ;; *.py) script=$1 && shift ;; esac
sampling=(--system_prompt "" --reward gsm8k --max_prompt_length 16 --max_response_length 48 --eval_prompts 16 --rollout_batch_size 8)
if grep -q "^    teacher:" "$script"; then # distill.py or a fork of it: the model learns from itself behind another prompt
    own=("${sampling[@]}" --teacher self --teacher_prompt "{answer}" --passes 0.002)
elif grep -q "^    rollout_batch_size:" "$script"; then
    own=("${sampling[@]}" --group_size 4 --mini_batch_size 16 --total_episodes 160)
else # reward_model.py
    own=(--max_length 64 --batch_size 512 --eval_pairs 64)
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" # for a fork in another folder
python "$script" --run_name "debug-$(basename "$script" .py)-$(date +%Y%m%d-%H%M%S)" --model assets/tiny \
    --dataset arithmetic "${own[@]}" --micro_batch_tokens 2048 --learning_rate 3e-4 --eval_every 2 --save_every 2 "$@"
