#!/usr/bin/env bash
# PPO of Llama-3.1-8B (Tulu 3 after DPO) on the mixture of Tulu 3's last stage (GSM8K, MATH and prompts with IFEval's
# constraints), on two nodes of eight 80 GB GPUs: vLLM samples the next step while this one trains, and a response without
# a stop token scores -10. `math` scores the rows named gsm8k and MATH, ifeval those of that name (pip install
# if-verifiable==0.1.2); held out: GSM8K's test rows in the same form. Learning rate, KL, lengths, rewards (10 for a right
# answer) and the critic's start as in open-instruct's ppo_8b.sh for Tulu 3.
# Numbers: open-instruct reports none beside that script; this has not been run here.
#   bash scripts/train/ppo_llama3.1_8b_2nodes.sh 0 HOST        on the first node, HOST its address
#   bash scripts/train/ppo_llama3.1_8b_2nodes.sh 1 HOST        on the second; both need the same --output_dir
set -euo pipefail
cd "$(dirname "$0")/../.."
[ "${VIRTUAL_ENV:-}" ] || PATH="$PWD/.venv/bin:$PATH" # the active environment, else that of scripts/setup.sh
rank=${1:?rank of this node, 0 or 1} host=${2:?address of the first node}
shift 2
torchrun --nnodes 2 --node_rank "$rank" --rdzv_endpoint "$host:${PORT:-29500}" --nproc_per_node 8 \
    ppo.py --model allenai/Llama-3.1-Tulu-3-8B-DPO --value_model allenai/Llama-3.1-Tulu-3-8B-RM \
    --dataset allenai/RLVR-GSM-MATH-IF-Mixed-Constraints --eval_dataset allenai/RLVR-GSM --system_prompt "" \
    --reward math ifeval --reward_weights 10 10 \
    --non_stop_penalty --penalty_reward_value -10 --stop_token eos --temperature 1 \
    --shard fsdp --rollout_backend vllm --async_steps 1 \
    --rollout_batch_size 256 --mini_batch_size 256 --num_epochs 1 --total_episodes 2000128 \
    --max_prompt_length 2048 --max_response_length 2048 --micro_batch_tokens 8192 --kv_cache_gb 12 \
    --learning_rate 3e-7 --kl_coef 0.05 "$@"
