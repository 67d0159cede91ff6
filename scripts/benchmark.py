"""Measure a step of grpo.py beside transformers and AdamW alone, on random weights. The first thing to run on a GPU:

    python scripts/benchmark.py --output results/training.md

Runs that are compared take turns, each in a process of its own with one thread. Seconds are medians over the processes
of the median step, the first two left out.
"""

import os
import platform
import shlex
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Callable

import pandas
import torch
import transformers
import tyro
from torch.nn.functional import cross_entropy

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import grpo
import utils
from plumbing.run.log import read_log

TINY, GPU = os.path.join(utils.ROOT, "assets/tiny"), torch.cuda.is_available()
SHAPES = {  # hidden size, layers, heads, key heads, intermediate size, vocabulary
    "0.5b": (896, 24, 14, 2, 4864, 151_936),  # Qwen2.5-0.5B
    "1.5b": (1536, 28, 12, 2, 8960, 151_936),  # Qwen2.5-1.5B
    "39m": (512, 8, 8, 2, 1536, 32_000),
    "13m": (320, 8, 5, 5, 1280, 512),  # most parameters in the blocks
}
SEQUENCES, LENGTH = 16, 1024 if GPU else 128  # responses of a step, and tokens of each
WARM_UP = 2  # first steps of a run, which do not count
FLAGS = {  # of grpo.py: one pass for log-probs, two updates of one micro-batch, nothing but the work of a step
    "dataset": "arithmetic", "system_prompt": "", "reward": "gsm8k", "max_prompt_length": 16, "group_size": 8,
    "rollout_batch_size": SEQUENCES // 8, "mini_batch_size": SEQUENCES, "num_epochs": 2, "warmup_ratio": 0,
    "min_response_length": LENGTH, "max_response_length": LENGTH, "micro_batch_tokens": SEQUENCES * (LENGTH + 16),
    "total_episodes": SEQUENCES * (WARM_UP + 3), "kl_coef": 0, "eval_every": 0, "save_every": 0, "log_samples": 0,
    "rollout_backend": "hf", "run_name": "run",
}  # fmt: skip
PHASES = {"rollout, s": "time/rollout", "log-probs, s": "time/logprobs", "updates, s": "time/training"}
VARIANTS = ("shard fsdp", "gradient_checkpointing", "lora_rank 16")
VARIANTS += tuple(f"attention {name}" for name in ("sdpa", "eager", "flash_attention_2", "flex_attention"))
VARIANTS += tuple(f"precision {name}" for name in ("float32", "bf16", "fp16", "pure_bf16"))


# ---- what is measured: (flags of grpo.py, further words of its command line) -> metrics of each step -----------------


def run_grpo(flags: dict, words: list[str]) -> list[dict]:
    """Train by grpo.py."""
    line = [f"--{name}={x}" for name, x in flags.items()]
    grpo.main(tyro.cli(grpo.Args, args=[*line, "--no-non_stop_penalty", *words]))
    return read_log(os.path.join(flags["output_dir"], flags["run_name"]))


def bare_logprobs(model, ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each token (N, L) but the first, by transformers' whole logits."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=GPU):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
    return -cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)


def run_transformers(flags: dict, words: list[str]) -> list[dict]:
    """Do the work of steps by transformers and AdamW alone: `generate`, a pass for log-probs, updates in one batch."""
    device, length = torch.device("cuda" if GPU else "cpu"), flags["max_response_length"]
    model = transformers.AutoModelForCausalLM.from_pretrained(flags["model"], dtype=torch.float32).to(device)
    stop, optimizer = model.config.eos_token_id, torch.optim.AdamW(model.parameters(), 1e-6, weight_decay=0.0)
    ids = torch.randint(2, model.config.vocab_size, (flags["mini_batch_size"], 8 + length), device=device)
    sampling = transformers.GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=length, min_new_tokens=length, eos_token_id=stop, pad_token_id=stop
    )
    clock, steps = utils.Clock(utils.World(0, 1, device), 0.0, utils.parameter_count(model)), []
    for _ in range(flags["total_episodes"] // len(ids)):
        clock.start()
        clock.begin("rollout")
        model.generate(ids[:, :8], generation_config=sampling)
        clock.begin("logprobs")
        with torch.no_grad():
            bare_logprobs(model, ids)
        clock.begin("training")
        for _ in range(flags["num_epochs"]):
            bare_logprobs(model, ids).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        steps.append(clock.metrics(ids.numel()))
    return steps


def measure(function: Callable, *args) -> dict[str, float]:
    """Call one of the functions above; return the medians over the steps that count, and the process's peak memory."""
    steps = pandas.DataFrame(function(*args))
    medians = steps[WARM_UP:].median(numeric_only=True)
    numbers = {"step, s": medians["time/step"], **{name: medians[metric] for name, metric in PHASES.items()}}
    return {**numbers, "tokens/s": medians["perf/tokens_per_second"], "peak, GB": steps["perf/peak_memory_gb"].max()}


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


def compare(flags: dict, kinds: dict[str, tuple], rounds: int) -> pandas.DataFrame:
    """Return what `measure` returns, a row for each (kind, round). A kind that fails is left out, after a line why.

    Args:
        flags: of grpo.py, for all kinds; a round is its seed.
        kinds: {name: (function from the section above, its second argument)}.
    """
    rows = {}
    for seed in range(1, rounds + 1):
        for kind, (function, words) in kinds.items():
            with (
                tempfile.TemporaryDirectory() as folder,
                ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process,
            ):
                future = process.submit(measure, function, {**flags, "seed": seed, "output_dir": folder}, words)
                if error := future.exception():
                    print(f"{kind}: {type(error).__name__}: {error}", file=sys.stderr)
                else:
                    rows[kind, seed] = future.result()
    return pandas.DataFrame.from_dict(rows, orient="index")


def table(rows: pandas.DataFrame) -> str:
    """Return medians over the rounds, and the median, lowest and highest ratio to transformers alone, in a round."""
    medians = rows.groupby(level=0, sort=False).median()
    ratios = rows[list(PHASES)].div(rows.loc["transformers", list(PHASES)], level=1).groupby(level=0)
    for name in PHASES:
        cells = zip(*(ratios[name].agg(how)[medians.index] for how in ("median", "min", "max")))
        medians[f"ratio of {name.split(',')[0]}"] = [f"{x:.2f} ({low:.2f} to {high:.2f})" for x, low, high in cells]
    return medians.to_string(float_format="{:,.4g}".format)


def main(rounds: int = 3, output: str = "") -> None:
    """Time rollouts, log-probs and updates (forward, backward, AdamW) of random weights, beside transformers alone.

    Args:
        rounds: processes of each kind, in turns.
        output: Markdown file to write.
    """
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    kinds = {"transformers": (run_transformers, []), "grpo.py": (run_grpo, [])}
    kinds |= {f"--{flag}": (run_grpo, f"--{flag}".split()) for flag in VARIANTS}
    device = torch.cuda.get_device_name() if GPU else f"{platform.machine()}, {os.cpu_count()} cores"
    lines = [
        "# A step of grpo.py, and of transformers alone", "",
        f"`python scripts/benchmark.py {shlex.join(sys.argv[1:])}`", "",
        f"- {time.strftime('%Y-%m-%d')}, {device}, torch {torch.__version__}",
        f"- {rounds} processes of each; ratios to transformers: median (lowest to highest) of the rounds",
        f"- a step: {SEQUENCES} responses of {LENGTH} tokens, one pass for log-probs, two updates of one micro-batch",
    ]  # fmt: skip
    for shape in ("0.5b", "1.5b") if GPU else ("39m", "13m"):
        with tempfile.TemporaryDirectory() as folder:
            rows = compare({**FLAGS, "model": random_model(shape, folder)}, kinds, rounds)
        lines += ["", f"## {shape}", "", "```", table(rows), "```"]
    print(*lines, sep="\n")
    if output:
        Path(output).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
