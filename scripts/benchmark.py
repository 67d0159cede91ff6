"""Measure a step of grpo.py beside transformers and AdamW alone, on random weights. The first thing to run on a GPU:

    python scripts/benchmark.py --output results/training.md
    python scripts/benchmark.py --shape 1.5b --variants "--precision pure_bf16" "--gradient_checkpointing"

Runs that are compared take turns, each in a process of its own with one thread. Numbers are medians over the processes
of the median step, the first two left out.
"""

import itertools
import os
import platform
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pandas
import repository  # noqa: F401
import torch
import transformers
import tyro
from torch.nn.functional import cross_entropy

import grpo
import utils
from plumbing.run.log import read_log

TINY = os.path.join(utils.ROOT, "assets/tiny")
GPU = torch.cuda.is_available()
SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
)
SHAPES = {
    "39m": (512, 8, 8, 2, 1536, 32_000),
    "0.5b": (896, 24, 14, 2, 4864, 151_936),  # Qwen2.5-0.5B
    "1.5b": (1536, 28, 12, 2, 8960, 151_936),  # Qwen2.5-1.5B
}
SEQUENCES = 16  # responses of a step
LENGTH = 1024 if GPU else 128  # tokens of each
WARM_UP = 2  # first steps of a run, which do not count
FLAGS = {  # of grpo.py: one pass for log-probs, two updates of one micro-batch, nothing but the work of a step
    "dataset": "arithmetic",
    "system_prompt": "",
    "reward": ("gsm8k",),
    "non_stop_penalty": False,
    "group_size": 8,
    "rollout_batch_size": SEQUENCES // 8,
    "mini_batch_size": SEQUENCES,
    "num_epochs": 2,
    "min_response_length": LENGTH,
    "max_response_length": LENGTH,
    "micro_batch_tokens": SEQUENCES * (LENGTH + 16),
    "total_episodes": SEQUENCES * (WARM_UP + 3),
    "kl_coef": 0,
    "eval_every": 0,
    "save_every": 0,
    "rollout_backend": "hf",
}
METRICS = {
    "time/step": "step, s",
    "time/rollout": "rollout, s",
    "time/logprobs": "log-probs, s",
    "time/training": "updates, s",
    "perf/tokens_per_second": "tokens/s",
    "perf/peak_memory_gb": "peak, GB",
}


def bare_logprobs(model, ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each token (N, L) but the first, by transformers' whole logits."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=GPU):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
    return -cross_entropy(logits.mT, ids[:, 1:], reduction="none")


def run_transformers(flags: dict) -> list[dict]:
    """Do the work of steps by transformers and AdamW alone: `generate`, a pass for log-probs, updates in one batch."""
    device = torch.device("cuda" if GPU else "cpu")
    model = transformers.AutoModelForCausalLM.from_pretrained(flags["model"], dtype=torch.float32).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-6, weight_decay=0.0)
    length = flags["max_response_length"]
    ids = torch.randint(2, model.config.vocab_size, (flags["mini_batch_size"], 8 + length), device=device)
    clock = utils.Clock(utils.World(0, 1, device), 0.0, utils.parameter_count(model))
    steps = []
    for _ in range(flags["total_episodes"] // len(ids)):
        clock.start()
        clock.begin("rollout")
        model.generate(ids[:, :8], do_sample=True, top_k=0, max_new_tokens=length, min_new_tokens=length)
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


def measure(kind: str, flags: dict) -> pandas.Series:
    """Return the medians of METRICS over the steps that count, of "transformers" or of "grpo.py" with further flags."""
    name, *further = kind.split()
    if name == "transformers":
        steps = run_transformers(flags)
    else:
        grpo.main(tyro.cli(grpo.Args, args=further, default=grpo.Args(**flags)))
        steps = read_log(os.path.join(flags["output_dir"], flags["run_name"]))
    return pandas.DataFrame(steps)[[*METRICS]][WARM_UP:].median().rename(METRICS)


def random_model(shape: tuple, folder: str) -> str:
    """Save a random Qwen2 with the tokenizer of assets/tiny; return the folder."""
    config = transformers.Qwen2Config(
        **dict(zip(SIZES, shape)),
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return folder


def compare(flags: dict, kinds: list[str], rounds: int) -> pandas.DataFrame:
    """Return what `measure` returns, a row for each (kind, round).

    Args:
        flags: of grpo.py, for all kinds; a round is its seed.
    """
    rows = {}
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as process:
        for seed, kind in itertools.product(range(1, rounds + 1), kinds):
            run = {**flags, "run_name": f"{kind} {seed}", "seed": seed}
            rows[kind, seed] = process.submit(measure, kind, run).result()
    return pandas.DataFrame(rows).T


def table(rows: pandas.DataFrame) -> str:
    """Return medians over the rounds, and the median, lowest and highest ratio to transformers alone, in a round."""
    medians = rows.groupby(level=0, sort=False).median().round(4)
    ratios = rows.div(rows.loc["transformers"], level=1).groupby(level=0, sort=False)
    ranges = ratios.agg(["median", "min", "max"]).round(2).T
    return f"{medians.to_string()}\n\nratios to transformers, in a round\n{ranges.to_string()}"


def main(
    shape: str = "0.5b" if GPU else "39m", rounds: int = 3, variants: tuple[str, ...] = (), output: str = ""
) -> None:
    """Time rollouts, log-probs and updates (forward, backward, AdamW) of random weights, beside transformers alone.

    Args:
        shape: of the model: 39m, 0.5b or 1.5b.
        rounds: processes of each kind, in turns.
        variants: flags of grpo.py to time, too, such as "--attention sdpa".
        output: Markdown file to write.
    """
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    kinds = ["transformers", "grpo.py", *(f"grpo.py {flags}" for flags in variants)]
    with tempfile.TemporaryDirectory() as folder:
        flags = {**FLAGS, "model": random_model(SHAPES[shape], f"{folder}/model"), "output_dir": folder}
        rows = compare(flags, kinds, rounds)
    device = torch.cuda.get_device_name() if GPU else f"{platform.machine()}, {os.cpu_count()} cores"
    text = f"# {shape} on {device}, torch {torch.__version__}, {rounds} rounds\n\n```\n{table(rows)}\n```\n"
    print(text)
    if output:
        Path(output).write_text(text)


if __name__ == "__main__":
    tyro.cli(main)
