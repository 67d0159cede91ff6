"""Write one HTML page of one or several runs: headline numbers, curves, samples with their tokens,
times and arguments.

    python scripts/report.py runs/a runs/b --output report.html
    python scripts/report.py runs/a --watch        # while the run goes on

A folder of scripts/evaluate.py counts as a run. The page requires no network: it is
assets/report/page.html with its style sheet, its scripts, the charting library uPlot and the runs'
data.
"""

import json
import math
import os
import time
from collections import Counter
from itertools import count

import jinja2
import repository  # noqa: F401
import tyro

import utils
from plumbing.run.command import report_errors
from plumbing.run.log import (
    CURVES,
    read_args,
    read_log,
    replace_file,
    without_secrets,
)

# Most of the samples in a page, and of their tokens, all runs together.
SAMPLE_BYTES = 6_000_000
TOKEN_BYTES = 12_000_000
RELOAD_SECONDS = 20  # with --watch
# Flags that runs of a group differ by.
NAMES = {"seed", "run_name", "output_dir", "resume", "track"}


def main(
    runs: tyro.conf.Positional[tuple[str, ...]], output: str = "report.html", watch: bool = False
):
    """Write one HTML page of one or several runs: headline numbers, curves, samples with their
    tokens, times and arguments.

    Args:
        runs: Folders of runs, or of scripts/evaluate.py. Runs that differ by their seed alone share
            a curve, with a band.
        output: The page to write.
        watch: Write the page again every 20 seconds until all runs have ended; the page reloads
            itself, and keeps what is open.
    """
    print(output)
    running = True
    while running:
        with utils.as_user_error("RUNS"):
            text, running = page(list(dict.fromkeys(map(os.path.normpath, runs))), watch)
        with utils.as_user_error(f"--output {output}"):
            replace_file(output, text)
        if running:
            time.sleep(RELOAD_SECONDS)


def run_names(folders: list[str]) -> list[str]:
    """Return the name of each run folder: the part of its path that the others do not share."""
    if not folders:
        raise ValueError("names no run folder")
    paths = [os.path.abspath(folder) for folder in folders]
    shared = os.path.commonpath(map(os.path.dirname, paths))
    return [os.path.relpath(path, shared) for path in paths]


def page(folders: list[str], watch: bool = False) -> tuple[str, bool]:
    """Return the page of some folders, and with `watch` whether it will change: a run goes on."""
    runs = [
        read_run(folder, name, len(folders)) for folder, name in zip(folders, run_names(folders))
    ]
    keys = [without_seed(run) for run in runs]
    for run, key in zip(runs, keys):
        run["group"] = list(dict.fromkeys(keys)).index(key)
    parts = jinja2.Environment(
        loader=jinja2.FileSystemLoader(f"{utils.ROOT}/assets/report"),
        autoescape=True,
        extensions=["jinja2.ext.do"],
    )
    running = watch and not all(run["finished"] for run in runs)
    # An HTML parser would read "</script>" in a sample as the end of the data.
    data = json.dumps({"runs": runs}, separators=(",", ":")).replace("<", "\\u003c")
    text = parts.get_template("page.html").render(
        title=runs[0]["name"] if len(runs) == 1 else f"{len(runs)} runs",
        runs=runs,
        titles=CURVES,
        seconds=RELOAD_SECONDS if running else None,
        data=data,
    )
    return text, running


def read_run(folder: str, name: str, runs: int) -> dict:
    """Return what the page has of a run; `runs` share the bytes for samples. A folder of metrics
    alone, or of a run before its first step, will do.
    """
    facts = read_args(folder)
    rows = list(read_log(folder))
    evaluated = read_args(folder, "results.json")  # of scripts/evaluate.py
    if evaluated:
        facts = {"script": "scripts/evaluate.py", **evaluated}
        scores = {f"eval/{name}": x["value"] for name, x in evaluated["scores"].items()}
        rows = [{"step": 0, **scores}]
    if not rows and not facts:
        raise ValueError(f"{folder} has no args.json and no metrics.jsonl with a whole line")
    names = dict.fromkeys(name for row in rows for name in row if name not in ("step", "episode"))
    size = SAMPLE_BYTES // 2 // runs
    samples = read_samples(folder, "samples.jsonl", size)
    tokens = read_samples(folder, "tokens.jsonl", TOKEN_BYTES // runs, samples)
    of_sample = {(row["step"], row["sample"]): row for row in tokens}
    for row in samples:
        row["held_out"] = bool(evaluated)
        row["tokens"] = of_sample.get((row["step"], row["place"]))
    held_out = read_samples(folder, "held_out.jsonl", size)
    return {
        "args": {},
        **without_secrets(facts),
        "name": name,
        "steps": [row["step"] for row in rows],
        "metrics": {name: [five_digits(row.get(name)) for row in rows] for name in names},
        "samples": samples + [{**row, "held_out": True} for row in held_out],
        "finished": bool(evaluated) or os.path.isdir(f"{folder}/final"),
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


def read_samples(folder: str, name: str, size: int, among: list[dict] | None = None) -> list[dict]:
    """Return the rows of so many steps, evenly spread and the last one among them, as `size` bytes
    hold; with their "place" in the step, and step 0 where they have none.

    The log is read twice, line by line: of the steps that are left out, a number each is in memory.

    Args:
        among: rows of the steps to choose from; None for all.
    """
    steps = None if among is None else {row["step"] for row in among}
    sizes = Counter()
    for row in read_log(folder, name):
        step = row.get("step", 0)
        if steps is None or step in steps:
            sizes[step] += len(json.dumps(row))
    every = math.ceil(sizes.total() / size) or 1
    kept = {step: count() for step in sorted(sizes, reverse=True)[::every]}
    rows = ({"step": 0, **row} for row in read_log(folder, name))
    return [{**row, "place": next(kept[row["step"]])} for row in rows if row["step"] in kept]


if __name__ == "__main__":
    with report_errors():
        tyro.cli(main)
