"""The curves of several runs in one picture: python scripts/plot.py runs/a runs/b runs/c --output curves.png"""

import os
import sys

import tyro

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import utils
from plumbing.run.log import plot_curves, read_log


def run_names(folders: list[str]) -> list[str]:
    """Return the name of each run folder: the part of its path that the others do not share."""
    if not folders:
        raise ValueError("names no run folder")
    paths = [os.path.abspath(folder) for folder in folders]
    shared = os.path.commonpath(map(os.path.dirname, paths))
    return [os.path.relpath(path, shared) for path in paths]


def main(runs: tyro.conf.Positional[tuple[str, ...]], output: str = "curves.png", metrics: tuple[str, ...] = ()):
    """Draw the curves of several runs into one picture, a color a run.

    Args:
        runs: Run folders, each with a metrics.jsonl.
        output: The picture to write: .png, .pdf or .svg.
        metrics: Names from metrics.jsonl to draw, accuracies in one panel; default: the main ones that the runs have.
    """
    with utils.loading("RUNS"):
        rows = dict(zip(run_names(runs), map(read_log, runs)))
        if not all(rows.values()):
            raise ValueError(f"{' '.join(runs)}: one has no metrics.jsonl with a whole line")
    known = set().union(*sum(rows.values(), []))
    if unknown := {*metrics} - known:
        utils.fail(f"--metrics {' '.join(unknown)}: the runs have {', '.join(sorted(known))}")
    with utils.loading(f"--output {output}"):
        plot_curves(rows, output, metrics)
    print(output)


if __name__ == "__main__":
    tyro.cli(main)
