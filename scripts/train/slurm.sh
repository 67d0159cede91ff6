#!/usr/bin/env bash
# GRPO of Qwen2.5-7B on nodes of eight 80 GB GPUs under Slurm, started in the repository's folder, which they share:
#   sbatch scripts/train/slurm.sh --learning_rate 2e-6          sbatch -N 4 scripts/train/slurm.sh
# Ten minutes before the time limit the trainers get SIGTERM, save and end; the job goes back into the queue, and its
# next start resumes the run. Numbers: the sizes are from no source that reports any; this has only run with stand-ins
# for srun and scontrol.
#SBATCH --job-name=grpo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@600
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start this with sbatch}" # what sbatch runs is a copy elsewhere
[ "${VIRTUAL_ENV:-}" ] || PATH="$PWD/.venv/bin:$PATH" # the active environment, else that of scripts/setup.sh
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")

# On each node. SIGUSR1 becomes a SIGTERM for the trainers: torchrun would kill them after 30 s, too soon to save.
on_node='
(trap "" USR1 && exec "$@") &
agent=$!
trap "pkill -TERM -P $agent || true" USR1
code=0; wait "$agent" || code=$?
while kill -0 "$agent" 2>/dev/null; do code=0; wait "$agent" || code=$?; done # a trap ends a wait
exit "$code"'
srun -K0 bash -c "$on_node" on_node \
    torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc_per_node 8 --rdzv_backend c10d \
    --rdzv_endpoint "${hosts%%$'\n'*}:${PORT:-29500}" --rdzv_id "$SLURM_JOB_ID" \
    grpo.py --model Qwen/Qwen2.5-7B --run_name "slurm-$SLURM_JOB_ID" --resume --shard fsdp \
    --dataset agentica-org/DeepScaleR-Preview-Dataset --eval_dataset HuggingFaceH4/MATH-500 --reward math \
    --rollout_batch_size 128 --group_size 8 --mini_batch_size 256 --total_episodes 409600 \
    --max_prompt_length 1024 --max_response_length 3072 --rollout_backend vllm "$@" &
step=$! asked='' code=0
trap 'asked=yes; kill -USR1 "$step"' TERM
wait "$step" || code=$?
while kill -0 "$step" 2>/dev/null; do code=0 && wait "$step" || code=$?; done
if [ -n "$asked" ] && [ "$code" != 0 ]; then scontrol requeue "$SLURM_JOB_ID" && exit 0; fi
exit "$code"
