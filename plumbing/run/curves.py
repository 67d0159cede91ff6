"""The picture of run folders: a curve of each main metric, a line a run."""

import math
import os

from plumbing.run.files import read_log

CURVES = {  # the metrics that a picture has, if a run has them, and those of eval/ that its last lines have
    "eval/greedy_accuracy": "held-out accuracy, greedy",
    "eval/accuracy": "held-out accuracy, sampled (what is trained)",
    "eval/pair_accuracy": "held-out pairs ranked right",
    "train/loss": "loss",
    "eval/margin": "held-out margin (chosen - rejected)",
    "train/pair_accuracy": "training pairs ranked right",
    "objective/scores": "mean score",
    "objective/kl": "KL to the reference (sum over tokens)",
    "objective/divergence": "divergence from the teacher per token (nats)",
    "policy/entropy_avg": "entropy per token (nats)",
    "val/explained_variance": "explained variance of the values",
    "val/sequence_lengths": "response length (tokens)",
    "loss/grad_norm": "gradient norm",
}


def run_names(folders: list[str]) -> list[str]:
    """Return the name of each run folder: the part of its path that the others do not share."""
    if not folders:
        raise ValueError("names no run folder")
    paths = [os.path.abspath(folder) for folder in folders]
    shared = os.path.commonpath(paths) if len(set(paths)) > 1 else os.path.dirname(paths[0])
    return [os.path.relpath(path, shared) for path in paths]


def plot_curves(folders: list[str], path: str, metrics: tuple[str, ...] = ()) -> None:
    """Draw curves of run folders into a picture; raise ValueError if there is nothing to draw.

    Args:
        path: its ending names the format, such as .png, .svg or .pdf.
        metrics: what to draw, as in metrics.jsonl; default: the CURVES that the runs have.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    runs = dict(zip(run_names(folders), map(read_log, folders)))
    keys = [k for k in metrics or CURVES if any(row.get(k) is not None for rows in runs.values() for row in rows)]
    if not keys:
        raise ValueError(f"there is nothing to draw in {' '.join(folders)}")
    width = min(3, len(keys))
    height = math.ceil(len(keys) / width)
    figure = Figure((4.4 * width, 2.9 * height), layout="constrained")  # requires no display
    for place, key in enumerate(keys, 1):
        axis = figure.add_subplot(height, width, place)
        for number, (name, rows) in enumerate(runs.items()):
            values = {row["step"]: row[key] for row in rows if row.get(key) is not None}
            marker = "o" if len(values) < 20 else None
            axis.plot(values.keys(), values.values(), f"C{number % 10}", marker=marker, markersize=3, label=name)
        axis.set_title(CURVES.get(key, key), loc="left", fontsize=10)
        axis.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#ecebe6")
    if len(runs) > 1:
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower left", ncols=4, frameon=False)
    figure.savefig(path, dpi=130)
