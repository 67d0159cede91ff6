"""Preference pairs: rows with a preferred and another response, turned into token ids."""

import functools
import os
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from plumbing.data.cache import check_rows_fit, encode_rows, leave_out, numbers_of
from plumbing.data.encoding import Text
from plumbing.data.formats import (
    PROMPTS,
    as_messages,
    check_is_text,
    of_text,
    read_prompt,
    with_system,
)
from plumbing.data.messages import Message, read_messages
from plumbing.data.mixture import stream
from plumbing.data.prompts import SHORT, without
from plumbing.data.rendering import Rendering
from plumbing.data.rows import read_rows, split_of
from utils import UserError, say, warn

# Token ids of prompt and response, in a pair as `load_pairs` makes it.
SIDES = ("chosen", "rejected")
TEXTS = ("prompt", "chosen_text", "rejected_text")  # what is shown of a pair


def load_train_and_eval_pairs(
    args: Any, tokenizer: PreTrainedTokenizerBase, stop_ids: list[int]
) -> tuple:
    """Return the pairs to train on, and those to evaluate on, which are never trained on (none with
    --eval_every 0).
    """
    pairs = load_pairs("--dataset", args.dataset, "train", tokenizer, stop_ids, args)
    held_out = pairs.take(0)
    dataset, _ = split_of(args.dataset)
    if args.eval_every and (args.eval_dataset or not os.path.isfile(dataset)):
        held_out = load_pairs(
            "--eval_dataset", args.eval_dataset or dataset, "test", tokenizer, stop_ids, args
        )
        held_out = held_out.take(min(args.eval_pairs or len(held_out), len(held_out)))
    elif args.eval_every:
        count = min(args.eval_pairs or len(pairs), max(1, len(pairs) // 10))
        held_out = pairs.select(stream(len(pairs), 0, count, args.seed))
    kept = without(f"--dataset {args.dataset}", pairs, held_out)
    for side in SIDES:
        for part in (kept, held_out):
            check_rows_fit(args.model, part, [side], f"--dataset {args.dataset}")
    return kept, held_out


def load_pairs(
    flag: str,
    name: str,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: list[int],
    args: Any,
):
    """Read preference pairs and encode them, once and for all; those over --max_length are left out
    and reported.

    Returns:
        Rows {"prompt", "chosen_text", "rejected_text": text; "chosen", "rejected": token ids of
        prompt, response and stop token; "margin": float, 0 if the row has none; "subset": text or
        None}
    """
    dataset, split = split_of(name, split)
    where = f"{flag} {dataset}"
    raw = read_rows(flag, "arithmetic_pairs" if dataset == "arithmetic" else dataset, split)
    as_is = args.chat_template == "none"
    rendering = Rendering(tokenizer, stop_ids, args.system_prompt, as_is)
    make = functools.partial(make_pair, rendering=rendering)
    pairs = encode_rows(flag, dataset, raw, make, tokenizer, stop_ids)
    for part in TEXTS:
        say(f"{where}: {part}: {SHORT.repr(pairs[0][part])}")
    if not pairs[0]["prompt"]:
        warn(
            f"{where}: has none of {', '.join(PROMPTS)}, so chosen and rejected are read as whole texts"
        )
    lengths = np.maximum(*(numbers_of(pairs, side) for side in SIDES))
    why = f"which have more tokens than --max_length {args.max_length}"
    return leave_out(where, pairs, lengths <= args.max_length, why)


# ---- a row ---------------------------------------------------------------------------------------


def make_pair(where: str, row: dict, rendering: Rendering) -> list[dict]:
    """Return the pair of a row, for `encode_rows`: see `load_pairs`."""
    margin = of_text(row.get("margin"))  # a .csv file has texts
    margin = 0.0 if margin in (None, "") else margin
    if not is_number(margin):
        raise UserError(f"{where}: margin must be a number, not {str(margin)[:60]!r}")
    subset = None if row.get("subset") is None else str(row["subset"])
    pair: dict[str, Any] = {"prompt": "", "margin": margin, "subset": subset, "problem": ""}
    rendering = rendering.of_row(where, row)
    for side, (*messages, turn) in zip(SIDES, read_pair(where, row)):
        if messages:
            *before, last = rendering.dialogue([*messages, turn])
            query = rendering.prompt(where, before)
            text = rendering.turn(where, before, query, last)
            pair["prompt"] = query.shown
            pair[side] = [query, text]
        else:
            if others := turn.as_dict().keys() - {"role", "content"}:
                raise UserError(
                    f"{where}: has {', '.join(sorted(others))}, and no prompt before it"
                )
            text = Text(where, turn.content, special=True, is_learned=True)
            pair[side] = [text]
        pair[f"{side}_text"] = text.shown
    # No pair of this prompt, or of these two texts, is both trained and evaluated on.
    pair["about"] = pair["prompt"] or str(sorted(pair[f"{side}_text"] for side in SIDES))
    return [pair]


def read_pair(where: str, row: dict) -> list[list[Message]]:
    """Return the two sides of a row, chosen and rejected, as conversations that end with the
    response.

    Raise a UserError, naming the row, if a side is missing or the two are equal.
    """
    check_is_text(where, row)
    if "response" in row and "sort" in row:
        row = read_ranked(where, row)
    filled = (name for name in PROMPTS if row.get(name) not in (None, "", []))
    column = next(filled, None)
    prompt = read_messages(where, read_prompt(where, row, column)) if column else []
    sides = [read_side(where, name, row, prompt) for name in SIDES]
    chosen, rejected = ([message.as_dict() for message in side] for side in sides)
    if chosen == rejected:
        raise UserError(f"{where}: the chosen and the rejected response are the same")
    return sides


def read_ranked(where: str, row: dict) -> dict:
    """Return a row in PaddleNLP's form, src, tgt, response and sort, as one of prompt, chosen and
    rejected.
    """
    prompt = read_prompt(where, row, "src")
    responses = row["response"]
    sort = row["sort"]
    pairs = all(isinstance(x, list) and len(x) == 2 for x in (responses, sort))
    if prompt[-1]["role"] == "assistant" or not pairs:
        raise UserError(
            f"{where}: src requires one turn more than tgt, response and sort two entries each"
        )
    if not all(map(is_number, sort)) or sort[0] == sort[1]:
        raise UserError(
            f"{where}: sort must be two different numbers, the higher for the chosen response, not {sort}"
        )
    chosen = int(sort[1] > sort[0])
    return {"prompt": prompt, "chosen": responses[chosen], "rejected": responses[1 - chosen]}


def read_side(where: str, name: str, row: dict, prompt: list[Message]) -> list[Message]:
    """Return a response behind its prompt.

    Args:
        name: of the response: text; or messages, of which the last one is the response. If the first
            one is the user's, or the system's, they hold the prompt, too.
    """
    where = f"{where} {name}"
    response = row.get(name)
    response = as_messages(where, [response] if isinstance(response, dict) else response)
    is_given = isinstance(response, str | list)
    turns = read_messages(where, response, "assistant") if is_given else []
    if not is_given or not turns[-1].says:
        raise UserError(f"{where}: is no response; the columns of the row are {', '.join(row)}")
    if turns[-1].role != "assistant":
        raise UserError(f"{where}: has to end with a turn of the assistant")
    if turns[0].role == "assistant":
        return prompt + turns
    return read_messages(where, with_system(row, response))


def is_number(value: Any) -> bool:
    """Return whether a value of a file is a number that float32 can hold; true and false are not
    numbers.
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e30
