"""Measure speed. The first command is the first thing to run on a GPU; with trl==1.16.0 the second:

    python scripts/benchmark.py step --output results/training.md
    python scripts/benchmark.py trl --work demo "long tail" --output results/trl.md
    python scripts/benchmark.py trl --work bf16 float32 --model path/to/SmolLM2-135M-Instruct --picture bars.png
    python scripts/benchmark.py scale --output results/scale.md
    python scripts/benchmark.py step --shape 0.5b 1.5b --minutes 10 --variants "precision pure_bf16" "attention sdpa"

Runs that are compared take turns, each in a process of its own with one thread, and each is printed
at once. Numbers are medians over the processes of the median step, the first two left out.
"""

import asyncio
import itertools
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
import zlib
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Callable, Sequence

import datasets
import numpy as np
import pandas
import repository  # noqa: F401
import torch
import transformers
import tyro
import yaml
from matplotlib.figure import Figure
from tqdm import tqdm

import distill
import grpo
import utils
from extras.episodes.tool_processes import ToolProcess, ToolProcesses
from plumbing.data import tasks
from plumbing.data.prompts import load_train_and_eval
from plumbing.models.tokenizer import load_tokenizer
from plumbing.rewards.sources import RewardSources, Scoring, why_unscorable
from plumbing.rewards.verifiers import gsm8k
from plumbing.rollout.batch import Batch, Sample
from plumbing.run.log import read_log

TINY = os.path.join(utils.ROOT, "assets/tiny")
GPU = torch.cuda.is_available()
# Shapes of models, flags of grpo.py, metrics.
TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
METRICS = TABLE["metrics"]
WARM_UP = 2  # first steps of a run, which do not count
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def parity(prompts: list[str], responses: list[str], **columns) -> list[float]:
    """A reward that differs from response to response, whatever a model writes."""
    return [zlib.crc32(response.encode()) % 2 for response in responses]


def run_trl(flags: dict) -> list[dict]:
    """Train and evaluate the same by TRL's GRPOTrainer, in the micro-batches that suit it best."""
    import trl

    args = grpo.Args(**flags)
    if args.dataset == "arithmetic":
        rows = tasks.arithmetic("", "train", 20_000)
    else:  # chats: TRL renders their template, as grpo.py does
        frame = pandas.read_json(args.dataset, lines=True)
        rows = [{"prompt": [{"role": "user", "content": text}]} for text in frame["prompt"]]
    clock = utils.Clock(utils.World(0, 1, torch.device("cpu")), 0.0)
    steps = []

    def reward(prompts, completions, **columns) -> list[float]:
        if args.reward == ("gsm8k",):
            return list(map(gsm8k, completions, columns["answer"]))
        return parity(prompts, list(map(str, completions)))

    class Trainer(trl.GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            if not self.model.training:
                return super()._generate_and_score_completions(inputs)
            clock.begin("rollout")
            outputs = super()._generate_and_score_completions(inputs)
            clock.begin("training")
            return outputs

    class Callback(transformers.TrainerCallback):
        def on_step_end(self, *given, **named):
            steps.append(clock.metrics(math.nan))

        def on_evaluate(self, *given, metrics, **named):
            steps[-1]["eval/accuracy"] = metrics["eval_reward"]

    size = min(TABLE["trl_micro_batch"], args.mini_batch_size)
    trainer = Trainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        args=trl.GRPOConfig(
            **TABLE["trl"],
            output_dir=args.output_dir,
            seed=args.seed,
            max_steps=args.total_episodes // args.mini_batch_size,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=args.mini_batch_size // size,
            max_completion_length=args.max_response_length,
            learning_rate=args.learning_rate,
            bf16=args.precision == "bf16",
            gradient_checkpointing=args.gradient_checkpointing,
            eval_strategy="steps" if args.eval_every else "no",
        ),
        reward_funcs=reward,
        train_dataset=datasets.Dataset.from_list(rows),
        eval_dataset=datasets.Dataset.from_list(tasks.arithmetic("", "test", args.eval_prompts)),
        processing_class=transformers.AutoTokenizer.from_pretrained(args.model),
        callbacks=[Callback()],
    )
    trainer.train()
    return steps


def measure(kind: str, flags: dict) -> None:
    """Run "TRL", or "grpo.py" with further flags; its steps are in metrics.jsonl of its folder."""
    if kind == "TRL":
        folder = os.path.join(flags["output_dir"], flags["run_name"])
        os.makedirs(folder)
        steps = pandas.DataFrame(run_trl(flags))
        steps.to_json(f"{folder}/metrics.jsonl", orient="records", lines=True)
        return
    _, *further = kind.split()
    grpo.main(tyro.cli(grpo.Args, args=further, default=grpo.Args(**flags)))


def medians(steps: pandas.DataFrame) -> pandas.Series:
    """Return the medians of METRICS over the steps that count, and the seconds of the first step,
    which has what --compile costs.
    """
    frame = steps.reindex(columns=[*METRICS]).rename(columns=METRICS).dropna(subset="step, s")
    first = pandas.Series({"first step, s": frame["step, s"].iloc[0]})
    return pandas.concat([frame[WARM_UP:].median(), first])


def random_model(shape: str, folder: str) -> str:
    """Save a random Qwen2 with the tokenizer of assets/tiny; return the folder."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**TABLE["shapes"][shape])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if shape == "long tail":  # each token is as likely as any other
        model.lm_head.weight.data.zero_()
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return folder


def compare(cases: dict[str, dict], kinds: list[str], rounds: int, minutes: float) -> tuple:
    """Run each kind on each case in turns, in processes of their own, until the minutes are over;
    print the medians of each at once.

    Args:
        cases: flags of grpo.py by name; a round is their seed.
    Returns:
        {case: {(kind, round): steps}}, without those that have no step that counts, and the names
        of those that failed.
    """
    runs: dict[str, dict] = {case: {} for case in cases}
    failed = []
    os.environ |= ENVIRONMENT
    end = time.monotonic() + 60 * minutes
    for seed, case, kind in itertools.product(range(1, rounds + 1), cases, kinds):
        if (left := end - time.monotonic()) <= 0:
            break
        name = f"{case}, {kind}, round {seed}"
        flags = {**cases[case], "run_name": name, "seed": seed}
        process = get_context("spawn").Process(target=measure, args=(kind, flags))
        process.start()
        process.join(left)
        code = process.exitcode
        if code is None:
            process.kill()
            process.join()
        steps = pandas.DataFrame(read_log(os.path.join(flags["output_dir"], name)))
        if code:
            failed.append(name)
            print(f"{name}: FAILED, exit code {code}", flush=True)
        elif steps.reindex(columns=["time/step"]).count().item() <= WARM_UP:
            print(f"{name}: no number, as the time was over", flush=True)
        else:
            runs[case][kind, seed] = steps
            numbers = medians(steps).dropna().map("{:.4g}".format)
            print(f"{name}:", ", ".join(f"{n} {x}" for n, x in numbers.items()), flush=True)
    return runs, failed


def table(runs: dict[tuple, pandas.DataFrame]) -> str:
    """Return medians over the rounds, and the median, lowest and highest ratio to the first kind,
    in a round.
    """
    if not runs:
        return "no number"
    rows = pandas.DataFrame({key: medians(steps) for key, steps in runs.items()}).T
    rows = rows.dropna(axis=1)
    base = rows.index[0][0]
    ratios = rows.div(rows.loc[base], level=1).groupby(level=0, sort=False)
    ranges = ratios.agg(["median", "min", "max"]).round(2).T
    text = rows.groupby(level=0, sort=False).median().round(4).to_string()
    return f"{text}\n\nratios to {base}, in a round\n{ranges.to_string()}"


def row(count: int, folder: str) -> Callable:
    """Read, check and encode the rows of a file, of the size of GSM8K's, at the first start."""
    words = "and one more word " * 12
    rows = [{"prompt": f"{i} {words}", "answer": str(i)} for i in range(count)]
    return loader(folder, rows, grpo.Args())


def cached_row(count: int, folder: str) -> Callable:
    """Do it at the second start."""
    load = row(count, folder)
    load()
    return load


def supervised_turn(count: int, folder: str) -> Callable:
    """Encode 20 conversations of so many turns of the user and as many of the assistant."""
    turns = [{"role": role, "content": "a few words"} for role in ("user", "assistant")]
    rows = [
        {"messages": [{"role": "system", "content": f"{i}"}] + turns * count} for i in range(20)
    ]
    return loader(folder, rows, distill.Args(on_policy_share=0.0), "conversations", [1])


def loader(folder: str, rows: list[dict], args, *learned) -> Callable:
    """Write rows to a file; return what a script does with it."""
    args.dataset = os.path.join(folder, "rows.jsonl")
    pandas.DataFrame(rows).to_json(args.dataset, orient="records", lines=True)
    args.eval_every = 0
    args.max_prompt_length = args.max_response_length = 4000
    args.model = random_model("10m", folder)
    tokenizer = load_tokenizer(args.model)
    tokenizer.chat_template = TABLE["template"]
    return lambda: load_train_and_eval(args, tokenizer, why_unscorable, None, *learned)


def token(count: int, folder: str) -> Callable:
    """Make a batch of the responses of an engine, 1,000 tokens each."""
    given = list(range(1000)), {"rollout_logprobs": [-0.5] * 1000}, True
    make = lambda: Sample({"query": [1]}, *given, scores={})
    return lambda: Batch.from_samples([make() for _ in range(count // 1000)], torch.device("cpu"))


def code_response(count: int, folder: str) -> Callable:
    """Run the programs of so many responses."""
    sources = RewardSources(grpo.Args(reward=("code",)), load_tokenizer(TINY))
    scoring = Scoring(sources, lambda: False)
    row = {"prompt": "", "answer": json.dumps({"inputs": ["1\n"], "outputs": ["1\n"]})}
    text = "```python\nprint(input())\n```"

    def score() -> None:
        for place in range(count):
            scoring.add(place, SimpleNamespace(row=row, text=text, response=[1]))
        scoring.finish()

    return score


def conversation(count: int, folder: str) -> Callable:
    """Start the processes of so many conversations at once."""
    game = os.path.join(utils.ROOT, "assets/guess/game.py:GuessTheNumber")
    of_run = ToolProcesses((), game, 60.0)
    processes = [ToolProcess(of_run, seed) for seed in range(count)]

    async def start() -> None:
        await asyncio.gather(*(process.ask("reset", {"secret": 1}) for process in processes))
        for process in processes:
            process.kill()

    return lambda: asyncio.run(start())


def cost(unit: str, count: int, folder: str) -> float:
    """Return the seconds that so many of a unit take."""
    datasets.config.HF_DATASETS_CACHE = folder
    work = globals()[unit](count, folder)
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def scale(output: str = "") -> None:
    """Print what a row, a turn, a token, a response and a conversation cost at several counts, and
    the exponent by which the seconds grow from one count to the next.

    Args:
        output: Markdown file to write.
    """
    os.environ |= ENVIRONMENT
    counts = [(unit, count) for unit, counts in TABLE["counts"].items() for count in counts]
    rows = []
    for unit, count in tqdm(counts):
        with (
            tempfile.TemporaryDirectory() as folder,
            ProcessPoolExecutor(1, get_context("spawn")) as process,
        ):
            rows.append((unit, count, process.submit(cost, unit, count, folder).result()))
    frame = pandas.DataFrame(rows, columns=["unit", "count", "seconds"])
    frame["ms per unit"] = 1e3 * frame["seconds"] / frame["count"]
    logs = np.log(frame[["count", "seconds"]]).groupby(frame["unit"]).diff()
    frame["exponent"] = logs["seconds"] / logs["count"]
    report("Scale", frame.to_string(index=False, float_format="{:.4g}".format), output)


def report(title: str, text: str, output: str, failed: Sequence[str] = ()) -> None:
    """Print what was measured, and where; write it to a Markdown file if there is a name for it; exit
    with code 1 if some processes failed.
    """
    cores = f"{platform.machine()}, {os.cpu_count()} cores"
    device = torch.cuda.get_device_name() if GPU else cores
    text = f"# {title}\n\n{device}, torch {torch.__version__}\n\n```\n{text}\n```\n"
    print(text)
    if output:
        Path(output).write_text(text)
    if failed:
        sys.exit(f"failed: {'; '.join(failed)}")


def predict(flags: dict) -> subprocess.Popen:
    """Start scripts/memory.py with flags of grpo.py. It follows no rollout of transformers' model:
    it gets a vLLM with next to no cache.
    """
    config = Path(flags["model"], "flags.yaml")
    config.write_text(yaml.safe_dump({**flags, "rollout_backend": "auto", "kv_cache_gb": 0.001}))
    command = "scripts/memory.py grpo --no-advice --config".split()
    return subprocess.Popen(
        [sys.executable, *command, config], cwd=utils.ROOT, stdout=subprocess.PIPE, text=True
    )


def step(
    shape: tuple[str, ...] = ("0.5b", "1.5b") if GPU else ("39m",),
    rounds: int = 3,
    variants: tuple[str, ...] = (),
    length: int = 256 if GPU else 128,
    minutes: float = 30.0,
    output: str = "",
) -> None:
    """Time rollouts, log-probs and updates (forward, backward, AdamW) of random weights.

    Args:
        shape: of the models: 10m, 39m, 135m, 0.5b or 1.5b.
        rounds: processes of each kind and shape, in turns.
        variants: flags of grpo.py to time beside its defaults, without the first two dashes, such as
            "attention sdpa".
        length: tokens of a response.
        minutes: after which no process runs any more; what is measured by then is reported.
        output: Markdown file to write.
    """
    kinds = ["grpo.py", *(f"grpo.py --{flags}" for flags in variants)]
    lengths = {"min_response_length": length, "max_response_length": length}
    # One micro-batch of 16 responses with their prompts.
    flags = {**TABLE["flags"], **lengths, "micro_batch_tokens": 16 * (length + 16)}
    with tempfile.TemporaryDirectory() as folder:
        cases = {
            name: {**flags, "model": random_model(name, f"{folder}/{name}"), "output_dir": folder}
            for name in shape
        }
        predictions = {name: predict(flags) for name, flags in cases.items()}
        runs, failed = compare(cases, kinds, rounds, minutes)
        text = ""
        for name, prediction in predictions.items():
            memory = prediction.communicate()[0]
            text += f"{name}\n{table(runs[name])}\n\nscripts/memory.py, bf16\n{memory}\n"
    report("Steps", text, output, failed)


def word_problems(path: str) -> str:
    """Write prompts of the length of GSM8K's to a file of rows; return its path."""
    words = TABLE["story"].split()
    rows = [{"prompt": f"{i}. {' '.join(words[i % 40 :])}"} for i in range(1000)]
    pandas.DataFrame(rows).to_json(path, orient="records", lines=True)
    return path


def trl(
    work: tuple[str, ...] = ("demo",),
    rounds: int = 3,
    steps: int = 0,
    model: str = "",
    output: str = "",
    picture: str = "",
) -> None:
    """Time GRPO by TRL and by grpo.py on the CPU: the same model, prompts, loss, optimizer, reward
    and precision, no KL.

    Args:
        work: demo (the demo's task), "long tail" (each token ends a response with probability 1/64),
            "bf16" and "float32" (--model, 2 prompts x 8 responses of up to 64 tokens, the blocks
            recomputed; grpo.py also with --compile).
        rounds: processes of each, in turns. steps: of each; 0: those of benchmark.yaml.
        model: folder of a chat model.
        output: Markdown file to write.
        picture: PNG file to write: held-out accuracy over seconds of training, or seconds per step.
    """
    runs, failed, text = {}, [], ""
    with tempfile.TemporaryDirectory() as folder:
        for name in work:
            flags = {**TABLE["demo"], **TABLE["work"][name], "output_dir": f"{folder}/{name}"}
            flags |= {"total_episodes": steps * flags["mini_batch_size"]} if steps else {}
            kinds = ["TRL", "grpo.py"]
            if name == "demo":
                flags["model"] = TINY
            elif name == "long tail":
                flags["model"] = random_model(name, f"{folder}/model")
            else:
                flags["model"] = model
                flags["dataset"] = word_problems(f"{folder}/rows.jsonl")
                kinds.append("grpo.py --compile")
            if name != "demo":
                flags["reward"] = (f"{__file__}:parity",)
            results, failures = compare({name: flags}, kinds, rounds, 1e3)
            runs |= results
            failed += failures
            text += f"{name}, {rounds} rounds\n{table(runs[name])}\n\n"
    if picture:
        draw(runs, picture)
    report("GRPO by TRL and by grpo.py", text, output, failed)


def draw(runs: dict[str, dict], picture: str) -> None:
    """Draw held-out accuracy over seconds of the demo's task alone, else the seconds of a step."""
    axes = Figure(figsize=(7, 3), layout="constrained").subplots()
    if [*runs] == ["demo"]:
        for (kind, number), run in runs["demo"].items():
            curve = run.assign(seconds=run["time/step"].cumsum()).dropna(subset="eval/accuracy")
            color = {"TRL": "tab:orange"}.get(kind, "tab:blue")
            label = kind if number == 1 else None
            axes.plot(curve["seconds"], curve["eval/accuracy"], ".-", color=color, label=label)
        axes.set(xlabel="seconds of training, one CPU thread", ylabel="held-out accuracy")
        axes.legend()
    else:
        seconds = {
            (name, kind, number): medians(run)["step, s"]
            for name, by_kind in runs.items()
            for (kind, number), run in by_kind.items()
        }
        over_rounds = pandas.Series(seconds).groupby(level=[0, 1], sort=False).median()
        over_rounds.unstack(sort=False).plot.bar(
            ax=axes, rot=0, color=["tab:orange", "tab:blue", "tab:green"]
        )
        axes.set_ylabel("seconds per step, one CPU thread")
        for bars in axes.containers:
            # 0 stands for what did not run.
            axes.bar_label(bars, [f"{x:.3g}" if x else "" for x in bars.datavalues])
        axes.margins(y=0.1)
    axes.figure.savefig(picture, dpi=150)


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"step": step, "trl": trl, "scale": scale})
