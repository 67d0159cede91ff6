#!/usr/bin/env bash
# Trains the bundled tiny model on 3-digit addition, on a CPU, in a few minutes; installs what is missing first.
#   bash scripts/demo.sh                     GRPO
#   bash scripts/demo.sh ppo                 or rloo, or reward_model
#   bash scripts/demo.sh grpo --seed 2       with other flags; they override the ones below
set -euo pipefail
cd "$(dirname "$0")/.."
algorithm=${1:-grpo}
[ $# -gt 0 ] && shift

# What the three that sample share; the rest is each one's own.
sampling=(--system_prompt "" --reward gsm8k --max_prompt_length 16 --max_response_length 48
    --total_episodes 30720 --micro_batch_tokens 4096 --learning_rate 3e-4 --warmup_ratio 0.04 --kl_coef 0.001
    --eval_every 20 --eval_prompts 256 --eval_samples 4 --save_every 60)
case "$algorithm" in
grpo | rloo) own=("${sampling[@]}" --rollout_batch_size 32 --group_size 8 --mini_batch_size 256) ;;
ppo) own=("${sampling[@]}" --rollout_batch_size 256 --mini_batch_size 128 --critic_learning_rate 1e-3) ;;
reward_model)
    own=(--max_length 64 --batch_size 64 --num_epochs 3 --micro_batch_tokens 4096 --learning_rate 1e-3
        --centre_coef 0.001 --eval_every 100 --eval_pairs 500 --save_every 500)
    ;;
*)
    echo "error: no demo called '$algorithm'; there are grpo, rloo, ppo and reward_model" >&2
    exit 2
    ;;
esac

bash scripts/setup.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # two are faster on idle cores, and ten times slower on busy ones
exec .venv/bin/python "$algorithm.py" \
    --run_name "demo-$algorithm-$(date +%Y%m%d-%H%M%S)" \
    --model assets/tiny --dataset arithmetic --adam_beta2 0.95 "${own[@]}" "$@"
