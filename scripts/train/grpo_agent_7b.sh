#!/usr/bin/env bash
# GRPO of Qwen2.5-7B-Instruct as the model behind an agent (docs/agents.md), on one node of eight 80 GB GPUs: by default
# the guessing game of assets/guess, in rows that say its rules; else AGENT=path/agent.py:play DATASET=rows.jsonl.
# Numbers: the sizes are from no source that reports any; this has not been run here.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ "${VIRTUAL_ENV:-}" ] || PATH="$PWD/.venv/bin:$PATH" # the active environment, else that of scripts/setup.sh
torchrun --nproc_per_node 8 grpo.py --model Qwen/Qwen2.5-7B-Instruct --shard fsdp \
    --dataset "${DATASET:-assets/guess/rules.jsonl}" --eval_share 0.05 \
    --reward episode --agent "${AGENT:-assets/guess/agent.py:play}" --max_turns 20 --agent_timeout 600 \
    --rollout_backend vllm --rollout_batch_size 64 --group_size 8 --total_episodes 64000 \
    --max_prompt_length 1024 --max_response_length 4096 "$@"
