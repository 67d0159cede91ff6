"""The main metrics of a run and their titles, and curves.png, the picture of them."""

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


def plot_curves(folder: str, path: str) -> None:
    """Draw the CURVES that a run has, if it has one, into a picture."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    rows = read_log(folder)
    curves = {key: {row["step"]: row[key] for row in rows if row.get(key) is not None} for key in CURVES}
    curves = {key: values for key, values in curves.items() if values}
    if not curves:
        return
    width = min(3, len(curves))
    height = math.ceil(len(curves) / width)
    figure = Figure((4.4 * width, 2.9 * height), layout="constrained")  # requires no display
    for place, (key, values) in enumerate(curves.items(), 1):
        axis = figure.add_subplot(height, width, place)
        axis.plot(values.keys(), values.values(), marker="o" if len(values) < 20 else None, markersize=3)
        axis.set_title(CURVES[key], loc="left", fontsize=10)
        axis.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#ecebe6")
    figure.savefig(path, dpi=130)
