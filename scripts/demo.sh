#!/usr/bin/env bash
# Trains a small model on a CPU; installs what is missing first. The bundled tiny model takes a few minutes:
#   bash scripts/demo.sh                     3-digit addition by GRPO
#   bash scripts/demo.sh ppo                 or rloo, or reward_model
#   bash scripts/demo.sh distill             trains a teacher on worked solutions, and then its student
#   bash scripts/demo.sh environment         a game of several turns by GRPO; or environment-ppo, environment-rloo
#   bash scripts/demo.sh agent               the same game by a program that asks through OpenAI's API; requires vLLM,
#                                            which `bash scripts/test.sh` installs where there is no GPU
#   bash scripts/demo.sh grpo --seed 2       with other flags; they override the ones below
# A pretrained model, SmolLM2-135M-Instruct (a download of 93 MB), takes about 80 minutes on one core with bf16:
#   bash scripts/demo.sh smollm2             instructions whose fulfilment a program checks, by GRPO
#   bash scripts/demo.sh smollm2 --seed 2    with other flags; scripts/train/smollm2.sh has the other algorithms
set -euo pipefail
cd "$(dirname "$0")/.."
demo=${1:-grpo}
[ $# -gt 0 ] && shift
algorithm=${demo#environment-}
case "$demo" in environment | agent) algorithm=grpo ;; esac

# What those that sample share; the rest is each one's own, or the task's.
sampling=(--system_prompt "" --max_prompt_length 16 --micro_batch_tokens 4096 --learning_rate 3e-4 --warmup_ratio 0.04
    --eval_every 20 --eval_prompts 256 --eval_samples 4 --save_every 60)
rl=("${sampling[@]}" --total_episodes 30720 --kl_coef 0.001)
case "$algorithm" in
grpo | rloo) own=("${rl[@]}" --rollout_batch_size 32 --group_size 8 --mini_batch_size 256) ;;
ppo) own=("${rl[@]}" --rollout_batch_size 256 --mini_batch_size 128 --critic_learning_rate 1e-3) ;;
distill) own=("${sampling[@]}" --rollout_batch_size 128 --learning_rate 1e-3 --passes 0.256 --eval_every 10) ;;
reward_model)
    own=(--max_length 64 --batch_size 64 --passes 3 --micro_batch_tokens 4096 --learning_rate 1e-3
        --centre_coef 0.001 --eval_every 100 --eval_pairs 500 --save_every 500)
    ;;
esac
case "$demo" in
smollm2) ;; # scripts/train/smollm2.sh has its flags
grpo | rloo | ppo | distill) task=(--model assets/tiny --dataset arithmetic --reward gsm8k --max_response_length 48) ;;
reward_model) task=(--model assets/tiny --dataset arithmetic) ;;
agent | environment | environment-grpo | environment-rloo | environment-ppo)
    player=(--environment assets/guess/game.py:GuessTheNumber)
    [ "$demo" = agent ] && player=(--agent assets/guess/agent.py:play --rollout_backend vllm)
    task=(--model assets/guess --dataset assets/guess/train.jsonl --eval_dataset assets/guess/test.jsonl
        "${player[@]}" --reward episode
        --max_response_length 64
        --total_episodes 15360 --mini_batch_size 128 --learning_rate 6e-4 --lr_schedule linear)
    ;;
*)
    echo "error: no demo called '$demo'; there are grpo, rloo, ppo, distill, reward_model, agent, environment," \
        "environment-rloo, environment-ppo and smollm2" >&2
    exit 2
    ;;
esac

bash scripts/setup.sh
name=demo-$demo-$(date +%Y%m%d-%H%M%S)
if [ "$demo" = smollm2 ]; then
    if ! .venv/bin/python -c 'import gguf, if_verifiable' 2>/dev/null; then
        .venv/bin/python -m pip --disable-pip-version-check install --quiet -r assets/smollm2/requirements.txt || {
            echo "error: the packages of assets/smollm2/requirements.txt cannot be installed; \`bash scripts/demo.sh\`" \
                "trains the bundled tiny model and needs none of them" >&2
            exit 2
        }
    fi
    export VIRTUAL_ENV=$PWD/.venv PATH="$PWD/.venv/bin:$PATH" NAME="$name"
    exec bash scripts/train/smollm2.sh grpo "$@"
fi
case "${task[*]} $*" in *"--rollout_backend vllm"*)
    if ! .venv/bin/python -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("vllm"))'; then
        echo "error: vLLM is not installed; where there is no GPU, \`bash scripts/test.sh\` installs it" >&2
        exit 2
    fi
    ;;
esac
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # two are faster on idle cores, and ten times slower on busy ones
if [ "$demo" = distill ]; then # the teacher: the same model after supervised fine-tuning on worked solutions
    .venv/bin/python distill.py --run_name "$name-teacher" --no-gradient_checkpointing --adam_betas 0.9 0.95 "${own[@]}" "${task[@]}" --eval_every 40 \
        --on_policy_share 0
    task+=(--teacher "runs/$name-teacher/final")
fi
exec .venv/bin/python "$algorithm.py" --run_name "$name" --no-gradient_checkpointing --adam_betas 0.9 0.95 "${own[@]}" "${task[@]}" "$@"
