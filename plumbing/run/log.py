"""What a run prints and logs: progress, metrics.jsonl, samples.jsonl, held_out.jsonl, curves.png,
and --track; and functions that read the logs and args.json afterwards.
"""

import importlib
import json
import math
import os
import re
import sys
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any, Callable, Iterable, Iterator

import numpy as np
from tqdm import tqdm

from plumbing.run.ranks import begin_phase, status
from utils import UserError, World, as_user_error, first_line, one_line, say, warn

# Metrics that the progress bar, or the line of a step, shows if a run has them.
PROGRESS = {
    "objective/scores": "score",
    "objective/kl": "kl",
    "train/loss": "loss",
    "eval/accuracy": "held-out",
    "eval/pair_accuracy": "held-out",
    "val/zero_std_fraction": "zero-std",
    "rollout/logprob_diff_mean": "logp-diff",
    "time/step": "seconds",
}
# Metrics that curves.png shows if a run has them; the last lines of a run show those of eval/.
CURVES = {
    "eval/accuracy": "held-out accuracy, sampled (what is trained)",
    "eval/greedy_accuracy": "held-out accuracy, greedy",
    "eval/pair_accuracy": "held-out pairs ranked right",
    "train/pair_accuracy": "training pairs ranked right",
    "train/loss": "loss",
    "eval/margin": "held-out margin (chosen - rejected)",
    "objective/scores": "mean score",
    "objective/kl": "KL to the reference (sum over tokens)",
    "objective/divergence": "divergence from the teacher per token (nats)",
    "policy/entropy_avg": "entropy per token (nats)",
    "val/explained_variance": "explained variance of the values",
    "val/sequence_lengths": "response length (tokens)",
    "loss/grad_norm": "gradient norm",
}
# Lowest and highest usual mean of a metric over ten steps; docs/metrics.md says what another one may
# mean. "stopped": share of the sampled responses, as in the line of a step.
USUAL = {
    "stopped": (0.5, 1.0),
    "val/zero_std_fraction": (0.0, 0.8),
    "val/missing_scores": (0.0, 0.0),
    "val/skipped_updates": (0.0, 0.0),
    "val/explained_variance": (0.0, 1.0),
    "policy/clipfrac_avg": (0.0, 0.3),
    "rollout/prob_diff_mean": (0.0, 0.02),
    "rollout/left_out": (0.0, 0.5),
    "stop_reason/error": (0.0, 0.05),
}
# The name of a metric or score whose source is a file's function or a server. Its groups are the
# parts that logs keep.
SOURCE = r"^((?:eval/)?reward(?:_\w+)?/|)(?:(?:.*/)?(?=[^/]+\.py:[\w.]+(?:/\w+)?$)|https?://(?:[^/?#]*@)?([^?#]*).*)"


class RunLog:
    """The console output of a run and the files that it logs to.

    Every rank has a RunLog and makes the same calls; rank 0 writes.
    """

    def __init__(
        self, folder: str, run_id: str, args: Any, world: World, total_steps: int, step: int
    ):
        """Open the logs in a run's folder, which exists.

        Args:
            args: the flags of a script: those of plumbing.cli.RunArgs, and more.
            total_steps: of the run. step: the last one that it has made.
        """
        self.folder = folder
        self.world = world
        self.args = args
        self.values: dict[str, str] = {}  # in the progress bar
        self.latest: deque[dict] = deque(maxlen=10)  # metrics of the last steps
        self.warned: set[str] = set()
        self.library: ModuleType | None = None  # of --track
        if args.track:
            world.on_main(self._track, run_id)
        # Some CI has a terminal of size 0, without room for a bar.
        terminal = (
            world.main and sys.stderr.isatty() and min(os.get_terminal_size(sys.stderr.fileno()))
        )
        self.progress = tqdm(
            total=total_steps,
            initial=step,
            dynamic_ncols=True,
            disable=not terminal,
            bar_format="{desc}|{bar:8}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]",
        )
        self.show_every = 0.5 if terminal else 30.0  # seconds
        self.phase("start")

    def _track(self, run_id: str) -> None:
        """Begin or continue the run in the library that --track names."""
        args = self.args
        with as_user_error(f"--track {args.track}"):
            library = importlib.import_module(args.track)
            # Weights & Biases continues the run of the same id, trackio the run of the same name.
            options = {"id": run_id, "dir": self.folder} if args.track == "wandb" else {}
            run = library.init(
                project=os.environ.get("WANDB_PROJECT", "rl-on-language-models"),
                name=os.path.basename(self.folder),
                config=without_secrets(asdict(args)),
                resume="allow",
                **options,
            )
        self.library = library
        if address := getattr(run, "url", None):
            replace_file(f"{self.folder}/tracked.txt", address)

    def track(self, call: Callable) -> None:
        """Call a function with the library of --track, if there is one. What it raises becomes a
        warning, once per run: metrics.jsonl has all values.
        """
        try:
            if self.library:
                call(self.library)
        except Exception as error:
            if "track" not in self.warned:
                warn(f"--track {self.args.track}: {first_line(error)}; the run goes on")
            self.warned.add("track")

    def lengths(self, step: int, name: str, lengths: list[int]) -> None:
        """Print the number of items and the range of their lengths in tokens; track a histogram."""
        if lengths:
            span = f"{min(lengths)} to {max(lengths)} tokens, median {np.median(lengths):g}"
            say(f"{name}: {len(lengths):,} of {span}")
            self.track(lambda to: to.log({f"lengths/{name}": to.Histogram(lengths)}, step=step))

    def phase(self, name: str) -> None:
        """Begin a phase, which the progress bar shows."""
        begin_phase(name, self.world)
        self.next_show = time.monotonic() + self.show_every  # when `show` is due
        self.progress.set_description(name)

    def show(self, ended: int, total: int) -> None:
        """Show how many responses of the phase have ended."""
        self.next_show = time.monotonic() + self.show_every
        self.progress.set_description(f"{status.phase} {ended}/{total}")
        if self.progress.disable:
            say(f"{status.phase}: {ended} of {total} responses have ended")

    def log(self, metrics: dict) -> None:
        """Log the metrics of a step, "step" among them: to metrics.jsonl, where null stands for what
        is not finite, to --track and to the console.
        """
        if not self.world.main:
            return
        row = as_logged(metrics)
        append(f"{self.folder}/metrics.jsonl", [row])
        step = row["step"]
        tracked = {name: x for name, x in row.items() if x is not None}
        self.track(lambda library: library.log(tracked, step=step))
        values = {}
        if step:
            self.latest.append(row)
            seconds = fmean(each["time/step"] for each in self.latest)
            values["left"] = f"{math.ceil(seconds * (self.progress.total - step) / 60)} min"
        if "val/sampled_prompts" in row:
            responses = row["val/sampled_prompts"] * self.args.group_size
            values["stopped"] = f"{row['val/num_stop_token_ids']}/{responses}"
            row["stopped"] = row["val/num_stop_token_ids"] / responses  # not in metrics.jsonl
        for key, name in PROGRESS.items():
            if row.get(key) is not None:
                values[name] = f"{row[key]:.3g}"
        self.values |= values
        self.progress.n = step
        self.progress.set_postfix(self.values)
        if self.progress.disable:
            line = ", ".join(map("=".join, values.items()))
            print(f"step {step} of {self.progress.total}: {line}", flush=True)
        if len(self.latest) == self.latest.maxlen:
            self._warn_of_unusual()

    def _warn_of_unusual(self) -> None:
        """Warn, once per run, of each metric whose mean over the last steps is not in its range of
        USUAL.
        """
        for name, (low, high) in USUAL.items():
            values = [row[name] for row in self.latest if row.get(name) is not None]
            if values and name not in self.warned and not low <= fmean(values) <= high:
                self.warned.add(name)
                warn(
                    f"steps {self.latest[0]['step']} to {self.latest[-1]['step']}: {name} is "
                    f"{fmean(values):.3g} (usual: {low:g} to {high:g}); docs/metrics.md#usual-ranges "
                    "says what it may mean"
                )

    def samples(self, step: int, rows: Iterable[dict], name: str = "samples.jsonl") -> None:
        """Append rows to samples.jsonl, to held_out.jsonl for samples of an evaluation, or to
        tokens.jsonl.
        """
        if self.world.main:
            append(f"{self.folder}/{name}", ({"step": step, **as_logged(row)} for row in rows))

    def table(self, step: int, rows: list[dict]) -> None:
        """Print the first samples of an evaluation; track all of them as a table. They have the same
        columns.
        """
        if not self.world.main:
            return
        shown = [
            as_logged({name: x for name, x in row.items() if name not in ("length", "turns")})
            for row in rows
        ]
        for row in shown[:4]:
            say(f"held-out sample after step {step}")
            for name, x in row.items():
                say(f"    {name}: {shortened(x)}")
        values = [list(row.values()) for row in shown]
        table = lambda library: library.Table(columns=list(shown[0]), data=values)
        self.track(lambda library: library.log({"samples": table(library)}, step=step))

    def draw(self) -> None:
        """Draw curves.png. A failure is a warning: the values are in metrics.jsonl."""
        if not self.world.main:
            return
        try:
            from plumbing.run.curves import plot_curves

            plot_curves(read_log(self.folder), f"{self.folder}/curves.png")
        except Exception as error:
            warn(f"{self.folder}/curves.png: {first_line(error)}")

    def close(self, message: str) -> None:
        """End the log: print `message` and the held-out results, draw curves.png, end --track."""
        begin_phase("end", self.world)
        if not self.world.main:
            return
        self.progress.close()
        print(message, flush=True)  # before drawing, which may be interrupted
        self.draw()
        rows = list(read_log(self.folder))
        titles = {key: title for key, title in CURVES.items() if key.startswith("eval/")}
        for row in rows:
            for key in row:
                if key.startswith("eval/accuracy/"):
                    titles[key] = f"held-out accuracy of {key.removeprefix('eval/accuracy/')}"
        for key, title in titles.items():
            values = [
                f"{row[key]:.3f} at step {row['step']}" for row in rows if row.get(key) is not None
            ]
            if values:
                first_and_last = dict.fromkeys((values[0], values[-1]))  # one if they are the same
                print(f"{title}: {', '.join(first_and_last)}")
        self._print_answers()
        self._warn_of_unusual()
        if os.path.exists(path := f"{self.folder}/curves.png"):
            print(f"curves: {path}", flush=True)
        self.track(lambda library: library.finish())

    def _print_answers(self) -> None:
        """Print three held-out prompts with their responses in the first and the last evaluation. A
        resume may have changed the prompts.
        """
        evaluations: dict[int, dict] = {}  # step: {prompt: response}
        for row in read_log(self.folder, "held_out.jsonl"):
            if "response" in row:
                evaluations.setdefault(row["step"], {})[row["prompt"]] = row["response"]
        if len(evaluations) < 2:
            return
        first, *_, last = evaluations.values()
        prompts = [prompt for prompt in first if prompt in last]
        for prompt in prompts[:: math.ceil(len(prompts) / 3) or 1]:
            print(f"prompt: {shortened(one_line(prompt))}")
            for name, responses in (("before", first), ("after", last)):
                print(f"    {name}: {shortened(one_line(responses[prompt]))}")


def shortened(x: Any, most: int = 400) -> str:
    """Return a value as text for the console, of `most` characters. A long text keeps both ends: a
    prompt ends with the question, a response with the answer.
    """
    text = f"{x:g}" if isinstance(x, float) else str(x)
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"


def check_track(name: str) -> None:
    """Raise a UserError if the library of --track is not installed, or if it requires a login and
    there is none.
    """
    if not importlib.util.find_spec(name):
        raise UserError(f"--track {name} requires the package {name}: pip install {name}")
    with as_user_error(f"--track {name}"):
        library = importlib.import_module(name)
        if name == "wandb":
            library.login()  # WANDB_MODE=offline requires none


def as_logged(row: dict) -> dict:
    """Return a row as it is logged: None for what is not finite, and reward sources by short names.

    A short name has no folder, user, password or query. Where two short names would be the same,
    the second one stays long.
    """
    logged = {}
    for key, x in row.items():
        name = re.sub(SOURCE, r"\1\2", key)
        finite = not isinstance(x, float) or math.isfinite(x)
        logged[key if name in logged else name] = x if finite else None
    return logged


def replace_file(path: str, text: str) -> None:
    """Write a file. At any instant it has its old or its new content."""
    Path(f"{path}.tmp").write_text(text, "utf-8")
    os.replace(f"{path}.tmp", path)


def append(path: str | Path, rows: Iterable[dict]) -> None:
    """Append rows to a .jsonl file."""
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read_log(folder: str, name: str = "metrics.jsonl") -> Iterator[dict]:
    """Yield the rows of a run's log, none if there is no log; with None for what is not finite. A
    last line that a kill cut short is left out; raise a UserError if another line cannot be read.
    """
    path = Path(folder, name)
    if path.exists():
        with as_user_error(str(path)), open(path, encoding="utf-8") as lines:
            for line in lines:
                if line.endswith("\n"):
                    yield json.loads(line, parse_constant=lambda _: None)


def read_args(folder: str, name: str = "args.json") -> dict:
    """Return a run's args.json, {"args": {flag: value}, "defaults": ..., "script": ..., ...}, or
    another file of that kind; {} if there is none.
    """
    path = Path(folder, name)
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def without_secrets(flags: dict) -> dict:
    """Return flags for others to see: their addresses have no user, password or query, which may
    hold keys. A number that is not finite, which JSON does not have, becomes a word.
    """
    address = r"(?<=://)(?:[^\s\"\\/?#]*@)?([^\s\"\\?#]*)[^\s\"\\]*"
    return json.loads(re.sub(address, r"\1", json.dumps(flags)), parse_constant=str)
