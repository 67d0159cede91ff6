"""What a run shows and logs: progress, metrics.jsonl, samples.jsonl, curves.png and report.html.

Imports plumbing.run.files (how a file is written and read), plumbing.run.curves and plumbing.run.report (what is drawn),
plumbing.run.resume (where the run begins), plumbing.run.tracking (Weights & Biases, TensorBoard) and plumbing.run.ranks (which
phase a rank is in).
"""

import math
import os
from typing import Callable

import numpy as np
from tqdm import tqdm

from plumbing.run.curves import plot_curves
from plumbing.run.files import append, read_jsonl, why_not_written
from plumbing.run.ranks import Phase, begin_phase
from plumbing.run.report import write_report
from plumbing.run.resume import Origin
from plumbing.run.tracking import TRACKERS
from utils import World, progress_bars, warn

SHOWN = {  # what stands in the progress bar, as far as a run has it
    "objective/scores": "score",
    "objective/kl": "kl",
    "train/loss": "loss",
    "eval/accuracy": "held-out",
    "eval/pair_accuracy": "held-out",
}
SUMMARY = {  # the last lines of a run, as far as it has these metrics
    "held-out accuracy, sampled": "eval/accuracy",
    "held-out accuracy, greedy": "eval/greedy_accuracy",
    "held-out pairs ranked right": "eval/pair_accuracy",
}


class RunLog:
    """The console output of a run, and its metrics.jsonl, samples.jsonl and curves.png.

    Every rank makes one and makes the same calls; rank 0 writes.
    """

    def __init__(self, origin: Origin, args, world: World, total_steps: int, step: int, data: dict[str, list[int]]):
        """
        Args:
            origin: its folder is there.
            step: that the run goes on after; 0 for a new one.
            data: lengths in tokens of what the run reads, by name.
        """
        self.folder, self.world, self.args, self.tracker, self.progress = origin.folder, world, args, None, None
        self.shown: dict[str, str] = {}  # the values in the progress bar
        resumed = origin.checkpoint is not None
        if args.track:
            world.on_main(lambda: self._track(origin))
        if world.main:
            print(f"run: {self.folder}" + (f" (goes on after step {step})" if resumed else ""), flush=True)
            for name, (before, now) in origin.changes.items():
                print(f"changed since: --{name} {before} -> {now}", flush=True)
            self._describe(data, resumed)
            self.progress = tqdm(total=total_steps, initial=step, unit="step", dynamic_ncols=True, smoothing=0.1)
            progress_bars.append(self.progress)
        self.phase("start")

    def _track(self, origin: Origin) -> None:
        self.tracker = TRACKERS[self.args.track](origin, self.args)

    def _describe(self, data: dict, resumed: bool) -> None:
        """Print the lengths of the data; track their histograms, once a run."""
        for name, lengths in data.items():
            print(f"{name}: {length_statistics(lengths)}", flush=True)
            if self.tracker and not resumed:
                self.tracker.histogram(f"data/{name}", lengths, 0)

    def phase(self, name: str) -> None:
        """Begin a phase, which the progress bar shows."""
        begin_phase(name, self.world)
        if self.progress is not None:
            self.progress.set_description(name)

    def log(self, metrics: dict) -> None:
        """Append a row of metrics, with "step", to metrics.jsonl, and track it; null stands for what is not finite."""
        row = finite(metrics)
        self.world.on_main(lambda: append(os.path.join(self.folder, "metrics.jsonl"), [row]))
        if not self.world.main:
            return
        if self.tracker:
            self.tracker.metrics(row)
        self.shown |= {SHOWN[key]: f"{x:.3g}" for key, x in row.items() if key in SHOWN and x is not None}
        self.progress.set_postfix(self.shown)
        self.progress.update(row["step"] - self.progress.n)

    def samples(self, step: int, rows: list[dict], name: str = "samples.jsonl") -> None:
        """Append rows to samples.jsonl, or to held_out.jsonl, which has those of evaluations."""
        path, rows = os.path.join(self.folder, name), [{"step": step, **finite(row)} for row in rows]
        self.world.on_main(lambda: append(path, rows))

    def table(self, step: int, rows: list[dict], lengths: list[int]) -> None:
        """Print held-out samples as a table.

        Args:
            rows: a few samples, all with the same columns.
            lengths: tokens of every held-out response; a histogram of them is tracked with the samples.
        """
        if not self.world.main:
            return
        import rich.console
        import rich.table
        import rich.text

        rows = [{name: x for name, x in row.items() if name != "length"} for row in rows]
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
        if self.tracker:
            self.tracker.table(rows, step)
            self.tracker.histogram("lengths", lengths, step)

    def draw(self) -> dict[str, str]:
        """Draw curves.png and, with --report, report.html; return {"curves": path or "none", ...}. For rank 0 alone.

        A failure is a warning: what they show is in the run's other files.
        """
        found = {}
        drawn_by = {"curves.png": plot_curves} | ({"report.html": write_report} if self.args.report else {})
        for name, draw in drawn_by.items():
            path = os.path.join(self.folder, name)
            try:
                draw([self.folder], path)
            except Exception as error:  # a full disk, or whatever a damaged file made of it
                warn(f"{path}: cannot be written ({why_not_written(error)})")
                path = "none"
            found[name.partition(".")[0]] = path
        return found

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
        drawn = self.draw()
        rows = read_jsonl(os.path.join(self.folder, "metrics.jsonl"))
        for name, key in SUMMARY.items():
            values = {row["step"]: row[key] for row in rows if row.get(key) is not None}
            if values:
                ends = dict.fromkeys((min(values), max(values)))  # one step if there is only one
                print(f"{name}: " + ", ".join(f"{values[step]:.3f} at step {step}" for step in ends))
        for name, path in drawn.items():
            print(f"{name}: {path}", flush=True)
        summary = {}
        if push:
            summary["published_model"] = push(self.tracker.url if self.tracker else None)
            print(f"published: {summary['published_model']}", flush=True)
        if self.tracker:
            self.tracker.close(**summary)


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
