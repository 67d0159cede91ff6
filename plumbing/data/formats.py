"""The forms in which rows come: in which columns prompt, answer and response are, and how each form is read."""

import ast
import contextlib
import json
import re
import warnings
from typing import Annotated, Any, Callable, Literal, NamedTuple, Sequence

from pydantic import Field, TypeAdapter

from plumbing.data.messages import is_turn_of_assistant, read_messages
from plumbing.data.rows import validate
from utils import UserError, as_user_error

# Of ShareGPT's turns.
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}
Learn = Literal["", "prompts", "turns", "conversations"]
"""What is learned of a row: nothing, as it is a prompt for the sources of --reward; nothing, but it
gives the prompt of each turn of the assistant; these turns, one in a row; all of them in one row, where
the chat template allows it."""
MEDIA = "image images video videos audio audios".split()  # columns of what is not text
TURNS = TypeAdapter(list[Annotated[str, Field(pattern=r"\S")]])
EXCHANGES = TypeAdapter(list[tuple[str, str]])  # of Alpaca's history


# ---- prompts: functions (place, row, the value of the column) -> text or messages ----------------


def as_messages(where: str, value: Any):
    """Return text or messages as they are; messages may be ShareGPT's turns, and their JSON or
    Python text.
    """
    if isinstance(value, str) and re.match(r"\s*\[\s*\{", value):
        turns = of_text(value)
        if all(isinstance(turn, dict) and {"role", "from"} & turn.keys() for turn in turns):
            value = turns
    if isinstance(value, list) and all(
        isinstance(x, dict) and {"from", "value"} <= x.keys() for x in value
    ):
        value = [read_sharegpt_turn(where, turn) for turn in value]
    return value


def of_text(value: Any):
    """Return what a text holds as JSON, or as Python, which pandas writes into a .csv file; the text
    itself if it holds none, and any other value.
    """
    for read in (json.loads, ast.literal_eval):
        with (
            contextlib.suppress(TypeError, ValueError, SyntaxError, RecursionError, MemoryError),
            warnings.catch_warnings(action="ignore"),  # of a \d in Python
        ):
            return read(value)
    return value


def read_sharegpt_turn(where: str, turn: dict) -> dict:
    """Return a turn of ShareGPT, {"from", "value"}, as a message."""
    others = {name: value for name, value in turn.items() if name not in ("from", "value")}
    kind = turn["from"]
    value: Any = turn.get("value")
    message = {"role": ROLES.get(str(kind), kind), **others}
    if kind != "function_call":
        return {**message, "content": value}
    with as_user_error(f"{where}: function_call"):
        calls = json.loads(value)
    return {**message, "tool_calls": calls if isinstance(calls, list) else [calls]}


def read_alpaca(where: str, row: dict, prompt: Any):
    """Return Alpaca's instruction and `input`, behind its `history`."""
    if is_filled(row.get("input")):
        texts = [prompt, row["input"]]
        prompt = "\n\n".join(validate(f"{where}: instruction, input", texts, TURNS, "text"))
    history = validate(f"{where}: history", row.get("history") or [], EXCHANGES, "turn")
    return behind(as_turns(history), prompt)


def as_turns(exchanges: Sequence[Sequence[str]]) -> list[dict]:
    """Return exchanges, texts of the user and the assistant, as messages."""
    roles = ("user", "assistant")
    return [{"role": role, "content": x} for texts in exchanges for role, x in zip(roles, texts)]


def behind(turns: list[dict], prompt: Any):
    """Return a prompt behind other turns."""
    if turns and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    return turns + prompt if isinstance(prompt, list) else prompt


def with_system(row: dict, prompt: Any):
    """Return a prompt behind the text in the row's column of the system turn, unless it is messages
    that have such a turn.
    """
    turns = [
        {"role": "system", "content": row[name]}
        for name in SYSTEM
        if isinstance(row.get(name), str) and row[name].strip()
    ]
    has_turn = isinstance(prompt, list) and any(turn.get("role") == "system" for turn in prompt)
    return prompt if has_turn else behind(turns[:1], prompt)


def read_src_and_tgt(where: str, row: dict, src: Any) -> list[dict]:
    """Return the turns of PaddleNLP's rows as messages: `src` are the user's and `tgt` the
    assistant's, lists or texts.

    With one `tgt` less than `src`, the last `src` is the turn to answer; with as many, the last
    `tgt` is its reference answer.
    """
    tgt = [] if row.get("tgt") is None else row["tgt"]
    src, tgt = ([turns] if isinstance(turns, str) else turns for turns in (src, tgt))
    validate(f"{where}: src", src, TURNS, "turn")
    validate(f"{where}: tgt", tgt, TURNS, "turn")
    if not src or not len(src) - 1 <= len(tgt) <= len(src):
        raise UserError(
            f"{where}: has {len(src)} turns in src and {len(tgt)} in tgt, which requires as many or one less"
        )
    return as_turns([*zip(src, tgt), src[len(tgt) :]])


# The columns of prompts, in the order in which they are looked for: of TRL and verl, GSM8K,
# open-instruct, MATH, Knights and Knaves, PaddleNLP, Alpaca and ShareGPT. --prompt_column may name
# any other one.
PROMPTS = "prompt question messages problem quiz src instruction conversations".split()
FORMS: dict[str, Callable] = {"src": read_src_and_tgt, "instruction": read_alpaca}
SYSTEM = ("system", "system_prompt")  # columns of a turn before the prompt
# The columns that are looked for, in this order; a dot goes into an object.
COLUMNS = {
    "prompt": PROMPTS,
    # Of rows to learn from that have no response: ultrachat_200k has the first turn as prompt, too.
    "conversation": ["messages", "conversations", *PROMPTS],
    # Knights and Knaves' solution as text stands before the one as a list.
    "answer": (
        "answer ground_truth reward_model.ground_truth verification_info.ground_truth expected_answer "
        "solution_text solution tgt completion output"
    ).split(),
    # The solution rather than its result.
    "response": "response completion solution tgt answer output".split(),
}


# ---- columns -------------------------------------------------------------------------------------


class Columns(NamedTuple):
    """The columns of a data set; None for none."""

    prompt: str
    answer: str | None
    response: str | None = None
    """Of what is to be learned behind the prompt."""
    is_named: bool = False
    """Whether --response_column names it. If not, a last turn of the assistant goes before it."""


def value_at(row: dict, column: str | None):
    """Return what a row has in a column, where "a.b" is b in the object a, or in its text; None
    if it has no such column.
    """
    if column is None or column in row:
        return row.get(column)
    value: Any = row
    for part in column.split("."):
        value = of_text(value)
        value = value.get(part) if isinstance(value, dict) else None
    return value


def is_filled(value: Any) -> bool:
    """Return whether a row has anything in a column: neither null or NaN (pandas' null), nor empty
    or blank.
    """
    if value is None or value != value or value in ([], {}):
        return False
    return not isinstance(value, str) or bool(value.strip())


def find_column(where: str, kind: str, named: str, rows: list[dict]) -> str | None:
    """Return the column that a flag names, or else the first known one in which any row has
    something, None for none.

    Raise a UserError if no row has anything in a named column, or in any known one of a prompt.

    Args:
        kind: of COLUMNS. named: by --prompt_column and so on; "" for none.
    """
    for column in [named] if named else COLUMNS[kind]:
        if any(is_filled(value_at(row, column)) for row in rows):
            return column
    flag = kind.replace("conversation", "prompt")
    if named or flag == "prompt":
        empty = f"column {named!r}" if named else " or ".join(COLUMNS[kind])
        raise UserError(
            f"{where}: has nothing in {empty}; name a column with --{flag}_column, row 1 has {', '.join(rows[0])}"
        )
    return None


# ---- what a row has ------------------------------------------------------------------------------


def check_is_text(where: str, row: dict) -> None:
    """Raise a UserError if a row has more than text."""
    for name, value in row.items():
        # As `datasets` stores a file.
        is_file = isinstance(value, dict) and isinstance(value.get("bytes"), str | bytes)
        if is_file or (name in MEDIA and is_filled(value)):
            raise UserError(
                f"{where}: has {name}, and only text is read; without it, remove the column"
            )


def read_prompt(where: str, row: dict, column: str):
    """Return the prompt of a row, text or messages that are not yet checked; raise a UserError if it
    has none.

    Messages end with the assistant's turn if the row has it there.
    """
    prompt = value_at(row, column)
    if not is_filled(prompt):
        raise UserError(f"{where}: has nothing in column {column!r}")
    prompt = as_messages(where, prompt)
    if column in FORMS:
        prompt = FORMS[column](where, row, prompt)
    return with_system(row, prompt)


def read_answer(where: str, row: dict, column: str | None, last_turn: str | None):
    """Return the reference answer of a row, anything or None.

    Args:
        last_turn: the text of a turn of the assistant behind the prompt, which is the reference if
            the row has no other one.
    """
    answer = value_at(row, column)
    if last_turn is not None and not is_filled(answer):
        answer = last_turn
    # IFEval's rows, for the reward ifeval
    if answer is None and is_filled(row.get("instruction_id_list")):
        answer = {"instruction_id": row["instruction_id_list"], "kwargs": row.get("kwargs")}
    turns = as_messages(where, answer)
    if is_turn_of_assistant(turns):  # TRL's completions are messages, too
        answer = read_messages(where, turns)[-1].content
    return answer


def named_sources(where: str, row: dict, reward: Sequence[str]) -> list[str] | None:
    """Return the sources of --reward that a row of a data set names; None if all of them score it.

    A row names them in its column `verifier` or, as in open-instruct's data sets, in `dataset`, if
    it has a `ground_truth` and there is a choice. Names are compared without case: open-instruct
    writes MATH. Its gsm8k, the last number of a response, is `math` where --reward has no gsm8k.
    """
    is_choice = "ground_truth" in row and len(reward) > 1
    column = "verifier" if "verifier" in row or not is_choice else "dataset"
    value = row.get(column)
    if not is_filled(value):
        return None
    known = {name.lower(): name for name in reward}
    if "math" in known:
        known.setdefault("gsm8k", "math")
    names = [str(name).lower() for name in (value if isinstance(value, list) else [value])]
    for name in names:
        if name not in known:
            raise UserError(
                f"{where}: {column} is {value!r}, which is not in --reward {' '.join(reward)}; if it "
                "names no source, rename the column"
            )
    return [known[name] for name in names]
