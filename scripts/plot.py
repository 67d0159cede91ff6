"""Draw the curves of several runs into one picture.

    python scripts/plot.py runs/a runs/b runs/c --output curves.png
"""

import os
import sys
from dataclasses import dataclass

import tyro

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import utils
from plumbing import run_log


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[str, ...]]
    """Run folders, each with a metrics.jsonl."""
    output: str = "curves.png"
    """The picture to write."""


def main(args: Args) -> None:
    for folder in args.runs:
        if not run_log.read_jsonl(os.path.join(folder, "metrics.jsonl")):
            utils.fail(f"{folder}: has no metrics.jsonl with a whole line")
    run_log.plot_curves(list(args.runs), args.output)
    print(args.output)


if __name__ == "__main__":
    main(tyro.cli(Args))
