"""What a run prints and logs: progress, metrics.jsonl, samples.jsonl, held_out.jsonl, curves.png, and --track."""

import importlib
import math
import os
from collections import deque
from dataclasses import asdict

import numpy as np
from tqdm import tqdm

from plumbing.run.curves import CURVES, plot_curves
from plumbing.run.files import append, read_log
from plumbing.run.ranks import begin_phase
from plumbing.run.resume import Origin
from utils import World, first_line, loading, progress_bars, warn

PROGRESS = {  # the values in the progress bar, or in the line of a step, if a run has them
    "objective/scores": "score",
    "objective/kl": "kl",
    "train/loss": "loss",
    "eval/accuracy": "held-out",
    "eval/pair_accuracy": "held-out",
    "time/step": "seconds",
}
CONTROL = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "\ufffd")  # codes that a terminal obeys


class RunLog:
    """The console output of a run and the files that it logs to.

    Every rank makes one and makes the same calls; rank 0 writes.
    """

    def __init__(self, origin: Origin, args, world: World, total_steps: int, step: int):
        """Open the logs in the folder of `origin`, which exists, of a run that has made `step` steps."""
        self.folder, self.world = origin.folder, world
        self.values: dict[str, str] = {}  # in the progress bar
        self.latest, self.warned = deque(maxlen=10), set()  # the metrics of the last ten steps; what was warned of
        self.library = self.url = None  # that of --track, and the address of the run there
        if args.track:
            world.on_main(lambda: self._track(origin, args))
        if world.main:
            print(f"run: {self.folder}" + (f" (goes on after step {step})" if origin.checkpoint else ""), flush=True)
            for name, (before, now) in origin.changes.items():
                print(f"changed since: --{name} {before} -> {now}", flush=True)
        disable = None if world.main else True  # None: without a terminal
        self.progress = tqdm(total=total_steps, initial=step, unit="step", dynamic_ncols=True, disable=disable)
        progress_bars.append(self.progress)
        self.phase("start")

    def _track(self, origin: Origin, args) -> None:
        """Begin the run in the library that --track names, or continue it there."""
        with loading(f"--track {args.track}"):
            library = importlib.import_module(args.track)
            # Weights & Biases continues the run of an id, trackio that of a name.
            options = {"id": origin.run_id, "dir": origin.folder} if args.track == "wandb" else {}
            run = library.init(
                project=os.environ.get("WANDB_PROJECT", "rl-on-language-models"), name=os.path.basename(origin.folder),
                config=asdict(args), resume="allow", **options,
            )  # fmt: skip
        self.library, self.url = library, getattr(run, "url", None)

    def lengths(self, data: dict[str, list[int]]) -> None:
        """Print how many items of each name there are, and how long they are in tokens."""
        for name, lengths in data.items():
            if lengths and self.world.main:
                span = f"{min(lengths)} to {max(lengths)} tokens, median {np.median(lengths):g}"
                tqdm.write(f"{name}: {len(lengths):,} of {span}")

    def phase(self, name: str) -> None:
        """Begin a phase, which the progress bar shows."""
        begin_phase(name, self.world)
        self.progress.set_description(name)

    def log(self, metrics: dict) -> None:
        """Append a row of metrics, with "step", to metrics.jsonl, and track it; null stands for what is not finite."""
        if not self.world.main:
            return
        row = finite(metrics)
        append(os.path.join(self.folder, "metrics.jsonl"), [row])
        if self.library:
            self.library.log({name: x for name, x in row.items() if x is not None}, step=row["step"])
        values = {PROGRESS[key]: f"{x:.3g}" for key, x in row.items() if key in PROGRESS and x is not None}
        self.values |= values
        self.progress.set_postfix(self.values)
        self.progress.update(row["step"] - self.progress.n)
        if self.progress.disable:
            line = ", ".join(map("=".join, values.items()))
            print(f"step {row['step']} of {self.progress.total}: {line}", flush=True)
        if row["step"]:
            self.latest.append(row)
            self._warn_of_troubles()

    def _warn_of_troubles(self) -> None:
        """Warn, once a run, of what is amiss in ten steps in a row."""
        column = lambda name: np.array([row.get(name) for row in self.latest], dtype=float)  # NaN for None
        scores, stopped = column("objective/scores"), column("reward/stopped")
        troubles = {
            "all responses to a prompt score alike: try another --temperature": column("val/zero_std_fraction") == 1,
            "no response stops: try a higher --max_response_length": column("val/num_stop_token_ids") == 0,
            "the score falls at every step: try a lower --learning_rate": np.diff(scores) < 0,
            "cut-off responses score best: try a lower --penalty_reward_value": column("reward/cut_off") > stopped,
        }
        for trouble, found in troubles.items():
            if len(self.latest) == self.latest.maxlen and found.all() and trouble not in self.warned:
                self.warned.add(trouble)
                warn(f"steps {self.latest[0]['step']} to {self.latest[-1]['step']}: {trouble}")

    def samples(self, step: int, rows: list[dict], name: str = "samples.jsonl") -> None:
        """Append rows to samples.jsonl, or to held_out.jsonl, which has those of evaluations."""
        if self.world.main:
            append(os.path.join(self.folder, name), [{"step": step, **finite(row)} for row in rows])

    def table(self, step: int, rows: list[dict]) -> None:
        """Print a few held-out samples, all with the same columns, as a table."""
        if not self.world.main:
            return
        import rich.console
        import rich.table
        import rich.text

        rows = [{name: x for name, x in row.items() if name not in ("length", "turns")} for row in rows]
        title = f"held-out samples after step {step}"
        table = rich.table.Table(*rows[0], title=title, title_justify="left", show_lines=True)
        for row in rows:
            cells = [f"{x:g}" if isinstance(x, float) else str(x).translate(CONTROL) for x in finite(row).values()]
            # Both ends of a long text: the question ends a prompt, the answer a response.
            table.add_row(*(rich.text.Text(c if len(c) <= 400 else f"{c[:200]} ... {c[-200:]}") for c in cells))
        with tqdm.external_write_mode():
            rich.console.Console().print(table)
        if self.library:
            samples = self.library.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
            self.library.log({"samples": samples}, step=step)

    def draw(self) -> None:
        """Draw curves.png. A failure is a warning: the values are in metrics.jsonl."""
        if not self.world.main:
            return
        try:
            plot_curves([self.folder], os.path.join(self.folder, "curves.png"))
        except Exception as error:
            warn(f"{self.folder}/curves.png: {first_line(error)}")

    def close(self, message: str) -> None:
        """End the progress bar and the tracking, print `message` and the held-out results, and draw curves.png."""
        begin_phase("end", self.world)
        if not self.world.main:
            return
        self.progress.close()
        print(message, flush=True)  # before the picture, as drawing it may be interrupted
        self.draw()
        rows = read_log(self.folder)
        for key, name in CURVES.items():
            values = {row["step"]: row[key] for row in rows if row.get(key) is not None}
            if values and key.startswith("eval/"):
                ends = dict.fromkeys((min(values), max(values)))  # one step if there is only one
                print(f"{name}: " + ", ".join(f"{values[step]:.3f} at step {step}" for step in ends))
        if os.path.exists(path := os.path.join(self.folder, "curves.png")):
            print(f"curves: {path}", flush=True)
        if self.library:
            self.library.finish()


def check_track(name: str) -> None:
    """Exit with code 2 if the library of --track is not installed, or if it requires a login and there is none."""
    with loading(f"--track {name}"):
        library = importlib.import_module(name)
        if name == "wandb":
            library.login()  # WANDB_MODE=offline requires none


def finite(row: dict) -> dict:
    """Return a row with None for numbers that are not finite, which JSON does not have."""
    return {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in row.items()}
