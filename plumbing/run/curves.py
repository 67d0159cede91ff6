"""The picture of the curves of runs. Importing this file takes a second, for matplotlib."""

import math
from collections.abc import Iterable

from matplotlib.figure import Figure
from pandas import DataFrame

from plumbing.run.log import CURVES


def plot_curves(runs: dict[str, Iterable[dict]], path: str, metrics: tuple[str, ...] = ()) -> None:
    """Draw curves into a picture: a panel per metric, a color per run.

    Args:
        runs: rows of metrics.jsonl by the name of the run.
        path: its ending names the format, such as .png, .svg or .pdf.
        metrics: what to draw, as in metrics.jsonl; default: the CURVES that the runs have.
    Raises:
        ValueError: if there is nothing to draw.
    """
    shown = metrics or CURVES
    tables = []
    for rows in runs.values():
        table = DataFrame(rows, columns=["step", *shown])
        tables.append(table.set_index("step"))
    drawn = [key for key in shown if any(table[key].notna().any() for table in tables)]
    if not drawn:
        raise ValueError("there is nothing to draw")
    width = min(4, len(drawn))
    height = math.ceil(len(drawn) / width)
    figure = Figure((4 * width, 2.8 * height), layout="constrained")  # requires no display
    for place, key in enumerate(drawn, 1):
        axis = figure.add_subplot(height, width, place)
        for table in tables:
            # Markers show a curve of a single value.
            axis.plot(table[key].dropna(), marker=".", markersize=4)
        if "accuracy" in key:
            axis.set_ylim(-0.02, 1.02)  # also shows a line at 1
        axis.set_title(CURVES.get(key, key), loc="left", fontsize=10)
        axis.locator_params("x", integer=True)
        axis.grid(color="#ecebe6")
    if len(runs) > 1:
        figure.legend(axis.lines, runs, loc="outside lower left", ncols=4, frameon=False)
    figure.savefig(path, dpi=130)
