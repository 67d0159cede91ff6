#!/usr/bin/env bash
# Makes the figures of README.md and docs/ anew, on a CPU, into results/. A part that is interrupted goes on when the
# command runs again at the same commit; parts that are done are skipped. The runs stay in runs/evidence-COMMIT.
#   bash scripts/evidence.sh                   all parts: days on two cores, smollm2 and variants most of them
#   bash scripts/evidence.sh demo environment  some of them; two commands with different parts may run side by side
# It cannot make results/gpu.md and results/agreement.md: one needs a GPU, the other packages of its own (docs/evidence.md).
set -euo pipefail
cd "$(dirname "$0")/.."
all="demo environment reward_model sevens smollm2 trl memory invariance variants"
read -ra parts <<<"${*:-$all}"
for part in "${parts[@]}"; do
    if [[ " $all " != *" $part "* ]]; then
        echo "error: no part called '$part'; there are $all" >&2
        exit 2
    fi
done

bash scripts/setup.sh
export VIRTUAL_ENV=$PWD/.venv PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
commit=$(git rev-parse --short=7 HEAD)
git diff --quiet HEAD -- '*.py' '*.sh' assets || echo "warning: files differ from commit $commit" >&2
export RUNS="runs/evidence-$commit"
mkdir -p "$RUNS"
seeds="1 2 3"

demo() { # the name of a run, the demo, further flags
    bash scripts/demo.sh "$2" --output_dir "$RUNS" --run_name "$1" --resume "${@:3}"
}

summarize() { # a file of results/, and the names of its runs
    python scripts/summarize.py "${@:2}" --output "results/$1.json" --command "bash scripts/evidence.sh $part"
}

runs_of() { # their folders, in order of name
    for name in "$@"; do echo "$RUNS/$name"; done
}

written() { # whether a file of results/ is of this commit
    grep -qs "$commit" "results/$1"
}

part_demo() {
    for seed in $seeds; do
        for algorithm in grpo rloo ppo; do demo "$algorithm-$seed" "$algorithm" --seed "$seed"; done
    done
    # shellcheck disable=SC2046
    summarize demo $(runs_of {grpo,rloo,ppo}-{1,2,3})
    cp "$RUNS/grpo-1/curves.png" assets/demo.png
}

part_environment() {
    for seed in $seeds; do
        for algorithm in grpo rloo ppo; do
            demo "environment-$algorithm-$seed" "environment-$algorithm" --seed "$seed"
        done
    done
    # shellcheck disable=SC2046
    summarize environment $(runs_of environment-{grpo,rloo,ppo}-{1,2,3})
}

part_reward_model() { # a reward model, and PPO on it: with a KL that holds, with one that does not, and with it as critic
    for seed in $seeds; do demo "reward_model-$seed" reward_model --seed "$seed"; done
    scored=(--reward gsm8k "$RUNS/reward_model-1/final" --reward_weights 0 1)
    demo ppo-on-reward_model ppo "${scored[@]}" --kl_coef 0.05
    demo ppo-exploits-reward_model ppo "${scored[@]}" --kl_coef 0.001
    demo ppo-critic-from-reward_model ppo --value_model "$RUNS/reward_model-1/final" --critic_gae_lambda 1 \
        --critic_num_epochs 4 --value_clip 0 --critic_lr_schedule linear --critic_warmup_steps 20
    # shellcheck disable=SC2046
    summarize reward_model $(runs_of reward_model-{1,2,3} ppo-{on,exploits,critic-from}-reward_model)
}

part_sevens() { # a reward that counts sevens: what PPO's critic is worth where it can learn
    run=(--reward scripts/train/sevens.py:sevens --no-non_stop_penalty --total_episodes 7680 --eval_every 0 --save_every 0)
    critic=(--critic_gae_lambda 1 --critic_num_epochs 4)
    for seed in $seeds; do
        demo "sevens-ppo-$seed" ppo "${run[@]}" "${critic[@]}" --seed "$seed"
        demo "sevens-frozen-$seed" ppo "${run[@]}" "${critic[@]}" --critic_learning_rate 1e-12 --seed "$seed"
        demo "sevens-rloo-$seed" rloo "${run[@]}" --mini_batch_size 128 --seed "$seed"
    done
    # shellcheck disable=SC2046
    summarize sevens $(runs_of sevens-{ppo,frozen,rloo}-{1,2,3})
}

part_smollm2() {
    recipe() { # the name of a run, the recipe, further flags
        NAME="$1" bash scripts/train/smollm2.sh "$2" --resume "${@:3}"
    }
    python -m pip --disable-pip-version-check install --quiet -r assets/smollm2/requirements.txt
    for seed in $seeds; do recipe "smollm2-grpo-$seed" grpo --seed "$seed"; done
    recipe smollm2-rloo rloo --total_episodes 1024 --eval_every 16
    recipe smollm2-ppo ppo --total_episodes 1024 --eval_every 16
    recipe smollm2-distill distill --teacher "$RUNS/smollm2-grpo-3/final"
    recipe smollm2-brief brief
    recipe smollm2-reward_model reward_model --total_episodes 1024 --eval_every 16
    # shellcheck disable=SC2046
    summarize smollm2 $(runs_of smollm2-grpo-{1,2,3} smollm2-{rloo,ppo,distill,brief,reward_model-pairs,reward_model})
    cp "$RUNS/smollm2-grpo-1/curves.png" assets/smollm2.png
}

part_trl() { # requires trl==1.16.0, which scripts/test.sh installs
    work=(demo "long tail" bf16 float32)
    written trl.md || python scripts/benchmark.py trl --work "${work[@]}" --model "$(python scripts/smollm2.py)" \
        --output results/trl.md --picture assets/trl.png
}

part_memory() { # the table of docs/models_and_memory.md
    written memory.md && return
    {
        echo "# GB of a GPU of 80 GB: the last line of \`python scripts/memory.py COMMAND --model MODEL\`, at $commit"
        echo
        for run in "grpo --gpus 1" "grpo --gpus 8" "grpo --gpus 1 --lora_rank 32" "ppo --gpus 8"; do
            for model in Qwen/Qwen2.5-{0.5B,1.5B,3B,7B,14B,32B} meta-llama/Llama-3.1-8B Qwen/Qwen3-30B-A3B; do
                # shellcheck disable=SC2086
                echo "- $run, $model: $(python scripts/memory.py $run --gpu_gb 80 --model "$model" 2>&1 | tail -n 1)"
            done
        done
    } >"$RUNS/memory.md"
    mv "$RUNS/memory.md" results/memory.md
}

part_invariance() {
    written invariance.txt && return
    {
        echo "python tests/test_invariance.py, at $commit"
        python tests/test_invariance.py
    } >"$RUNS/invariance.txt"
    mv "$RUNS/invariance.txt" results/invariance.txt
}

# Names and flags of grpo.py. With four updates of a rollout the ratio is not 1; with --async_steps vLLM samples.
variants="
grpo
dr_grpo             --loss dr_grpo
dapo                --loss dapo
gspo                --loss gspo
cispo               --loss cispo
sapo                --loss sapo
dppo                --loss dppo
no_scale            --advantage_scale none
token_mean          --loss_aggregation token
async2              --async_steps 2
async4              --async_steps 4
async4_dppo         --async_steps 4 --loss dppo
async4_dppo_kl      --async_steps 4 --loss dppo_kl
async4_truncate     --async_steps 4 --rollout_correction truncate
async4_mask         --async_steps 4 --rollout_correction mask
async4_sequence     --async_steps 4 --rollout_correction sequence_mask
async4_geometric    --async_steps 4 --rollout_correction geometric
"

part_variants() { # which choices matter: five seeds of the tiny task; requires vLLM, which scripts/test.sh installs
    names=()
    for seed in 1 2 3 4 5; do # whole seeds first: an interrupted part can compare those that it has
        while read -r name flags; do
            [ -n "$name" ] || continue
            case "$flags" in *async*) flags="$flags --rollout_backend vllm" ;; esac
            # shellcheck disable=SC2086
            demo "variants-$name-$seed" grpo --mini_batch_size 64 --total_episodes 15360 --eval_every 10 $flags --seed "$seed"
            names+=("variants-$name-$seed")
        done <<<"$variants"
    done
    # shellcheck disable=SC2046
    summarize variants $(runs_of "${names[@]}")
    python scripts/variants.py results/variants.json --picture assets/variants.png >results/variants.md
}

for part in "${parts[@]}"; do "part_$part"; done
