"""Draw the curves of several runs into one picture; runs that differ by their seed alone share one, with a band.

python scripts/plot.py runs/a runs/b runs/c --output curves.png
"""

import os
import sys
from dataclasses import dataclass
from typing import Literal

import tyro

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import utils
from plumbing import command_line
from plumbing.data.rows import is_number
from plumbing.run import curves, resume


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[str, ...]] = ()
    """Run folders, each with a metrics.jsonl."""
    output: str = "curves.png"
    """The picture to write: .png, .pdf or .svg."""
    metrics: tuple[str, ...] = ()
    """Names from metrics.jsonl to draw; default: the main ones that the runs have."""
    log: Literal["none", "x", "y", "xy"] = "none"
    """Axes with a logarithmic scale."""


def main(args: Args) -> None:
    if not args.runs:
        utils.fail("names no run folder; python scripts/plot.py runs/a runs/b --output curves.png")
    if not os.path.splitext(args.output)[1]:
        utils.fail(f"--output {args.output}: has to end with .png, .pdf or .svg")
    folders = list(dict.fromkeys(os.path.normpath(folder) for folder in args.runs))
    names = ("step", *(args.metrics or curves.CURVES))
    for folder in folders:
        path = os.path.join(folder, "metrics.jsonl")
        rows = resume.read_log(folder, "metrics.jsonl") if os.path.isfile(path) else []
        if not rows:
            utils.fail(f"{folder}: has no metrics.jsonl with a whole line")
        for number, row in enumerate(rows, 1):
            if not all(is_number(row[name]) for name in names if row.get(name) is not None):
                utils.fail(f"{path} line {number}: has a value that is no number; mend or remove this line")
    try:
        drawn = curves.plot_curves(folders, args.output, args.metrics, args.log)
    except (OSError, ValueError) as error:  # no folder, no right to write, a format that matplotlib does not have
        utils.fail(f"--output {args.output}: cannot be written ({utils.first_line(error)})")
    if not drawn:
        utils.fail(f"{' '.join(folders)}: has none of the metrics that are drawn ({', '.join(names[1:])})")
    print(args.output)


if __name__ == "__main__":
    main(command_line.parse_ungrouped(Args))
