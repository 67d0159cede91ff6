"""The text between the turns of a conversation, as token ids, and the calls of tools in a turn.

Sampled tokens are never tokenised again. The text between two turns is what the chat template
writes behind a turn that messages follow. A template that changes earlier turns for them, such as
one that drops thoughts, is warned of at the start: here turns stay as they were sampled.

A reader returns the calls in a turn in order: (name, arguments) as the model wrote them, or a text
for the model with the reason why a call cannot be read. Whether a call fits a tool is not checked.
"""

import functools
import json
import os
from typing import Callable

import regex

from plumbing.data.prompts import Text, encode_texts, guarded
from plumbing.rewards.answers import after_thought
from plumbing.turns.worker import EnvironmentFailure
from utils import exit_on_error, first_line, warn

Call = tuple[str, dict]  # name and arguments
MARK = "SAMPLED-TURN"  # where a rendering has the end of a sampled turn
QUESTION = {"role": "user", "content": "x"}
TURN = {"role": "assistant", "content": f"<think>\nA-THOUGHT\n</think>\n\n{MARK}"}


class Turns:
    """The text between the turns of a conversation, and the calls in a turn.

    `calls(text)` reads the calls in a turn. The text is decoded with special tokens, which may be
    part of a call, but without the stop token at its end.
    """

    def __init__(
        self, tokenizer, stop_ids: list[int], schemas: list[dict], args, has_step: bool = True
    ):
        """Exit with code 2 if the chat template cannot hold such conversations, or if its calls
        cannot be read.

        `schemas` are those of all tools; `has_step`: whether the environment, if there is one,
        answers with messages.
        """
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids
        self.schemas = schemas or None
        self.has_template = tokenizer.chat_template is not None and args.chat_template != "none"
        self.calls = lambda text: []
        # The template of a base model may not know the role of results.
        self.result_role = "tool" if "tool" in str(tokenizer.chat_template) else "user"
        if args.tool_call_pattern:
            with exit_on_error(f"--tool_call_pattern {args.tool_call_pattern!r}"):
                self.calls = pattern_reader(args.tool_call_pattern, schemas, args.timeout)
        flag = "--tools" if args.tools else "--environment"
        with exit_on_error(f"{flag}: the chat template of --model"):
            if schemas and not args.tool_call_pattern:
                self.calls = self._template_reader()
            if self.has_template:
                self._check_followers(flag, schemas, args.environment and has_step)

    def _check_followers(self, flag: str, results: list, messages_of_user: bool) -> None:
        """Read how the template ends turns; raise ValueError if it hides messages that follow one.

        Args:
            results, messages_of_user: whether results of tools and messages of the environment may
                follow.
        """
        before = self._render([QUESTION, TURN])
        self.after_last_turn = before.rpartition(MARK)[2]
        for role, may_follow in ((self.result_role, results), ("user", messages_of_user)):
            if not may_follow:
                continue
            follower = {"role": role, "name": "x", "content": "A-RESULT"}
            if "A-RESULT" not in self._between([follower]):
                raise ValueError(f"does not show messages of {role} after a turn")
            followed = self._render([QUESTION, TURN, follower], prompt=True)
            if not ("A-THOUGHT" in before and followed.startswith(before)):
                warn(
                    f"{flag}: the chat template of --model changes earlier turns, such as by dropping thoughts, "
                    f"once messages of {role} follow; here they stay as they were sampled"
                )
        self.end = self._end_of_turn()  # the first token ids of an observation

    def _template_reader(self) -> Callable[[str], list[Call | str]]:
        """Return the reader of the calls that the chat template writes; raise ValueError if there
        is none.
        """
        other = "--tool_call_pattern reads calls of a form that the prompts themselves ask for"
        name = self.schemas[0]["function"]["name"]
        prompt = self._render([QUESTION], prompt=True) if self.has_template else ""
        if name not in prompt:
            raise ValueError(f"does not show tools; {other}")
        if getattr(self.tokenizer, "response_template", None):
            reader = functools.partial(
                response_template_calls, self.tokenizer, prompt, self.schemas
            )
        else:
            reader = functools.partial(hermes_calls, prompt)
        function = {"name": name, "arguments": {"x": "1"}}
        tool_calls = [{"id": "call00000", "type": "function", "function": function}]
        text = self._render(
            [QUESTION, {"role": "assistant", "content": "", "tool_calls": tool_calls}]
        )
        if reader(text[len(os.path.commonprefix([text, prompt])) :]) != [(name, {"x": "1"})]:
            raise ValueError(f"writes calls in another form than <tool_call>; {other}")
        return reader

    def _end_of_turn(self) -> list[int]:
        """Return the token ids from a turn's text to the stop token behind it; [] if the template
        writes no stop token.

        Raise ValueError if it ends turns by another token of the added vocabulary, which no turn
        would end with.
        """
        ids = self._encode(self.after_last_turn)
        length = next((length for length, token in enumerate(ids, 1) if token in self.stop_ids), 0)
        if not length and any(token in self.tokenizer.added_tokens_decoder for token in ids):
            raise ValueError(
                f"ends turns by {self.tokenizer.decode(ids)!r}, which holds no --stop_token"
            )
        return ids[:length]

    def _render(self, messages: list[dict], prompt: bool = False) -> str:
        """Return messages as text, with the generation prompt if asked for."""
        return self.tokenizer.apply_chat_template(
            messages, self.schemas, tokenize=False, add_generation_prompt=prompt
        )

    def _between(self, messages: list[dict]) -> str:
        """Return the text between a turn and the next one: end of turn, messages, generation
        prompt.

        Raise ValueError if the template does not show the turn then, or ends it in another way.
        It may raise other exceptions by itself.
        """
        between = self._render([QUESTION, TURN, *messages], prompt=True).partition(MARK)[2]
        if not between.startswith(self.after_last_turn):
            raise ValueError("shows the end of a turn differently once messages follow")
        return between

    def observation_ids(self, messages: list[dict], last_token: int) -> list[int]:
        """Return the token ids between the turn just sampled and the next one; without chat
        template, of the contents.

        Raise EnvironmentFailure if the template raises an exception.

        Args:
            messages: {"role", "content"}, those of tools with their "name".
            last_token: of the turn. If it is a stop token, the one that the template writes there
                is left out.
        """
        contents = [message["content"] for message in messages]
        if not self.has_template:
            return self._encode(guarded("".join(contents), self.tokenizer))
        if self.result_role == "user":
            messages = [{"role": "user", "content": "\n".join(contents)}]
        try:
            ids = self._encode(self._between(guarded(messages, self.tokenizer)))
        except Exception as error:  # templates may raise any exception
            raise EnvironmentFailure(
                f"the chat template of --model refuses messages: {first_line(error)}"
            ) from error
        return ids[len(self.end) :] if last_token in self.stop_ids else ids

    def _encode(self, text: str) -> list[int]:
        """Return the token ids of a text; half of a surrogate pair, which models can write in JSON,
        becomes "?".
        """
        text = text.encode(errors="replace").decode()
        return encode_texts([Text("--tools", text)], self.tokenizer)[0]


# ---- calls in a turn -----------------------------------------------------------------------------


def read_call(value) -> Call | str:
    """Return the call in a JSON value, or the text of the error."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return 'a call has to be a JSON object with "name" and "arguments"'
    arguments = value.get("arguments") or {}
    # Some models write it as a string.
    arguments = json_or_text(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(arguments, dict):
        return f"the arguments of {value['name']} have to be a JSON object"
    return value["name"], arguments


def json_or_text(text: str):
    """Return the value of a JSON text, or the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # the second: brackets in thousands of brackets
        return text


def hermes_calls(prompt: str, text: str) -> list[Call | str]:
    """Return the calls <tool_call>{"name": ..., "arguments": {...}}</tool_call>, the form of Hermes
    and Qwen.

    The last one may lack its end. Thoughts hold no calls, nor does one that begins at the end of any `prompt`.
    """
    opened = "<think>" if prompt.rstrip().endswith("<think>") else ""
    calls = []
    for part in after_thought(opened + text).split("<tool_call>")[1:]:
        try:
            calls.append(read_call(json.loads(part.partition("</tool_call>")[0])))
        except (ValueError, RecursionError) as error:
            calls.append(f"the call is not valid JSON ({first_line(error)})")
    return calls


def response_template_calls(
    tokenizer, prompt: str, schemas: list[dict], text: str
) -> list[Call | str]:
    """Return the calls in the form that the tokenizer's response template describes."""
    try:
        message = tokenizer.parse_response(text, prefix=prompt, tools=schemas)
    except Exception as error:
        # The template names the functions that read its parts; they may raise any error.
        return [f"the call cannot be read ({first_line(error)})"]
    return [read_call(call.get("function")) for call in message.get("tool_calls") or []]


def pattern_reader(
    pattern: str, schemas: list[dict], timeout: float
) -> Callable[[str], list[Call | str]]:
    """Return a reader of the calls that match --tool_call_pattern; raise ValueError if the pattern
    lacks a group.

    The group "arguments" holds a JSON object with names of the tool's parameters, or else the value
    of the only parameter. The group "name" names the tool; without it the only tool is meant. A dot
    matches line ends, too.

    A pattern can take exponential time. Unlike re, regex stops after `timeout` seconds, and lets
    other threads run meanwhile.
    """
    tools = {
        schema["function"]["name"]: schema["function"]["parameters"]["properties"]
        for schema in schemas
    }
    compiled = regex.compile(pattern, regex.DOTALL)
    if "arguments" not in compiled.groupindex:
        raise ValueError("requires a group (?P<arguments>...), which holds the arguments of a call")
    if "name" not in compiled.groupindex and len(tools) != 1:
        raise ValueError(
            "requires a group (?P<name>...), which names the tool, unless there is exactly one"
        )

    def read(match: regex.Match) -> Call | str:
        groups = match.groupdict(default="")
        name = groups.get("name", next(iter(tools), "")).strip()
        text = groups["arguments"].strip()
        value = json_or_text(text)
        parameters = tools.get(name, {})
        if len(parameters) == 1 and not (
            isinstance(value, dict) and value.keys() == parameters.keys()
        ):
            [(parameter, schema)] = parameters.items()
            return name, {parameter: text if schema.get("type") == "string" else value}
        return read_call({"name": name, "arguments": value})

    def read_all(text: str) -> list[Call | str]:
        try:
            return [
                read(match) for match in compiled.finditer(text, timeout=timeout, concurrent=True)
            ]
        except TimeoutError:
            return [f"the calls cannot be read within {timeout:g} s"]

    return read_all
