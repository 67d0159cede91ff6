"""Measure speed. The first command is the first thing to run on a GPU; with trl==1.16.0 the second:

    python scripts/benchmark.py step --output results/training.md
    python scripts/benchmark.py trl --work demo "long tail" --output results/trl.md --picture assets/trl.png
    python scripts/benchmark.py trl --work bf16 float32 --model path/to/SmolLM2-135M-Instruct
    python scripts/benchmark.py step --shape 0.5b 1.5b --minutes 10 --variants "precision pure_bf16" "attention sdpa"

Runs that are compared take turns, each in a process of its own with one thread, and each is printed
at once. Numbers are medians over the processes of the median step, the first two left out.
"""

import itertools
import math
import os
import sys
import tempfile
import time
import zlib
from multiprocessing import get_context
from pathlib import Path

import datasets
import pandas
import repository  # noqa: F401
import torch
import transformers
import tyro
import yaml
from matplotlib.figure import Figure

import grpo
import utils
from plumbing.data import tasks
from plumbing.rewards.verifiers import gsm8k
from plumbing.run.command import report_errors
from plumbing.run.folder import git_commit, machine
from plumbing.run.log import append, read_log

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
            clock.begin_phase("rollout")
            outputs = super()._generate_and_score_completions(inputs)
            clock.begin_phase("training")
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
        append(f"{folder}/metrics.jsonl", run_trl(flags))
        return
    _, *further = kind.split()
    grpo.main(tyro.cli(grpo.Args, args=further, default=grpo.Args(**flags)))


def medians(steps: pandas.DataFrame) -> pandas.Series:
    """Return the medians of METRICS over the steps that count, and the seconds of the first step,
    which has what --compile costs.
    """
    frame = steps.reindex(columns=[*METRICS]).rename(columns=METRICS).dropna(subset="step, s")
    first = pandas.Series({"first step, s": frame["step, s"][:1].mean()})
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


def compare(cases: dict[tuple, dict], rounds: int, minutes: float) -> tuple:
    """Run each case in turns, in processes of their own, until the minutes are over; print the
    medians of each at once.

    Args:
        cases: {(name, kind): flags of grpo.py}; their seed is the number of the round.
    Returns:
        {(name, kind, round): steps}, without those that have no step that counts, and the names of
        those that failed.
    """
    runs = {}
    failed = []
    os.environ |= ENVIRONMENT
    end = time.monotonic() + 60 * minutes
    for seed, ((case, kind), flags) in itertools.product(range(1, rounds + 1), cases.items()):
        if (left := end - time.monotonic()) <= 0:
            break
        name = f"{case}, {kind}, round {seed}"
        flags = {**flags, "run_name": name, "seed": seed}
        process = get_context("spawn").Process(target=measure, args=(kind, flags))
        process.start()
        process.join(left)
        code = process.exitcode  # None if the time is over
        process.kill()
        process.join()
        steps = pandas.DataFrame(read_log(os.path.join(flags["output_dir"], name)))
        numbers = medians(steps).dropna()
        if code:
            failed.append(name)
            print(f"{name}: FAILED, exit code {code}", flush=True)
        elif "step, s" not in numbers:
            print(f"{name}: no number, as the time was over", flush=True)
        else:
            runs[case, kind, seed] = steps
            print(f"{name}:", ", ".join(f"{n} {x:.4g}" for n, x in numbers.items()), flush=True)
    return runs, failed


def table(rows: pandas.DataFrame) -> str:
    """Return medians over the rounds, and the median, lowest and highest ratio to the first kind,
    in a round; of the rows of each (kind, round).
    """
    rows = rows.dropna(axis=1)
    base = rows.index[0][0]
    ratios = rows.div(rows.loc[base], level=1).groupby(level=0, sort=False)
    ranges = ratios.agg(["median", "min", "max"]).round(2).T
    text = rows.groupby(level=0, sort=False).median().round(4).to_string()
    return f"{text}\n\nratios to {base}, in a round\n{ranges.to_string()}"


def report(title: str, runs: dict[tuple, pandas.DataFrame], failed: list[str], output: str) -> None:
    """Print the table of each case, and where it was measured; write this to a Markdown file if
    there is a name for it; exit with code 1 if some processes failed.
    """
    rows = pandas.DataFrame({key: medians(steps) for key, steps in runs.items()}).T
    cases = dict.fromkeys(case for case, *_ in runs)
    tables = "\n\n".join(f"{case}\n{table(rows.loc[case])}" for case in cases)
    where = f"{machine()}, torch {torch.__version__}, at {git_commit()}"
    text = f"# {title}\n\n{where}\n\n```\n{tables or 'no number'}\n```\n"
    print(text)
    if output:
        Path(output).write_text(text)
    if failed:
        sys.exit(f"failed: {'; '.join(failed)}")


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
    flags = {**TABLE["flags"], "min_response_length": length, "max_response_length": length}
    # One micro-batch of 16 responses with their prompts.
    flags["micro_batch_tokens"] = 16 * (length + 16)
    cases = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in shape:
            model = random_model(name, f"{folder}/{name}")
            for kind in kinds:
                cases[name, kind] = {**flags, "model": model, "output_dir": folder}
        runs, failed = compare(cases, rounds, minutes)
    report("Steps", runs, failed, output)


def word_problems(path: str) -> str:
    """Write prompts of the length of GSM8K's to a file of rows; return its path."""
    words = TABLE["story"].split()
    rows = [{"prompt": f"{i}. {' '.join(words[i % 40 :])}"} for i in range(1000)]
    pandas.DataFrame(rows).to_json(path, orient="records", lines=True)
    return path


def trl(
    work: tuple[str, ...] = ("demo",),
    rounds: int = 3,
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
        rounds: processes of each, in turns.
        model: folder of a chat model.
        output: Markdown file to write.
        picture: PNG file to write, of the demo's task: held-out accuracy over seconds of training.
    """
    cases = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in work:
            flags = {**TABLE["demo"], **TABLE["work"][name], "output_dir": f"{folder}/{name}"}
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
            cases |= {(name, kind): flags for kind in kinds}
        runs, failed = compare(cases, rounds, 1e3)
    if picture and "demo" in work:
        draw(runs, picture)
    report("GRPO by TRL and by grpo.py", runs, failed, output)


def draw(runs: dict[tuple, pandas.DataFrame], picture: str) -> None:
    """Draw held-out accuracy over seconds of training, a curve per run of the demo's task."""
    axes = Figure(figsize=(7, 3), layout="constrained").subplots()
    for (case, kind, number), run in runs.items():
        if case == "demo":
            curve = run.assign(seconds=run["time/step"].cumsum()).dropna(subset="eval/accuracy")
            color = "tab:orange" if kind == "TRL" else "tab:blue"
            label = kind if number == 1 else None
            axes.plot(curve["seconds"], curve["eval/accuracy"], ".-", color=color, label=label)
    axes.set(xlabel="seconds of training, one CPU thread", ylabel="held-out accuracy")
    axes.legend()
    axes.figure.savefig(picture, dpi=150)


if __name__ == "__main__":
    with report_errors():
        tyro.extras.subcommand_cli_from_dict({"step": step, "trl": trl})
