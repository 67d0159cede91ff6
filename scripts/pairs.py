"""Make preference pairs for reward_model.py of the responses that scripts/evaluate.py has scored.

    python scripts/pairs.py runs/NAME/samples.jsonl pairs.jsonl

Of each prompt with both, a correct response is preferred to a wrong one; all of them have stopped.
The prompts hold the chat template already: reward_model.py --dataset pairs.jsonl --chat_template
none.
"""

import json
from collections import defaultdict
from pathlib import Path

import repository  # noqa: F401
import tyro
from tyro.conf import Positional

from plumbing.run.command import report_errors
from utils import as_user_error


def main(samples: Positional[Path], pairs: Positional[Path]) -> None:
    """
    Args:
        samples: that evaluate.py has written.
        pairs: file to write, {"prompt", "chosen", "rejected", "subset": the data set} a line.
    """
    found: dict = defaultdict(lambda: ([], []))  # of a prompt: its wrong and correct responses
    with as_user_error(f"SAMPLES {samples}"), open(samples) as lines:
        for row in map(json.loads, lines):
            if "correct" not in row:
                raise ValueError("has rows that scripts/evaluate.py has not written")
            if row["stopped"] and row["correct"] is not None:
                found[row["prompt"], row["dataset"]][row["correct"] == 1].append(row["response"])
    # As many as there are of the rarer kind, each response once.
    rows = [
        {"prompt": prompt, "chosen": chosen, "rejected": rejected, "subset": subset}
        for (prompt, subset), (wrong, correct) in found.items()
        for chosen, rejected in zip(correct, wrong)
    ]
    with as_user_error(f"PAIRS {pairs}"):
        pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{pairs}: {len(rows)} pairs of {len(found)} prompts")


if __name__ == "__main__":
    with report_errors():
        tyro.cli(main)
