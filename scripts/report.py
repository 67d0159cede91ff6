"""Write one HTML page of one or several runs: headline numbers, curves, arguments, times and samples.

python scripts/report.py runs/a runs/b --output report.html
"""

import os
import sys

import tyro

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import utils
from plumbing.run.report import write_report


def main(runs: tyro.conf.Positional[tuple[str, ...]], output: str = "report.html"):
    """Write one HTML page of one or several runs: headline numbers, curves, arguments, times and samples.

    Args:
        runs: Run folders. Runs that differ by their seed alone share a curve, with a band.
        output: The page to write.
    """
    with utils.loading(f"--output {output}"):
        write_report(list(dict.fromkeys(map(os.path.normpath, runs))), output)
    print(output)


if __name__ == "__main__":
    tyro.cli(main)
