"""Golden runs: many small runs recorded from one state of the code, to compare another state of it with.

Each run is made of real commands on a CPU with one thread. Its metrics without times, its samples and
the norm of each tensor of its final model become one JSON file. NAMES are shell patterns, by default all.

    python tests/golden.py record ROOT OUT [NAMES ...]       # of the code in the folder ROOT; two runs at once
    python tests/golden.py compare OLD NEW [NAMES ...]       # two folders of recordings; exit code 1 if they differ
"""

import fnmatch
import glob
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from safetensors import safe_open

TOLERANCES = {"float64": 1e-9, "float32": 1e-4}
LEAST = 1e-3  # a difference is relative to the old number, or to this where that is smaller

COMMON = "--run_name run --output_dir runs --eval_every 2 --save_every 0 --log_samples 8"
SAMPLING = (
    f"{COMMON} --dataset arithmetic --system_prompt '' --reward gsm8k reward.py:score --max_prompt_length 16 "
    "--max_response_length 36 --total_episodes 96 --mini_batch_size 32 --learning_rate 3e-4 --kl_coef 0.05 "
    "--eval_prompts 16 --eval_samples 2"
)
BASE = {
    "grpo": f"{SAMPLING} --rollout_batch_size 8 --group_size 4",
    "rloo": f"{SAMPLING} --rollout_batch_size 8 --group_size 4",
    "ppo": f"{SAMPLING} --rollout_batch_size 32 --group_size 1 --mini_batch_size 16 --critic_learning_rate 1e-3",
    "reward_model": f"{COMMON} --dataset pairs.jsonl --max_length 48 --batch_size 12 --learning_rate 1e-3",
}
FOUR = "--mini_batch_size 16 --num_epochs 2"  # updates a step
CUT = "--micro_batch_tokens 100"
LORA = "--lora_rank 4"
GAME = (  # GUESS: assets/guess
    "--model GUESS --dataset GUESS/train.jsonl --eval_dataset GUESS/test.jsonl --reward environment "
    "--environment GUESS/game.py:GuessTheNumber --max_response_length 48 --temperature 1.2"
)
MOVING = "--kl_target 0.001 --kl_horizon 100"
STATE = f"{MOVING} --ref_refresh_every 1 --save_every 1"  # all of which a checkpoint holds
SAMPLER = "--temperature 1.3 --top_p 0.9 --repetition_penalty 1.1 --min_response_length 6"
VLLM = "--rollout_backend vllm --kv_cache_gb 0.02"
FILTER = "--reward gsm8k --temperature 1.5 --max_response_length 40 --kl_estimator k2"
PTX = "--ptx_dataset rows.jsonl --ptx_coef 0.1 --ptx_batch_size 6"
SCHEDULE = "--lr_schedule cosine --warmup_ratio 0.4 --min_learning_rate 1e-5 --weight_decay 0.1 --adam_betas 0.9 0.95"
JUDGE = "reward_model --run_name judge --eval_every 0"
TO_2, TO_4 = "--total_episodes 64", "--total_episodes 128"  # steps


def resumed(command: str, first: str = TO_2, then: str = TO_4) -> str:
    """Write a command that ends early, and the same one that goes on from there."""
    return f"{command} {first} ; {command} {then} --resume"


# name: commands, with ; between them. A command is the number of ranks if above 1, the script, and flags after BASE.
CASES = {
    "grpo_default": "grpo",
    "grpo_loss_grpo": f"grpo {FOUR} --loss grpo --kl_estimator k3",
    "grpo_loss_dr_grpo": f"grpo {FOUR} --loss dr_grpo --kl_in reward --kl_estimator k1",
    "grpo_loss_dapo": f"grpo {FOUR} --loss dapo --kl_estimator k2",
    "grpo_loss_bnpo": f"grpo {FOUR} --loss bnpo --kl_in reward --kl_estimator abs",
    "grpo_loss_gspo": f"grpo {FOUR} --loss gspo --kl_estimator k3",
    "grpo_loss_cispo": f"grpo {FOUR} --loss cispo --kl_in reward --kl_estimator k3 --learning_rate 1e-4",
    "grpo_loss_sapo": f"grpo {FOUR} --loss sapo --kl_in reward --kl_estimator k2",
    "grpo_loss_reinforce": f"grpo {FOUR} --loss reinforce --kl_estimator abs",
    "grpo_kl_k1_in_loss": f"grpo {FOUR} --kl_estimator k1 --advantage_scale batch --loss_aggregation sequence_sum",
    "grpo_kl_k2_in_reward": "grpo --kl_in reward --kl_estimator k2 --loss_aggregation token --advantage_scale none",
    "grpo_no_kl": f"grpo {FOUR} --kl_coef 0 --clip_low 0.01 --clip_high 0.02 --max_grad_norm 0.1",
    "grpo_kl_adaptive": f"grpo {FOUR} --kl_target 0.001 --kl_horizon 100",
    "grpo_ref_refresh": f"grpo {FOUR} --ref_refresh_every 2",
    "grpo_entropy": f"grpo {FOUR} --entropy_coef 0.01",
    "grpo_dual_clip": f"grpo {FOUR} --dual_clip 1.01 --learning_rate 1e-3 --kl_estimator k2",
    "grpo_schedule": f"grpo {FOUR} {SCHEDULE}",
    "grpo_lora": f"grpo {FOUR} {LORA} --learning_rate 1e-3",
    "grpo_drop": f"grpo {FOUR} {FILTER} --filter_groups drop",
    "grpo_refill": f"grpo {FOUR} {FILTER} --filter_groups refill",
    "grpo_missing": f"grpo {FOUR} --reward gsm8k reward.py:partial --reward_weights 1.0 0.5 --kl_estimator k2",
    "grpo_mask_truncated": f"grpo {FOUR} --mask_truncated",
    "grpo_overlong": f"grpo {FOUR} --overlong_buffer 8 --no-non_stop_penalty",
    "grpo_penalty": f"grpo {FOUR} --penalty_reward_value -1 --advantage_scale none",
    "grpo_sampler": f"grpo {SAMPLER} --generation_batch_size 5",
    "grpo_recompute": f"grpo {FOUR} --gradient_checkpointing {CUT}",
    "grpo_game": f"grpo {FOUR} {GAME}",
    "grpo_ddp": f"2 grpo {FOUR} {CUT} --reward gsm8k reward.py:partial",
    "grpo_fsdp": f"2 grpo {FOUR} --shard fsdp --ref_refresh_every 1",
    "grpo_fsdp_lora": f"2 grpo --shard fsdp {LORA} --learning_rate 1e-3 --gradient_checkpointing",
    "grpo_resume": resumed(f"grpo {FOUR} {STATE}"),
    "grpo_lora_resume": resumed(f"grpo {LORA} --save_every 2"),
    "grpo_fsdp_resume": resumed(f"2 grpo --shard fsdp {STATE}"),
    "grpo_vllm": f"grpo {VLLM}",
    "grpo_vllm_truncate": f"grpo {VLLM} {FOUR} --rollout_correction truncate",
    "grpo_vllm_async": f"grpo {VLLM} {FOUR} --async_steps 1 {TO_4} --kl_estimator k2",
    "grpo_vllm_async_mask": f"grpo {VLLM} --async_steps 1 {TO_4} --rollout_correction sequence_mask",
    "rloo": f"rloo {FOUR}",
    "rloo_once": "rloo",
    "rloo_sequence": f"rloo {FOUR} --ratio sequence --kl_in loss --kl_estimator k3",
    "rloo_plus_plus": f"rloo {FOUR} --advantage reinforce++ --gamma 0.95 --rollout_batch_size 32 --group_size 1",
    "rloo_baseline": f"rloo {FOUR} --advantage reinforce++-baseline --kl_in loss --kl_estimator k2",
    "rloo_remax": f"rloo {FOUR} --advantage remax --kl_estimator k3",
    "rloo_opo": f"rloo {FOUR} --advantage opo --kl_estimator abs --loss_aggregation step_token",
    "rloo_missing": f"rloo {FOUR} --reward gsm8k reward.py:partial --filter_groups drop",
    "rloo_lora": f"rloo {FOUR} {LORA} --learning_rate 1e-3 --kl_estimator k1",
    "rloo_game": f"rloo {FOUR} {GAME}",
    "rloo_ddp": f"2 rloo {FOUR} {CUT} --advantage remax",
    "rloo_vllm_remax": f"rloo {VLLM} --advantage remax",
    "ppo": "ppo",
    "ppo_epochs": "ppo --num_epochs 3 --loss_aggregation step_token --gamma 0.99 --gae_lambda 0.9",
    "ppo_once": "ppo --mini_batch_size 32 --kl_in loss --kl_estimator k3",
    "ppo_value_clip": "ppo --value_clip 0.001 --num_epochs 2 --kl_estimator k1",
    "ppo_no_value_clip": "ppo --value_clip 0 --num_epochs 2 --kl_in loss --kl_estimator k2",
    "ppo_critic_warmup": "ppo --critic_warmup_steps 1",
    "ppo_no_whiten": "ppo --no-whiten_advantages",
    "ppo_pf_pow": "ppo --pf_ppo pow",
    "ppo_pf_max_min": "ppo --pf_ppo max_min --rollout_batch_size 8 --group_size 4",
    "ppo_pf_max_random": "ppo --pf_ppo max_random",
    "ppo_penalties": f"ppo --entropy_coef 0.01 --dual_clip 3 --mask_truncated {PTX}",
    "ppo_missing": f"ppo --reward gsm8k reward.py:partial --reward_normalization --reward_clip 0.5 {CUT}",
    "ppo_schedule": f"ppo {SCHEDULE} --critic_lr_schedule linear --critic_warmup_ratio 0.3 --critic_weight_decay 0.1",
    "ppo_lora": f"ppo {LORA} --learning_rate 1e-3",
    "ppo_game": f"ppo {GAME} --rollout_batch_size 32",
    "ppo_value_model": f"{JUDGE} ; ppo --value_model runs/judge/final",
    "ppo_reward_model": f"{JUDGE} ; ppo --reward gsm8k runs/judge/final",
    "ppo_ddp": f"2 ppo --num_epochs 2 {CUT}",
    "ppo_fsdp": f"{JUDGE} ; 2 ppo --shard fsdp --reward gsm8k runs/judge/final --reward_weights 1 0.5",
    "ppo_resume": resumed(f"ppo {STATE}"),
    "ppo_fsdp_resume": resumed(f"2 ppo --shard fsdp {STATE}"),
    "ppo_vllm_async": f"ppo {VLLM} --async_steps 1 {TO_4} --rollout_correction truncate",
    "reward_model": "reward_model",
    "reward_model_centre": "reward_model --centre_coef 0.05 --micro_batch_tokens 100 --gradient_checkpointing",
    "reward_model_arithmetic": "reward_model --eval_dataset arithmetic --eval_pairs 40",
    "reward_model_lora": f"reward_model {LORA}",
    "reward_model_ddp": "2 reward_model --micro_batch_tokens 100",
    "reward_model_fsdp": "2 reward_model --shard fsdp --weight_decay 0.1",
    "reward_model_resume": resumed("reward_model --batch_size 18 --save_every 1", "", "--num_epochs 2"),
    "reward_model_fsdp_resume": resumed("2 reward_model --shard fsdp --save_every 1", "", "--num_epochs 2"),
}
REWARD = """
def score(prompts, responses, **columns):
    return [sum(map(ord, prompt + response)) % 7 / 7 for prompt, response in zip(prompts, responses)]

def partial(prompts, responses, **columns):
    return [None if x == 3 / 7 else x for x in score(prompts, responses)]
"""


def names_of(patterns: list[str]) -> list[str]:
    """List all names, with the precision at their end, that match one of the patterns with or without it."""
    alike = lambda name: any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    names = [f"{case}-{'float32' if 'vllm' in case else 'float64'}" for case in CASES]
    return [name for name in names if not patterns or alike(name) or alike(name.split("-")[0])]


def norms(path: str) -> dict[str, float]:
    """Compute the norm of each tensor in a file, by "file name: tensor"."""
    with safe_open(path, "np") as file:
        tensors = {key: file.get_tensor(key).astype(float) for key in sorted(file.keys())}
    return {f"{os.path.basename(path)}: {key}": float(np.linalg.norm(x)) for key, x in tensors.items()}


def write_inputs(folder: str) -> None:
    """Write the files that CASES names: two rewards, rows to imitate, pairs with margins and subsets."""
    sums = zip(range(100, 780, 17), range(101, 621, 13))
    rows = [{"prompt": f"{a}+{b}=", "answer": f"#### {a + b}"} for a, b in sums]
    pairs = [
        {"prompt": row["prompt"], "chosen": row["answer"], "rejected": f"#### {i}{'0' * (i % 3)}", "margin": i % 4 / 10,
         "subset": f"{i % 2}"} for i, row in enumerate(rows)
    ]  # fmt: skip
    lines = lambda rows: "".join(json.dumps(row) + "\n" for row in rows)
    for name, text in (("reward.py", REWARD), ("rows.jsonl", lines(rows)), ("pairs.jsonl", lines(pairs))):
        with open(os.path.join(folder, name), "w") as file:
            file.write(text)


def record_one(root: str, out_dir: str, name: str, python: str) -> str:
    """Make one run in a folder of its own and write OUT_DIR/NAME.json; return "" or why it failed."""
    case, precision = name.split("-")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": ""}
    path = os.path.join(out_dir, f"{name}.json")
    if os.path.exists(path):
        os.remove(path)  # a run that fails leaves no older recording behind
    with tempfile.TemporaryDirectory(prefix="golden_") as work:
        write_inputs(work)
        for command in CASES[case].split(" ; "):
            words = shlex.split(command.replace("GUESS", os.path.join(root, "assets", "guess")))
            ranks = int(words.pop(0)) if words[0].isdigit() else 1
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] * (ranks > 1)
            flags = ["--model", os.path.join(root, "assets", "tiny"), *shlex.split(BASE[words[0]]), *words[1:]]
            line = [python, *launch, os.path.join(root, f"{words[0]}.py"), *flags, "--precision", precision]
            done = subprocess.run(line, cwd=work, env=environment, capture_output=True, text=True, timeout=600)
            if done.returncode:
                return f"{command}: exit code {done.returncode}\n{done.stderr[-2000:]}"
        run = os.path.join(work, "runs", "run")
        rows_of = lambda part: [json.loads(line) for line in open(os.path.join(run, f"{part}.jsonl"))]
        timeless = lambda row: {key: x for key, x in row.items() if not key.startswith(("time/", "perf/"))}
        # Values of single tokens have four digits, which rounding changes; their sums are among the metrics.
        texts = [{key: x for key, x in row.items() if key not in ("tokens", "length")} for row in rows_of("samples")]
        recording = {"metrics": [timeless(row) for row in rows_of("metrics")], "samples": texts}
        recording["weights"] = [
            norms(each) for each in sorted(glob.glob(f"{run}/final/**/*.safetensors", recursive=True))
        ]
    parts = (f'"{part}": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]" for part, rows in recording.items())
    with open(path, "w") as file:
        file.write("{\n" + ",\n".join(parts) + "\n}\n")
    return ""


def record(root: str, out_dir: str, names: list[str], python: str = sys.executable) -> bool:
    """Record the named runs of the code in `root` by a `python`; return whether all of them ended well."""
    os.makedirs(out_dir, exist_ok=True)

    def timed(name: str) -> bool:
        begin, why = time.monotonic(), record_one(os.path.abspath(root), out_dir, name, python)
        print(f"{name}: {time.monotonic() - begin:.0f} s{' FAILED: ' * bool(why)}{why}", flush=True)
        return not why

    with ThreadPoolExecutor(2) as pool:
        return all(list(pool.map(timed, names)))


def differences(old, new, where: str = "") -> list[tuple[float, str]]:
    """List (size, where and what) of all numbers that are not the same, and with size inf of all else that differs."""
    number = lambda x: isinstance(x, (int, float)) and not isinstance(x, bool)
    if isinstance(old, dict) and isinstance(new, dict):
        lines = [(math.inf, f"{where} {key}: missing") for key in old if key not in new]
        lines += [(math.inf, f"{where} {key}: added") for key in new if key not in old]
        both = [key for key in old if key in new]
        return lines + [line for key in both for line in differences(old[key], new[key], f"{where} {key}")]
    if isinstance(old, list) and isinstance(new, list):
        lines = [(math.inf, f"{where}: {len(old)} rows -> {len(new)}")] if len(old) != len(new) else []
        return lines + [x for i, (a, b) in enumerate(zip(old, new)) for x in differences(a, b, f"{where}[{i}]")]
    if old == new:
        return []
    size = abs(old - new) / max(abs(old), LEAST) if number(old) and number(new) else math.inf
    return [(size, f"{where}: {old!r} -> {new!r}")]


def compare(old: dict, new: dict, tolerance: float) -> list[str]:
    """List where two recordings differ by more than the tolerance, the largest differences first."""
    lines = sorted(differences(old, new), key=lambda x: -x[0])
    return [f"{size:.1e}{what}" for size, what in lines if size > tolerance]


def compare_folders(old_dir: str, new_dir: str, patterns: list[str]) -> bool:
    """Print what differs between two folders of recordings, run by run; return whether nothing does."""
    load = lambda folder, name: json.load(open(os.path.join(folder, f"{name}.json")))
    recorded = lambda folder: [name for name in names_of(patterns) if os.path.exists(f"{folder}/{name}.json")]
    missing = [name for name in recorded(old_dir) if name not in recorded(new_dir)]
    both, agree, worst = [name for name in recorded(old_dir) if name not in missing], 0, 0.0
    for name in both:
        old, new = load(old_dir, name), load(new_dir, name)
        if lines := compare(old, new, TOLERANCES[name.split("-")[1]]):
            print(f"{name}: {len(lines)} differences", *lines[:8], sep="\n    ")
        else:
            agree, worst = agree + 1, max([worst, *(size for size, _ in differences(old, new))])
    print(f"{agree} of {len(both)} runs agree; the largest difference in these is {worst:.1e}")
    if missing:
        print(f"not recorded in {new_dir}: {' '.join(missing)}")
    return agree == len(both) and not missing


if __name__ == "__main__":
    mode, one, two, *patterns = sys.argv[1:]
    ok = record(one, two, names_of(patterns)) if mode == "record" else compare_folders(one, two, patterns)
    sys.exit(0 if ok else 1)
