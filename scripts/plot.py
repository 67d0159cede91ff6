"""The curves of several runs in one picture: python scripts/plot.py runs/a runs/b runs/c --output
curves.png
"""

import os

import repository  # noqa: F401
import tyro

import utils
from plumbing.run.curves import plot_curves
from plumbing.run.log import read_log
from plumbing.run.ranks import report_errors


def run_names(folders: list[str]) -> list[str]:
    """Return the name of each run folder: the part of its path that the others do not share."""
    if not folders:
        raise ValueError("names no run folder")
    paths = [os.path.abspath(folder) for folder in folders]
    shared = os.path.commonpath(map(os.path.dirname, paths))
    return [os.path.relpath(path, shared) for path in paths]


def read_metrics(folder: str) -> list[dict]:
    """Return the rows of metrics.jsonl; raise ValueError if there is none."""
    rows = list(read_log(folder))
    if not rows:
        raise ValueError(f"{folder} has no metrics.jsonl with a whole line")
    return rows


def main(
    runs: tyro.conf.Positional[tuple[str, ...]],
    output: str = "curves.png",
    metrics: tuple[str, ...] = (),
):
    """Draw the curves of several runs into one picture: a panel per metric, a color per run.

    Args:
        runs: Run folders, each with a metrics.jsonl.
        output: The picture to write: .png, .pdf or .svg.
        metrics: Names from metrics.jsonl to draw; default: the main ones that the runs have.
    """
    with utils.as_user_error("RUNS"):
        rows = {name: read_metrics(run) for name, run in zip(run_names(runs), runs)}
    known = {key for table in rows.values() for row in table for key in row}
    if unknown := {*metrics} - known:
        raise utils.UserError(
            f"--metrics {' '.join(unknown)}: the runs have {', '.join(sorted(known))}"
        )
    with utils.as_user_error(f"--output {output}"):
        plot_curves(rows, output, metrics)
    print(output)


if __name__ == "__main__":
    with report_errors():
        tyro.cli(main)
