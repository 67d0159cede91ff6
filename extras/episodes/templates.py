"""The text between the turns of a conversation, as token ids, and the calls of tools in a turn.

Sampled tokens are never tokenised again. The text between two turns is what the chat template
writes behind a turn that messages follow. A template that changes earlier turns for them, such as
one that drops thoughts, is warned of at the start: here turns stay as they were sampled.

Calls are read in the form that the chat template writes them in: (name, arguments), or a text for the
model with the reason why one cannot be read. Whether a call fits a tool is not checked.
"""

import ast
import functools
import json
import os
from pathlib import Path

import yaml
from transformers.utils.chat_parsing.response_templates import load_response_template

from extras.episodes.tool_processes import EnvironmentFailure
from plumbing.data.encoding import CUT, Text, encode_texts, guarded
from plumbing.data.messages import Function
from plumbing.data.rendering import apply_template, shown
from utils import first_line, warn

Call = tuple[str, dict]  # name and arguments
MARK = "SAMPLED-TURN"  # where a rendering has the end of a sampled turn
THOUGHT = "<think>\nA-THOUGHT\n</think>\n\n"
QUESTION = {"role": "user", "content": "x"}
warn_once = functools.cache(warn)
FORMS = yaml.safe_load(Path(__file__).with_name("calls.yaml").read_text())["forms"]


class TurnTemplate:
    """The text between the turns of a conversation, and the calls in a turn."""

    def __init__(
        self,
        tokenizer,
        stop_ids: list[int],
        schemas: list[dict],
        followers: list[str],
        has_template: bool = True,
    ):
        """Raise ValueError if the chat template cannot hold such conversations, or if its calls
        cannot be read; a template may raise any exception.

        Args:
            schemas: of all tools. followers: roles of the messages that may follow a turn.
            has_template: whether to use the chat template, if there is one.
        """
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids
        self.schemas = schemas or None
        self.has_template = has_template and tokenizer.chat_template is not None
        self.form = None  # of the calls
        self.opened = ""  # what the generation prompt begins of a turn
        if schemas:
            self._find_form()
        # By whether a turn has calls: see `_end_of_turn`.
        self.ends: dict[bool, tuple[int, int]] = {}
        if self.has_template:
            self._check_followers(followers)

    def _turn(self, messages: list[dict], thought: str = "") -> dict:
        """Return a turn that messages may follow: with a call, if they begin with its result."""
        if not self._follow_calls(messages):
            return {"role": "assistant", "content": THOUGHT + MARK}
        function = {"name": messages[0].get("name", "x"), "arguments": {"x": MARK}}
        calls = [{"id": "call00000", "type": "function", "function": function}]
        return {"role": "assistant", "content": thought, "tool_calls": calls}

    def _follow_calls(self, messages: list[dict]) -> bool:
        return bool(messages and messages[0]["role"] == "tool" and self.schemas)

    def _check_followers(self, followers: list[str]) -> None:
        """Read how the template ends turns; raise ValueError if it hides messages that follow
        one.
        """
        for role in followers:
            messages = [{"role": role, "name": "x", "content": "A-RESULT"}]
            end = shown(self._between, messages).partition("A-RESULT")[0]
            self.ends[self._follow_calls(messages)] = self._end_of_turn(messages, end)
            turns = [QUESTION, self._turn(messages, THOUGHT)]
            before = self._render(turns)
            followed = self._render([*turns, *messages], prompt=True)
            if not ("A-THOUGHT" in before and followed.startswith(before)):
                warn_once(
                    "the chat template of --model changes earlier turns, such as by dropping thoughts, "
                    f"once messages of {role} follow; here they stay as they were sampled"
                )

    def _find_form(self) -> None:
        """Find the form of the calls that the chat template writes, the tokenizer's own or one of
        FORMS; raise ValueError if there is none.
        """
        other = "an --environment can read calls of any form, and answer them"
        name = self.schemas[0]["function"]["name"]
        before = self._render([QUESTION])
        prompt = self._render([QUESTION], prompt=True)
        if name not in prompt.replace(CUT, ""):
            raise ValueError(f"does not show tools; {other}")
        call = self._turn([{"role": "tool", "name": name}])
        text = self._render([QUESTION, call])
        text = text[len(os.path.commonprefix([text, before])) :].replace(CUT, "")
        for form in filter(None, (self.tokenizer.response_template, *FORMS.values())):
            self.form = load_response_template(form)
            if self.parse(text)[1] == [(name, {"x": MARK})]:
                self.opened = prompt.removeprefix(before)
                return
        raise ValueError(f"writes calls in another form than {', '.join(FORMS)}; {other}")

    def parse(self, text: str) -> tuple[str, list[Call | str]]:
        """Return what a turn says beside its calls, without special tokens; and the calls, or the
        reason why they cannot be read. Thoughts hold no calls.

        The text is decoded with special tokens, which may be part of a call, but without the stop
        token at its end.
        """
        if self.form is None:
            return "", []
        is_xml = self.form.fields["tool_calls"].content == "xml-inline"
        try:
            message = self.tokenizer.parse_response(
                text, self.form, prefix=self.opened, tools=self.schemas if is_xml else None
            )
            found = message.get("tool_calls", [])
            calls = [read_call(value) for call in found for value in listed(call["function"])]
            said = message.get("content", "").strip()
        except Exception as error:  # of any type: the model may write anything
            return "", [f"the call cannot be read ({first_line(error.__cause__ or error)})"]
        if thought := message.get("thinking"):
            said = f"<think>\n{thought}\n</think>\n\n{said}"
        for token in self.tokenizer.all_special_tokens:
            said = said.replace(token, "")
        return said, calls

    def _end_of_turn(self, messages: list[dict], text: str) -> tuple[int, int]:
        """Return how many tokens of a text behind the mark of a turn are the turn's own: up to the
        end of its call, and up to the stop token, if the template writes one.

        Raise ValueError if it ends turns by another token of the added vocabulary, which no turn
        would end with.
        """
        with_calls = self._follow_calls(messages)
        ids = self.encode(text, before=MARK)
        length = next((length for length, token in enumerate(ids, 1) if token in self.stop_ids), 0)
        if length:
            return (length - 1) * with_calls, length
        last = self.encode(self._after_turn([]), before=MARK)
        if any(token in self.tokenizer.added_tokens_decoder for token in last):
            raise ValueError(
                f"ends turns by {self.tokenizer.decode(last)!r}, which holds no --stop_token"
            )
        length = len(self.encode(self._after_turn(messages), before=MARK)) * with_calls
        return length, length

    def _render(self, messages: list[dict], prompt: bool = False) -> str:
        """Return messages as text, with CUTs, and with the generation prompt if asked for; without
        chat template, their contents.
        """
        if self.has_template:
            return apply_template(self.tokenizer, messages, self.schemas, prompt)
        return "".join(turn["content"] for turn in guarded(messages, self.tokenizer))

    def _after_turn(self, messages: list[dict]) -> str:
        """Return the text that ends the last turn of a conversation, of the kind that messages would
        follow.
        """
        return self._render([QUESTION, self._turn(messages)]).rpartition(MARK)[2]

    def _between(self, messages: list[dict]) -> str:
        """Return the text between a turn and the next one: end of turn, messages, generation
        prompt.

        Raise ValueError if the template does not show the turn then, or ends it in another way.
        It may raise other exceptions by itself.
        """
        turns = [QUESTION, self._turn(messages), *messages]
        between = self._render(turns, prompt=True).partition(MARK)[2]
        if not between.startswith(self._after_turn(messages)):
            raise ValueError("shows the end of a turn differently once messages follow")
        return between

    def prompt(self, messages: list[dict]) -> str:
        """Return the text of messages that a turn follows; raise ValueError if the chat template
        leaves out a content or a call.
        """
        return shown(functools.partial(self._render, prompt=True), messages)

    def observation_ids(self, messages: list[dict], last_token: int) -> list[int]:
        """Return the token ids between the turn just sampled and the next one; without chat
        template, of the contents.

        Raise EnvironmentFailure if the template raises an exception.

        Args:
            messages: {"role", "content"}, those of tools with their "name".
            last_token: of the turn. If it is a stop token, the one that the template writes there
                is left out.
        """
        before = self.tokenizer.decode([last_token])
        if not self.has_template:
            return self.encode(self.prompt(messages), before=before)
        try:
            ids = self.encode(shown(self._between, messages), before=before)
        except Exception as error:  # templates may raise any exception
            raise EnvironmentFailure(
                f"the chat template of --model refuses messages: {first_line(error)}"
            ) from error
        of_turn, with_stop = self.ends[self._follow_calls(messages)]
        return ids[with_stop if last_token in self.stop_ids else of_turn :]

    def encode(self, text: str, special: bool = False, before: str = "") -> list[int]:
        """Return the token ids of a text that stands behind another one; half of a surrogate pair,
        which models can write in JSON, becomes "?".
        """
        text = text.encode(errors="replace").decode()
        return encode_texts([Text("--tools", text, special, before=before)], self.tokenizer)[0]


# ---- calls in a turn -----------------------------------------------------------------------------


def listed(calls) -> list:
    """Return the calls of a text, which is a list in Python; any other value is one call."""
    if not isinstance(calls, str):
        return [calls]
    return [
        {
            "name": ast.unparse(call.func),
            "arguments": {
                x.arg: python_or_json(ast.get_source_segment(calls, x.value)) for x in call.keywords
            },
        }
        for call in ast.parse(calls, mode="eval").body.elts
    ]


def python_or_json(text: str):
    """Return the value of a literal."""
    try:
        return json.loads(text)  # true, false and null are no literals of Python
    except ValueError:
        return ast.literal_eval(text)


def read_call(value) -> Call | str:
    """Return the call in a JSON value, or the text of the error."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return 'a call has to be a JSON object with "name" and "arguments"'
    arguments = value.get("arguments", value.get("parameters"))
    try:  # some models write JSON in JSON
        return value["name"], Function(name=value["name"], arguments=arguments).arguments
    except (ValueError, RecursionError):  # the second: thousands of brackets
        return f"the arguments of {value['name']} have to be a JSON object"
