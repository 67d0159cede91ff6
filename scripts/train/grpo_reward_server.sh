#!/usr/bin/env bash
# GRPO of Qwen2.5-7B-Instruct on Knights and Knaves of 3 to 7 people with a reward server, as PaddleNLP's GRPO runs, on
# one node of eight 80 GB GPUs. MODEL=meta-llama/Llama-3.1-8B-Instruct trains Llama. Learning rate and its schedule, KL,
# temperature and responses per prompt are those of PaddleNLP's config/qwen/grpo_argument.json, which has longer responses
# (4,096 tokens) and evaluates on 5 people only.
# Numbers: PaddleNLP's page reports none; this has not been run here.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ "${VIRTUAL_ENV:-}" ] || PATH="$PWD/.venv/bin:$PATH" # the active environment, else that of scripts/setup.sh
port=${PORT:-8731}
python scripts/reward_server.py --reward scripts/train/knights.py:score --port "$port" &
server=$!
trap 'kill "$server" 2>/dev/null || true' EXIT
until curl --silent --fail --output /dev/null "http://127.0.0.1:$port/health"; do
    kill -0 "$server" # ends the script where the server has ended
    sleep 1
done
torchrun --nproc_per_node 8 grpo.py --model "${MODEL:-Qwen/Qwen2.5-7B-Instruct}" --shard fsdp \
    --dataset scripts/train/knights_train.json --eval_dataset scripts/train/knights_test.json \
    --system_prompt "Think step by step, and end with who is a knight and who is a knave, one line a person." \
    --reward "http://127.0.0.1:$port" --rollout_batch_size 64 --group_size 8 --mini_batch_size 128 \
    --total_episodes 51200 --max_response_length 2048 --temperature 0.7 \
    --learning_rate 5e-7 --lr_schedule cosine --min_learning_rate 2e-7 --kl_coef 0.001 "$@"
