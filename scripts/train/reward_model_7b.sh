#!/usr/bin/env bash
# Reward model from Qwen2.5-7B-Instruct on UltraFeedback's pairs, one pass, on one node of eight 80 GB GPUs.
# Numbers: the sizes are from no source that reports any; this has not been run here.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ "${VIRTUAL_ENV:-}" ] || PATH="$PWD/.venv/bin:$PATH" # the active environment, else that of scripts/setup.sh
torchrun --nproc_per_node 8 reward_model.py --model Qwen/Qwen2.5-7B-Instruct --shard fsdp \
    --dataset trl-lib/ultrafeedback_binarized --max_length 2048 --batch_size 128 --learning_rate 5e-6 \
    --centre_coef 0.01 "$@"
