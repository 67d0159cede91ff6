"""Curves of the metrics of run folders: which ones a picture shows, which runs share a curve, and the picture.

Imports plumbing.run.files.
"""

import json
import math
import os
import re

from plumbing.run.files import replacing

CURVES = {  # what a picture shows, as far as a run has it
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
COLORS = ("#2b6cb0", "#d2691e", "#2f8f63", "#b03a6e", "#7350b8", "#8a7420", "#2392a3", "#7a4a33")
STYLE = {  # matplotlib's names
    "font.size": 9, "axes.titlesize": 10, "axes.titlepad": 8, "axes.labelsize": 8.5,
    "axes.edgecolor": "#b9b6b0", "axes.labelcolor": "#6d6b70", "text.color": "#1f1f23", "xtick.color": "#6d6b70",
    "ytick.color": "#6d6b70", "xtick.labelsize": 8, "ytick.labelsize": 8, "xtick.major.size": 0, "ytick.major.size": 0,
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False, "axes.grid": True,
    "grid.color": "#ecebe6", "axes.axisbelow": True, "lines.linewidth": 1.6, "lines.markersize": 3,
    "legend.frameon": False, "svg.fonttype": "none",
}  # fmt: skip
# Flags that say where and how a run was started, not what it is.
OF_A_START = {
    "run_name", "output_dir", "resume", "resume_with_changes", "report", "track", "wandb_project", "push_to_hub",
    "hub_model_id", "hub_private_repo",
}  # fmt: skip


def read_metrics(folder: str) -> tuple[list[dict], int]:
    """Return the rows of a run's metrics.jsonl, [] if there is none, and how many lines of it cannot be read."""
    rows, unread = [], 0
    try:
        with open(os.path.join(folder, "metrics.jsonl"), encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    row = json.loads(line)
                    rows.append({**row, "step": int(row["step"])})
                except (ValueError, TypeError, KeyError):
                    unread += line.endswith("\n")  # else it is being written
    except FileNotFoundError:
        pass
    return rows, unread


def run_names(folders: list[str]) -> list[str]:
    """Return what to call each run folder: the part of its path that the others do not share."""
    paths = [os.path.abspath(folder) for folder in folders]
    shared = os.path.commonpath(paths) if len(set(paths)) > 1 else os.path.dirname(paths[0])
    return [os.path.relpath(path, shared) for path in paths]


def groups_of_seeds(runs: list[dict]) -> list[tuple[str, list[dict]]]:
    """Return the runs whose flags are the same, seed and names aside, together, each group with a name.

    Args:
        runs: {"name", "script", "args"} each. A run without args is a group of its own.
    """
    groups = {}
    for number, run in enumerate(runs):
        flags = {name: x for name, x in run["args"].items() if name not in OF_A_START | {"seed"}}
        key = json.dumps([run["script"], flags], sort_keys=True) if flags else number
        groups.setdefault(key, []).append(run)
    return [(common_name([run["name"] for run in members]), members) for members in groups.values()]


def common_name(names: list[str]) -> str:
    """Return what the names of a group's runs begin with: "gsm8k" for gsm8k-seed1 and gsm8k-seed2."""
    if len(names) == 1:
        return names[0]
    return re.sub(r"([-_./ ]*(seed|s))?[-_./ =]*$", "", os.path.commonprefix(names)) or names[0]


def plot_curves(folders: list[str], path: str, metrics: tuple[str, ...] = (), log: str = "none") -> bool:
    """Draw curves of run folders into a picture, and return whether there is anything to draw.

    Runs that differ by their seed alone are one line, their mean, in a band from the lowest to the highest.

    Args:
        path: its ending names the format, .png, .svg or .pdf.
        metrics: what to draw, as in metrics.jsonl; default: the CURVES that the runs have.
        log: axes with a logarithmic scale, of "x" and "y".
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    runs = [read_run(folder, name) for folder, name in zip(folders, run_names(folders))]
    keys = [k for k in metrics or CURVES if any(row.get(k) is not None for run in runs for row in run["rows"])]
    if not keys:
        return False
    groups = groups_of_seeds(runs)
    width = min(3, len(keys))
    height = math.ceil(len(keys) / width)
    with matplotlib.rc_context(STYLE):
        figure = Figure((4.4 * width, 2.9 * height + 0.3 * (len(groups) > 1)), layout="constrained")  # needs no display
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)  # inches
        for place, key in enumerate(keys, 1):
            axis = figure.add_subplot(height, width, place)
            for number, (name, members) in enumerate(groups):
                label = f"{name} ({len(members)} seeds)" if len(members) > 1 else name
                draw_group(axis, key, members, COLORS[number % len(COLORS)], label)
            axis.set_title(CURVES.get(key, key), loc="left")
            axis.set_xlabel("step")
            if "x" in log:
                axis.set_xscale("symlog")  # step 0 has no logarithm
            else:
                axis.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
            if "y" in log:
                axis.set_yscale("log")
        if len(groups) > 1:
            handles = {label: line for axis in figure.axes for line, label in zip(*axis.get_legend_handles_labels())}
            figure.legend(handles.values(), handles, loc="outside lower left", ncols=4)
        ending = os.path.splitext(path)[1]
        with replacing(path) as temporary:
            figure.savefig(temporary, format=ending[1:], dpi=130)
    return True


def draw_group(axis, key: str, runs: list[dict], color: str, label: str) -> None:
    """Draw a metric of runs that differ by their seed: the mean of those that have a step, and a band around it."""
    values = {}  # {step: [number of each run]}
    for run in runs:
        for row in run["rows"]:
            if row.get(key) is not None:
                values.setdefault(row["step"], []).append(row[key])
    if not values:
        return
    steps = sorted(values)
    if len(runs) > 1:
        low, high = [min(values[step]) for step in steps], [max(values[step]) for step in steps]
        axis.fill_between(steps, low, high, color=color, alpha=0.18, linewidth=0)
    means = [sum(values[step]) / len(values[step]) for step in steps]
    axis.plot(steps, means, color=color, marker="o" if len(steps) < 20 else None, label=label)


def read_run(folder: str, name: str) -> dict:
    """Return the "rows" of a run's metrics.jsonl, the "facts" of its args.json, and "script" and "args" of these."""
    try:
        with open(os.path.join(folder, "args.json"), encoding="utf-8") as file:
            facts = json.load(file)
    except (OSError, ValueError):  # a folder of metrics alone, or a damaged file
        facts = {}
    rows, unread = read_metrics(folder)
    return {
        "name": name, "rows": rows, "unread": unread, "facts": facts,
        "script": facts.get("script", ""), "args": facts.get("args", {}),
    }  # fmt: skip
