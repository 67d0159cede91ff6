"""Make preference pairs for reward_model.py of the responses that scripts/evaluate.py has scored.

    python scripts/pairs.py runs/NAME/samples.jsonl pairs.jsonl

Of each prompt with both, a correct response is preferred to a wrong one; all of them have stopped.
The prompts hold the chat template already: reward_model.py --dataset pairs.jsonl --chat_template
none.
"""

import json
from pathlib import Path

import pandas
import tyro
from tyro.conf import Positional


def main(samples: Positional[Path], pairs: Positional[Path]) -> None:
    """
    Args:
        samples: that evaluate.py has written.
        pairs: file to write, {"prompt", "chosen", "rejected", "subset": the data set} a line.
    """
    table = pandas.read_json(samples, lines=True)
    table = table[table["stopped"]]
    rows = []
    for (prompt, subset), responses in table.groupby(["prompt", "dataset"], sort=False):
        chosen = responses["response"][responses["correct"] == 1]
        rejected = responses["response"][responses["correct"] == 0]
        # As many as there are of the rarer kind, each response once.
        for better, worse in zip(chosen, rejected):
            rows.append({"prompt": prompt, "chosen": better, "rejected": worse, "subset": subset})
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{pairs}: {len(rows)} pairs of {table['prompt'].nunique()} prompts")


if __name__ == "__main__":
    tyro.cli(main)
