"""Log-probabilities, entropies and so on of single tokens, in samples.jsonl: those of a step's first responses.

Imports plumbing.rollout.batch (the batch).
"""

import torch

from plumbing.rollout.batch import Batch
from utils import World

TOKENS = 2048  # most tokens of a step that are logged; one response is, however long


class TokenLog:
    """What the update computes of each token of the batch's first responses."""

    def __init__(self, batch: Batch, args):
        """Choose the first responses, as many of --log_samples as TOKENS allows, and one in any case."""
        self.batch, self.count, self.parts, tokens = batch, 0, [], 0
        for response in batch.responses[: args.log_samples]:
            tokens += len(response)
            if self.count and tokens > TOKENS:
                break
            self.count += 1

    def add(self, t: dict[str, torch.Tensor], **values: torch.Tensor) -> None:
        """Take values (n, T) by name of a micro-batch, whose slices of the batch are t."""
        logged = t["rows"] < self.count
        if logged.any():
            self.parts.append((t["rows"][logged], {name: x.detach()[logged] for name, x in values.items()}))

    def rows(self, tokenizer, world: World) -> list[dict]:
        """Return for each response its tokens, {"text": [str], "logprob": [number or None], ...}, on all ranks alike.

        Beside what `add` took there is the log-probability by what sampled and, where it differs within a response,
        the advantage. None: the token was not sampled, or its response does not train. Four digits are kept.
        """
        found = [
            (row, {name: x[i].tolist() for name, x in values.items()})
            for chosen, values in self.parts
            for i, row in enumerate(chosen.tolist())
        ]
        added = dict(world.all_gather(found))
        tokens, rows = self.batch.tokens, []
        for i, response in enumerate(self.batch.responses[: self.count]):
            columns = {"logprob": tokens["rollout_logprobs"][i].tolist(), **added.get(i, {})}
            advantages = tokens["advantages"][i][tokens["response_mask"][i]]
            if (advantages != advantages[:1]).any():
                columns["advantage"] = tokens["advantages"][i].tolist()
            mask = tokens["response_mask"][i].tolist()
            row = {"text": token_texts(tokenizer, response)}
            for name, column in columns.items():
                row[name] = [float(f"{x:.4g}") if sampled else None for x, sampled in zip(column, mask)]
            rows.append({name: column[: len(response)] for name, column in row.items()})
        return rows


def token_texts(tokenizer, ids: list[int]) -> list[str]:
    """Return the text of each token, spaces and special tokens included; joined they are the text of all.

    Of a character that several tokens make, the last has the character and the others have "".
    """
    texts, waiting = [], []
    start = tokenizer.decode(ids[:1])  # some tokenizers drop a space at the start
    for i, token in enumerate(ids):
        waiting.append(token)
        text = tokenizer.decode([ids[0], *waiting])[len(start) :] if i else start
        if text.endswith("\ufffd") and len(waiting) < 4 and i + 1 < len(ids):
            texts.append("")
        else:
            texts.append(text)
            waiting = []
    return texts
