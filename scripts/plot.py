"""The curves of several runs in one picture: python scripts/plot.py runs/a runs/b runs/c --output
curves.png
"""

import os

import repository  # noqa: F401
import tyro

import utils
from plumbing.run.log import CURVES, plot_curves, read_log


def run_names(folders: list[str]) -> list[str]:
    """Return the name of each run folder: the part of its path that the others do not share."""
    if not folders:
        raise ValueError("names no run folder")
    paths = [os.path.abspath(folder) for folder in folders]
    shared = os.path.commonpath(map(os.path.dirname, paths))
    return [os.path.relpath(path, shared) for path in paths]


def main(
    runs: tyro.conf.Positional[tuple[str, ...]],
    output: str = "curves.png",
    metrics: tuple[str, ...] = (),
):
    """Draw the curves of several runs into one picture, a color a run.

    Args:
        runs: Run folders, each with a metrics.jsonl.
        output: The picture to write: .png, .pdf or .svg.
        metrics: Names from metrics.jsonl to draw, accuracies in one panel; default: the main ones
            that the runs have.
    """
    shown = {"step", *(metrics or CURVES)}
    known = set()
    rows = {}
    with utils.exit_on_error("RUNS"):
        for name, run in zip(run_names(runs), runs):
            rows[name] = []
            for row in read_log(run):
                known |= row.keys()
                rows[name].append({key: row[key] for key in row.keys() & shown})
            if not rows[name]:
                raise ValueError(f"{run} has no metrics.jsonl with a whole line")
    if unknown := {*metrics} - known:
        utils.fail(f"--metrics {' '.join(unknown)}: the runs have {', '.join(sorted(known))}")
    with utils.exit_on_error(f"--output {output}"):
        plot_curves(rows, output, metrics)
    print(output)


if __name__ == "__main__":
    tyro.cli(main)
