#!/usr/bin/env bash
# SmolLM2-135M-Instruct learns to follow instructions whose fulfilment a program checks (assets/instructions.yaml), on
# two CPU cores or one GPU of 24 GB. Held-out prompts are of a tenth by hash; of one kind, frequency, no prompt trains.
#   bash scripts/train/smollm2.sh grpo           or rloo, ppo: about 80 minutes on one core with bf16
#   bash scripts/train/smollm2.sh distill        the model that grpo has trained teaches the one that it began from
#   bash scripts/train/smollm2.sh brief          the model learns what it does behind a system prompt: short answers
#   bash scripts/train/smollm2.sh reward_model   pairs of the model's own responses, a reward model, and GRPO on it
#   bash scripts/train/smollm2.sh gsm8k FOLDER   train.jsonl and test.jsonl of GSM8K: supervised, then GRPO, 100 steps each
# Numbers: results/smollm2.json has three runs of grpo and one of each other recipe, of which rloo, ppo and reward_model
# ran 16 steps.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ "${VIRTUAL_ENV:-}" ] || PATH="$PWD/.venv/bin:$PATH" # the active environment, else that of scripts/setup.sh
recipe=${1:-grpo}
[ $# -gt 0 ] && shift
name=${NAME:-smollm2-$recipe}
runs=${RUNS:-runs} # the folder of its runs
model=${SMOLLM2:-$(python scripts/smollm2.py)}

precision=auto
if ! nvidia-smi >/dev/null 2>&1; then
    precision=bf16
    if ! grep -qE 'amx_bf16|avx512_bf16' /proc/cpuinfo 2>/dev/null; then
        precision=float32
        echo "warning: this CPU has no products of bf16 matrices (AMX, AVX-512 bf16): in float32 a step takes several" \
            "times longer; \`bash scripts/demo.sh\` trains the tiny model" >&2
    fi
fi

common=(--output_dir "$runs" --reward ifeval --system_prompt "" --max_prompt_length 160 --max_response_length 96 --precision "$precision")
training=(--micro_batch_tokens 1024 --no-gradient_checkpointing --adam_betas 0.9 0.95 --warmup_ratio 0.05 --save_every 0)
evaluation=(--eval_dataset assets/smollm2/kinds.json --eval_prompts 96 --eval_samples 2 --eval_every 24 --log_samples 96)
task=(--model "$model" --dataset instructions "${common[@]}" "${training[@]}" "${evaluation[@]}")
groups=(--rollout_batch_size 8 --group_size 8 --filter_groups drop --total_episodes 3072 --kl_coef 0 --learning_rate 4e-5)

case "$recipe" in
grpo | rloo) exec python "$recipe.py" --run_name "$name" "${task[@]}" "${groups[@]}" "$@" ;;
ppo)
    # The critic learns little here. With a lambda below 1 the last tokens would get most of the advantage, and the
    # responses became short.
    exec python ppo.py --run_name "$name" "${task[@]}" --rollout_batch_size 64 --total_episodes 3072 --kl_coef 0 \
        --learning_rate 1e-5 --critic_learning_rate 2e-5 --gae_lambda 1 --critic_warmup_steps 2 --critic_num_epochs 2 "$@"
    ;;
distill)
    exec python distill.py --run_name "$name" "${task[@]}" --teacher "$runs/smollm2-grpo/final" \
        --rollout_batch_size 32 --passes 0.16 --learning_rate 2e-5 "$@"
    ;;
brief)
    exec python distill.py --run_name "$name" "${task[@]}" --teacher "$model" --teacher_system_prompt "Answer in one short sentence." \
        --dataset assets/smollm2/topics.jsonl --eval_dataset assets/smollm2/topics_held_out.jsonl \
        --reward scripts/train/brief.py:at_most_30_words --eval_prompts 24 --rollout_batch_size 16 --passes 1 --learning_rate 1e-4 "$@"
    ;;
reward_model)
    # Both are kept, so that `reward_model --resume` goes on.
    if [ ! -e "$runs/$name-samples/pairs.jsonl" ]; then
        python scripts/evaluate.py --run_name "$name-samples" --model "$model" --dataset instructions@train \
            --num_prompts 192 --samples 8 "${common[@]}"
        python scripts/pairs.py "$runs/$name-samples/samples.jsonl" "$runs/$name-samples/pairs.jsonl"
    fi
    python reward_model.py --resume --run_name "$name-pairs" --model "$model" --dataset "$runs/$name-samples/pairs.jsonl" \
        --output_dir "$runs" --chat_template none --max_length 256 --batch_size 32 --passes 3 --learning_rate 2e-5 \
        --precision "$precision" "${training[@]}"
    exec python grpo.py --run_name "$name" "${task[@]}" "${groups[@]}" --reward "$runs/$name-pairs/final" ifeval \
        --reward_weights 1 0 --kl_coef 0.05 "$@"
    ;;
gsm8k)
    folder=${1:?a folder with train.jsonl and test.jsonl of GSM8K}
    rows=(--output_dir "$runs" --dataset "$folder/train.jsonl" --eval_dataset "$folder/test.jsonl" --reward gsm8k math --system_prompt "" --max_prompt_length 256
        --max_response_length 200 --precision "$precision" --eval_prompts 256 --eval_samples 2 --eval_every 100)
    shift
    python distill.py --resume --run_name "$name-supervised" --model "$model" "${rows[@]}" "${training[@]}" --on_policy_share 0 \
        --rollout_batch_size 32 --passes 0.43 --learning_rate 1e-4
    exec python grpo.py --run_name "$name" --model "$runs/$name-supervised/final" "${rows[@]}" "${training[@]}" \
        --rollout_batch_size 16 --group_size 8 --total_episodes 12800 --kl_coef 0 --learning_rate 1e-5 "$@"
    ;;
*)
    echo "error: no recipe called '$recipe'; there are grpo, rloo, ppo, distill, brief, reward_model and gsm8k" >&2
    exit 2
    ;;
esac
