"""Times grpo.py and TRL's GRPOTrainer side by side on the CPU; writes results/benchmark.json and results/benchmark.md.

    python -m venv trl-venv
    trl-venv/bin/pip install torch==2.13.0 transformers==5.19.0 datasets==5.2.0 trl==1.16.0    # grpo.py's own versions
    python scripts/benchmark.py --trl_python trl-venv/bin/python --rounds 5

A pair is one process of each, one after the other: the same model, prompts, loss, optimizer, reward, float32
arithmetic, number of threads and transformers' `generate`. What is not the work (evaluation, checkpoints, trackers,
gradient checkpointing) is off in both. grpo.py has the flags of scripts/demo.sh, TRL the fastest of the micro-batch
sizes that were tried by hand. A step lasts from the end of the one before to its own end, logging included; the first
two of a run are left out. Linux only: memory is read from /proc.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from dataclasses import dataclass

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SYSTEMS = ("ours", "TRL")
WARM_UP = 2  # first steps of a run, left out
# scripts/demo.sh, with evaluation and checkpoints off
DEMO = """--model assets/tiny --dataset arithmetic --system_prompt= --reward gsm8k --max_prompt_length 16
    --max_response_length 48 --rollout_batch_size 32 --group_size 8 --mini_batch_size 256 --micro_batch_tokens 4096
    --learning_rate 3e-4 --adam_beta2 0.95 --warmup_ratio 0.04 --kl_coef 0.001 --eval_every 0 --save_every 0""".split()
COMPARED = "--kl_coef 0 --warmup_ratio 0 --no-non_stop_penalty".split()  # and, from the job, these flags:
SHARED = "model dataset reward learning_rate rollout_batch_size mini_batch_size max_response_length micro_batch_tokens"
CASES = {
    "short": "the demo without KL: 32 prompts x 8 responses of up to 48 tokens; the strict #### reward",
    "long tail": "a model that stops after each token with probability 1/64: 32 x 8 responses of up to 256 tokens; the "
    "reward is the parity of a checksum, so that groups have advantages; the learning rate is negligible",
    "demo": "scripts/demo.sh, KL included, evaluation and checkpoints off; grpo.py only",
    "memory, at once": "the long tail with a vocabulary of 151,936; 2 prompts x 8 responses in one micro-batch",
    "memory, one by one": "the same in micro-batches of one response",
}


@dataclass
class Args:
    trl_python: str
    """Python of the environment that has TRL."""
    rounds: int = 5
    """Pairs of each case and number of threads."""
    threads: tuple[int, ...] = (1,)
    """Numbers of threads to measure with, one after the other; memory is measured with the first."""
    output_dir: str = "results"
    """Folder for benchmark.json and benchmark.md."""


def read_jsonl(path: str) -> list[dict]:
    with open(path) as file:
        return [json.loads(line) for line in file]


def checksum_parity(prompts: list[str], responses: list[str], **columns) -> list[float]:
    return [float(zlib.crc32(response.encode()) % 2) for response in responses]


def memory(field: str) -> float:
    """MiB of this process now (VmRSS), or at most since the last `reset_peak` (VmHWM)."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(field))


def reset_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


# ---- the two sides, each in a process of its own: seconds of the steps, peak memory over the loaded model ------------


def our_side(job: dict) -> dict:
    sys.path.insert(0, ROOT)
    import tyro

    import grpo
    from plumbing import checkpoints, run, run_log

    flags = [*DEMO, f"--total_episodes={job['steps'] * job['mini_batch_size']}", f"--seed={job['seed']}"]
    if job["case"] != "demo":
        flags += COMPARED + [f"--{name}={job[name]}" for name in SHARED.split()]
    result = {"versions": run_log.versions(), "flags": " ".join(flags)}

    class MeasuredRun(run_log.RunLog):  # made when all is loaded and training begins
        def __init__(self, *args):
            result["peak_mib"] = -memory("VmRSS")
            reset_peak()
            super().__init__(*args)

    def training_ends(*args):
        result["peak_mib"] += memory("VmHWM")

    run.RunLog, checkpoints.save_final = MeasuredRun, training_ends
    grpo.main(tyro.cli(grpo.Args, args=[*flags, "--output_dir", job["folder"], "--run_name", "run"]))
    rows = read_jsonl(os.path.join(job["folder"], "run", "metrics.jsonl"))
    result["steps"] = [
        {
            "step": row["time/from_scratch"] - before["time/from_scratch"],
            "rollout": row["time/rollout"], "logprobs": row["time/logprobs"], "update": row["time/training"],
            "score": row["objective/scores"], "tokens": row["val/sequence_lengths"] * job["mini_batch_size"],
        }
        for before, row in zip(rows[WARM_UP - 1 :], rows[WARM_UP:])
    ]  # fmt: skip
    return result


def trl_side(job: dict) -> dict:
    import torch
    import transformers
    import trl
    from datasets import Dataset

    from plumbing import verifiers as verifier

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    result, now = {"steps": []}, time.perf_counter
    result["versions"] = {module.__name__: module.__version__ for module in (trl, torch, transformers)}

    class Timed(trl.GRPOTrainer):
        logprobs = 0.0

        def _generate_and_score_completions(self, inputs):
            begin = now()
            out = super()._generate_and_score_completions(inputs)
            self.rollout_end, self.tokens = now(), out["completion_mask"].sum().item()
            self.rollout = self.rollout_end - begin - self.logprobs
            return out

        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            begin = now()
            out = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            if not torch.is_grad_enabled():  # before the update; with one update a rollout TRL needs none either
                self.logprobs += now() - begin
            return out

    class Clock(transformers.TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            result["peak_mib"] = -memory("VmRSS")
            reset_peak()
            self.last = now()

        def on_step_end(self, *args, **kwargs):
            end = now()
            parts = {"rollout": trainer.rollout, "logprobs": trainer.logprobs, "update": end - trainer.rollout_end}
            score = trainer._metrics["train"]["reward"][-1]
            result["steps"].append({"step": end - self.last, **parts, "score": score, "tokens": trainer.tokens})
            trainer.logprobs, self.last = 0.0, end

    config = trl.GRPOConfig(
        output_dir=job["folder"], seed=job["seed"], use_cpu=True, bf16=False, gradient_checkpointing=False,
        # one rollout, one update
        per_device_train_batch_size=job["trl_micro_batch"], num_generations=8, num_iterations=1, max_steps=job["steps"],
        gradient_accumulation_steps=job["mini_batch_size"] // job["trl_micro_batch"],
        max_completion_length=job["max_response_length"],
        # the loss
        loss_type="grpo", beta=0.0, epsilon=0.2, scale_rewards="group", temperature=1.0, top_p=1.0, top_k=0,
        # the optimizer
        learning_rate=job["learning_rate"], lr_scheduler_type="constant", warmup_steps=0, adam_beta1=0.9,
        adam_beta2=0.95, weight_decay=0.0, max_grad_norm=1.0,
        # what is not the work
        save_strategy="no", eval_strategy="no", logging_strategy="no", report_to="none", log_completions=False,
        disable_tqdm=True,
    )  # fmt: skip
    if job["reward"] == "gsm8k":
        reward = lambda completions, answer, **columns: list(map(verifier.gsm8k, completions, answer))
    else:
        reward = lambda completions, prompts, **columns: checksum_parity(prompts, completions)
    trainer = Timed(
        model=transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
        processing_class=transformers.AutoTokenizer.from_pretrained(job["model"], padding_side="left"),
        train_dataset=Dataset.from_list(read_jsonl(job["dataset"])), reward_funcs=reward, args=config,
        callbacks=[Clock()],
    )  # fmt: skip
    trainer.train()
    result["peak_mib"] += memory("VmHWM")
    return {**result, "steps": result["steps"][WARM_UP:]}


# ---- the comparison ----------------------------------------------------------------------------------------------


def make_long_tailed_model(folder: str, vocabulary: int = 0, mean_length: int = 64) -> str:
    """A Qwen2 of width 64 and 2 layers that stops after any token with probability 1 / mean_length.

    Coordinate 0 of the residual stream is one large constant: every embedding has it and no layer writes to it, so it
    leaves the last norm as sqrt(64), the bias that the head lacks. The row of <eos> reads only that coordinate, <pad>
    and <unk> are next to impossible, and all other tokens share the rest almost evenly.
    """
    import torch
    from transformers import AutoTokenizer, Qwen2ForCausalLM, Qwen2Tokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = Qwen2ForCausalLM.from_pretrained(os.path.join(ROOT, "assets/tiny"))
    tiny = AutoTokenizer.from_pretrained(os.path.join(ROOT, "assets/tiny"))
    words = tiny.get_vocab()
    words |= {f"<filler{i}>": i for i in range(len(words), vocabulary)}
    special = {"pad_token": tiny.pad_token, "eos_token": tiny.eos_token, "unk_token": tiny.unk_token}
    Qwen2Tokenizer(vocab=words, merges=[], padding_side="left", **special).save_pretrained(folder)
    model.config.vocab_size, model.config.tie_word_embeddings = len(words), False
    torch.manual_seed(1)
    model = Qwen2ForCausalLM(model.config)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 100.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0
        head = model.lm_head.weight
        head[:, 0] = 0
        head[[tiny.pad_token_id, tiny.eos_token_id, tiny.unk_token_id]] = 0
        head[[tiny.pad_token_id, tiny.unk_token_id], 0] = -69 / 8  # 1e-30 times as likely as the others
        head[tiny.eos_token_id, 0] = math.log((len(words) - 3) / (mean_length - 1)) / 8  # odds 1 : mean_length - 1
    model.save_pretrained(folder)
    return folder


def run_side(system: str, python: str, job: dict) -> dict:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(job["threads"]))
    quiet = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [python, "scripts/benchmark.py", "--side", system, json.dumps(job)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **threads, **quiet}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {system}, {job['case']}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    keys = result["steps"][0] if result["steps"] else ()
    median = {key: statistics.median(step[key] for step in result["steps"]) for key in keys}
    print(f"{job['case']}, round {job['seed']}, {system}: {median.get('step', math.nan):.3f} s a step", flush=True)
    return {"case": job["case"], "threads": job["threads"], "round": job["seed"], "median": median, **result}


def report(record: dict) -> str:
    """What benchmark.md says."""
    lines = ["# grpo.py and TRL's GRPOTrainer on a CPU", "", f"    {record['command']}", ""]
    lines += [f"- {key}: {record[key]}" for key in ("date", "cpu", "cores")]
    loads = [run["load_average"][0] for run in record["runs"]]
    lines += [
        f"- load average when the runs began, about 1 of it the benchmark's: {min(loads):.1f} to {max(loads):.1f}"
    ]
    lines += [
        f"- {system}: {', '.join(f'{k} {v}' for k, v in record['versions'][system].items())}" for system in SYSTEMS
    ]
    lines += ["", *(f"- **{case}**: {text}" for case, text in CASES.items()), ""]
    lines += ["Seconds a step and its parts, medians over the runs of each run's median; the ratio of seconds a step,"]
    lines += ["ours / TRL's, pair by pair: median (lowest to highest); peak memory over the loaded model, MiB.", ""]
    lines += ["| case | threads | system | step | rollout | log-probs | update | ratio | response tokens | peak |"]
    lines += ["|---" * 10 + "|"]
    runs: dict[tuple, list[dict]] = {}
    for run in record["runs"]:
        runs.setdefault((run["case"], run["threads"], run["system"]), []).append(run)
    for (case, threads, system), mine in runs.items():
        cells = dict.fromkeys(("step", "rollout", "logprobs", "update", "ratio", "tokens"), "")
        for key in mine[0]["median"]:
            if key in cells:
                median = statistics.median(run["median"][key] for run in mine)
                cells[key] = f"{median:,.0f}" if key == "tokens" else f"{median:.3f}"
        theirs = runs.get((case, threads, "TRL"), [])
        ratios = [a["median"]["step"] / b["median"]["step"] for a, b in zip(mine, theirs) if a["median"]]
        if ratios and system == "ours":
            cells["ratio"] = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        peak = statistics.median(run["peak_mib"] for run in mine)
        lines += [f"| {case} | {threads} | {system} | {' | '.join(cells.values())} | {peak:,.0f} |"]
    return "\n".join(lines) + "\n"


def main(args: Args) -> None:
    sys.path.insert(0, ROOT)
    from plumbing.rows import arithmetic_rows

    with open("/proc/cpuinfo") as file:
        cpu = next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    flags = f"--trl_python trl-venv/bin/python --rounds {args.rounds} --threads {' '.join(map(str, args.threads))}"
    record = {"command": f"python scripts/benchmark.py {flags}", "date": time.strftime("%Y-%m-%d"), "cpu": cpu}
    record |= {"cores": os.cpu_count(), "cases": CASES, "versions": {}, "runs": []}
    with tempfile.TemporaryDirectory() as work:
        rows, tail = os.path.join(work, "arithmetic.jsonl"), os.path.join(work, "long_tail")
        with open(rows, "w") as file:  # as many as "short" takes, so both systems train on each of them once
            file.writelines(json.dumps(row) + "\n" for row in arithmetic_rows("train", 12 * 32))
        make_long_tailed_model(tail)
        make_long_tailed_model(tail + "_large", vocabulary=151_936)
        short = {
            "model": "assets/tiny", "dataset": rows, "reward": "gsm8k", "learning_rate": 3e-4, "rollout_batch_size": 32,
            "mini_batch_size": 256, "max_response_length": 48, "micro_batch_tokens": 4096, "steps": 12,
            "trl_micro_batch": 128,
        }  # fmt: skip
        long = {"model": tail, "reward": "scripts/benchmark.py:checksum_parity", "learning_rate": 1e-9, "steps": 6}
        long = {**short, **long, "max_response_length": 256, "trl_micro_batch": 64}
        large = {**long, "model": tail + "_large", "rollout_batch_size": 2, "mini_batch_size": 16, "steps": 2}
        at_once = {**large, "micro_batch_tokens": 16_384, "trl_micro_batch": 16}
        one_by_one = {**large, "micro_batch_tokens": 1, "trl_micro_batch": 1}
        jobs = dict(zip(CASES, (short, long, short, at_once, one_by_one)))
        timed, memory_cases = list(CASES)[:3], list(CASES)[3:]
        plan = [(case, t, number) for t in args.threads for number in range(1, args.rounds + 1) for case in timed]
        for case, threads, number in plan + [(case, args.threads[0], 1) for case in memory_cases]:
            for system in SYSTEMS[: 1 if case == "demo" else 2]:
                own = {"case": case, "threads": threads, "seed": number, "folder": tempfile.mkdtemp(dir=work)}
                python = args.trl_python if system == "TRL" else sys.executable
                run = {"system": system, "load_average": os.getloadavg(), **run_side(system, python, jobs[case] | own)}
                record["versions"][system] = run.pop("versions")
                record["runs"].append(run)
    os.makedirs(args.output_dir, exist_ok=True)
    with open(os.path.join(args.output_dir, "benchmark.json"), "w") as file:
        file.write(json.dumps(record, indent=1).replace(work + "/", ""))
    with open(os.path.join(args.output_dir, "benchmark.md"), "w") as file:
        file.write(report(record))
    print(report(record))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:  # started by `run_side`; TRL's environment need not have tyro
        print(json.dumps({"ours": our_side, "TRL": trl_side}[sys.argv[2]](json.loads(sys.argv[3]))))
    else:
        import tyro

        main(tyro.cli(Args))
