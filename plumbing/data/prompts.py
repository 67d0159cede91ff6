"""A row turned into what a run needs: the prompt as the token ids that the model sees, and the
reference answer.

What a message of a row says reaches the model as the chat template writes it, or the run ends.
"""

import functools
import json
import re
from itertools import chain
from typing import Annotated, Any, Literal, NamedTuple, Sequence

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    Json,
    TypeAdapter,
    ValidationInfo,
    field_validator,
    model_validator,
)

from plumbing.data.rows import validate
from utils import UserError, as_user_error, first_line

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
# Of rows to learn from that have no such response: ultrachat_200k has the first turn as prompt, too.
COLUMNS["conversation"] = ["messages", "conversations", *COLUMNS["prompt"]]
# Of ShareGPT's turns.
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}
MEDIA = "image images video videos audio audios".split()  # columns of what is not text
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # a message's keys; templates read one


class Strict(BaseModel):
    """A part of a row in which a key that nothing reads is an error."""

    model_config = ConfigDict(extra="forbid")


class TextPart(Strict):
    """A part of a message's content; images and the like are refused."""

    type: Literal["text"]
    text: str


class Function(Strict):
    """What a turn calls, and with which arguments, an object or its text."""

    name: str
    arguments: dict[str, Any] | Json[dict[str, Any]] = {}


class ToolCall(Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    function: Function

    @model_validator(mode="before")
    @classmethod
    def nested(cls, value):
        """Read {"name", "arguments"}, too."""
        is_flat = isinstance(value, dict) and "name" in value
        return {"function": value} if is_flat else value


class Message(Strict):
    """A turn of a conversation."""

    role: str
    content: str | list[TextPart]
    tool_calls: list[ToolCall] = Field(default_factory=list)  # [] would be copied each time
    thought: str = Field("", validation_alias=AliasChoices(*THOUGHTS))
    name: str | None = None
    tool_call_id: str | None = None
    # 0 for a turn of the assistant that is not learned; other turns never are
    weight: Literal[0, 1, False, True] = Field(1, validation_alias=AliasChoices("weight", "train"))

    @model_validator(mode="before")
    @classmethod
    def with_content(cls, value):
        """Give a turn of calls or of a thought alone a content."""
        alone = isinstance(value, dict) and {"tool_calls", *THOUGHTS} & value.keys()
        return {"content": "", **value} if alone else value

    @field_validator("weight")
    @classmethod
    def is_read(cls, weight: int, info: ValidationInfo) -> int:
        if weight and info.data.get("role") != "assistant":
            raise ValueError("only turns of the assistant are learned")
        return weight

    @property
    def says(self) -> bool:
        return bool(self.text.strip() or self.tool_calls or self.thought)

    @property
    def text(self) -> str:
        """The content, its parts joined."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


MESSAGES = TypeAdapter(Annotated[list[Message], Field(min_length=1)])
TURNS = TypeAdapter(list[Annotated[str, Field(pattern=r"\S")]])
EXCHANGES = TypeAdapter(list[tuple[str, str]])  # of Alpaca's history
SCHEMAS = TypeAdapter(list[dict[str, Any]] | Json[list[dict[str, Any]]])


def without_nulls(value):
    """Return a value without the keys of objects that are null."""
    if isinstance(value, dict):
        return {name: without_nulls(x) for name, x in value.items() if x is not None}
    return [without_nulls(x) for x in value] if isinstance(value, list) else value


def read_messages(where: str, turns: list) -> list[Message]:
    """Return messages as they are checked; raise a UserError, and the turn and key, if they are none.

    A key that is null counts as none.
    """
    return validate(where, without_nulls(turns), MESSAGES, "turn")


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


# ---- the prompt and the answer of a row ----------------------------------------------------------


def with_messages(where: str, row: dict, prompt_column: str) -> dict:
    """Return a row whose prompt is text, or messages that end with the assistant's turn if the row
    has it there.

    PaddleNLP's src and tgt, Alpaca's instruction, input, system and history, ShareGPT's turns and
    system, and messages as JSON text are turned into these forms.
    """
    for name in MEDIA:
        if is_filled(row.get(name)):
            raise UserError(
                f"{where}: has {name}, and only text is read; without it, remove the column"
            )
    prompt = value_at(row, prompt_column)
    if not is_filled(prompt):
        raise UserError(f"{where}: has nothing in column {prompt_column!r}")
    if prompt_column == "src":
        return {**row, "src": interleave(where, prompt, row.get("tgt")), "tgt": None}
    if isinstance(prompt, str) and re.match(r"\s*\[\s*\{", prompt):
        prompt = messages_of_text(prompt)
    before = []
    if prompt_column in ("instruction", "conversations") and is_filled(row.get("system")):
        before = [{"role": "system", "content": row["system"]}]
    if prompt_column == "instruction":
        if is_filled(row.get("input")):
            prompt = f"{prompt}\n\n{row['input']}"
        for texts in validate(f"{where}: history", row.get("history") or [], EXCHANGES, "turn"):
            before += [{"role": r, "content": x} for r, x in zip(("user", "assistant"), texts)]
    elif isinstance(prompt, list) and all(isinstance(x, dict) and "from" in x for x in prompt):
        prompt = [from_sharegpt(where, turn) for turn in prompt]
    return {**row, prompt_column: before + as_turns(prompt) if before else prompt}


def messages_of_text(text: str):
    """Return the messages that a text holds as JSON, or the text itself if it holds none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    is_message = [isinstance(turn, dict) and {"role", "from"} & turn.keys() for turn in value]
    return value if all(is_message) else text


def from_sharegpt(where: str, turn: dict) -> dict:
    """Return a turn of ShareGPT, {"from", "value"}, as a message."""
    others = {name: value for name, value in turn.items() if name not in ("from", "value")}
    message = {"role": ROLES.get(str(turn["from"]), turn["from"]), **others}
    if turn["from"] != "function_call":
        return {**message, "content": turn.get("value")}
    with as_user_error(f"{where}: function_call"):
        calls = json.loads(turn["value"])
    return {**message, "tool_calls": calls if isinstance(calls, list) else [calls]}


def as_turns(prompt) -> list[dict]:
    """Return a prompt, text or messages, as messages."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def tools_of(where: str, row: dict) -> list[dict] | None:
    """Return the schemas of a row's column `tools`, a list or its JSON text, as chat templates read
    them; None if it has none.
    """
    if not is_filled(row.get("tools")):
        return None
    schemas = without_nulls(validate(f"{where}: tools", row["tools"], SCHEMAS, "tool"))
    return [x if "function" in x else {"type": "function", "function": x} for x in schemas]


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
        last_turn = read_messages(where, prompt)[-1].text
        prompt = prompt[:-1]
        answer = answer if is_filled(answer) else last_turn
    # IFEval's rows, for the reward ifeval
    if answer is None and is_filled(row.get("instruction_id_list")):
        answer = {"instruction_id": row["instruction_id_list"], "kwargs": row.get("kwargs")}
    if is_turn_of_assistant(answer):  # TRL's completions are messages, too
        answer = read_messages(where, answer)[-1].text
    return prompt, answer


def rows_of_turns(where: str, row: dict, prompt_column: str, response_column) -> list[tuple]:
    """Return (the row, cut after it, the turn) for each turn of the assistant that is to be learned;
    (the row, None) if there is none.

    A turn with nothing before it is left out, unless it is the only one; so is one of weight 0.

    Args:
        response_column: of a text or messages that follow the prompt; then its turns alone are
            learned. None: the turns of the prompt are.
    """
    turns = row[prompt_column]
    response = value_at(row, response_column)
    if is_filled(response) and isinstance(response, str | list):
        before = turns[:-1] if is_turn_of_assistant(turns) else turns
        if isinstance(response, str):
            response = [{"role": "assistant", "content": response}]
        turns = [{**turn, "weight": 0} for turn in as_turns(before)] + response
    if not is_turn_of_assistant(turns):
        return [(row, None)]
    checked = read_messages(where, turns)
    learned = [
        ({**row, prompt_column: turns[: i + 1]}, turns[i])
        for i, turn in enumerate(checked)
        if turn.role == "assistant" and turn.weight and turn.says and (i or len(turns) == 1)
    ]
    return learned or [(row, None)]


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
            raise UserError(
                f"{where}: {column} is {value!r}, which is not in --reward {' '.join(args.reward)}"
            )
    return [known[name] for name in names]


def is_turn_of_assistant(messages) -> bool:
    """Return whether a value is a list of messages of which the last one is the assistant's."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and last.get("role") == "assistant"


def says_something(where: str, turn: dict) -> bool:
    """Return whether a message has a text, a call or a thought; raise a UserError if it is not one."""
    return read_messages(where, [turn])[0].says


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
        raise UserError(
            f"{where}: has {len(src)} turns in src and {len(tgt)} in tgt, which requires as many or one less"
        )
    messages = [{"role": "user", "content": text} for text in src]
    for i, text in enumerate(tgt):
        messages.insert(2 * i + 1, {"role": "assistant", "content": text})
    return messages


# ---- token ids -----------------------------------------------------------------------------------


def as_messages(where: str, prompt, system_prompt: str) -> list[dict]:
    """Return a prompt, text or messages, as messages with texts, the system turn included."""
    checked = read_messages(f"{where} prompt", as_turns(prompt))
    messages = [as_message(message) for message in checked]
    if not messages[-1]["content"].strip() and len(messages[-1]) == 2:
        raise UserError(f"{where}: the last turn of the prompt is empty")
    if system_prompt and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    return messages


def as_message(message: Message) -> dict:
    """Return a message with what it says: its content as text, and its other keys but the weight."""
    given = message.model_dump(include={"role", "name", "tool_call_id"}, exclude_none=True)
    if message.tool_calls:
        given["tool_calls"] = [call.model_dump(exclude_none=True) for call in message.tool_calls]
    if message.thought:
        given[THOUGHTS[0]] = message.thought
    return {**given, "content": message.text}


class Text(NamedTuple):
    """A text to encode, with CUT where no token may span."""

    where: str
    """Its place, for messages."""
    text: str
    special: bool = False
    """Whether the tokenizer puts special tokens around it, as around what no template has written."""
    is_learned: bool = False
    """Whether it is a response, which ends by a stop token."""
    before: str = ""
    """What stands before it."""

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
    """Return a prompt as messages and as the text that the model sees; raise a UserError if it is not
    valid, or if the chat template leaves a part of it out.

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
        # The template has written the special tokens.
        text = apply_template(where, messages, tokenizer, tools, prompt=True)
        if part := hidden(messages, text, tools):
            raise UserError(f"{where}: the chat template of --model does not show {part}")
        return messages, Text(where, text)
    several = "several turns" if not isinstance(prompt, str) and len(prompt) > 1 else ""
    if several or tools:
        lacks = (
            "--chat_template is none" if as_is else "the tokenizer of --model has no chat template"
        )
        raise UserError(
            f"{where}: has {several or 'tools'}, and {lacks}; name a file of one with --chat_template"
        )
    return messages, Text(where, "\n".join(turn["content"] for turn in messages), special=True)


def render_turn(
    where: str,
    messages: list[dict],
    query: Text,
    turn: dict,
    stop_ids: list[int],
    tokenizer,
    as_is: bool = False,
    tools: list[dict] | None = None,
) -> Text:
    """Return a turn of the assistant as a text to learn: what the chat template writes for it behind
    the prompt, up to the stop token.

    A turn that is only text is learned as it stands where the template begins one in another way, or
    does not show all of it, such as a thought. Raise a UserError if such a turn is more than text.

    Args:
        messages, query: of `render_prompt`. turn: a message. as_is, tools: see there.
    """
    (message,) = as_messages(where, [turn], "")
    others = message.keys() - {"role", "content"}
    if not as_is and tokenizer.chat_template is not None:
        whole = apply_template(where, [*messages, message], tokenizer, tools)
        text = whole.removeprefix(query.text)
        stops = [stop for stop in map(tokenizer.decode, stop_ids) if stop and stop in text]
        end = min((text.index(stop) + len(stop) for stop in stops), default=len(text.rstrip()))
        response = Text(where, text[:end], is_learned=True, before=query.text)
        parts = said(message, thoughts=True)
        if text != whole and all(occurs(part, response.shown) for part in parts):
            return response
    if others:
        raise UserError(
            f"{where}: the chat template of --model does not write {', '.join(sorted(others))}"
        )
    content = message["content"]
    if query.text.rstrip().endswith("<think>"):
        content = content.lstrip().removeprefix("<think>").lstrip("\n")
        if "</think>" not in content:
            raise UserError(
                f"{where}: the chat template of --model opens a thought, and the response closes none; "
                "name another template with --chat_template"
            )
    return render_response(where, content, tokenizer, stop_ids, before=query.text)


def render_response(
    where: str,
    text: str,
    tokenizer,
    stop_ids: list[int],
    special: bool = False,
    before: str = "",
) -> Text:
    """Return a response as a text to learn; with `special`, one that holds a whole conversation."""
    if special:
        return Text(where, text, special, is_learned=True)
    ends = (end for end in map(tokenizer.decode, stop_ids) if end and text.endswith(end))
    end = next(ends, "")
    content = guarded(text.removesuffix(end), tokenizer, own=True)
    return Text(where, content + end, is_learned=True, before=before)


def apply_template(
    where: str, messages: list[dict], tokenizer, tools: list[dict] | None, prompt: bool = False
) -> str:
    """Return messages as the chat template writes them, with CUTs; with the start of the assistant's
    turn for a prompt.
    """
    messages = guarded(for_template(messages, tokenizer), tokenizer)
    with as_user_error(f"{where}: the chat template of --model"):
        return tokenizer.apply_chat_template(
            messages, tools, tokenize=False, add_generation_prompt=prompt
        )


def for_template(messages: list[dict], tokenizer) -> list[dict]:
    """Return messages, as `as_messages` gives them, in the form that the chat template reads, see
    `form_of_template`.
    """
    thought, as_text, as_parts = form_of_template(tokenizer, str(tokenizer.chat_template))
    made = []
    for message in messages:
        message = {thought if name == THOUGHTS[0] else name: x for name, x in message.items()}
        if as_parts:
            message["content"] = [{"type": "text", "text": message["content"]}]
        if as_text and "tool_calls" in message:
            functions = [call["function"] for call in message["tool_calls"]]
            texts = [json.dumps(x["arguments"], ensure_ascii=False) for x in functions]
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": text}}
                for call, text in zip(message["tool_calls"], texts)
            ]
        made.append(message)
    return made


@functools.cache
def form_of_template(tokenizer, template: str) -> tuple[str, bool, bool]:
    """Return which of THOUGHTS a chat template reads, whether it wants arguments of calls as text,
    and whether it wants contents as lists of parts, as those of models that read images do.
    """

    def render(*messages: dict) -> str:
        try:
            return tokenizer.apply_chat_template(list(messages), tokenize=False)
        except Exception:  # templates raise exceptions of any type, such as at text + object
            return ""

    thoughts = (name for name in THOUGHTS if re.search(rf"""[.'"]{name}\b""", template))
    call = {"id": "call00000", "type": "function"}  # Mistral's template wants 9 characters
    answers = []
    for arguments in ({"x": "A-VALUE"}, '{"x": "A-VALUE"}'):
        calls = [{**call, "function": {"name": "f", "arguments": arguments}}]
        turn = {"role": "assistant", "content": "", "tool_calls": calls}
        answers.append(render(*as_turns("x"), turn))
    as_object, as_text = answers
    wants_text = "A-VALUE" in as_text and (not as_object or "{'x'" in as_object)
    parts = [{"type": "text", "text": "A-TEXT"}]
    shows_text, shows_parts = (
        "A-TEXT" in render({"role": "user", "content": content}) for content in ("A-TEXT", parts)
    )
    wants_parts = shows_parts and not shows_text
    return next(thoughts, THOUGHTS[0]), wants_text, wants_parts


def hidden(messages: list[dict], text: str, tools: list[dict] | None = None) -> str:
    """Return what of messages, earlier thoughts excepted, and of the names of tools a text does not
    show; "" if it shows all.
    """
    text = text.replace(CUT, "")
    for number, message in enumerate(messages, 1):
        if not all(occurs(part, text) for part in said(message)):
            return f"turn {number}, of {message['role']}"
    shown = all(occurs(tool["function"]["name"], text) for tool in tools or ())
    return "" if shown else "tools"


def said(message: dict, thoughts: bool = False) -> list[str]:
    """Return the texts that a rendering of a message has to show, with or without its thoughts."""
    parts = re.split("</?think>", message["content"])
    if not thoughts and message["role"] == "assistant":
        parts = parts[-1:]
    calls = message.get("tool_calls", ())
    thought = message.get(THOUGHTS[0], "") if thoughts else ""
    return [*parts, thought, *(call["function"]["name"] for call in calls)]


def occurs(part: str, text: str) -> bool:
    """Return whether a text has a part, as it is or as JSON, without the space around it."""
    part = part.strip()
    return part in text or any(json.dumps(part, ensure_ascii=x)[1:-1] in text for x in (0, 1))


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
    encode = functools.partial(backend.encode_batch_fast, add_special_tokens=False)
    contexts = [
        context_of(tokenizer, before)
        for text, of_text in zip(texts, parts)
        for before in (text.before, *of_text[:-1])
    ]
    try:
        # A call of the tokenizer takes a fifth longer: it makes masks and offsets, too.
        encoded = iter(encode([a + b for a, b in zip(contexts, chain(*parts))]))
    except Exception as error:  # tokenizers raise exceptions of any type
        if len(texts) == 1:
            raise UserError(f"{texts[0].where}: {first_line(error)}") from error
        return [encode_texts([text], tokenizer, stop_ids)[0] for text in texts]
    drop = iter([len(x.ids) for x in encode(contexts)] if any(contexts) else [0] * len(contexts))
    lists = []
    for text, of_text in zip(texts, parts):
        first, *others = [(next(encoded), next(drop)) for _ in of_text]
        if text.special:
            first = backend.post_process(first[0]), 0
        ids = list(chain.from_iterable(part.ids[start:] for part, start in (first, *others)))
        if text.special and ids[:2] == [tokenizer.bos_token_id] * 2:
            ids = ids[1:]
        if text.is_learned and ids[-1:] not in ([stop] for stop in stop_ids):
            ids.append(stop_ids[0])
        if not ids and text.text.strip():
            raise UserError(
                f"{text.where}: the tokenizer of --model makes no tokens of {text.text[:60]!r}"
            )
        lists.append(ids)
    return lists


def context_of(tokenizer, before: str) -> str:
    """Return what to encode before a text that stands behind another one, so that its tokens are
    those of the whole; its own tokens are dropped.

    SentencePiece and some others put a space before the first word of what they encode. "" for other
    tokenizers.
    """
    if not before or not puts_space(tokenizer):
        return ""
    added = (token for token in tokenizer.get_added_vocab() if before.endswith(token))
    return next(added, "\n")


@functools.cache
def puts_space(tokenizer) -> bool:
    """Return whether a tokenizer puts a space before a text."""
    tokens = tokenizer.backend_tokenizer.encode("x", add_special_tokens=False).tokens
    return tokens[:1] != [] and tokens[0][0] in "\u2581\u0120"  # of SentencePiece, and of bytes


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
