"""A page of one or several runs, one HTML file that requires no network: what scripts/report.py writes.

The page is assets/report/page.html with its style sheet, its scripts, the charting library uPlot and the runs' data;
the scripts draw everything from the data.
"""

import html
import json
import math
import os
import re

from plumbing.run.curves import CURVES, run_names
from plumbing.run.files import read_args, read_jsonl, read_metrics, replace_file
from utils import ROOT

PARTS = os.path.join(ROOT, "assets", "report")
STYLES = ("uplot/uPlot.min.css", "page.css")
SCRIPTS = ("page.js", "curves.js", "samples.js")
POINTS = 1500  # most points of a curve; those of longer runs are means over neighbouring steps
SAMPLE_BYTES = 6_000_000  # most of the samples in a page, all runs together
NAMES = {"run_name", "output_dir", "resume", "track", "push_to_hub"}  # flags that do not change what a run computes


def write_report(folders: list[str], path: str) -> None:
    """Write the page of some run folders; it has its old or its new content at any instant.

    Raises:
        OSError, ValueError: if a file of a run cannot be read, or the page cannot be written.
    """
    if not folders:
        raise ValueError("names no run folder")
    runs = [read_run(folder, name, len(folders)) for folder, name in zip(folders, run_names(folders))]
    for number, members in enumerate(groups_of_seeds(runs)):
        for run in members:
            run.update(group=number, group_name=common_name([member["name"] for member in members]))
    texts = {
        "title": html.escape(runs[0]["name"] if len(runs) == 1 else f"{len(runs)} runs"),
        "style": "\n".join(map(read_part, STYLES)),
        # An HTML parser would read "</script>" in a sample as the end of the data.
        "data": json.dumps({"titles": CURVES, "runs": runs}, separators=(",", ":")).replace("<", "\\u003c"),
        "library": read_part("uplot/uPlot.iife.min.js"),
        "script": "\n".join(map(read_part, SCRIPTS)),
    }
    replace_file(path, re.sub(r"\{\{(\w+)\}\}", lambda match: texts[match[1]], read_part("page.html")))


def read_part(name: str) -> str:
    """Return the text of a file of the page."""
    with open(os.path.join(PARTS, name), encoding="utf-8") as file:
        return file.read()


def read_run(folder: str, name: str, runs: int) -> dict:
    """Return what the page has of a run; `runs` share the bytes for samples. A folder of metrics alone will do.

    Raises:
        ValueError: if there is no row of metrics.
    """
    facts, rows = read_args(folder), read_metrics(folder)
    if not rows:
        raise ValueError(f"{folder} has no metrics.jsonl with a whole line")
    steps, columns = columns_of(rows)
    samples = some_steps(read_jsonl(os.path.join(folder, "samples.jsonl")), SAMPLE_BYTES // 2 // runs)
    held_out = some_steps(read_jsonl(os.path.join(folder, "held_out.jsonl")), SAMPLE_BYTES // 2 // runs)
    return {
        "name": name,
        **{key: facts.get(key) for key in ("script", "defaults", "versions", "git_commit", "ranks")},
        "args": facts.get("args", {}),
        "steps": steps,
        "metrics": columns,
        "samples": samples + [{**row, "held_out": True} for row in held_out],
        "finished": os.path.isdir(os.path.join(folder, "final")),
    }


def groups_of_seeds(runs: list[dict]) -> list[list[dict]]:
    """Return together the runs whose flags differ by seed and names alone. A run without args is a group by itself."""
    groups = {}
    for number, run in enumerate(runs):
        flags = {name: x for name, x in run["args"].items() if name not in NAMES | {"seed"}}
        key = json.dumps([run["script"], flags], sort_keys=True) if flags else number
        groups.setdefault(key, []).append(run)
    return list(groups.values())


def common_name(names: list[str]) -> str:
    """Return what names of runs begin with: "gsm8k" for gsm8k-seed1 and gsm8k-seed2."""
    prefix = os.path.commonprefix(names)
    return names[0] if len(names) == 1 else re.sub(r"([-_./ ]*(seed|s))?[-_./ =]*$", "", prefix) or names[0]


def columns_of(rows: list[dict]) -> tuple[list[int], dict[str, list]]:
    """Return the steps, and the values of each metric at them: {name: [number or None]}, rounded to five digits.

    Of more than POINTS rows, each point is the mean of neighbouring rows, at the step of the last one.
    """
    size = math.ceil(len(rows) / POINTS)
    parts = [rows[i : i + size] for i in range(0, len(rows), size)]
    names = dict.fromkeys(key for row in rows for key in row if key not in ("step", "episode"))
    columns = {}
    for name in names:
        values = [[row[name] for row in part if isinstance(row.get(name), (int, float))] for part in parts]
        columns[name] = [float(f"{sum(part) / len(part):.5g}") if part else None for part in values]
    return [part[-1]["step"] for part in parts], columns


def some_steps(rows: list[dict], size: int) -> list[dict]:
    """Return the rows of so many steps, evenly spread and the last one among them, as `size` bytes hold."""
    every = math.ceil(sum(len(json.dumps(row)) for row in rows) / size)
    kept = set(sorted({row["step"] for row in rows}, reverse=True)[:: max(1, every)])
    return [row for row in rows if row["step"] in kept]
