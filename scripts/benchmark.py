"""Measure speed and memory. Each sub-command prints tables; docs/benchmarks.md has each figure with its command:

    python scripts/benchmark.py training --output results/training.md             # on a GPU: the shapes of Qwen2.5
    trl-venv/bin/python scripts/benchmark.py trl --output results/benchmark.md    # and benchmark.json, with each step

TRL is in an environment of its own, with the same versions of all else (python -m venv trl-venv; trl-venv/bin/pip
install -r requirements.txt trl==1.16.0). Linux only: a process's memory is read from /proc.

Runs that are compared take turns, each in a process of its own, and are shown in one form of table. Seconds are medians
over the runs of the median step, the first two left out; a step lasts from the end of the one before to its own end.
"""

import importlib.util
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from typing import Annotated, Callable, Literal
from unittest import mock

import torch
import transformers
import tyro
from tyro.constructors import PrimitiveConstructorSpec

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import agree
import benchmark_bare
import benchmark_padding
import benchmark_rewards
import benchmark_scaling
from benchmark_bare import KINDS
from benchmark_scaling import PHASES
from benchmark_trl import CASES, train

import grpo
import utils
from plumbing.command_line import parse, run_subcommand
from plumbing.flags import PositiveInt, in_range
from plumbing.run import checkpoints, resume, run
from plumbing.run.files import read_jsonl

TINY, GPU = os.path.join(utils.ROOT, "assets/tiny"), torch.cuda.is_available()
SHAPES = {  # hidden size, layers, heads, key heads, intermediate size, vocabulary
    "0.5b": (896, 24, 14, 2, 4864, 151_936),  # Qwen2.5-0.5B
    "1.5b": (1536, 28, 12, 2, 8960, 151_936),  # Qwen2.5-1.5B
    "10m-large": (64, 4, 4, 2, 256, 151_936),  # 10 million parameters, most of them in the vocabulary
    "10m-small": (320, 8, 5, 5, 1280, 512),  # 13 million parameters, most of them in the blocks
    "39m": (512, 8, 8, 2, 1536, 32_000),
    "10m-rollout": (256, 8, 4, 4, 1024, 8_192),
    "1m-rollout": (64, 2, 2, 2, 256, 8_192),
    "long tail": (64, 2, 4, 2, 256, 64),
    "large vocabulary": (64, 2, 4, 2, 256, 151_936),
    **{f"vocabulary {n}": (128, 2, 2, 2, 512, n) for n in benchmark_scaling.VOCABULARIES},
}
Shape = Literal[tuple(SHAPES)]
# Of all runs: the demo's task without a system turn, KL, evaluation and checkpoints.
RUN = {
    "dataset": "arithmetic", "system_prompt": "", "reward": "gsm8k", "max_prompt_length": 16, "group_size": 8,
    "adam_beta2": 0.95, "warmup_ratio": 0, "kl_coef": 0, "eval_every": 0, "save_every": 0, "log_samples": 0,
    "logits_chunk_tokens": 512, "micro_batch_tokens": 4096, "run_name": "run",
}  # fmt: skip


def output_file(words: list[str]) -> str:
    """Return the name of the file to write. Raise ValueError, before anything is measured, if that cannot be done."""
    (name,) = words
    if os.path.isdir(name) or not os.access(os.path.dirname(name) or ".", os.W_OK):
        raise ValueError(f"{name} is no file that can be written")
    return name


OutputFile = Annotated[
    str,
    PrimitiveConstructorSpec(1, "FILE", output_file, lambda name: isinstance(name, str), lambda name: [name]),
    tyro.conf.arg(help="Markdown file to write."),
]
Rounds = Annotated[PositiveInt, tyro.conf.arg(help="Processes of each kind, in turns.")]


def report(output: str, title: str, about: list[str], *tables: list) -> None:
    """Print lines and tables (rows of cells, the header first) as Markdown, and write them if `output` names a file."""
    device = torch.cuda.get_device_name() if GPU else f"{platform.machine()}, {os.cpu_count()} cores"
    row = lambda cells: f"| {' | '.join(cells)} |"
    lines = [f"# {title}", "", f"`python scripts/benchmark.py {shlex.join(sys.argv[1:])}`", ""]
    lines += [f"- {time.strftime('%Y-%m-%d')}, {device}, torch {torch.__version__}", *(f"- {line}" for line in about)]
    for header, *rows in tables:
        lines += ["", row(header), "|---" * len(header) + "|", *map(row, rows)]
    print(*lines, sep="\n")
    if output:
        with open(output, "w") as file:
            file.write("\n".join(lines) + "\n")


def random_model(shape: str, folder: str) -> str:
    """Save a random Qwen2 with the tokenizer of assets/tiny; return the folder.

    Every token of "long tail" is as likely as any other, so that a response stops after each with probability 1/64.
    """
    hidden, layers, heads, key_heads, inner, vocabulary = SHAPES[shape]
    config = transformers.Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=key_heads, max_position_embeddings=8192, bos_token_id=None,
        eos_token_id=1, pad_token_id=0, tie_word_embeddings=shape != "long tail",
    )  # fmt: skip
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    if shape == "long tail":
        model.lm_head.weight.data.zero_()
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return folder


# ---- runs ------------------------------------------------------------------------------------------------------------

WARM_UP = 2  # first steps of a run, which do not count
COLUMNS = {  # of a table of runs: the metrics of a step
    "step, s": "time/whole", "rollout, s": "time/rollout", "log-probs, s": "time/logprobs",
    "updates, s": "time/training", "sync, s": "time/sync", "tokens": "val/sequence_lengths",
    "MFU of updates": "perf/mfu_training",
}  # fmt: skip


class PeakMemory:
    """The most memory that this process takes over what it has at the beginning, in MiB."""

    def begin(self) -> None:
        self.before = self._read("VmRSS")
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")

    def end(self) -> None:
        self.mib = self._read("VmHWM") - self.before

    def _read(self, field: str) -> float:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) / 1024 for line in file if line.startswith(field))


def read_steps(folder: str) -> list[dict]:
    """Return the metrics of each step of the run in a folder, "time/whole" among them."""
    steps, ended = read_jsonl(os.path.join(folder, RUN["run_name"], "metrics.jsonl")), 0.0
    for step in steps:
        step["time/whole"], ended = step["time/from_scratch"] - ended, step["time/from_scratch"]
    return steps


def run_grpo(folder: str, flags: dict, more: list[str]) -> dict:
    """Return the metrics of each step of a run with RUN and these flags, "time/whole" among them, and its peak memory
    over the loaded models in MiB (of a GPU: all that is allocated). `more`: further words of its command line."""
    words = [f"--{name}={x}" for name, x in (RUN | flags | {"output_dir": folder}).items()]
    args = parse(grpo.Args, [*words, "--no-non_stop_penalty", *more])
    memory, start = PeakMemory(), run.Run.start

    def training_begins(*inputs):
        start(*inputs)
        memory.begin()

    ends = mock.patch.multiple(checkpoints, save_checkpoint=lambda *_: memory.end(), save_final=lambda *_: None)
    with ends, mock.patch.object(run.Run, "start", training_begins):
        grpo.main(args)
    steps = read_steps(folder)
    allocated = max(step["perf/peak_memory_gb"] for step in steps) * 1e9 / 2**20
    return {"steps": steps, "peak": allocated if GPU else memory.mib}


def in_process(function: Callable, flags: dict, more, threads: int) -> dict | str:
    """Return what a function of this file returns in a process of its own, or a line that says why it could not.

    It is called with an empty folder, the flags and `more`. The machine's load when it began is added, as "load".
    """
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    env |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    with tempfile.TemporaryDirectory() as folder:
        env["TORCHINDUCTOR_CACHE_DIR"] = folder  # empty, so that the first update compiles all
        words = [sys.executable, os.path.abspath(__file__), "--call", function.__name__]
        words.append(json.dumps([folder, flags, more]))
        load = os.getloadavg()[0]
        done = subprocess.run(words, cwd=utils.ROOT, env=env, capture_output=True, text=True)
    if done.returncode == 0:
        return {**json.loads(done.stdout.splitlines()[-1]), "load": load}
    lines = [line for line in done.stderr.splitlines() if "rror" in line] or [f"exit code {done.returncode}"]
    return lines[-1].removeprefix("error: ")[:300]


def compare(flags: dict, kinds: dict[str, tuple], rounds: int, threads: int = 1) -> dict[str, list[dict] | str]:
    """Return what each kind of run measured, round by round, or a line that says why it could not.

    Args:
        flags: of grpo.py, for all kinds. Of a model that SHAPES names, a random one is made.
        kinds: {name: (function of this file, more)}, see `in_process`. Each round has a seed of its own.
    """
    results: dict[str, list[dict] | str] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        if flags["model"] in SHAPES:
            flags = {**flags, "model": random_model(flags["model"], folder)}
        for number in range(1, rounds + 1):
            for kind, (function, more) in kinds.items():
                if isinstance(results[kind], str):
                    continue
                found = in_process(function, {**flags, "seed": number}, more, threads)
                if isinstance(found, str):
                    results[kind] = found
                else:
                    results[kind].append(found)
                print(f"{kind}, round {number}: {found if isinstance(found, str) else 'measured'}")
    return results


def typical(run: dict, *keys: str) -> float:
    """Return the median of a metric over the steps of a run that count, summed over the metrics; NaN without one."""
    steps = run["steps"][WARM_UP:]
    return sum(statistics.median([step.get(key) or math.nan for step in steps] or [math.nan]) for key in keys)


def run_table(title: str, results: dict[str, list[dict] | str], *ratios_of: tuple[str, ...]) -> list[list[str]]:
    """Return a table of what `compare` returned; ratios_of: metrics whose sum is divided by that of the first kind,
    round by round, shown as median (lowest to highest)."""
    header = [title, *COLUMNS, "first step, s", "peak, MiB", "load", *("ratio of " + " + ".join(x) for x in ratios_of)]
    base, rows = next(iter(results.values())), []
    for kind, found in results.items():
        if isinstance(found, str):
            rows.append([kind, found, *[""] * (len(header) - 2)])
            continue
        numbers = [[typical(run, key) for run in found] for key in COLUMNS.values()]
        numbers.append([run["steps"][0]["time/whole"] for run in found])
        numbers += [[run[key] for run in found] for key in ("peak", "load")]
        cells = ["" if math.isnan(x) else f"{x:,.4g}" for x in map(statistics.median, numbers)]
        for keys in ratios_of:
            pairs = [] if isinstance(base, str) else zip(found, base)
            ratios = [typical(run, *keys) / typical(other, *keys) for run, other in pairs] or [math.nan]
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            cells.append("" if math.isnan(ratios[0]) else spread)
        rows.append([kind, *cells])
    return [header, *rows]


# ---- grpo.py and TRL's GRPOTrainer -----------------------------------------------------------------------------------

Case = Literal[tuple(CASES)]


def run_trl(folder: str, flags: dict, micro_batch: int) -> dict:
    """Return what `run_grpo` does, of the same run by TRL; micro_batch: responses."""
    memory = PeakMemory()
    steps = train(folder, RUN | flags, micro_batch, memory.begin)
    memory.end()
    return {"steps": steps, "peak": memory.mib}


def trl(
    rounds: PositiveInt = 5, threads: PositiveInt = 1, cases: tuple[Case, ...] = tuple(CASES), output: OutputFile = "",
) -> None:  # fmt: skip
    """Time grpo.py and TRL's GRPOTrainer side by side on the CPU.

    A pair is one process of each, one after the other: the same model, prompts, loss, optimizer, reward, float32
    arithmetic and number of threads. What is not the work (evaluation, checkpoints, trackers, gradient checkpointing)
    is off in both. TRL has the fastest of the micro-batch sizes that were tried by hand. The steps' numbers go into a
    .json file beside the output.

    Args:
        rounds: pairs of each case; a case that is about memory has one.
        threads: threads of each process.
        cases: which of the cases.
    """
    if importlib.util.find_spec("trl") is None:
        utils.fail("trl: the package trl is not installed here; the top of this file says how to")
    versions = {**resume.versions(), "trl": metadata.version("trl")}
    about = [", ".join(f"{name} {version}" for name, version in versions.items()) + f", {threads} thread(s) each"]
    results = {}
    for case in cases:
        text, flags, micro_batch = CASES[case]
        about.append(f"{case}: {text}")
        kinds = {"TRL": (run_trl, micro_batch), "grpo.py": (run_grpo, [])}
        results[case] = compare(flags, kinds, 1 if case.startswith("memory") else rounds, threads)
    tables = [run_table(case, found, ("time/whole",)) for case, found in results.items()]
    report(output, "grpo.py and TRL's GRPOTrainer on a CPU", about, *tables)
    if output:
        with open(os.path.splitext(output)[0] + ".json", "w") as file:
            json.dump(results, file, indent=1)


# ---- updates and log-probs -------------------------------------------------------------------------------------------

VARIANTS = ("shard fsdp", "gradient_checkpointing", *(f"logits_chunk_tokens {2**i}" for i in range(10, 14)))
VARIANTS += tuple(f"attention {name}" for name in ("sdpa", "eager", "flash_attention_2", "flex_attention"))
VARIANTS += tuple(f"precision {name}" for name in ("float32", "bf16", "fp16", "pure_bf16"))


def training(
    shapes: tuple[Shape, ...] = ("0.5b", "1.5b"), variants: tuple[str, ...] = VARIANTS, base: tuple[str, ...] = (),
    sequences: in_range(int, lambda x: x > 0 and x % 8 == 0, "a multiple of 8") = 16, length: PositiveInt = 1024,
    rounds: Rounds = 3, steps: PositiveInt = 3, output: OutputFile = "",
) -> None:  # fmt: skip
    """Time an update (forward, backward, AdamW) and a pass for log-probs of one micro-batch, with random weights.

    Args:
        shapes: models, of those in SHAPES.
        variants: flags of grpo.py without their dashes, each of which is measured together with those of the base.
        base: flags of grpo.py of all that is measured.
        sequences: responses of a micro-batch.
        length: tokens of each.
        steps: steps of a process after the first two.
    """
    flags = {
        "rollout_batch_size": sequences // 8, "mini_batch_size": sequences, "min_response_length": length,
        "max_response_length": length, "micro_batch_tokens": sequences * (length + 16), "num_epochs": 2,
        "rollout_backend": "hf", "total_episodes": sequences * (WARM_UP + steps),
    }  # fmt: skip
    added = {"base": (), **{f"--{flag}": (flag,) for flag in variants}}
    kinds = {kind: (run_grpo, " ".join(f"--{flag}" for flag in (*base, *own)).split()) for kind, own in added.items()}
    tables = []
    for shape in shapes:
        results = compare({**flags, "model": shape}, kinds, rounds)
        tables.append(run_table(shape, results, ("time/training", "time/logprobs")))
    about = f"a step: {sequences} responses of {length} tokens, one pass for log-probs, two updates of one micro-batch"
    report(output, "Updates and log-probs", [about], *tables)


# ---- passes beside bare ones -----------------------------------------------------------------------------------------


def run_passes(folder: str, flags: dict, more: list) -> dict:
    """Return the seconds of passes as steps, and the process's peak memory; `more`: of `time_passes`."""
    memory = PeakMemory()
    memory.begin()
    steps = benchmark_bare.time_passes(flags["model"], *more)
    memory.end()
    return {"steps": steps, "peak": memory.mib}


def run_ranks(folder: str, flags: dict, ranks: int) -> dict:
    """Return what `run_grpo` does, of a run of several ranks, without its memory."""
    words = [f"--{name}={x}" for name, x in (RUN | flags | {"output_dir": folder}).items()]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "grpo.py"]
    subprocess.run([*start, *words, "--no-non_stop_penalty"], check=True, stdout=subprocess.DEVNULL)
    return {"steps": read_steps(folder), "peak": math.nan}


def bare(rounds: Rounds = 3, output: OutputFile = "") -> None:
    """Time passes of grpo.py beside bare ones of transformers, and a run of two ranks beside one of one rank, with one
    thread each: at 100 % efficiency two ranks take half of the time."""
    tables = []
    cases = [(*case, KINDS, ["time/logprobs", "time/training"]) for case in benchmark_bare.UPDATES]
    cases += [(*case, KINDS[:2], ["time/rollout"]) for case in benchmark_bare.ROLLOUTS]
    for model, sequences, length, kinds, passes in cases:
        runs = {kind: (run_passes, [kind, passes, sequences, length]) for kind in kinds}
        results = compare({"model": model}, runs, rounds)
        tables.append(run_table(f"{model}: {sequences} x {length}", results, *([name] for name in passes)))
    results = compare(benchmark_bare.RANKS, {f"{ranks} ranks": (run_ranks, ranks) for ranks in (1, 2)}, rounds)
    tables.append(run_table("10m-small: 64 x 96, two ranks", results, ["time/whole"]))
    about = f"{rounds} processes of each kind, in turns; peak memory includes the model and its gradient"
    report(output, "Passes beside bare ones of transformers", [about], *tables)


def scaling(rounds: Rounds = 1, output: OutputFile = "") -> None:
    """Measure how seconds and memory of a step grow with responses, their length, the group and the vocabulary, with
    one thread. Beside the output goes a picture (.png)."""
    tables, drawn = [], {}
    for axis, points in benchmark_scaling.AXES.items():
        results = {}
        for size, flags in points.items():
            runs = {f"{axis} {size}": (run_grpo, [])}
            (results[str(size)],) = compare(benchmark_scaling.BASE | flags, runs, rounds).values()
        tables.append(run_table(axis, results, ["time/whole"]))
        drawn[axis] = {
            int(size): {key: statistics.median(typical(run, key) for run in found) for key in PHASES.values()}
            | {"peak": statistics.median(run["peak"] for run in found)}
            for size, found in results.items() if not isinstance(found, str)
        }  # fmt: skip
    report(output, "How a step grows", [f"{benchmark_scaling.BASE}", f"{rounds} process(es) of each"], *tables)
    if output:
        benchmark_scaling.draw(drawn, os.path.splitext(output)[0] + ".png")


# ---- rollouts --------------------------------------------------------------------------------------------------------


def measure_rollouts(rounds: Rounds = 3, steps: PositiveInt = 8, output: OutputFile = "") -> None:
    """Time steps with rollouts by transformers and by vLLM, before the training and during it, where what is shown as
    the rollout is the waiting for it.

    Args:
        steps: steps of each process.
    """
    backends = ("hf", "vllm", "vllm --async_steps 1")
    kinds = {backend: (run_grpo, ["--rollout_backend", *backend.split()]) for backend in backends}
    tables = []
    for name, model, n, length in (("the demo's", TINY, 256, 48), ("Qwen2 of 10 M parameters", "10m-rollout", 64, 96)):
        flags = {
            "model": model, "max_response_length": length, "rollout_batch_size": n // 8, "mini_batch_size": n,
            "total_episodes": n * steps, "kv_cache_gb": 0.0 if GPU else 0.5,
        }  # fmt: skip
        results = compare(flags, kinds, rounds)
        tables.append(run_table(f"{name}: {n} x up to {length} tokens", results, ("time/whole",)))
    report(output, "Rollouts", [f"--rollout_backend; {rounds} runs of each, {steps} steps"], *tables)


GOES_ON = """
class GoesOn:
    def reset(self, **row):
        return None

    def step(self, response):
        return "+", 0.0, False
"""


def turns(
    turns: PositiveInt = 8, turn_length: PositiveInt = 32, rounds: Rounds = 3, steps: PositiveInt = 4,
    output: OutputFile = "",
) -> None:  # fmt: skip
    """Time rollouts of conversations by vLLM beside those of single turns with as many tokens.

    The models are random and hardly ever stop. The environment answers each turn with one token.

    Args:
        turns: turns of a conversation.
        turn_length: tokens of each.
        steps: steps of each process.
    """
    n, tokens, tables = 32, turns * turn_length, []
    flags = {
        "rollout_backend": "vllm", "kv_cache_gb": 0.5, "max_response_length": tokens + turns, "learning_rate": 1e-9,
        "rollout_batch_size": n // 8, "mini_batch_size": n, "total_episodes": n * steps,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as work:
        with open(f"{work}/goes_on.py", "w") as file:
            file.write(GOES_ON)
        talk = ["--environment", f"{work}/goes_on.py:GoesOn", "--max_turn_length"]
        kinds = {
            "no environment": (run_grpo, ["--max_response_length", str(tokens)]),
            "one turn": (run_grpo, [*talk, str(tokens), "--max_turns", "1"]),
            f"{turns} turns": (run_grpo, [*talk, str(turn_length), "--max_turns", str(turns)]),
        }
        for shape in ("1m-rollout", "10m-rollout"):
            results = compare({**flags, "model": shape}, kinds, rounds)
            tables.append(run_table(f"Qwen2 of {SHAPES[shape][1]} layers", results, ("time/rollout",)))
    about = f"{n} responses of {tokens} tokens at once; {rounds} processes of each, {steps} steps"
    report(output, "Conversations with vLLM", [about], *tables)


# ---- rewards ---------------------------------------------------------------------------------------------------------


def measure_rewards(responses: PositiveInt = 512, repeats: PositiveInt = 5, output: OutputFile = "") -> None:
    """Measure reward sources: responses a second on one core, by way of a reward server, and what stuck calls cost.

    Args:
        responses: responses of a measurement.
        repeats: measurements, of which the median counts.
    """
    about, table = benchmark_rewards.measure(responses, repeats)
    report(output, "Reward sources", about, table)


def measure_padding(draws: PositiveInt = 20, output: OutputFile = "") -> None:
    """Count how many of the tokens that ranks compute are padding, or stand for waiting for the rank with the longest
    rows. Lengths are drawn; nothing is computed but the cuts of `utils.micro_batches`.

    Args:
        draws: draws of which the mean is shown.
    """
    about = f"{benchmark_padding.COUNT} rows, mean of {draws} draws (micro-batches a rank)"
    report(output, "Padding and waiting", [about], benchmark_padding.table(draws))


def measure_agreement(trl_python: str = "", verl_python: str = "", store: str = "", output: OutputFile = "") -> None:
    """Compare equations, losses and gradients with those of TRL's and verl's own code on the same inputs (agree.py).

    Args:
        trl_python: Python of an environment with TRL; "" leaves TRL out.
        verl_python: Python of one with verl.
        store: folder in which to keep what they make of small inputs; tests/agreement is what the tests compare with.
    """
    pythons = {who: python for who, python in (("trl", trl_python), ("verl", verl_python)) if python}
    about, tables = agree.compare(pythons, store)
    report(output, "Agreement with TRL and verl", about, *tables)


COMMANDS = {
    "trl": trl, "training": training, "bare": bare, "scaling": scaling,
    "rollout": measure_rollouts, "turns": turns, "rewards": measure_rewards,
    "padding": measure_padding, "agree": measure_agreement,
}  # fmt: skip

if __name__ == "__main__":
    if sys.argv[1:2] == ["--call"]:  # by `compare`
        print(json.dumps(globals()[sys.argv[2]](*json.loads(sys.argv[3]))))
    else:
        run_subcommand(COMMANDS, description=__doc__)
