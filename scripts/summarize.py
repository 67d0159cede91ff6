"""Collect what runs have measured into a JSON file of results/.

    python scripts/summarize.py runs/demo-smollm2-1 runs/demo-smollm2-2 --output results/smollm2.json

Runs that the file has already, by the names of their folders, are replaced.
"""

import json
import re
from pathlib import Path

import pandas
import repository  # noqa: F401
import tyro
from tyro.conf import Positional

import utils
from plumbing.run.command import report_errors
from plumbing.run.log import read_args, read_log, replace_file, without_secrets

# Metrics of which every value is kept, and those of which the median is, without the first step.
BY_STEP = (
    "eval/|objective/(scores|divergence)|val/(sequence_lengths|explained_variance)"
    "|train/(loss|pair_accuracy)"
)
MEDIANS = "time/|perf/"


def summary(folder: Path) -> dict:
    """Return where and with what a run ran, its flags that are not the default, and its metrics."""
    # Without the folders of this machine.
    text = re.sub(r'"/[^"]*/', '"', json.dumps(without_secrets(read_args(str(folder)))))
    facts = json.loads(text)
    if not facts:
        raise utils.UserError(f"{folder}: is no folder of a run: it has no args.json")
    defaults = facts.pop("defaults")
    flags = {name: value for name, value in facts.pop("args").items() if value != defaults[name]}
    rows = pandas.DataFrame(read_log(str(folder))).set_index("step")
    kept = rows.filter(regex=BY_STEP).round(4)
    medians = rows.filter(regex=MEDIANS)[2:].median().round(4)
    return {
        **facts,
        "flags": flags,
        "by_step": {name: x.dropna().to_dict() for name, x in kept.items()},
        "medians": medians.dropna().to_dict(),
        "seconds": round(rows["time/from_scratch"].iloc[-1], 1),
    }


def main(folders: Positional[tuple[Path, ...]], output: Path, command: str = "") -> None:
    """
    Args:
        folders: of runs that have ended. output: JSON file to write, {name of a run: its summary}.
        command: that made the runs, for the file.
    """
    results = json.loads(output.read_text()) if output.exists() else {}
    made_by = {"command": command} if command else {}
    results |= {folder.name: {**made_by, **summary(folder)} for folder in folders}
    replace_file(str(output), json.dumps(results, indent=1) + "\n")
    print(f"{output}: {', '.join(results)}")


if __name__ == "__main__":
    with report_errors():
        tyro.cli(main)
