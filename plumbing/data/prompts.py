"""A row turned into what a run needs: the prompt as the token ids that the model sees, and the
reference answer.
"""

import functools
import re
from itertools import chain
from typing import Annotated, Literal, NamedTuple, Sequence

from pydantic import BaseModel, Field, TypeAdapter

from plumbing.data.rows import validate
from utils import exit_on_error, fail, first_line

# The columns that are looked for, in this order; a dot goes into an object. They are those of
# GSM8K, MATH, open-instruct (messages, ground_truth), verl (reward_model.ground_truth), TRL
# (prompt, solution, completion), PaddleNLP (src, tgt), Alpaca (instruction, input, output),
# ShareGPT (conversations), and Knights-and-Knaves, whose solution as text stands before the one as
# a list.
COLUMNS = {
    "prompt": "prompt question messages problem quiz src instruction conversations".split(),
    "answer": "answer ground_truth reward_model.ground_truth solution_text solution tgt completion output".split(),
    # The solution rather than its result.
    "response": "response completion solution tgt answer output".split(),
}
ROLES = {"human": "user", "gpt": "assistant"}  # of ShareGPT's turns


class TextPart(BaseModel):
    """A part of a message's content; images and the like are refused."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A turn of a conversation."""

    role: str
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        """The content, its parts joined."""
        return (
            self.content
            if isinstance(self.content, str)
            else "".join(part.text for part in self.content)
        )


MESSAGES = TypeAdapter(Annotated[list[Message], Field(min_length=1)])
TURNS = TypeAdapter(list[Annotated[str, Field(pattern=r"\S")]])


# ---- columns -------------------------------------------------------------------------------------


def value_at(row: dict, column: str | None):
    """Return what a row has in a column, where "a.b" is b in the object a; None if it has no such
    column.
    """
    if column is None or column in row:
        return row.get(column)
    value = row
    for part in column.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def is_filled(value) -> bool:
    """Return whether a row has anything in a column: neither null or NaN (pandas' null), nor empty
    or blank.
    """
    if value is None or value != value or value in ([], {}):
        return False
    return not isinstance(value, str) or bool(value.strip())


def find_column(where: str, kind: str, named: str, rows: list[dict]) -> str | None:
    """Return the column that a flag names, or else the first known one in which any row has
    something, None for none.

    Exit with code 2 if no row has anything in a named column, or in any known one of a prompt.

    Args:
        kind: "prompt", "answer" or "response". named: by --prompt_column and so on; "" for none.
    """
    for column in [named] if named else COLUMNS[kind]:
        if any(is_filled(value_at(row, column)) for row in rows):
            return column
    if named or kind == "prompt":
        empty = f"column {named!r}" if named else " or ".join(COLUMNS[kind])
        fail(
            f"{where}: has nothing in {empty}; name a column with --{kind}_column, row 1 has {', '.join(rows[0])}"
        )
    return None


# ---- the prompt and the answer of a row ----------------------------------------------------------


def with_messages(where: str, row: dict, prompt_column: str) -> dict:
    """Return a row whose prompt is text, or messages that end with the assistant's turn if the row
    has it there.

    PaddleNLP's src and tgt, Alpaca's instruction and input, and ShareGPT's turns are turned into
    these forms.
    """
    prompt = value_at(row, prompt_column)
    if not is_filled(prompt):
        fail(f"{where}: has nothing in column {prompt_column!r}")
    if prompt_column == "src":
        return {**row, "src": interleave(where, prompt, row.get("tgt")), "tgt": None}
    if prompt_column == "instruction" and is_filled(row.get("input")):
        prompt = f"{prompt}\n\n{row['input']}"
    elif isinstance(prompt, list) and all(
        isinstance(turn, dict) and "from" in turn for turn in prompt
    ):
        prompt = [
            {"role": ROLES.get(str(turn["from"]), turn["from"]), "content": turn.get("value")}
            for turn in prompt
        ]
    return {**row, prompt_column: prompt}


def prompt_and_answer(
    where: str, row: dict, prompt_column: str, answer_column: str | None
) -> tuple:
    """Return the prompt of a row (text or messages, not yet checked) and its reference answer
    (anything, or None).

    Messages that end with a turn of the assistant lose it: it is the reference, unless the row has
    another one.

    Args:
        row: as `with_messages` gives it.
    """
    prompt = row[prompt_column]
    answer = value_at(row, answer_column)
    if is_turn_of_assistant(prompt):
        last_turn = validate(where, prompt, MESSAGES, "turn")[-1].text
        prompt = prompt[:-1]
        answer = answer if is_filled(answer) else last_turn
    # IFEval's rows, for the reward ifeval
    if answer is None and is_filled(row.get("instruction_id_list")):
        answer = {"instruction_id": row["instruction_id_list"], "kwargs": row.get("kwargs")}
    if is_turn_of_assistant(answer):  # TRL's completions are messages, too
        answer = validate(where, answer, MESSAGES, "turn")[-1].text
    return prompt, answer


def rows_of_turns(row: dict, prompt_column: str) -> list[dict]:
    """Return a row for each turn of the assistant, cut after it, if the messages of a row end with
    such a turn.

    A turn with nothing before it is left out, unless it is the only one.
    """
    turns = row[prompt_column]
    if not is_turn_of_assistant(turns):
        return [row]
    ends = [end for end, turn in enumerate(turns, 1) if end > 1 and is_turn_of_assistant([turn])]
    return [{**row, prompt_column: turns[:end]} for end in ends or [1]]


def named_sources(where: str, row: dict, args) -> list[str] | None:
    """Return the sources of --reward that a row of a data set names; None if all of them score it.

    A row names them in its column `verifier` or, as in open-instruct's data sets, in `dataset`, if
    it has a `ground_truth` and there is a choice. Names are compared without case: open-instruct
    writes MATH. Its gsm8k, the last number of a response, is `math` where --reward has no gsm8k.
    """
    is_choice = "ground_truth" in row and len(args.reward) > 1
    column = "verifier" if "verifier" in row or not is_choice else "dataset"
    value = row.get(column)
    if not is_filled(value):
        return None
    known = {name.lower(): name for name in args.reward}
    if "math" in known:
        known.setdefault("gsm8k", "math")
    names = [str(name).lower() for name in (value if isinstance(value, list) else [value])]
    for name in names:
        if name not in known:
            fail(
                f"{where}: {column} is {value!r}, which is not in --reward {' '.join(args.reward)}"
            )
    return [known[name] for name in names]


def is_turn_of_assistant(messages) -> bool:
    """Return whether a value is a list of messages of which the last one is the assistant's."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and last.get("role") == "assistant"


def holds_template(row: dict) -> bool:
    """Return whether the text of a prompt looks like the output of a chat template, or ends as one
    of plain text.
    """
    marks = r"<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|<\|user\|>|<｜User｜>|\[INST\]"
    plain = r"(?i:assistant|bot|### response):\s*(<think>)?\s*$"
    return re.search(f"{marks}|{plain}", row["messages"][-1]["content"]) is not None


def interleave(where: str, src, tgt) -> list[dict]:
    """Return the turns of PaddleNLP's rows as messages: `src` are the user's and `tgt` the
    assistant's, lists or texts.

    With one `tgt` less than `src`, the last `src` is the turn to answer; with as many, the last
    `tgt` is its reference answer.
    """
    src, tgt = (
        [turns] if isinstance(turns, str) else turns for turns in (src, [] if tgt is None else tgt)
    )
    validate(f"{where}: src", src, TURNS, "turn")
    validate(f"{where}: tgt", tgt, TURNS, "turn")
    if not src or not len(src) - 1 <= len(tgt) <= len(src):
        fail(
            f"{where}: has {len(src)} turns in src and {len(tgt)} in tgt, which requires as many or one less"
        )
    messages = [{"role": "user", "content": text} for text in src]
    for i, text in enumerate(tgt):
        messages.insert(2 * i + 1, {"role": "assistant", "content": text})
    return messages


# ---- token ids -----------------------------------------------------------------------------------


def as_messages(where: str, prompt, system_prompt: str) -> list[dict]:
    """Return a prompt, text or messages, as messages with texts, the system turn included."""
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    checked = validate(f"{where} prompt", turns, MESSAGES, "turn")
    messages = [{**turn, "content": message.text} for turn, message in zip(turns, checked)]
    if not messages[-1]["content"].strip():
        fail(f"{where}: the last turn of the prompt is empty")
    if system_prompt and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    return messages


class Text(NamedTuple):
    """A text to encode, with CUT where no token may span."""

    where: str
    """Its place, for messages."""
    text: str
    special: bool = False
    """Whether the tokenizer puts special tokens around it, as around what no template has written."""
    is_learned: bool = False
    """Whether it is a response, which ends by a stop token."""

    @property
    def shown(self) -> str:
        return self.text.replace(CUT, "")


def render_prompt(
    where: str,
    prompt,
    tokenizer,
    system_prompt: str,
    as_is: bool = False,
    tools: list[dict] | None = None,
) -> tuple[list[dict], Text]:
    """Return a prompt as messages and as the text that the model sees; exit with code 2 if it is not
    valid.

    Args:
        prompt: text, which is one user turn; or messages, a list of {"role", "content"}. A
            tokenizer without a chat template requires a single user turn.
        system_prompt: stands before a prompt that has no system turn; "" for none.
        as_is: leave a text without chat template and system prompt, for one that holds both
            already.
        tools: the schemas that the chat template shows to the model.
    """
    messages = as_messages(where, prompt, "" if as_is else system_prompt)
    if not as_is and tokenizer.chat_template is not None:
        with exit_on_error(f"{where}: the chat template of --model"):
            text = tokenizer.apply_chat_template(
                guarded(messages, tokenizer), tools, tokenize=False, add_generation_prompt=True
            )
        # The template has written the special tokens.
        return messages, Text(where, text)
    if not isinstance(prompt, str) and len(prompt) > 1:
        lacks = (
            "--chat_template is none" if as_is else "the tokenizer of --model has no chat template"
        )
        fail(f"{where}: has several turns, and {lacks}; name a file of one with --chat_template")
    return messages, Text(where, "\n".join(turn["content"] for turn in messages), special=True)


def render_response(
    where: str, text: str, tokenizer, stop_ids: list[int], special: bool = False
) -> Text:
    """Return a response as a text to learn; with `special`, one that holds a whole conversation."""
    if special:
        return Text(where, text, special, is_learned=True)
    ends = (end for end in map(tokenizer.decode, stop_ids) if end and text.endswith(end))
    end = next(ends, "")
    content = guarded(text.removesuffix(end), tokenizer, own=True)
    return Text(where, content + end, is_learned=True)


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
        before = query.text + response.text + stop
    return [rows[0] | {"response": texts[1:]}]


def encode_texts(texts: Sequence[Text], tokenizer, stop_ids: Sequence[int] = ()) -> list[list[int]]:
    """Return the token ids of texts; responses end by the first stop token, unless they have one
    there.

    The parts of a text between CUTs are encoded one by one, so that no token spans a cut. Exit with
    code 2, naming the first text that the tokenizer refuses or makes no tokens of.
    """
    parts = [text.text.split(CUT) for text in texts]
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    try:
        # A call of the tokenizer takes a fifth longer: it makes masks and offsets, too.
        encoded = iter(backend.encode_batch_fast(list(chain(*parts)), add_special_tokens=False))
    except Exception as error:  # tokenizers raise exceptions of any type
        if len(texts) == 1:
            fail(f"{texts[0].where}: {first_line(error)}")
        return [encode_texts([text], tokenizer, stop_ids)[0] for text in texts]
    lists = []
    for text, of_text in zip(texts, parts):
        first, *others = [next(encoded) for _ in of_text]
        if text.special:
            first = backend.post_process(first)
        ids = first.ids + list(chain.from_iterable(other.ids for other in others))
        if text.special and ids[:2] == [tokenizer.bos_token_id] * 2:
            ids = ids[1:]
        if text.is_learned and ids[-1:] not in ([stop] for stop in stop_ids):
            ids.append(stop_ids[0])
        if not ids and text.text.strip():
            fail(f"{text.where}: the tokenizer of --model makes no tokens of {text.text[:60]!r}")
        lists.append(ids)
    return lists


# ---- contents that spell tokens of the added vocabulary ------------------------------------------

CUT = "\ufdd0"  # not a character of any text: Unicode reserves it for marks within a program
OWN = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # what the model itself writes


@functools.cache
def added_texts(tokenizer, own: bool) -> re.Pattern:
    """Return a pattern of the first character of each text that is a token of the added
    vocabulary.
    """
    # Gemma's has blanks, too, which structure no conversation.
    texts = [
        text
        for text in tokenizer.get_added_vocab()
        if len(text.strip()) > 1 and not (own and text in OWN)
    ]
    patterns = [re.escape(text[0]) + f"(?={re.escape(text[1:])})" for text in texts]
    return re.compile("|".join(patterns) or "(?!)")


def guarded(value, tokenizer, own: bool = False):
    """Return a text with CUT within what spells a token of the added vocabulary; of lists and
    objects, all texts.

    Only a chat template writes such tokens: a content with "<|im_end|>" would otherwise forge the
    turns behind it. `encode_texts` drops the cuts. Without them the token ids are those of the whole
    text.

    Args:
        own: leave OWN, as in turns of the assistant and in the instructions of a system turn.
    """
    if isinstance(value, str):
        return added_texts(tokenizer, own).sub(lambda first: first[0] + CUT, value)
    if isinstance(value, list):
        return [guarded(item, tokenizer, own) for item in value]
    if isinstance(value, dict):
        own = own or value.get("role") in ("assistant", "system")
        return {
            guarded(key, tokenizer, own): guarded(item, tokenizer, own)
            for key, item in value.items()
        }
    return value
