"""Write one HTML page of one or several runs: headline numbers, curves, arguments, times and
samples.

    python scripts/report.py runs/a runs/b --output report.html

The page requires no network: it is assets/report/page.html with its style sheet, its scripts, the
charting library uPlot and the runs' data, from which the scripts draw everything.
"""

import json
import math
import os
from collections import Counter

import jinja2
import repository  # noqa: F401
import tyro

import utils
from plumbing.run.log import (
    CURVES,
    read_args,
    read_log,
    replace_file,
    without_secrets,
)
from plumbing.run.ranks import report_errors

SAMPLE_BYTES = 6_000_000  # most of the samples in a page, all runs together
# Flags that runs of a group differ by.
NAMES = {"seed", "run_name", "output_dir", "resume", "track"}


def main(runs: tyro.conf.Positional[tuple[str, ...]], output: str = "report.html"):
    """Write one HTML page of one or several runs: headline numbers, curves, arguments, times and
    samples.

    Args:
        runs: Run folders. Runs that differ by their seed alone share a curve, with a band.
        output: The page to write.
    """
    with utils.as_user_error("RUNS"):
        text = page(list(dict.fromkeys(map(os.path.normpath, runs))))
    with utils.as_user_error(f"--output {output}"):
        replace_file(output, text)
    print(output)


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


def page(folders: list[str]) -> str:
    """Return the page of some run folders."""
    runs = [
        read_run(folder, name, len(folders)) for folder, name in zip(folders, run_names(folders))
    ]
    keys = [without_seed(run) for run in runs]
    for run, key in zip(runs, keys):
        run["group"] = list(dict.fromkeys(keys)).index(key)
    parts = jinja2.Environment(
        loader=jinja2.FileSystemLoader(f"{utils.ROOT}/assets/report"), autoescape=True
    )
    title = runs[0]["name"] if len(runs) == 1 else f"{len(runs)} runs"
    # An HTML parser would read "</script>" in a sample as the end of the data.
    data = json.dumps({"titles": CURVES, "runs": runs}, separators=(",", ":")).replace(
        "<", "\\u003c"
    )
    return parts.get_template("page.html").render(title=title, data=data)


def read_run(folder: str, name: str, runs: int) -> dict:
    """Return what the page has of a run; `runs` share the bytes for samples. A folder of metrics
    alone will do.
    """
    facts = without_secrets(read_args(folder))
    rows = read_metrics(folder)
    names = dict.fromkeys(name for row in rows for name in row if name not in ("step", "episode"))
    samples, held_out = (
        read_samples(folder, part, SAMPLE_BYTES // 2 // runs)
        for part in ("samples.jsonl", "held_out.jsonl")
    )
    return {
        "args": {},
        **facts,
        "name": name,
        "steps": [row["step"] for row in rows],
        "metrics": {name: [five_digits(row.get(name)) for row in rows] for name in names},
        "samples": samples + [{**row, "held_out": True} for row in held_out],
        "finished": os.path.isdir(f"{folder}/final"),
    }


def without_seed(run: dict) -> str:
    """Return what the runs of a group share: script and flags, but for seed and names. A run
    without flags is alone.
    """
    flags = {name: x for name, x in run["args"].items() if name not in NAMES}
    return json.dumps([run.get("script"), flags], sort_keys=True) if flags else run["name"]


def five_digits(x: float | None) -> float | None:
    """Return a number as the page needs it; None stands for one that is not there."""
    return None if x is None else float(f"{x:.5g}")


def read_samples(folder: str, name: str, size: int) -> list[dict]:
    """Return the rows of so many steps, evenly spread and the last one among them, as `size` bytes
    hold.

    The log is read twice, line by line: of the steps that are left out, a number each is in memory.
    """
    sizes = Counter()
    for row in read_log(folder, name):
        sizes[row["step"]] += len(json.dumps(row))
    every = math.ceil(sizes.total() / size) or 1
    kept = sorted(sizes, reverse=True)[::every]
    return [row for row in read_log(folder, name) if row["step"] in kept]


if __name__ == "__main__":
    with report_errors():
        tyro.cli(main)
