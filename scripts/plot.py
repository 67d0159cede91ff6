"""The curves of several runs in one picture: python scripts/plot.py runs/a runs/b runs/c --output curves.png"""

import os
import sys

import tyro

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import utils
from plumbing.run.log import plot_curves


def main(runs: tyro.conf.Positional[tuple[str, ...]], output: str = "curves.png", metrics: tuple[str, ...] = ()):
    """Draw the curves of several runs into one picture, a line a run.

    Args:
        runs: Run folders, each with a metrics.jsonl.
        output: The picture to write: .png, .pdf or .svg.
        metrics: Names from metrics.jsonl to draw; default: the main ones that the runs have.
    """
    with utils.loading(f"--output {output}"):
        plot_curves(list(map(os.path.normpath, runs)), output, metrics)
    print(output)


if __name__ == "__main__":
    tyro.cli(main)
