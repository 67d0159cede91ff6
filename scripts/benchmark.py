"""Measure speed and memory, and print tables. The first thing to run on a GPU:

    python scripts/benchmark.py --output results/training.md

Runs that are compared take turns, each in a process of its own with one thread. Seconds are medians over the processes
of the median step, the first two left out.
"""

import os
import platform
import resource
import shlex
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Callable
from unittest import mock

import pandas
import torch
import transformers
import tyro
from torch.nn.functional import cross_entropy

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import grpo
import utils
from plumbing.run.files import read_log

TINY, GPU = os.path.join(utils.ROOT, "assets/tiny"), torch.cuda.is_available()
SHAPES = {  # hidden size, layers, heads, key heads, intermediate size, vocabulary
    "0.5b": (896, 24, 14, 2, 4864, 151_936),  # Qwen2.5-0.5B
    "1.5b": (1536, 28, 12, 2, 8960, 151_936),  # Qwen2.5-1.5B
    "39m": (512, 8, 8, 2, 1536, 32_000),
    "13m": (320, 8, 5, 5, 1280, 512),  # most parameters in the blocks
}
# Of all runs: the demo's task without a system turn, KL, evaluation and checkpoints.
RUN = {
    "dataset": "arithmetic", "system_prompt": "", "reward": "gsm8k", "max_prompt_length": 16, "group_size": 8,
    "warmup_ratio": 0, "kl_coef": 0, "eval_every": 0, "save_every": 0, "log_samples": 0, "micro_batch_tokens": 4096,
    "run_name": "run",
}  # fmt: skip
WARM_UP = 2  # first steps of a run, which do not count
COLUMNS = {  # of a table of runs: the metrics of a step
    "step, s": "time/whole", "rollout, s": "time/rollout", "log-probs, s": "time/logprobs",
    "updates, s": "time/training", "tokens": "val/sequence_lengths", "peak, MiB": "peak",
}  # fmt: skip


# ---- what is measured: (folder, flags, more) -> metrics of each step -------------------------------------------------


def run_grpo(folder: str, flags: dict, more: list[str]) -> list[dict]:
    """Train by grpo.py with these flags and `more` words of a command line."""
    words = [f"--{name}={x}" for name, x in (RUN | flags | {"output_dir": folder}).items()]
    grpo.main(tyro.cli(grpo.Args, args=[*words, "--no-non_stop_penalty", *more]))
    steps, ended = read_log(os.path.join(folder, RUN["run_name"])), 0.0
    for step in steps:
        step["time/whole"], ended = step["time/from_scratch"] - ended, step["time/from_scratch"]
    return steps


def bare_logprobs(model, ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each token (N, L) but the first, by transformers' whole logits."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=GPU):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
    return -cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)


def run_transformers(folder: str, flags: dict, more: list) -> list[dict]:
    """Do the work of steps by transformers and AdamW alone: `generate`, a pass for log-probs, updates in one batch."""
    device, length = torch.device("cuda" if GPU else "cpu"), flags["max_response_length"]
    model = transformers.AutoModelForCausalLM.from_pretrained(flags["model"], dtype=torch.float32).to(device)
    stop, optimizer = model.config.eos_token_id, torch.optim.AdamW(model.parameters(), 1e-6, weight_decay=0.0)
    ids = torch.randint(2, model.config.vocab_size, (flags["mini_batch_size"], 8 + length), device=device)
    sampling = transformers.GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=length, min_new_tokens=length, eos_token_id=stop, pad_token_id=stop
    )

    def update() -> None:
        for _ in range(flags["num_epochs"]):
            bare_logprobs(model, ids).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    work = {
        "time/rollout": lambda: model.generate(ids[:, :8], generation_config=sampling),
        "time/logprobs": torch.no_grad()(lambda: bare_logprobs(model, ids)),
        "time/training": update,
    }
    steps = []
    for _ in range(flags["total_episodes"] // len(ids)):
        seconds = {}
        for name, call in work.items():
            begin = time.perf_counter()
            call()
            if GPU:
                torch.cuda.synchronize()
            seconds[name] = time.perf_counter() - begin
        steps.append({**seconds, "time/whole": sum(seconds.values()), "val/sequence_lengths": length})
    return steps


def measure(function: Callable, *args) -> dict[str, float]:
    """Call one of the functions above; return the median of each metric over the steps that count, and the peak memory
    of this process in MiB (on a GPU what torch has allocated)."""
    medians = pandas.DataFrame(function(*args)[WARM_UP:]).median(numeric_only=True).to_dict()
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {**medians, "peak": torch.cuda.max_memory_allocated() / 2**20 if GPU else host}


# ---- processes and tables --------------------------------------------------------------------------------------------


def random_model(shape: str, folder: str) -> str:
    """Save a random Qwen2 with the tokenizer of assets/tiny; return the folder."""
    hidden, layers, heads, key_heads, inner, vocabulary = SHAPES[shape]
    config = transformers.Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=key_heads, max_position_embeddings=8192, bos_token_id=None,
        eos_token_id=1, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return folder


def compare(flags: dict, kinds: dict[str, tuple], rounds: int) -> dict[str, pandas.DataFrame]:
    """Return the metrics of each kind of run, a row for each round: medians of the steps that count, and "peak".

    A kind that fails is left out, after a line that says why.

    Args:
        flags: of grpo.py, for all kinds. Of a model that SHAPES names, a random one is made.
        kinds: {name: (function from the section above, its third argument)}. Each round has a seed of its own.
    """
    rows = {kind: [] for kind in kinds}
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, environment):
        if flags["model"] in SHAPES:
            flags = {**flags, "model": random_model(flags["model"], folder)}
        for seed in range(1, rounds + 1):
            for kind, (function, more) in kinds.items():
                with (
                    tempfile.TemporaryDirectory() as output,
                    ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process,
                ):
                    future = process.submit(measure, function, output, {**flags, "seed": seed}, more)
                    if error := future.exception():
                        print(f"{kind}: {type(error).__name__}: {error}", file=sys.stderr)
                    else:
                        rows[kind].append(future.result())
    return {kind: pandas.DataFrame(of_rounds) for kind, of_rounds in rows.items() if of_rounds}


def run_table(title: str, results: dict[str, pandas.DataFrame], *ratios_of: str) -> list[list[str]]:
    """Return a table of what `compare` returned; ratios_of: metrics that are divided by those of the first kind, round
    by round, shown as median (lowest to highest)."""
    rows = [[title, *COLUMNS, *(f"ratio of {metric}" for metric in ratios_of)]]
    base = next(iter(results.values()))
    for kind, rounds in results.items():
        medians = rounds.median()
        cells = [f"{medians[metric]:,.4g}" if metric in medians else "" for metric in COLUMNS.values()]
        for metric in ratios_of:
            ratios = rounds[metric] / base[metric]
            cells.append(f"{ratios.median():.2f} ({ratios.min():.2f} to {ratios.max():.2f})")
        rows.append([kind, *cells])
    return rows


# ---- the command -----------------------------------------------------------------------------------------------------

SEQUENCES, LENGTH = 16, 1024 if GPU else 128  # of the micro-batch of an update
VARIANTS = ("shard fsdp", "gradient_checkpointing", "lora_rank 16")
VARIANTS += tuple(f"attention {name}" for name in ("sdpa", "eager", "flash_attention_2", "flex_attention"))
VARIANTS += tuple(f"precision {name}" for name in ("float32", "bf16", "fp16", "pure_bf16"))


def main(rounds: int = 3, output: str = "") -> None:
    """Time rollouts, log-probs and updates (forward, backward, AdamW) of random weights, beside transformers alone.

    Args:
        rounds: processes of each kind, in turns.
        output: Markdown file to write.
    """
    flags = {
        "rollout_batch_size": SEQUENCES // 8, "mini_batch_size": SEQUENCES, "min_response_length": LENGTH,
        "max_response_length": LENGTH, "micro_batch_tokens": SEQUENCES * (LENGTH + 16), "num_epochs": 2,
        "rollout_backend": "hf", "total_episodes": SEQUENCES * (WARM_UP + 3),
    }  # fmt: skip
    kinds = {"grpo.py": (run_grpo, []), "transformers": (run_transformers, [])}
    kinds |= {f"--{flag}": (run_grpo, f"--{flag}".split()) for flag in VARIANTS}
    device = torch.cuda.get_device_name() if GPU else f"{platform.machine()}, {os.cpu_count()} cores"
    lines = [
        "# A step of grpo.py, and of transformers alone", "",
        f"`python scripts/benchmark.py {shlex.join(sys.argv[1:])}`", "",
        f"- {time.strftime('%Y-%m-%d')}, {device}, torch {torch.__version__}",
        f"- {rounds} processes of each",
        f"- a step: {SEQUENCES} responses of {LENGTH} tokens, one pass for log-probs, two updates of one micro-batch",
    ]  # fmt: skip
    for shape in ("0.5b", "1.5b") if GPU else ("39m", "13m"):
        results = compare({**flags, "model": shape}, kinds, rounds)
        header, *rows = run_table(shape, results, "time/rollout", "time/logprobs", "time/training")
        lines += ["", *(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))]
    print(*lines, sep="\n")
    if output:
        Path(output).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
