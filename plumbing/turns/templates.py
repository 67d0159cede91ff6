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

from plumbing.data.prompts import Text, encode_texts, guarded
from plumbing.rewards.answers import after_thought
from plumbing.turns.worker import EnvironmentFailure
from utils import first_line, warn

Call = tuple[str, dict]  # name and arguments
MARK = "SAMPLED-TURN"  # where a rendering has the end of a sampled turn
QUESTION = {"role": "user", "content": "x"}
TURN = {"role": "assistant", "content": f"<think>\nA-THOUGHT\n</think>\n\n{MARK}"}
warn_once = functools.cache(warn)


class Turns:
    """The text between the turns of a conversation, and the calls in a turn.

    `calls(text)` reads the calls in a turn. The text is decoded with special tokens, which may be
    part of a call, but without the stop token at its end.
    """

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
        self.calls = self._template_reader() if schemas else lambda text: []
        if self.has_template:
            self._check_followers(followers)

    def _check_followers(self, followers: list[str]) -> None:
        """Read how the template ends turns; raise ValueError if it hides messages that follow
        one.
        """
        before = self._render([QUESTION, TURN])
        self.after_last_turn = before.rpartition(MARK)[2]
        for role in followers:
            follower = {"role": role, "name": "x", "content": "A-RESULT"}
            if "A-RESULT" not in self._between([follower]):
                raise ValueError(f"does not show messages of {role} after a turn")
            followed = self._render([QUESTION, TURN, follower], prompt=True)
            if not ("A-THOUGHT" in before and followed.startswith(before)):
                warn_once(
                    "the chat template of --model changes earlier turns, such as by dropping thoughts, "
                    f"once messages of {role} follow; here they stay as they were sampled"
                )
        self.end = self._end_of_turn()  # the first token ids of an observation

    def _template_reader(self) -> Callable[[str], list[Call | str]]:
        """Return the reader of the calls that the chat template writes; raise ValueError if there
        is none.
        """
        other = "an --environment can read calls of any form, and answer them"
        name = self.schemas[0]["function"]["name"]
        prompt = self._render([QUESTION], prompt=True) if self.has_template else ""
        if name not in prompt:
            raise ValueError(f"does not show tools; {other}")
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
        ids = self.encode(self.after_last_turn)
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

    def prompt(self, messages: list[dict]) -> str:
        """Return the text of messages that a turn follows; without chat template, of the
        contents.
        """
        messages = guarded(messages, self.tokenizer)
        if self.has_template:
            return self._render(messages, prompt=True)
        return "".join(message["content"] for message in messages)

    def observation_ids(self, messages: list[dict], last_token: int) -> list[int]:
        """Return the token ids between the turn just sampled and the next one; without chat
        template, of the contents.

        Raise EnvironmentFailure if the template raises an exception.

        Args:
            messages: {"role", "content"}, those of tools with their "name".
            last_token: of the turn. If it is a stop token, the one that the template writes there
                is left out.
        """
        messages = guarded(messages, self.tokenizer)
        if not self.has_template:
            return self.encode("".join(message["content"] for message in messages))
        try:
            ids = self.encode(self._between(messages))
        except Exception as error:  # templates may raise any exception
            raise EnvironmentFailure(
                f"the chat template of --model refuses messages: {first_line(error)}"
            ) from error
        return ids[len(self.end) :] if last_token in self.stop_ids else ids

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Return the token ids of a text; half of a surrogate pair, which models can write in JSON,
        becomes "?".
        """
        text = text.encode(errors="replace").decode()
        return encode_texts([Text("--tools", text, special)], self.tokenizer)[0]


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
