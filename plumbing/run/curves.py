"""The picture of the curves of a run. Importing this file takes a second, for matplotlib."""

import math
from collections.abc import Iterable

from matplotlib.figure import Figure
from pandas import DataFrame

from plumbing.run.log import CURVES


def plot_curves(rows: Iterable[dict], path: str) -> None:
    """Draw the CURVES that a run has into a picture, a panel per metric.

    Args:
        rows: of metrics.jsonl. path: its ending names the format, such as .png.
    Raises:
        ValueError: if there is nothing to draw.
    """
    table = DataFrame(rows, columns=["step", *CURVES]).set_index("step").dropna(axis=1, how="all")
    if table.empty:
        raise ValueError("there is nothing to draw")
    width = min(4, len(table.columns))
    height = math.ceil(len(table.columns) / width)
    figure = Figure((4 * width, 2.8 * height), layout="constrained")  # requires no display
    for place, key in enumerate(table, 1):
        axis = figure.add_subplot(height, width, place)
        axis.plot(table[key].dropna(), marker=".", markersize=4)  # markers show a single value
        if "accuracy" in key:
            axis.set_ylim(-0.02, 1.02)  # also shows a line at 1
        axis.set_title(CURVES[key], loc="left", fontsize=10)
        axis.locator_params("x", integer=True)
        axis.grid(color="#ecebe6")
    figure.savefig(path, dpi=130)
