"""The data sets of a run: their prompts, mixtures of several, and the order in which a run takes them.

Imports plumbing.data.rows (reads the rows), plumbing.data.prompts (makes prompts of them), plumbing.rewards.sources and
plumbing.rewards.verifiers (what scores them, and which answers it can use) and plumbing.models.loading (how much the model can read).
"""

import functools
import os
from typing import Callable

from tqdm import tqdm

from plumbing.data.prompts import (
    ANSWER_COLUMNS,
    PROMPT_COLUMNS,
    as_messages,
    encode_prompt,
    encode_text,
    find_column,
    is_filled,
    is_turn_of_assistant,
    prompt_and_answer,
    template_tokens,
    value_at,
)
from plumbing.data.rows import read_parts, split_of
from plumbing.models.loading import check_positions, check_vocabulary
from plumbing.rewards.sources import is_scored_by, named_sources, needs_answer
from plumbing.rewards.verifiers import VERIFIERS
from utils import fail, generator, warn

# ---- the data sets of a run ------------------------------------------------------------------------------------------


def load_train_and_eval(
    args, tokenizer, answer_for: str, tools: list[dict] | None = None
) -> tuple[list[dict], list[dict]]:
    """Return the prompts to train on, and those to evaluate on ([] for none), which are never trained on."""
    train = load_prompts("--dataset", args.dataset, "train", tokenizer, args, answer_for, tools)
    held_out = []
    dataset, _ = split_of(args.dataset)
    if args.eval_every and (args.eval_dataset or not os.path.isfile(dataset)):
        name = args.eval_dataset or dataset
        held_out = load_prompts("--eval_dataset", name, "test", tokenizer, args, answer_for, tools)
        held_out = first_prompts(held_out, args.eval_prompts)
    kept = without(train, {row["prompt"] for row in held_out})
    if len(kept) < len(train):
        warn(f"--dataset {args.dataset}: left out {len(train) - len(kept)} rows whose prompts are evaluated on")
    if not kept:
        fail(f"--dataset {args.dataset}: every row is evaluated on, none is left to train on")
    check_lengths(args, kept + held_out)
    return kept, held_out


def check_lengths(args, prompts: list[dict]) -> None:
    """End the run if the model cannot read all prompts, the longest with a response of --max_response_length."""
    check_vocabulary(args.model, (row["query"] for row in prompts))
    longest = max(len(row["query"]) for row in prompts)
    check_positions(
        args.model, longest + args.max_response_length,
        f"--max_response_length {args.max_response_length}, behind a prompt of {longest} tokens",
    )  # fmt: skip


def load_prompts(
    flag: str, name: str, split: str, tokenizer, args, answer_for: str = "", tools: list[dict] | None = None
) -> list[dict]:
    """Read a data set, or a list of them, and turn each row into a prompt, once and for all, as token ids.

    Args:
        flag, name, split: as in `plumbing.data.rows.read_parts`.
        args: --prompt_column, --answer_column, --system_prompt, --chat_template, --max_prompt_length and
            --overlong_prompts.
        answer_for: the flag that needs an answer in every row, such as "--reward math"; "" if none does.
        tools: the schemas that the chat template shows to the model.
    Returns:
        Rows {"prompt": the text that the model sees, "query": its token ids, "messages": the same as messages, None
        with --chat_template none, "answer": the reference or None, "dataset": the name of its data set, "sources": what
        `named_sources` gives, "columns": the row as it was read}; a Mixture for a list of data sets. Ends the run,
        naming the row, on whatever is missing or empty.
    """
    encode = lambda part, rows: encode_rows(f"{flag} {part}", part, rows, tokenizer, args, answer_for, tools)
    return load_parts(flag, name, split, encode)


def encode_rows(
    where: str, name: str, rows: list[dict], tokenizer, args, answer_for: str, tools: list[dict] | None
) -> list[dict]:
    """Turn the rows of one data set into prompts; see `load_prompts`. `where` names it in messages."""
    prompt_column = find_column(where, "--prompt_column", args.prompt_column, PROMPT_COLUMNS, rows, required=True)
    answer_column = find_column(where, "--answer_column", args.answer_column, ANSWER_COLUMNS, rows, required=False)
    prompts, numbered, too_long, wrapped = [], {}, [], []
    as_is = args.chat_template == "none"
    marks = [] if as_is else template_tokens(tokenizer)
    for number, row in enumerate(tqdm(rows, desc=f"reading {where}", delay=2, leave=False), 1):
        at = f"{where} row {number}"
        for column in {"prompts", "responses"} & row.keys():
            fail(f"{at}: has a column {column!r}, which is a name that reward functions get something else by")
        prompt, answer = prompt_and_answer(at, row, prompt_column, answer_column)
        sources = named_sources(at, row, args)
        if answer_for and not is_filled(answer) and needs_answer(args, sources):
            missing = f"has no answer in {answer_column!r}" if answer_column else "has no answer"
            there = f"name a column with --answer_column, there are {', '.join(row)}"
            fail(f"{at}: {missing}, which {answer_for} needs; {there}")
        text, query = encode_prompt(at, prompt, tokenizer, args.system_prompt, as_is, tools)
        if isinstance(prompt, str):
            wrapped += [mark for mark in marks if mark in prompt][:1]
        if reason := over_limit(args, where, number, query):
            too_long.append(reason)
        else:
            messages = None if as_is else as_messages(at, prompt, args.system_prompt)
            own = {"prompt": text, "query": query, "messages": messages, "answer": answer}
            prompts.append({**own, "dataset": name, "sources": sources, "columns": row})
            numbered[number] = prompts[-1]
    warn_of_overlong(where, too_long, len(rows))
    check_references(where, args.reward, numbered)
    column = args.verifier_column
    if column not in ("", "none") and not any(column in row for row in rows):
        warn(f"{where}: has no column {column!r}, which --verifier_column names, so every source scores its rows")
    if wrapped:
        warn(
            f"{where}: {len(wrapped)} of {len(rows)} prompts hold {wrapped[0]}, and the chat template puts it around "
            "them once more; --chat_template none takes prompts as they are"
        )
    return prompts


def check_references(where: str, names: tuple[str, ...], rows: dict[int, dict]) -> None:
    """Warn of the rows whose answer a verifier can do nothing with; end the run if it is all that it scores.

    Args:
        names: of --reward. rows: {number in the data set: prompt}.
    """
    for name in [name for name in names if name in VERIFIERS and VERIFIERS[name].column]:
        column = VERIFIERS[name].column
        unread, scored = {}, [number for number, row in rows.items() if is_scored_by(row, name)]
        for number in scored:
            try:
                VERIFIERS[name].reference({**rows[number]["columns"], "answer": rows[number]["answer"]}.get(column))
            except ValueError as error:
                unread[number] = error
        first = "; ".join(f"row {number}: {error}" for number, error in list(unread.items())[:3])
        count = f"the answers of {len(unread)} of {len(scored)} rows"
        if unread and len(unread) == len(scored):
            fail(f"{where}: --reward {name} cannot use {count} ({first})")
        if unread:
            warn(f"{where}: --reward {name} cannot use {count}, whose responses get no score ({first})")


def over_limit(args, where: str, number: int, query: list[int], response: list[int] = ()) -> str:
    """Return what is too long in a row, "" if nothing is; with --overlong_prompts error end the run there."""
    for option, ids in (("max_prompt_length", query), ("max_response_length", response)):
        if len(ids) > getattr(args, option):
            reason = f"has {len(ids)} tokens, over --{option} {getattr(args, option)}"
            if args.overlong_prompts == "error":
                fail(f"{where} row {number}: {reason}; --overlong_prompts drop leaves such rows out")
            return f"row {number} {reason}"
    return ""


def warn_of_overlong(where: str, reasons: list[str], total: int) -> None:
    """Say how many of `total` rows are left out for their length; end the run if none is left."""
    if reasons and len(reasons) == total:
        fail(f"{where}: every row is too long; {reasons[0]}")
    if reasons:
        warn(f"{where}: left out {len(reasons)} of {total} rows that are too long; {reasons[0]}")


def load_supervised(args, tokenizer, stop_ids: list[int]) -> list[dict]:
    """Return the rows of --ptx_dataset: {"query": token ids of the prompt, "response": those of the text to imitate}.

    The text is the last turn of messages, if the assistant's, or else stands in the answer column. A stop token is
    added to it. A Mixture for a list of data sets.
    """
    encode = lambda name, rows: encode_supervised(f"--ptx_dataset {name}", rows, tokenizer, stop_ids, args)
    supervised = load_parts("--ptx_dataset", args.ptx_dataset, "train", encode)
    check_vocabulary(args.model, (row["query"] + row["response"] for row in supervised))
    longest = max(len(row["query"]) + len(row["response"]) for row in supervised)
    check_positions(args.model, longest, f"--ptx_dataset {args.ptx_dataset}: its longest row")
    return supervised


def encode_supervised(where: str, rows: list[dict], tokenizer, stop_ids: list[int], args) -> list[dict]:
    """Turn the rows of one data set into those of `load_supervised`. `where` names it in messages."""
    supervised, too_long = [], []
    for number, row in enumerate(rows, 1):
        at = f"{where} row {number}"
        prompt_column = find_column(at, "", "", PROMPT_COLUMNS, [row], required=False)
        answer_column = find_column(at, "", "", ANSWER_COLUMNS, [row], required=False)
        if is_turn_of_assistant(value_at(row, prompt_column)):
            answer_column = None
        prompt, text = prompt_and_answer(at, row, prompt_column, answer_column)
        if not isinstance(text, str) or not text.strip():
            fail(f"{at}: has no text to imitate in {', '.join(ANSWER_COLUMNS)} or in a last turn of the assistant")
        _, query = encode_prompt(at, prompt, tokenizer, args.system_prompt, args.chat_template == "none")
        response = [*encode_text(at, text, tokenizer, special=False), stop_ids[0]]
        if reason := over_limit(args, where, number, query, response):
            too_long.append(reason)
        else:
            supervised.append({"query": query, "response": response})
    warn_of_overlong(where, too_long, len(rows))
    return supervised


def load_parts(flag: str, name: str, split: str, encode: Callable) -> list[dict]:
    """Return what `encode(name, rows)` makes of a data set, or a Mixture of what it makes of each in a list of them."""
    parts = [(encode(part, rows), weight) for part, rows, weight in read_parts(flag, name, split)]
    return Mixture(parts) if len(parts) > 1 else parts[0][0]


def token_lengths(prompts: list[dict], eval_prompts: list[dict], supervised: list[dict] = ()) -> dict[str, list[int]]:
    """Return the tokens of each row by what it is for, {name: [tokens]}, for the statistics that a run shows."""
    rows = {"prompts": prompts, "held-out prompts": eval_prompts, "supervised rows": supervised}
    return {
        name: [len(row["query"]) + len(row.get("response", ())) for row in part] for name, part in rows.items() if part
    }


# ---- the order in which a run takes its prompts ----------------------------------------------------------------------


class Mixture(list):
    """The rows of several data sets, which take turns by weight."""

    def __init__(self, parts: list[tuple[list[dict], float]]):
        """`parts`: the rows of each data set, and the weight with which it gets its turns."""
        super().__init__(row for rows, _ in parts for row in rows)
        self.parts, self.counts = parts, [0] * len(parts)
        self.turns: list[tuple[int, int]] = []  # (part, position in it) of the positions that were asked for so far

    def next_part(self, counts: list[int], among: list[int]) -> int:
        """Return which of some parts lags most behind its share of their turns, after `counts` turns of each part."""
        total, turn = sum(self.parts[part][1] for part in among), sum(counts[part] for part in among) + 1
        return max(among, key=lambda part: self.parts[part][1] / total * turn - counts[part])

    def turn(self, position: int) -> tuple[int, int]:
        """Return the part, and the position in it, of a position of the mixture's endless stream.

        The parts take turns as evenly as their weights allow: next is the one that lags most behind its share.
        """
        while len(self.turns) <= position:
            part = self.next_part(self.counts, range(len(self.parts)))
            self.turns.append((part, self.counts[part]))
            self.counts[part] += 1
        return self.turns[position]


def first_prompts(prompts: list[dict], count: int) -> list[dict]:
    """Return the first `count` prompts, 0 for all; of a Mixture in turns as in training, but each prompt once."""
    count = min(count or len(prompts), len(prompts))
    if not isinstance(prompts, Mixture):
        return prompts[:count]
    taken, counts = [], [0] * len(prompts.parts)
    while len(taken) < count:
        left = [i for i, (rows, _) in enumerate(prompts.parts) if counts[i] < len(rows)]
        part = prompts.next_part(counts, left)
        taken.append(prompts.parts[part][0][counts[part]])
        counts[part] += 1
    return taken


def without(rows: list[dict], prompts: set[str]) -> list[dict]:
    """Return the rows whose prompt is not one of `prompts`; of a Mixture, one of the parts that are left."""
    if isinstance(rows, Mixture):
        parts = [(without(part, prompts), weight) for part, weight in rows.parts]
        return Mixture([(part, weight) for part, weight in parts if part])
    return [row for row in rows if row["prompt"] not in prompts]


def take_prompts(prompts: list[dict], position: int, count: int, seed) -> list[dict]:
    """Return the prompts `position ... position + count - 1` of an endless stream of passes, each shuffled anew.

    In a Mixture, each data set has passes of its own.
    """
    positions = range(position, position + count)
    if isinstance(prompts, Mixture):
        turns = map(prompts.turn, positions)
        return [take_prompts(prompts.parts[part][0], index, 1, (seed, part))[0] for part, index in turns]
    size = len(prompts)
    return [prompts[pass_order(seed, i // size, size)[i % size]] for i in positions]


@functools.lru_cache(maxsize=64)
def pass_order(seed, number: int, size: int) -> list[int]:
    """Return the order of the rows in a pass over `size` of them."""
    return generator("prompts", seed, number).permutation(size).tolist()
