"""Collect what runs have measured into a JSON file of results/.

    python scripts/results.py runs/demo-smollm2-1 runs/demo-smollm2-2 --output results/smollm2.json

Runs that the file has already, by the names of their folders, are replaced.
"""

import json
import platform
from pathlib import Path

import pandas
import repository  # noqa: F401
import torch
import tyro
from tyro.conf import Positional

from plumbing.run.log import read_args, read_log, replace_file

BY_STEP = ("eval/", "train/pair_accuracy")  # metrics of which every value is kept
MEDIANS = ("time/", "perf/")  # of which the median is, without the first step
IN_FACTS = ("script", "versions", "git_commit", "threads")


def summary(folder: Path) -> dict:
    """Return flags that are not the default, versions, evaluations by step, the mean score and
    length of the first and last ten steps, and median seconds of a step.
    """
    facts = read_args(str(folder))
    rows = pandas.DataFrame(read_log(str(folder))).set_index("step")
    changed = {
        name: value for name, value in facts["args"].items() if value != facts["defaults"][name]
    }
    by_step = rows[[name for name in rows if name.startswith(BY_STEP)]]
    steps = rows.drop(index=0, errors="ignore")
    medians = steps[[name for name in steps if name.startswith(MEDIANS)]][1:].median()
    means = steps[["objective/scores", "val/sequence_lengths"]] if "episode" in steps else steps[[]]
    return {
        **{name: facts[name] for name in IN_FACTS},
        "machine": machine(),
        "flags": changed,
        "first_10_steps": means[:10].mean().round(4).to_dict(),
        "last_10_steps": means[-10:].mean().round(4).to_dict(),
        "by_step": {name: x.dropna().round(4).to_dict() for name, x in by_step.items()},
        "medians": medians.dropna().round(4).to_dict(),
        "seconds": round(steps["time/from_scratch"].iloc[-1], 1),
    }


def machine() -> str:
    """Return the GPU's name, or the processor and its cores."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{names[0] if names else platform.machine()}, {len(names)} cores"


def main(folders: Positional[tuple[Path, ...]], output: Path) -> None:
    """
    Args:
        folders: of runs that have ended. output: JSON file to write, {name of a run: its summary}.
    """
    results = json.loads(output.read_text()) if output.exists() else {}
    results |= {folder.name: summary(folder) for folder in folders}
    replace_file(str(output), json.dumps(results, indent=1) + "\n")
    print(f"{output}: {', '.join(results)}")


if __name__ == "__main__":
    tyro.cli(main)
