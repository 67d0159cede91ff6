"""Messages written as the text that the model sees, by its chat template.

What a message says reaches the model as the template writes it, or a UserError is raised.
"""

import copy
import functools
import json
import re
from typing import Any, Callable, Sequence

from pydantic import Json, TypeAdapter
from transformers import PreTrainedTokenizerBase

from plumbing.data.encoding import CUT, Text, guarded
from plumbing.data.formats import is_filled
from plumbing.data.messages import THOUGHTS, Message, without_empty
from plumbing.data.rows import validate
from plumbing.models.tokenizer import template_values
from utils import UserError, as_user_error

OBJECT = dict[str, Any]
SCHEMAS = TypeAdapter(list[OBJECT | Json[OBJECT]] | Json[list[OBJECT]])


class Rendering:
    """How a run writes conversations."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Sequence[int] = (),
        system_prompt: str = "",
        as_is: bool = False,
        tools: list[dict] | None = None,
        converses: bool = False,
    ):
        """Prepare the writing of conversations.

        Args:
            stop_ids: end a turn of the assistant.
            system_prompt: stands before a conversation that has no system turn; "" for none.
            as_is: leave a text without chat template and system prompt, for one that holds both
                already.
            tools: schemas that the template shows in each conversation.
            converses: whether responses have several turns, by --tools, --environment or --agent.
        """
        self.tokenizer = tokenizer
        self.stops = [text for text in map(tokenizer.decode, stop_ids) if text]
        self.system_prompt = "" if as_is else system_prompt
        self.as_is = as_is
        self.has_template = not as_is and tokenizer.chat_template is not None
        self.tools = tools
        self.converses = converses
        self.values: dict = {}  # of a row, for the template

    def of_row(self, where: str, row: dict) -> "Rendering":
        """Return how the conversation of a row is written: with the schemas in its column `tools`,
        or else of --tools, and the values in `chat_template_kwargs`; each may be JSON text.
        """
        made = copy.copy(self)
        given = row.get("chat_template_kwargs") or {}
        where_given = f"{where}: chat_template_kwargs"
        made.values = template_values(where_given, given, self.tokenizer, self.has_template)
        if made.values and self.converses:
            raise UserError(
                f"{where_given} cannot vary with --tools, --environment or --agent; "
                "--chat_template_kwargs gives them to all rows"
            )
        if not is_filled(row.get("tools")):
            return made
        if self.tools:
            raise UserError(f"{where}: has tools of its own beside --tools")
        schemas = validate(f"{where}: tools", row["tools"], SCHEMAS, "tool")
        schemas = [without_empty(x, empty=(None,)) for x in schemas]
        made.tools = [
            x if "function" in x else {"type": "function", "function": x} for x in schemas
        ]
        if self.has_template:
            with as_user_error(f"{where}: the chat template of --model"):
                text = made.write([{"role": "user", "content": "x"}])
                if not all(occurs(tool["function"]["name"], text) for tool in made.tools):
                    raise ValueError("does not show tools")
        return made

    def write(self, messages: list[dict], prompt: bool = False) -> str:
        """Return messages as the chat template writes them, see `apply_template`."""
        return apply_template(self.tokenizer, messages, self.tools, prompt, self.values)

    def dialogue(self, messages: list[Message]) -> list[dict]:
        """Return messages as dicts, with the system turn."""
        turns = [message.as_dict() for message in messages]
        if self.system_prompt and turns and turns[0]["role"] != "system":
            turns.insert(0, {"role": "system", "content": self.system_prompt})
        return turns

    def prompt(self, where: str, messages: list[dict]) -> Text:
        """Return the text of a prompt, from what `dialogue` gives; raise a UserError if the chat
        template leaves a part of it out.

        A tokenizer without a chat template requires a single user turn.
        """
        if not messages:
            raise UserError(f"{where} prompt: has no turn before that of the assistant")
        if not messages[-1]["content"].strip() and messages[-1]["role"] in ("user", "system"):
            raise UserError(f"{where}: the last turn of the prompt is empty")
        if self.has_template:
            # The template has written the special tokens.
            with as_user_error(f"{where}: the chat template of --model"):
                return Text(where, shown(functools.partial(self.write, prompt=True), messages))
        added = messages[0] == {"role": "system", "content": self.system_prompt}
        several = "several turns" if len(messages) > 1 + added else ""
        if several or self.tools:
            lacks = "the tokenizer of --model has no chat template"
            lacks = "--chat_template is none" if self.as_is else lacks
            raise UserError(
                f"{where}: has {several or 'tools'}, and {lacks}; name a file of one with --chat_template"
            )
        return Text(where, "\n".join(turn["content"] for turn in messages), special=True)

    def turn(self, where: str, messages: list[dict], query: Text, turn: dict) -> Text:
        """Return a turn of the assistant as a text to learn: what the chat template writes for it
        behind the prompt, up to the stop token.

        A turn that is only text is learned as it stands where the template begins one in another way,
        or does not show all of it, such as a thought. Raise a UserError if such a turn is more than
        text.

        Args:
            messages: of the prompt. query: of `prompt`. turn: a message, as `dialogue` gives it.
        """
        if self.has_template:
            conversation = [*messages, turn]
            write = self.write
            with as_user_error(f"{where}: the chat template of --model"):
                whole = shown(write, conversation) if "tool_calls" in turn else write(conversation)
                text = whole.removeprefix(query.text)
                if text == whole:  # it has changed earlier turns, or does not begin this one so
                    header = query.text.removeprefix(write(messages))
                    # Earlier turns may have the same header: look behind the prompt's last message.
                    conversation[-2] = conversation[-2] | {"content": "LAST-TEXT."}
                    behind = write(conversation).rpartition("LAST-TEXT.")[2]
                    text = behind.partition(header or whole)[2]
            stops = [stop for stop in self.stops if stop in text]
            end = min((text.index(stop) + len(stop) for stop in stops), default=len(text.rstrip()))
            response = Text(where, text[:end], is_learned=True, before=query.text)
            parts = said(turn, thoughts=True)
            if all(occurs(part, response.shown) for part in parts):
                return response
        if others := turn.keys() - {"role", "content"}:
            raise UserError(
                f"{where}: the chat template of --model does not write {', '.join(sorted(others))}"
            )
        content = turn["content"]
        if query.text.rstrip().endswith("<think>"):
            content = content.lstrip().removeprefix("<think>").lstrip("\n")
            if "</think>" not in content:
                raise UserError(
                    f"{where}: the chat template of --model opens a thought, and the response closes none; "
                    "name another template with --chat_template"
                )
        return self.response(where, content, query.text)

    def response(self, where: str, content: str, before: str = "") -> Text:
        """Return a text as a response to learn behind another text."""
        end = next(filter(content.endswith, self.stops), "")
        content = guarded(content.removesuffix(end), self.tokenizer, own=True)
        return Text(where, content + end, is_learned=True, before=before)


def apply_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict],
    tools: list[dict] | None = None,
    prompt: bool = False,
    values: dict | None = None,
) -> str:
    """Return messages as the chat template writes them, with CUTs; with the start of the assistant's
    turn for a prompt. A template may raise any exception.

    Args:
        values: of a row, beside those of --chat_template_kwargs.
    """
    return tokenizer.apply_chat_template(
        guarded(for_template(messages, tokenizer), tokenizer),
        guarded(tools, tokenizer),
        tokenize=False,
        add_generation_prompt=prompt,
        **guarded(values or {}, tokenizer),
    )


def for_template(messages: list[dict], tokenizer: PreTrainedTokenizerBase) -> list[dict]:
    """Return messages, as `dialogue` gives them, in the form that the chat template reads, see
    `form_of_template`.
    """
    thought, as_text, as_parts = form_of_template(tokenizer, str(tokenizer.chat_template))
    made = []
    for message in messages:
        message = {thought if name == THOUGHTS[0] else name: x for name, x in message.items()}
        if as_parts:
            message["content"] = [{"type": "text", "text": message["content"]}]
        if as_text and "tool_calls" in message:
            message["tool_calls"] = [
                with_changes(
                    call, arguments=json.dumps(call["function"]["arguments"], ensure_ascii=False)
                )
                for call in message["tool_calls"]
            ]
        made.append(message)
    return made


def with_changes(call: dict, **values: str) -> dict:
    """Return a call with other values of its function."""
    return call | {"function": call["function"] | values}


@functools.cache
def form_of_template(tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[str, bool, bool]:
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
    as_object, as_text = (
        render(
            {"role": "user", "content": "x"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{**call, "function": {"name": "f", "arguments": arguments}}],
            },
        )
        for arguments in ({"x": "A-VALUE"}, '{"x": "A-VALUE"}')
    )
    wants_text = "A-VALUE" in as_text and (not as_object or "{'x'" in as_object)
    parts = [{"type": "text", "text": "A-TEXT"}]
    shows_text, shows_parts = (
        "A-TEXT" in render({"role": "user", "content": content}) for content in ("A-TEXT", parts)
    )
    return next(thoughts, THOUGHTS[0]), wants_text, shows_parts and not shows_text


def shown(write: Callable[[list[dict]], str], messages: list[dict]) -> str:
    """Return what a chat template writes of messages; raise ValueError if it leaves out a part of
    them, earlier thoughts excepted. The template may raise any exception.

    Args:
        write: returns the text of messages, with CUTs.
    """
    text = write(messages)
    marked = []
    for number, turn in enumerate(messages):
        # A short content or a name may occur by chance, so longer ones are looked for.
        if len(turn["content"].strip()) in range(1, 8):
            turn = turn | {"content": f"TEXT-{number}."}
        calls = [
            # Kimi's template writes no name but that in the id, functions.NAME:0.
            call
            if call["function"]["name"] in call.get("id", "")
            else with_changes(call, name=f"CALL-{number}-{i}.")
            for i, call in enumerate(turn.get("tool_calls", ()))
        ]
        marked.append(turn | {"tool_calls": calls} if calls else turn)
    found = (text if marked == messages else write(marked)).replace(CUT, "")
    for number, turn in enumerate(marked, 1):
        if not all(occurs(part, found) for part in said(turn)):
            raise ValueError(f"does not show turn {number}, of {turn['role']}")
    return text


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
    return part in text or any(
        json.dumps(part, ensure_ascii=x)[1:-1] in text for x in (False, True)
    )
