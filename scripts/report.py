"""Write one HTML page of one or several runs: headline numbers, curves, samples with their tokens,
times and arguments.

    python scripts/report.py runs/a runs/b --output report.html
    python scripts/report.py runs/a --watch        # while the run goes on

A folder of scripts/evaluate.py counts as a run. The page requires no network: it is
assets/report/page.html with its style sheet, its scripts, the charting library uPlot and the runs'
data.
"""

import json
import os
import statistics
import time
from itertools import groupby
from operator import itemgetter

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
# Flags that runs of a group, which share a curve, may differ by.
OF_ONE_RUN = {"seed", "run_name", "output_dir", "resume", "track"}


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
    groups = {}  # number of each
    for run in runs:
        run["group"] = groups.setdefault(without_seed(run), len(groups))
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


def read_run(folder: str, name: str, count: int) -> dict:
    """Return what the page has of one of `count` runs, which share the room for samples. A folder
    of metrics alone, or of a run before its first step, will do.
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
    known = (name for row in rows for name, x in row.items() if x is not None)
    names = [name for name in dict.fromkeys(known) if name not in ("step", "episode")]
    size = SAMPLE_BYTES // 2 // count  # of training, and as much of evaluations
    samples = read_samples(folder, "samples.jsonl", size)
    tokens = read_samples(folder, "tokens.jsonl", TOKEN_BYTES // count)
    of_sample = {(row["step"], row["sample"]): row for row in tokens}
    for row in samples:
        row["held_out"] = bool(evaluated)
        row["tokens"] = of_sample.get((row["step"], row["place"]))
    for _, group in groupby(samples, lambda row: (row["step"], row.get("prompt"))):
        explain_advantages(list(group), facts.get("args", {}))
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


def explain_advantages(group: list[dict], args: dict) -> None:
    """Add to each response of a whole group "why": how its score gave its advantage, if that is by
    the group's standard deviation, as in grpo.py, or by the mean of the others, as in rloo.py.
    """
    if not len(group) == args.get("group_size") > 1 or "gae_lambda" in args:
        return
    scores = [trained_score(row, args) for row in group]
    mean, std = statistics.fmean(scores), statistics.stdev(scores)
    std = 0 if std < 1e-9 else std  # of rounding, as for `equal_scores`
    for row, score in zip(group, scores):
        advantage = row.get("advantage") or 0
        others = (len(group) * mean - score) / (len(group) - 1)
        if abs((score - mean) / (std or 1) - advantage) < 0.001:
            row["why"] = f" = (score {score:.3g} - mean {mean:.3g}) / std {std:.3g}"
        # With --kl_in reward, the KL is a small part.
        elif args.get("advantage") == "rloo" and abs(score - others - advantage) < 0.02:
            row["why"] = f" = score {score:.3g} - mean of the others {others:.3g}"
        if not std and "why" in row:
            row["why"] = ": equal scores, so only other terms act, such as the KL (--kl_coef)"


def trained_score(row: dict, args: dict) -> float:
    """Return the score that a response trained with: the weighted sum of its rewards, or the penalty
    for no stop token.
    """
    names = args.get("reward", [])
    weights = args.get("reward_weights") or [1] * len(names)
    score = sum(weight * (row.get(name) or 0) for weight, name in zip(weights, names))
    if not args.get("non_stop_penalty") or row.get("stop_reason") != "length":
        return score
    value = args.get("penalty_reward_value")
    return min(score, 0) if value is None else value


def without_seed(run: dict) -> str:
    """Return what the runs of a group share: script and flags, but for seed and names. A run
    without flags is alone.
    """
    flags = {name: x for name, x in run["args"].items() if name not in OF_ONE_RUN}
    return json.dumps([run.get("script"), flags], sort_keys=True) if flags else run["name"]


def five_digits(x: float | None) -> float | None:
    """Return a number as the page needs it; None stands for one that is not there."""
    return None if x is None else float(f"{x:.5g}")


def read_samples(folder: str, name: str, size: int) -> list[dict]:
    """Return the rows of the last step and of every n-th step, with their "place" in the step; a row
    without a step is of step 0.

    n is 1, and doubles whenever the rows of every n-th step take more than `size` bytes. So the
    log is read once, and a step that is left out takes no memory. The steps of a higher n, which
    tokens need, are among those of a lower n.
    """
    log = ({"step": 0, **row} for row in read_log(folder, name))
    every, used = 1, 0
    kept = {}  # step: rows
    step, last = 0, []
    for step, group in groupby(log, itemgetter("step")):
        last = [{**row, "place": place} for place, row in enumerate(group)]
        if step % every == 0:
            kept[step] = last
            used += len(json.dumps(last))
        while used > size and len(kept) > 1:
            every *= 2
            kept = {step: rows for step, rows in kept.items() if step % every == 0}
            used = len(json.dumps([*kept.values()]))
    return [row for rows in {**kept, step: last}.values() for row in rows]


if __name__ == "__main__":
    with report_errors():
        tyro.cli(main)
