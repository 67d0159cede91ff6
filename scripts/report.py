"""Write one HTML page of one or several runs: headline numbers, curves, arguments, times, memory and samples.

python scripts/report.py runs/a runs/b --output report.html
"""

import os
import sys
from dataclasses import dataclass

import tyro

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import utils
from plumbing import command_line
from plumbing.run import curves, report


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[str, ...]] = ()
    """Run folders. Runs that differ by their seed alone share a curve, with a band."""
    output: str = ""
    """The page to write; default: report.html in the folder of the only run, or here if there are several."""


def main(args: Args) -> None:
    if not args.runs:
        utils.fail("names no run folder; python scripts/report.py runs/a runs/b --output report.html")
    folders = list(dict.fromkeys(os.path.normpath(folder) for folder in args.runs))
    for folder in folders:
        if not curves.read_metrics(folder)[0]:
            utils.fail(f"{folder}: has no metrics.jsonl with a whole line")
    output = args.output or os.path.join(folders[0] if len(folders) == 1 else "", "report.html")
    try:
        report.write_report(folders, output)
    except OSError as error:
        utils.fail(f"--output {output}: cannot be written ({utils.first_line(error)})")
    print(output)


if __name__ == "__main__":
    main(command_line.parse_ungrouped(Args))
