"""The data sets of a run: their prompts, mixtures of several, and the order in which a run reads
them.
"""

import functools
import math
import os
import reprlib
import zlib
from typing import Callable

from tqdm import tqdm

from plumbing.data import prompts
from plumbing.data.rows import leave_out, read_parts, split_of
from plumbing.models.loading import check_fits
from utils import fail, generator, say, warn

SHORT = reprlib.Repr()  # one line of 150 characters, of both ends of a text
SHORT.maxstring = 150

# ---- the data sets of a run ----------------------------------------------------------------------


def load_train_and_eval(
    args,
    tokenizer,
    check_reference: Callable,
    conversations=None,
    stop_ids: list[int] | None = None,
) -> tuple[list[dict], list[dict]]:
    """Return the prompts to train on, and those to evaluate on ([] for none), which are never
    trained on.

    Args:
        check_reference, conversations: see `load_prompts`. stop_ids: see there, for the prompts to
            train on.
    """
    given = tokenizer, args, check_reference, conversations
    train = mix(
        load_prompts("--dataset", args.dataset, "train", *given, stop_ids, False), args.seed
    )
    where = f"--dataset {args.dataset}"
    (dataset, _) = split_of(args.dataset)
    parts = []
    if args.eval_share:
        parts = load_prompts(
            f"--eval_share {args.eval_share} of", args.dataset, "train", *given, None, True
        )
    elif args.eval_every and (args.eval_dataset or not os.path.isfile(dataset)):
        parts = load_prompts("--eval_dataset", args.eval_dataset or dataset, "test", *given)
    elif args.eval_every:
        say(
            f"{where}: a file has no test split, so nothing is evaluated; --eval_share 0.1 holds out a tenth"
        )
    held_out = first_prompts(parts, args.eval_prompts)
    evaluated = {row["prompt"] for row in held_out}
    kept = [row for row in train if row["prompt"] not in evaluated]
    if not kept:
        warn(
            f"{where}: every row is evaluated on, too, which shows how well the run fits them and nothing else"
        )
    kept = leave_out(where, train, kept or train, "whose prompts are evaluated on")
    sampled_from = [*held_out, *kept] if getattr(args, "on_policy_share", 1) else held_out
    check_responses_fit(args, sampled_from)
    return kept, held_out


def check_responses_fit(args, rows: list[dict]) -> None:
    """Exit with code 2 if the model cannot read all prompts, the longest with a response of
    --max_response_length.
    """
    if rows:
        room = args.max_response_length
        check_fits(
            args.model, [row["query"] for row in rows], f"--max_response_length {room}", room
        )


def load_prompts(
    flag: str,
    name: str,
    split: str,
    tokenizer,
    args,
    check_reference: Callable,
    conversations=None,
    stop_ids: list[int] | None = None,
    held_out: bool | None = None,
) -> list[tuple[list[dict], float]]:
    """Read a data set, or a list of them, and turn each row into a prompt, once and for all, as
    token ids.

    Prints the first prompt of each data set, with its reference, and the columns that they are
    from.

    Args:
        flag, name, split: as in `plumbing.data.rows.read_parts`.
        args: --prompt_column, --answer_column, --system_prompt, --chat_template,
            --max_prompt_length; with `stop_ids` --response_column.
        check_reference: returns why nothing can score a row, see
            `plumbing.rewards.sources.check_reference`.
        conversations: plumbing.turns.conversations.Conversations, with --tools or --environment.
        stop_ids: of rows to learn from, which no source scores: each turn of the assistant is a row
            of its own; [] for their prompts alone.
        held_out: read the rows that --eval_share holds out, or the others; None for all.
    Returns:
        Of each data set its weight and its rows {"prompt": the text that the model sees, "query":
        its token ids,
        "messages": the same as messages, None with --chat_template none, "answer": the reference or
            None, "dataset":
        the name of its data set, "sources": what `named_sources` gives, "columns": the row as it
        was read; with `stop_ids` "response": the token ids to imitate; rows without such a text are
        left out}.
    """
    parts = []
    as_is = args.chat_template == "none"
    tools = conversations and conversations.schemas
    for part, rows, weight in read_parts(flag, name, split):
        where = f"{flag} {part}"
        encoded = []
        problems = []
        prompt_column = prompts.find_column(where, "prompt", args.prompt_column, rows)
        answer_column = prompts.find_column(where, "answer", args.answer_column, rows)
        by_turns = stop_ids is not None and not args.response_column
        if stop_ids:
            response_column = prompts.find_column(where, "response", args.response_column, rows)
        for number, row in enumerate(
            tqdm(rows, desc=f"reading {where}", delay=2, leave=False, disable=None), 1
        ):
            at = f"{where} row {number}"
            for column in {"prompts", "responses"} & row.keys():
                fail(
                    f"{at}: has a column {column!r}, the name of another argument of reward functions"
                )
            whole = prompts.with_messages(at, row, prompt_column)
            if (
                held_out is not None
                and is_held_out(whole[prompt_column], args.eval_share) != held_out
            ):
                continue
            for turn in prompts.rows_of_turns(whole, prompt_column) if by_turns else [whole]:
                prompt, answer = prompts.prompt_and_answer(at, turn, prompt_column, answer_column)
                text, query = prompts.encode_prompt(
                    at, prompt, tokenizer, args.system_prompt, as_is, tools
                )
                made = {
                    "prompt": text,
                    "query": query,
                    "messages": None
                    if as_is
                    else prompts.as_messages(at, prompt, args.system_prompt),
                    "answer": answer,
                    "dataset": part,
                    "sources": prompts.named_sources(at, row, args) if stop_ids is None else [],
                    "columns": row,
                }
                has_turn = prompts.is_turn_of_assistant(turn[prompt_column])
                column = answer_column
                # a last turn of the assistant counts before a column that no flag names
                if stop_ids:
                    column = None if by_turns and has_turn else response_column
                    _, answer = prompts.prompt_and_answer(at, turn, prompt_column, column)
                    if isinstance(answer, str) and answer.strip():
                        made["response"] = prompts.encode_response(at, answer, tokenizer, stop_ids)
                if not encoded:  # the first row
                    column = column or ("last turn" if has_turn else "no column")
                    say(f"{at}: prompt ({prompt_column}): {SHORT.repr(text)}")
                    say(f"{at}: answer ({column}): {SHORT.repr(answer)}")
                encoded.append(made)
                problems.append(check_reference(at, made, args))
        if not encoded:
            fail(
                f"{where}: {'holds out' if held_out else '--eval_share leaves'} none of {len(rows)} rows"
            )
        if (
            not as_is
            and tokenizer.chat_template
            and 2 * sum(map(prompts.holds_template, encoded)) > len(encoded)
        ):
            warn(
                f"{where}: its prompts hold a chat template, and get another one; --chat_template none leaves them"
            )
        scorable = [row for row, problem in zip(encoded, problems) if not problem]
        leave_out(
            where, encoded, scorable, f"which have no score: {next(filter(None, problems), '')}"
        )
        if stop_ids:
            why = f"which have no {', '.join(prompts.COLUMNS['response'])} or last turn of the assistant"
            scorable = leave_out(
                where, scorable, [row for row in scorable if "response" in row], why
            )
            fitting = [row for row in scorable if len(row["response"]) <= args.max_response_length]
            why = f"whose responses have more tokens than --max_response_length {args.max_response_length}"
            scorable = leave_out(where, scorable, fitting, why)
            check_fits(args.model, [row["query"] + row["response"] for row in scorable], where)
        fitting = [row for row in scorable if len(row["query"]) <= args.max_prompt_length]
        why = f"which have more tokens than --max_prompt_length {args.max_prompt_length}"
        parts.append((leave_out(where, scorable, fitting, why), weight))
        if conversations:
            conversations.try_reset(f"the first row of {where}", scorable[0]["columns"])
    return parts


def is_held_out(prompt, share: float) -> bool:
    """Return whether --eval_share holds out the rows with a prompt, text or messages: a hash
    decides.
    """
    return zlib.crc32(repr(prompt).encode()) < share * 2**32


# ---- mixtures, and the order in which a run reads its prompts ------------------------------------


def mix(parts: list[tuple[list[dict], float]], seed: int) -> list[dict]:
    """Return the rows of a single data set as they are; of several, as many rows as all have, drawn
    by weight.

    Each data set gives its rows in shuffled passes, so that one with a large weight and few rows
    repeats them.
    """
    if len(parts) == 1:
        return parts[0][0]
    count = sum(len(rows) for rows, _ in parts)
    total = sum(weight for _, weight in parts)
    drawn = (
        generator("mixture", seed)
        .choice(len(parts), count, p=[weight / total for _, weight in parts])
        .tolist()
    )
    streams = [
        iter(take_prompts(rows, 0, drawn.count(i), (seed, i))) for i, (rows, _) in enumerate(parts)
    ]
    return [next(streams[i]) for i in drawn]


def first_prompts(parts: list[tuple[list[dict], float]], count: int) -> list[dict]:
    """Return the first `count` prompts, 0 for all; of several data sets the first of each in
    proportion to its weight, rounded up.
    """
    total = sum(weight for _, weight in parts)
    ends = [math.ceil(count * weight / total) if count else None for _, weight in parts]
    return [row for (rows, _), end in zip(parts, ends) for row in rows[:end]]


def take_prompts(rows: list[dict], position: int, count: int, seed) -> list[dict]:
    """Return the prompts `position ... position + count - 1` of an endless stream of passes, each
    shuffled anew.
    """
    size = len(rows)
    return [
        rows[pass_order(seed, i // size, size)[i % size]] for i in range(position, position + count)
    ]


def count_steps(passes: float, rows: list[dict], size: int) -> int:
    """Return how many steps of `size` rows --passes over the rows make; exit with code 2 if they
    make none.
    """
    steps = round(passes * len(rows)) // size
    if not steps:
        fail(f"--passes {passes}: a step takes {size} rows, and there are {len(rows)} to train on")
    return steps


@functools.lru_cache(maxsize=64)
def pass_order(seed, number: int, size: int) -> list[int]:
    """Return the order of the rows in a pass over `size` of them."""
    return generator("prompts", seed, number).permutation(size).tolist()
