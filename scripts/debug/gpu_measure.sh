#!/usr/bin/env bash
# What to measure where a GPU is at hand for a quarter of an hour: speed and memory of two sizes, tests on CUDA, a real
# model. A part that fails or takes too long does not stop the next one; the exit code is the number of those that failed.
#   MODEL=path/to/model DATA=train.jsonl bash scripts/debug/gpu_measure.sh [folder, runs/gpu] [parts: step tests train compile]
#   TINY=1 bash scripts/debug/gpu_measure.sh        # the same commands in minutes on a CPU, with tiny shapes
# PYTHON is the interpreter (.venv's, else python3); SECONDS_STEP, ..._TESTS, _TRAIN and _COMPILE are the limits of the parts.
set -uo pipefail
out=$(realpath -m "${1:-runs/gpu}") && mkdir -p "$out"
shift || true
parts=("${@:-all}")
cd "$(dirname "$0")/../.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export PYTORCH_NVML_BASED_CUDA_CHECK=1 # asks for GPUs without initialising CUDA, which would not survive the tests' forks
shapes=(--shape 0.5b 1.5b) device=cuda episodes=100000
train=(--reward ifeval --max_prompt_length 160 --max_response_length 96 --rollout_batch_size 16 --group_size 8
    --learning_rate 1e-5 --adam_betas 0.9 0.95)
if [ "${TINY:-}" ]; then
    shapes=(--shape 10m --length 4) device=cpu episodes=24
    train=(--reward gsm8k --max_prompt_length 16 --max_response_length 4 --rollout_batch_size 2 --group_size 4)
    MODEL=assets/tiny DATA=arithmetic SECONDS_COMPILE=300
fi
failed=()

wanted() { # the name of a part
    [[ " ${parts[*]} " =~ " all "|" ${1%_*} " ]]
}

part() { # name, seconds, command: its lines go to $out/NAME.log and the terminal at once
    local name=$1 limit=$2 begin=$SECONDS code
    shift 2
    wanted "$name" || return 0
    echo "== $name, at most $limit s: $*" | tee "$out/$name.log"
    timeout -k 10 "$limit" "$@" 2>&1 | tee -a "$out/$name.log"
    code=${PIPESTATUS[0]}
    # Training ends with its time: what counts there is whether a step has come to its end.
    [ "$code" = 0 ] || [ -s "$out/$name/metrics.jsonl" ] || failed+=("$name (exit code $code)")
    echo "== $name: exit code $code after $((SECONDS - begin)) s" | tee -a "$out/$name.log"
}

learn() { # name, seconds, further flags
    local name=$1 limit=$2
    shift 2
    wanted "$name" || return 0 # else what an earlier call has measured would go
    rm -rf "$out/$name"
    part "$name" "$limit" "$python" grpo.py --model "${MODEL:?a model folder}" --dataset "${DATA:?rows}" --system_prompt "" \
        "${train[@]}" --kl_coef 0 --eval_every 0 --save_every 0 --total_episodes $episodes --output_dir "$out" --run_name "$name" "$@"
    [ ! -s "$out/$name/metrics.jsonl" ] || "$python" - "$out/$name/metrics.jsonl" <<'P' | tee -a "$out/$name.log"
import json, sys
keys = "time/step time/rollout time/logprobs time/training perf/tokens_per_second perf/mfu perf/decode_ms_per_token perf/decode_ms_bound"
keys += " perf/peak_memory_gb objective/scores val/sequence_lengths rollout/logprob_diff_mean"
rows = [json.loads(line) for line in open(sys.argv[1])]
for row in rows:
    print(row["step"], *(f"{key.split('/')[1]} {row[key]:.4g}" for key in keys.split() if row.get(key) is not None))
P
}

nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv 2>&1 | tee "$out/machine.log"
"$python" -c 'import torch, transformers; print(torch.__version__, transformers.__version__, torch.cuda.is_available())' 2>&1 | tee -a "$out/machine.log"
part step "${SECONDS_STEP:-300}" "$python" scripts/benchmark.py step "${shapes[@]}" --rounds 2 --minutes 4 --output "$out/step.md"
part tests_equations "${SECONDS_TESTS:-60}" "$python" -m pytest -p no:xdist -q -x --device $device tests/test_equations.py
part tests_invariance "${SECONDS_TESTS:-180}" "$python" -m pytest -p no:xdist -v --long tests/test_invariance.py ${TINY:+-k rloo-float32-1-fsdp-1}
learn train "${SECONDS_TRAIN:-120}"
learn compile "${SECONDS_COMPILE:-120}" --compile
echo "failed: ${failed[*]:-nothing}" | tee "$out/failed.log"
exit ${#failed[@]}
