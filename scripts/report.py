"""Write one HTML page of one or several runs: headline numbers, curves, arguments, times and samples.

    python scripts/report.py runs/a runs/b --output report.html

The page requires no network: it is assets/report/page.html with its style sheet, its scripts, the charting library
uPlot and the runs' data, from which the scripts draw everything.
"""

import html
import json
import math
import os
import re
import sys

import tyro

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from plot import run_names

import utils
from plumbing.run.log import CURVES, read_args, read_log, replace_file, without_secrets

SAMPLE_BYTES = 6_000_000  # most of the samples in a page, all runs together
NAMES = {"seed", "run_name", "output_dir", "resume", "track", "push_to_hub"}  # flags that runs of a group differ by


def main(runs: tyro.conf.Positional[tuple[str, ...]], output: str = "report.html"):
    """Write one HTML page of one or several runs: headline numbers, curves, arguments, times and samples.

    Args:
        runs: Run folders. Runs that differ by their seed alone share a curve, with a band.
        output: The page to write.
    """
    with utils.loading("RUNS"):
        text = page(list(dict.fromkeys(map(os.path.normpath, runs))))
    with utils.loading(f"--output {output}"):
        replace_file(output, text)
    print(output)


def page(folders: list[str]) -> str:
    """Return the page of some run folders."""
    runs = [read_run(folder, name, len(folders)) for folder, name in zip(folders, run_names(folders))]
    keys = [without_seed(run) for run in runs]
    for run, key in zip(runs, keys):
        run["group"] = list(dict.fromkeys(keys)).index(key)
    texts = {
        "title": html.escape(runs[0]["name"] if len(runs) == 1 else f"{len(runs)} runs"),
        # An HTML parser would read "</script>" in a sample as the end of the data.
        "data": json.dumps({"titles": CURVES, "runs": runs}, separators=(",", ":")).replace("<", "\\u003c"),
    }
    read = lambda match: texts[match[1]] if match[1] in texts else read_part(match[1])
    return re.sub(r"\{\{([\w./]+)\}\}", read, read_part("page.html"))


def read_part(name: str) -> str:
    """Return the text of a file of the page."""
    with open(os.path.join(utils.ROOT, "assets", "report", name), encoding="utf-8") as file:
        return file.read()


def read_run(folder: str, name: str, runs: int) -> dict:
    """Return what the page has of a run; `runs` share the bytes for samples. A folder of metrics alone will do."""
    facts, rows = without_secrets(read_args(folder)), read_log(folder)
    if not rows:
        raise ValueError(f"{folder} has no metrics.jsonl with a whole line")
    samples, held_out = (
        some_steps(read_log(folder, part), SAMPLE_BYTES // 2 // runs) for part in ("samples.jsonl", "held_out.jsonl")
    )
    return {
        "name": name,
        **{key: facts.get(key) for key in ("script", "defaults", "versions", "git_commit", "ranks")},
        "args": facts.get("args", {}),
        "steps": [row["step"] for row in rows],
        "metrics": columns_of(rows),
        "samples": samples + [{**row, "held_out": True} for row in held_out],
        "finished": os.path.isdir(os.path.join(folder, "final")),
    }


def without_seed(run: dict) -> str:
    """Return what the runs of a group share: script and flags, but for seed and names. A run without flags is alone."""
    flags = {name: x for name, x in run["args"].items() if name not in NAMES}
    return json.dumps([run["script"], flags], sort_keys=True) if flags else run["name"]


def columns_of(rows: list[dict]) -> dict[str, list]:
    """Return the values of each metric, {name: [number, or None in rows without it]}, rounded to five digits."""
    names = dict.fromkeys(key for row in rows for key in row if key not in ("step", "episode"))
    rounded = lambda x: float(f"{x:.5g}") if isinstance(x, (int, float)) else None
    return {name: [rounded(row.get(name)) for row in rows] for name in names}


def some_steps(rows: list[dict], size: int) -> list[dict]:
    """Return the rows of so many steps, evenly spread and the last one among them, as `size` bytes hold."""
    every = math.ceil(sum(len(json.dumps(row)) for row in rows) / size)
    kept = set(sorted({row["step"] for row in rows}, reverse=True)[:: max(1, every)])
    return [row for row in rows if row["step"] in kept]


if __name__ == "__main__":
    tyro.cli(main)
