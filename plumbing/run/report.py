"""A page of one or several runs, one HTML file that needs no network: what --report and scripts/report.py write.

The page is assets/report/page.html with its style sheet, its scripts, the charting library uPlot and the runs' data put
in; the scripts there draw everything from the data. Imports plumbing.run.curves (what runs are called, and the curves) and
plumbing.run.files.
"""

import html
import json
import math
import os
import re
import time

from plumbing.run.curves import CURVES, groups_of_seeds, read_run, run_names
from plumbing.run.files import replacing
from utils import ROOT

PARTS = os.path.join(ROOT, "assets", "report")
STYLES = ("uplot/uPlot.min.css", "page.css")
SCRIPTS = ("page.js", "curves.js", "samples.js")
STEPS = 1500  # most points of a curve; those of longer runs are means over neighbouring steps
SAMPLE_BYTES = 6_000_000  # most of samples.jsonl, and half as much of held_out.jsonl, in a page, all runs together


def write_report(folders: list[str], path: str) -> None:
    """Write the page of some run folders; it has its old or its new content, whatever happens meanwhile.

    Raises:
        OSError: if a folder cannot be read or the page not be written.
    """
    runs = [read_run(folder, name) for folder, name in zip(folders, run_names(folders))]
    shown = [page_data(run, folder, len(runs)) for run, folder in zip(runs, folders)]
    for number, (name, members) in enumerate(groups_of_seeds(shown)):
        for run in members:
            run.update(group=number, group_name=name)
    data = {"written": time.time(), "titles": CURVES, "runs": shown}
    texts = {
        "title": html.escape(runs[0]["name"] if len(runs) == 1 else f"{len(runs)} runs"),
        "style": "\n".join(map(read_part, STYLES)),
        # An HTML parser would take "</script>" in a sample for the end of the data.
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        "library": read_part("uplot/uPlot.iife.min.js"),
        "script": "\n".join(map(read_part, SCRIPTS)),
    }
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: texts[match[1]], read_part("page.html"))
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.write(page)


def read_part(name: str) -> str:
    """Return the text of a file of the page."""
    with open(os.path.join(PARTS, name), encoding="utf-8") as file:
        return file.read()


def page_data(run: dict, folder: str, runs: int) -> dict:
    """Return what the page shows of a run; `runs` share the room for samples."""
    rows, facts = run["rows"], run["facts"]
    steps, columns = compress(rows)
    notes = [f"{run['unread']} lines of metrics.jsonl could not be read."] if run["unread"] else []
    samples = []
    for file, room, held_out in (("samples.jsonl", SAMPLE_BYTES, False), ("held_out.jsonl", SAMPLE_BYTES // 2, True)):
        found, note = read_samples(os.path.join(folder, file), room // runs)
        samples += [{**row, "held_out": True} if held_out else row for row in found]
        notes += [note] if note else []
    return {
        **{key: run[key] for key in ("name", "script", "args")},
        **{key: facts.get(key) for key in ("defaults", "versions", "git_commit", "ranks")},
        "steps": steps,
        "metrics": columns,
        "last_step": rows[-1]["step"] if rows else 0,
        "total_steps": total_steps(run["args"]),
        "finished": os.path.isdir(os.path.join(folder, "final")),
        "samples": samples,
        "samples_note": f"{run['name']}: {' '.join(notes)}" if notes else "",
    }


def total_steps(args: dict) -> int | None:
    """Return how many steps the flags of a run ask for; None if it depends on the data, as for a reward model."""
    try:
        return args["total_episodes"] // (args["rollout_batch_size"] * args["group_size"])
    except (KeyError, TypeError, ZeroDivisionError):
        return None


def compress(rows: list[dict]) -> tuple[list[int], dict[str, list]]:
    """Return the steps, and the values of each metric at them: {name: [number or None]}, rounded to five digits.

    Of more than STEPS rows, each point is the mean of as many neighbouring rows as it takes, at the last one's step.
    """
    size = max(1, math.ceil(len(rows) / STEPS))
    parts = [rows[i : i + size] for i in range(0, len(rows), size)]
    names = dict.fromkeys(key for row in rows for key, x in row.items() if isinstance(x, (int, float)))
    columns = {}
    for name in names:
        if name not in ("step", "episode"):
            values = [[x for row in part if isinstance(x := row.get(name), (int, float))] for part in parts]
            columns[name] = [float(f"{sum(found) / len(found):.5g}") if found else None for found in values]
    return [part[-1]["step"] for part in parts], columns


def read_samples(path: str, room: int) -> tuple[list[dict], str]:
    """Return rows of a .jsonl file of samples, at most `room` bytes of it, and a note on what is left out, or "".

    Whole steps are left out, evenly, the last step never. The file may be far larger than what is held of it.
    """
    places = {}  # {step: [(offset, length) of its lines]}
    offset = 0
    try:
        with open(path, "rb") as file:
            for line in file:
                step = re.match(rb'\{"step": (\d+)', line)
                if step and line.endswith(b"\n"):
                    places.setdefault(int(step[1]), []).append((offset, len(line)))
                offset += len(line)
    except FileNotFoundError:
        return [], ""
    sizes = {step: sum(length for _, length in lines) for step, lines in places.items()}
    kept, every = list(places), 1
    while len(kept) > 1 and sum(sizes[step] for step in kept) > room:
        every += 1
        kept = list(places)[::-every][::-1]
    chosen = []
    with open(path, "rb") as file:
        for offset, length in (place for step in kept for place in places[step]):
            if chosen and room < length:
                break
            room -= length
            file.seek(offset)
            try:
                chosen.append(json.loads(file.read(length)))
            except ValueError:  # a line that something else has damaged
                continue
    total = sum(map(len, places.values()))
    note = f"{len(chosen):,} of the {total:,} rows of {os.path.basename(path)} are in this page."
    return chosen, note if len(chosen) < total else ""
