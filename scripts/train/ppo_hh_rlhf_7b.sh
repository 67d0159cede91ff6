#!/usr/bin/env bash
# A reward model from hh-rlhf's helpful pairs (in TRL's form: prompt, chosen and rejected as messages), then PPO of the
# same Qwen2.5-7B-Instruct with it as reward and as the critic's start, on one node of eight 80 GB GPUs.
# The reward model is kept, so that the recipe can be started again.
# Numbers: the sizes are from no source that reports any; this has not been run here.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ "${VIRTUAL_ENV:-}" ] || PATH="$PWD/.venv/bin:$PATH" # the active environment, else that of scripts/setup.sh
model=Qwen/Qwen2.5-7B-Instruct data=trl-lib/hh-rlhf-helpful-base
torchrun --nproc_per_node 8 reward_model.py --model "$model" --shard fsdp --dataset "$data" \
    --output_dir runs --run_name hh-reward --resume --max_length 1024 --batch_size 128 --learning_rate 5e-6 --centre_coef 0.01
torchrun --nproc_per_node 8 ppo.py --model "$model" --shard fsdp --dataset "$data" \
    --reward runs/hh-reward/final --value_model runs/hh-reward/final --system_prompt "" --rollout_backend vllm \
    --rollout_batch_size 512 --mini_batch_size 128 --total_episodes 43520 --max_prompt_length 768 \
    --max_response_length 512 --kl_coef 0.02 "$@"
