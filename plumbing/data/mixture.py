"""The data sets of a run: their prompts, mixtures of several, and the order in which a run reads
them.
"""

import functools
import math
import os
import reprlib
import zlib
from types import SimpleNamespace
from typing import Callable

import numpy as np

from plumbing.data import prompts
from plumbing.data.cache import check_rows_fit, column, encode_rows, leave_out
from plumbing.data.rows import first_rows, read_parts, split_of
from utils import UserError, generator, say, warn

SHORT = reprlib.Repr()  # one line of 150 characters, of both ends of a text
SHORT.maxstring = 150
# ---- the data sets of a run ----------------------------------------------------------------------


def load_train_and_eval(
    args,
    tokenizer,
    why_unscorable: Callable,
    conversations=None,
    stop_ids: list[int] | None = None,
) -> tuple:
    """Return the prompts to train on, and those to evaluate on (none of them is trained on), as
    `load_prompts` gives them.

    Args:
        why_unscorable, conversations: see `load_prompts`. stop_ids: see there, for the prompts to
            train on.
    """
    given = tokenizer, args, why_unscorable, conversations
    train = mix(
        load_prompts("--dataset", args.dataset, "train", *given, stop_ids, False), args.seed
    )
    where = f"--dataset {args.dataset}"
    (dataset, _) = split_of(args.dataset)
    parts = []
    if args.eval_share:
        flag = f"--eval_share {args.eval_share} of"
        parts = load_prompts(flag, args.dataset, "train", *given, None, True)
    elif args.eval_every and (args.eval_dataset or not os.path.isfile(dataset)):
        parts = load_prompts("--eval_dataset", args.eval_dataset or dataset, "test", *given)
    elif args.eval_every:
        say(
            f"{where}: a file has no test split, so nothing is evaluated; --eval_share 0.1 holds out a tenth"
        )
    held_out = first_prompts(parts, args.eval_prompts) if parts else train.take(0)
    train = without(where, train, held_out)
    check_responses_fit(args, held_out)
    if getattr(args, "on_policy_share", 1):
        check_responses_fit(args, train)
    return train, held_out


def without(where: str, train, held_out):
    """Return the rows to train on without those whose prompts are evaluated on, unless that leaves
    none.
    """
    kept = ~np.isin(column(train, "about"), column(held_out, "about"))
    if not kept.any():
        warn(
            f"{where}: every row is evaluated on, too, which shows how well the run fits them and nothing else"
        )
        return train
    return leave_out(where, train, kept, "whose prompts are evaluated on")


def check_responses_fit(args, rows) -> None:
    """Raise a UserError if the model cannot read all prompts, the longest with a response of
    --max_response_length.
    """
    room = args.max_response_length
    check_rows_fit(args.model, rows, ["query"], f"--max_response_length {room}", room)


def load_prompts(
    flag: str,
    name: str,
    split: str,
    tokenizer,
    args,
    why_unscorable: Callable,
    conversations=None,
    stop_ids: list[int] | None = None,
    held_out: bool | None = None,
) -> list[tuple]:
    """Read a data set, or a list of them, and turn each row into a prompt, once and for all, as
    token ids.

    Prints the first prompt of each data set, with its reference, and the columns that they are
    from.

    Args:
        flag, name, split: as in `plumbing.data.rows.read_parts`.
        args: --prompt_column, --answer_column, --max_prompt_length, --max_response_length and `flags`.
        why_unscorable: returns why nothing can score a row, see
            `plumbing.rewards.sources.why_unscorable`.
        conversations: extras.episodes.conversations.Conversations, with --tools or --environment.
        stop_ids: of rows to learn from, which no source scores; [] for their prompts alone.
        held_out: read the rows that --eval_share holds out, or the others; None for all.
    Returns:
        Of each data set its rows, see `make_prompts`, and its weight. Of rows to learn from, those
        without a response are left out.
    """
    parts = []
    as_is = args.chat_template == "none"
    flags = "chat_template eval_share on_policy_share response_column reward reward_weights system_prompt"
    for part, raw, weight in read_parts(flag, name, split):
        where = f"{flag} {part}"
        find = functools.partial(prompts.find_column, where, rows=first_rows(where, raw))
        text_column = None
        if stop_ids or stop_ids is not None and args.response_column:
            text_column = find("response", args.response_column)
        kind = "conversation" if stop_ids and not text_column else "prompt"
        given = SimpleNamespace(
            **{name: getattr(args, name, None) for name in flags.split()},
            prompt_column=find(kind, args.prompt_column),
            answer_column=find("answer", args.answer_column),
            text_column=text_column,
            tokenizer=tokenizer,
            tools=conversations and conversations.schemas,
            why_unscorable=why_unscorable,
            stop_ids=stop_ids,
            held_out=held_out,
        )
        make = functools.partial(make_prompts, given=given)
        rows = encode_rows(flag, part, raw, make, tokenizer, stop_ids or ())
        if not len(rows):
            raise UserError(
                f"{where}: {'holds out' if held_out else '--eval_share leaves'} none of {len(raw)} rows"
            )
        first = rows[0]
        say(f"{where}: prompt ({given.prompt_column}): {SHORT.repr(first['prompt'])}")
        say(f"{where}: answer ({first['target_from']}): {SHORT.repr(first['target'])}")
        last_turn = prompts.is_turn_of_assistant(first["columns"].get(given.prompt_column))
        if stop_ids is None and last_turn and first["target_from"] == given.answer_column:
            say(f"{where}: the assistant's last turn is left out, as the answer is another one")
        if not as_is and tokenizer.chat_template and prompts.holds_template(first):
            warn(
                f"{where}: its prompts hold a chat template, and get another one; --chat_template none leaves them"
            )
        if stop_ids:
            why = f"which have no {', '.join(prompts.COLUMNS['response'])} or last turn of the assistant"
            rows = leave_out(where, rows, column(rows, "response") > 0, why)
            why = f"whose responses have more tokens than --max_response_length {args.max_response_length}"
            fits = column(rows, "response") <= args.max_response_length
            rows = leave_out(where, rows, fits, why)
            check_rows_fit(args.model, rows, ["query", "response"], where)
        why = f"which have more tokens than --max_prompt_length {args.max_prompt_length}"
        fits = column(rows, "query") <= args.max_prompt_length
        rows = leave_out(where, rows, fits, why)
        parts.append((rows, weight))
    return parts


def make_prompts(at: str, row: dict, given) -> list[dict]:
    """Return what a run needs of a row of a data set, for `encode_rows`.

    Args:
        at: its place. given: flags and what `load_prompts` knows of the data set.
    Returns:
        Rows {"prompt": the text that the model sees, "query": the same to encode, "messages": the
        same as messages, None with --chat_template none, "answer": the reference or None, "target":
        it or, with `stop_ids`, the turn to learn, "target_from": its column, "sources": what
        `named_sources` gives, "columns": the row as it was read, "problem": what `why_unscorable`
        gives; with `stop_ids` "response": the text to learn, if there is one}. One, or with
        `stop_ids` one of each turn of the assistant that `join_turns` does not join; none if it is
        not to be read, by `held_out`.
    """
    column = given.prompt_column
    whole = prompts.with_messages(at, row, column)
    is_held_out = zlib.crc32(repr(whole[column]).encode()) < (given.eval_share or 0) * 2**32
    if given.held_out not in (None, is_held_out):
        return []
    tools = prompts.tools_of(at, row)
    if tools and given.tools:
        raise UserError(f"{at}: has tools of its own beside --tools")
    tools = tools or given.tools
    learns = given.stop_ids is not None
    stop = given.tokenizer.decode((given.stop_ids or [])[:1])
    as_is = given.chat_template == "none"
    has_turn = prompts.is_turn_of_assistant(whole[column])
    # A last turn of the assistant counts before a column that no flag names.
    text_column = None if has_turn and not given.response_column else given.text_column
    rows = prompts.rows_of_turns(at, whole, column, text_column) if learns else [(whole, None)]
    made = []
    for part, turn in rows:
        prompt, answer = prompts.prompt_and_answer(at, part, column, given.answer_column)
        messages, query = prompts.render_prompt(
            at, prompt, given.tokenizer, given.system_prompt, as_is, tools
        )
        target_from = text_column if given.stop_ids else given.answer_column
        encoded = {
            "prompt": query.shown,
            "query": [query],
            "messages": None if as_is else messages,
            "answer": answer,
            "target": answer,
            "target_from": target_from or ("last turn" if has_turn else "no column"),
            "sources": [] if learns else prompts.named_sources(at, row, given),
            "columns": row,
        }
        encoded["problem"] = given.why_unscorable(at, encoded, given)
        if given.stop_ids and turn:
            response = prompts.render_turn(
                at, messages, query, turn, given.stop_ids, given.tokenizer, as_is, tools
            )
            encoded |= {"target": response.shown.removesuffix(stop), "response": [response]}
        made.append(encoded)
    if given.stop_ids and not given.on_policy_share:  # else the student answers each turn's prompt
        made = prompts.join_turns(made, stop)
    return made


# ---- mixtures, and the order in which a run reads its prompts ------------------------------------


def mix(parts: list[tuple], seed: int):
    """Return the rows of a single data set as they are; of several, as many rows as all have, drawn
    by weight.

    Each data set gives its rows in shuffled passes, so that one with a large weight and few rows
    repeats them.
    """
    import datasets

    if len(parts) == 1:
        return parts[0][0]
    rows = datasets.concatenate_datasets([part for part, _ in parts])
    weights = np.array([x for _, x in parts])
    drawn = generator("mixture", seed).choice(len(parts), len(rows), p=weights / weights.sum())
    order = np.empty(len(rows), int)
    start = 0
    for i, (part, _) in enumerate(parts):
        of_part = drawn == i
        order[of_part] = start + stream(len(part), 0, of_part.sum(), (seed, i))
        start += len(part)
    return rows.select(order)


def first_prompts(parts: list[tuple], count: int):
    """Return the first `count` prompts, 0 for all; of several data sets the first of each in
    proportion to its weight, rounded up.
    """
    import datasets

    total = sum(weight for _, weight in parts)
    return datasets.concatenate_datasets(
        [
            rows.select(range(len(rows))[: math.ceil(count * weight / total) or None])
            for rows, weight in parts
        ]
    )


def take_prompts(rows, position: int, count: int, seed):
    """Return the prompts `position ... position + count - 1` of an endless stream of passes, each
    shuffled anew.
    """
    return [rows[i] for i in stream(len(rows), position, count, seed)]


def stream(size: int, position: int, count: int, seed):
    """Return the places of the rows that `take_prompts` takes of `size` rows (count,)."""
    orders = [
        pass_order(seed, number, size)
        for number in range(position // size, (position + count) // size + 1)
    ]
    return np.concatenate(orders)[position % size :][:count]


def count_steps(passes: float, rows, size: int) -> int:
    """Return how many steps of `size` rows --passes over the rows make; raise a UserError if they
    make none.
    """
    steps = round(passes * len(rows)) // size
    if not steps:
        raise UserError(
            f"--passes {passes}: a step takes {size} rows, and there are {len(rows)} to train on"
        )
    return steps


@functools.lru_cache(maxsize=4)
def pass_order(seed, number: int, size: int):
    """Return the order of the rows in a pass over `size` of them."""
    return generator("prompts", seed, number).permutation(size)
