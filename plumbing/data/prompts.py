"""The prompts of a run: rows of its data sets, turned into token ids, with what is learned of them."""

import functools
import os
import re
import reprlib
import zlib
from types import SimpleNamespace
from typing import Any, Callable, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from plumbing.data.cache import check_rows_fit, encode_rows, leave_out, numbers_of
from plumbing.data.encoding import Text
from plumbing.data.formats import (
    COLUMNS,
    Columns,
    Learn,
    as_messages,
    check_is_text,
    find_column,
    is_filled,
    named_sources,
    read_answer,
    read_prompt,
    value_at,
    with_system,
)
from plumbing.data.messages import Message, is_turn_of_assistant, read_messages
from plumbing.data.mixture import first_prompts, mix
from plumbing.data.rendering import Rendering
from plumbing.data.rows import first_rows, read_parts, split_of
from plumbing.models.config import positions_of
from utils import UserError, say, warn

SHORT = reprlib.Repr()  # one line of 150 characters, of both ends of a text
SHORT.maxstring = 150


def load_train_and_eval(
    args: Any,
    tokenizer: PreTrainedTokenizerBase,
    why_unscorable: Callable,
    conversations: Any = None,
    learn: Learn = "",
    stop_ids: Sequence[int] = (),
) -> tuple:
    """Return the prompts to train on, and those to evaluate on (none of them is trained on), as
    `load_prompts` gives them.

    Args:
        why_unscorable, conversations: see `load_prompts`. learn, stop_ids: see there, for the
            prompts to train on.
    """
    given = tokenizer, args, why_unscorable, conversations
    trained = (args.eval_share, 1)
    parts = load_prompts("--dataset", args.dataset, "train", *given, learn, stop_ids, trained)
    train = mix(parts, args.seed, args.shuffle)
    where = f"--dataset {args.dataset}"
    dataset, _ = split_of(args.dataset)
    parts = []
    if args.eval_share:
        flag = f"--eval_share {args.eval_share} of"
        parts = load_prompts(flag, args.dataset, "train", *given, span=(0, args.eval_share))
    elif args.eval_every and (args.eval_dataset or not os.path.isfile(dataset)):
        parts = load_prompts("--eval_dataset", args.eval_dataset or dataset, "test", *given)
    elif args.eval_every:
        message = f"{where}: a file has no test split, so nothing is evaluated; --eval_share 0.1 holds out a tenth"
        if args.keep_best:
            raise UserError(f"--keep_best {args.keep_best}: {message}")
        say(message)
    held_out = first_prompts(parts, args.eval_prompts) if parts else train.take(0)
    train = without(where, train, held_out)
    check_responses_fit(args, held_out)
    if learn != "conversations":  # there is something to sample
        check_responses_fit(args, train)
    return train, held_out


def without(where: str, train: Any, held_out: Any):
    """Return the rows to train on without those whose prompts are evaluated on, unless that leaves
    none.
    """
    kept = ~np.isin(numbers_of(train, "about"), numbers_of(held_out, "about"))
    if not kept.any():
        warn(
            f"{where}: every row is evaluated on, too, which shows how well the run fits them and nothing else"
        )
        return train
    return leave_out(where, train, kept, "whose prompts are evaluated on")


def check_responses_fit(args: Any, rows: Any) -> None:
    """Raise a UserError if the model cannot read all prompts, the longest with a response of
    --max_response_length.
    """
    room = args.max_response_length
    check_rows_fit(args.model, rows, ["query"], f"--max_response_length {room}", room)


def load_prompts(
    flag: str,
    name: str,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    args: Any,
    why_unscorable: Callable,
    conversations: Any = None,
    learn: Learn = "",
    stop_ids: Sequence[int] = (),
    span: tuple[float, float] = (0, 1),
) -> list[tuple]:
    """Read a data set, or a list of them, and turn each row into a prompt, once and for all, as
    token ids.

    Prints the first prompt of each data set, with its reference, and the columns that they are
    from.

    Args:
        flag, name, split: as in `plumbing.data.rows.read_parts`.
        args: --prompt_column, --answer_column, --max_prompt_length, --max_response_length and so on.
        why_unscorable: returns why nothing can score a row, see
            `plumbing.rewards.sources.why_unscorable`.
        conversations: extras.episodes.conversations.Conversations, with --tools or --environment.
        learn: see `Learn`. stop_ids: which end a turn that is learned.
        span: the rows whose prompts have a hash from 0 to 1 within it are read: below --eval_share
            they are held out.
    Returns:
        Of each data set its rows, see `make_prompts`, and its weight. If turns are learned, rows
        without one are left out.
    """
    parts = []
    learns_turns = learn in ("turns", "conversations")
    named = args.response_column if learn else ""
    make_rendering = functools.partial(
        Rendering,
        tokenizer,
        stop_ids,
        as_is=args.chat_template == "none",
        tools=conversations and conversations.schemas,
        converses=conversations is not None,
    )
    rendering = make_rendering(args.system_prompt)
    make_teacher_query = None
    own = getattr(args, "teacher_prompt", ""), getattr(args, "teacher_system_prompt", "")
    if learn and any(own):
        of_teacher = make_rendering(own[1] or args.system_prompt)
        make_teacher_query = functools.partial(teacher_query, of_teacher, *own)
    for part, raw, weight in read_parts(flag, name, split):
        where = f"{flag} {part}"
        find: Callable = functools.partial(find_column, where, rows=first_rows(where, raw))
        response = find("response", named) if learns_turns or named else None
        kind = "conversation" if learns_turns and not response else "prompt"
        columns = Columns(
            find(kind, args.prompt_column),
            find("answer", args.answer_column),
            response,
            bool(named),
        )
        make = functools.partial(
            make_prompts,
            columns=columns,
            rendering=rendering,
            learn=learn,
            span=span,
            sources=SimpleNamespace(
                reward=args.reward, reward_weights=getattr(args, "reward_weights", ())
            ),
            why_unscorable=why_unscorable,
            make_teacher_query=make_teacher_query,
        )
        rows = encode_rows(flag, part, raw, make, tokenizer, stop_ids)
        if not len(rows):
            verb = "--eval_share leaves" if span[0] else "holds out"
            raise UserError(f"{where}: {verb} none of {len(raw)} rows")
        report_first(where, rows[0], columns, rendering, learn)
        if learns_turns:
            why = f"which have no {', '.join(COLUMNS['response'])} or last turn of the assistant"
            rows = leave_out(where, rows, numbers_of(rows, "response") > 0, why)
            why = f"whose responses have more tokens than --max_response_length {args.max_response_length}"
            fits = numbers_of(rows, "response") <= args.max_response_length
            rows = leave_out(where, rows, fits, why)
            check_rows_fit(args.model, rows, ["query", "response"], where)
        why = f"which have more tokens than --max_prompt_length {args.max_prompt_length}"
        fits = numbers_of(rows, "query") <= args.max_prompt_length
        rows = leave_out(where, rows, fits, why)
        if make_teacher_query:
            first = tokenizer.decode(rows[0]["teacher_query"])
            say(f"{where}: prompt of the teacher: {SHORT.repr(first)}")
            room = positions_of(args.loaded_teacher or args.model) - args.max_response_length
            why = f"whose prompts of the teacher leave it no --max_response_length {args.max_response_length}"
            rows = leave_out(where, rows, numbers_of(rows, "teacher_query") <= room, why)
        parts.append((rows, weight))
    return parts


def report_first(
    where: str, row: dict, columns: Columns, rendering: Rendering, learn: Learn
) -> None:
    """Print the prompt and the answer of the first row, and what may be wrong with them."""
    say(f"{where}: prompt ({columns.prompt}): {SHORT.repr(row['prompt'])}")
    say(f"{where}: answer ({row['target_from']}): {SHORT.repr(row['target'])}")
    last_turn = is_turn_of_assistant(row["columns"].get(columns.prompt))
    if not learn and last_turn and row["target_from"] == columns.answer:
        say(f"{where}: the assistant's last turn is left out, as the answer is another one")
    if rendering.has_template and holds_template(row):
        warn(
            f"{where}: its prompts hold a chat template, and get another one; --chat_template none leaves them"
        )


def holds_template(row: dict) -> bool:
    """Return whether the text of a prompt looks like the output of a chat template, or ends as one
    of plain text.
    """
    marks = r"<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|<\|user\|>|<｜User｜>|\[INST\]"
    plain = r"(?i:assistant|bot|### response):\s*(<think>)?\s*$"
    return re.search(f"{marks}|{plain}", row["messages"][-1]["content"]) is not None


# ---- a row ---------------------------------------------------------------------------------------


def make_prompts(
    where: str,
    row: dict,
    columns: Columns,
    rendering: Rendering,
    learn: Learn,
    span: tuple[float, float],
    sources: Any,
    why_unscorable: Callable,
    make_teacher_query: Callable | None = None,
) -> list[dict]:
    """Return what a run needs of a row of a data set, for `encode_rows`.

    Args:
        where: the data set and the row. span: see `load_prompts`. sources: --reward and --reward_weights.
        make_teacher_query: see `teacher_query`; None where the teacher reads the same prompt.
    Returns:
        Rows {"prompt": the text that the model sees, "query": [the same to encode], "messages": the
        same as messages, None with --chat_template none, "answer": the reference or None, "target":
        it or the turn to learn, "target_from": its column, "sources": what `named_sources` gives,
        "columns": the row as it was read, "problem": what `why_unscorable` gives, "response": [the
        text to learn], if there is one, "teacher_query": [the teacher's prompt], if it is another}.
        One, or as `learn` says; none if the row is not read.
    """
    check_is_text(where, row)
    prompt = read_prompt(where, row, columns.prompt)
    if not span[0] <= zlib.crc32(repr(prompt).encode()) / 2**32 < span[1]:
        return []
    messages = turns = read_messages(where, prompt)
    has_turn = messages[-1].role == "assistant"
    others = row | {"tgt": None} if columns.prompt == "src" else row  # src has its turns
    text_column = None if has_turn and not columns.is_named else columns.response
    learned: list[int] = []
    if learn:
        turns, learned = turns_to_learn(where, messages, value_at(others, text_column))
    target_from = text_column if learn in ("turns", "conversations") else columns.answer
    rendering = rendering.of_row(where, row)
    stop = "".join(rendering.stops[:1])
    made = []
    for i in learned or [len(messages) - has_turn]:
        before = rendering.dialogue(turns[:i])
        query = rendering.prompt(where, before)
        last_turn = turns[i].content if i < len(turns) else None
        answer = read_answer(where, others, columns.answer, last_turn)
        encoded = {
            "prompt": query.shown,
            "query": [query],
            "messages": None if rendering.as_is else before,
            "answer": answer,
            "target": answer,
            "target_from": target_from or ("last turn" if has_turn else "no column"),
            "sources": [] if learn else named_sources(where, row, sources.reward),
            "columns": row,
        }
        encoded["problem"] = why_unscorable(where, encoded, sources)
        if make_teacher_query:
            text = make_teacher_query(where, row, turns[:i], alone=len(learned) < 2)
            encoded["teacher_query"] = [text]
        if learned and learn != "prompts":
            text = rendering.turn(where, before, query, turns[i].as_dict())
            encoded |= {"target": text.shown.removesuffix(stop), "response": [text]}
        made.append(encoded)
    return join_turns(made, stop) if learn == "conversations" else made


def teacher_query(
    rendering: Rendering,
    prompt: str,
    system_prompt: str,
    where: str,
    row: dict,
    turns: list[Message],
    alone: bool,
) -> Text:
    """Return the prompt that the teacher reads before a turn; raise a UserError if --teacher_prompt
    names what the row lacks, or if the row has several turns to learn, each with a prompt.

    Args:
        rendering: with the teacher's system prompt. prompt, system_prompt: --teacher_prompt and
            --teacher_system_prompt. turns: before the turn. alone: whether it is the only one.
    """

    def value(column: str) -> Any:
        found = value_at(row, column)
        if not is_filled(found):
            raise UserError(
                f"{where}: has nothing in column {column!r} of --teacher_prompt; it has {', '.join(row)}"
            )
        return found

    def text(field: re.Match) -> str:
        found = value(field[1])
        if isinstance(found, list | dict):
            raise UserError(f"{where}: --teacher_prompt has {field[0]}, and the column is not text")
        return str(found)

    if prompt:
        if not alone:
            raise UserError(
                f"{where}: has several turns to learn, and --teacher_prompt is one prompt"
            )
        filled, fields = re.subn(r"\{(\w[\w.]*)\}", text, prompt)
        given = as_messages(where, filled if fields else value(prompt))
        turns = read_messages(where, with_system(row, given))
    if system_prompt:
        turns = [turn for turn in turns if turn.role != "system"]
    return rendering.of_row(where, row).prompt(where, rendering.dialogue(turns))


def turns_to_learn(
    where: str, messages: list[Message], response: Any
) -> tuple[list[Message], list[int]]:
    """Return the conversation of a row, and the places of the turns of the assistant that are to be
    learned: of the response, if it is text or messages, else of the prompt.

    A turn with nothing before it is left out, unless it is the only one; so is one of weight 0.

    Args:
        messages: the prompt.
    """
    turns = messages
    response = as_messages(where, response)
    if is_filled(response) and isinstance(response, str | list):
        before = messages[:-1] if messages[-1].role == "assistant" else messages
        turns = [turn.model_copy(update={"weight": 0}) for turn in before]
        turns += read_messages(f"{where} response", response, "assistant")
    learned = [i for i, turn in enumerate(turns) if turn.is_learned and (i or len(turns) == 1)]
    if learned and turns[-1].role == "assistant":
        return turns, learned
    return messages, []


def join_turns(rows: list[dict], stop: str) -> list[dict]:
    """Return the rows of the assistant's turns in a conversation as one, which learns all of them.

    They stay apart if the template writes earlier turns in another way once messages follow, or does
    not end them by the stop token.

    Args:
        rows: {"query": [Text], "response": [Text], ...} of each turn, the ones before it in its
            query.
    """
    before = ""
    texts = []
    for row in rows:
        (query,) = row["query"]
        if not query.text.startswith(before) or "response" not in row:
            return rows
        (response,) = row["response"]
        texts += [query._replace(text=query.text.removeprefix(before)), response]
        before = query.text + response.text.removesuffix(stop) + stop
    return [rows[0] | {"response": texts[1:]}]
