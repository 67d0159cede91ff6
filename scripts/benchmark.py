"""Measure a step of grpo.py beside transformers and AdamW alone, on random weights. The first thing
to run on a GPU:

    python scripts/benchmark.py --output results/training.md
    python scripts/benchmark.py --shape 1.5b --variants "precision pure_bf16" "compile --attention sdpa"

Runs that are compared take turns, each in a process of its own with one thread. Numbers are medians
over the processes of the median step, the first two left out.
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
import yaml
from torch.nn.functional import cross_entropy

import grpo
import utils
from plumbing.run.log import read_log

TINY = os.path.join(utils.ROOT, "assets/tiny")
GPU = torch.cuda.is_available()
# shapes of models, flags of grpo.py, metrics
TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
LENGTH = 1024 if GPU else 128  # tokens of a response
FLAGS = TABLE["flags"] | {"min_response_length": LENGTH, "max_response_length": LENGTH}
METRICS = TABLE["metrics"]
WARM_UP = 2  # first steps of a run, which do not count


def bare_logprobs(model, ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each token (N, L) but the first, by transformers' whole
    logits.
    """
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=GPU):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
    return -cross_entropy(logits.mT, ids[:, 1:], reduction="none")


def run_transformers(flags: dict) -> list[dict]:
    """Do the work of steps by transformers and AdamW alone: `generate`, a pass for log-probs,
    updates in one batch.
    """
    device = torch.device("cuda" if GPU else "cpu")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        flags["model"], dtype=torch.float32
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-6, weight_decay=0.0)
    length = flags["max_response_length"]
    ids = torch.randint(
        2, model.config.vocab_size, (flags["mini_batch_size"], 8 + length), device=device
    )
    clock = utils.Clock(utils.World(0, 1, device), 0.0, model.num_parameters())
    steps = []
    for _ in range(flags["total_episodes"] // len(ids)):
        clock.start()
        clock.begin("rollout")
        model.generate(
            ids[:, :8], do_sample=True, top_k=0, max_new_tokens=length, min_new_tokens=length
        )
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
    """Return the medians of METRICS over the steps that count, of "transformers" or of "grpo.py"
    with further flags.

    Besides, the seconds of the first step, which has what --compile costs.
    """
    name, *further = kind.split()
    if name == "transformers":
        steps = run_transformers(flags)
    else:
        grpo.main(tyro.cli(grpo.Args, args=further, default=grpo.Args(**flags)))
        steps = read_log(os.path.join(flags["output_dir"], flags["run_name"]))
    frame = pandas.DataFrame(steps)[[*METRICS]].rename(columns=METRICS)
    return pandas.concat(
        [frame[WARM_UP:].median(), pandas.Series({"first step, s": frame["step, s"][0]})]
    )


def random_model(shape: str, folder: str) -> str:
    """Save a random Qwen2 with the tokenizer of assets/tiny; return the folder."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**TABLE["shapes"][shape])
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
    """Return medians over the rounds, and the median, lowest and highest ratio to transformers
    alone, in a round.
    """
    medians = rows.groupby(level=0, sort=False).median().round(4)
    ratios = rows.div(rows.loc["transformers"], level=1).groupby(level=0, sort=False)
    ranges = ratios.agg(["median", "min", "max"]).round(2).T
    return f"{medians.to_string()}\n\nratios to transformers, in a round\n{ranges.to_string()}"


def main(
    shape: str = "0.5b" if GPU else "39m",
    rounds: int = 3,
    variants: tuple[str, ...] = (),
    output: str = "",
) -> None:
    """Time rollouts, log-probs and updates (forward, backward, AdamW) of random weights, beside
    transformers alone.

    Args:
        shape: of the model: 10m, 39m, 0.5b or 1.5b.
        rounds: processes of each kind, in turns.
        variants: flags of grpo.py to time, too, without the first two dashes, such as "attention
            sdpa".
        output: Markdown file to write.
    """
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    kinds = ["transformers", "grpo.py", *(f"grpo.py --{flags}" for flags in variants)]
    with tempfile.TemporaryDirectory() as folder:
        flags = {**FLAGS, "model": random_model(shape, f"{folder}/model"), "output_dir": folder}
        rows = compare(flags, kinds, rounds)
    device = (
        torch.cuda.get_device_name() if GPU else f"{platform.machine()}, {os.cpu_count()} cores"
    )
    text = f"# {shape} on {device}, torch {torch.__version__}, {rounds} rounds\n\n```\n{table(rows)}\n```\n"
    print(text)
    if output:
        Path(output).write_text(text)


if __name__ == "__main__":
    tyro.cli(main)
