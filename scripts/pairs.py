"""Make preference pairs for reward_model.py of the responses that scripts/evaluate.py has scored.

    python scripts/pairs.py runs/NAME/samples.jsonl pairs.jsonl

Of each prompt with both, a correct response is preferred to a wrong one; all of them have stopped.
The prompts hold the chat template already: reward_model.py --dataset pairs.jsonl --chat_template
none.
"""

import json
from pathlib import Path

import pandas
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
    with as_user_error(f"SAMPLES {samples}"), open(samples) as lines:
        # read_json of pandas would make numbers of texts that look like them.
        table = pandas.DataFrame(map(json.loads, lines))
        table = table[table["stopped"]]
    rows = []
    for (prompt, subset), responses in table.groupby(["prompt", "dataset"], sort=False):
        chosen = responses["response"][responses["correct"] == 1]
        rejected = responses["response"][responses["correct"] == 0]
        # As many as there are of the rarer kind, each response once.
        for better, worse in zip(chosen, rejected):
            rows.append({"prompt": prompt, "chosen": better, "rejected": worse, "subset": subset})
    with as_user_error(f"PAIRS {pairs}"):
        pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{pairs}: {len(rows)} pairs of {table['prompt'].nunique()} prompts")


if __name__ == "__main__":
    with report_errors():
        tyro.cli(main)
