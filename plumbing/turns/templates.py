"""The text between the turns of a conversation, as token ids.

Sampled tokens are never tokenised again. The text between two turns is the difference of two renderings of the chat
template: of a conversation that ends with a turn, and of the same one with the messages that follow. A template that
changes earlier turns for later messages, such as one that drops thoughts, is refused at the start.
"""

import os
from typing import Callable

from plumbing.turns.processes import EnvironmentFailure
from plumbing.turns.tool_calls import ToolCall, hermes_reader, pattern_reader, response_template_reader
from utils import first_line, loading

MARK = "SAMPLED-TURN"  # where a rendering has the end of a sampled turn
QUESTION = {"role": "user", "content": "x"}
TURN = {"role": "assistant", "content": f"<think>\nA-THOUGHT\n</think>\n\n{MARK}"}


class Turns:
    """The text between the turns of a conversation, and the calls in a turn.

    `calls(text)` returns the calls in a turn, see plumbing/turns/tool_calls.py. The text is decoded with special
    tokens, which may be part of a call, but without the stop token at its end.
    """

    def __init__(self, tokenizer, stop_ids: list[int], schemas: list[dict], args, has_step: bool = True):
        """Exit with code 2 if the chat template cannot hold such conversations, or if its calls cannot be read.

        Args:
            stop_ids: tokens that end a turn.
            schemas: of all tools, as transformers' `get_json_schema` makes them.
            args: --tools, --environment, --tool_call_pattern and --chat_template.
            has_step: whether the environment, if there is one, answers with messages.
        """
        self.tokenizer, self.stop_ids, self.schemas = tokenizer, stop_ids, schemas
        self.has_template = tokenizer.chat_template is not None and args.chat_template != "none"
        self.calls = lambda text: []
        # The template of a base model may not know the role of results.
        self.result_role = "tool" if "tool" in str(tokenizer.chat_template) else "user"
        if args.tool_call_pattern:
            with loading(f"--tool_call_pattern {args.tool_call_pattern!r}"):
                self.calls = pattern_reader(args.tool_call_pattern, schemas)
        with loading(f"{'--tools' if args.tools else '--environment'}: the chat template of --model"):
            if schemas and not args.tool_call_pattern:
                self.calls = self._template_reader()
            if self.has_template and schemas:
                self._check_follows(self.result_role)
            if self.has_template and args.environment and has_step:
                self._check_follows("user")

    def _template_reader(self) -> Callable[[str], list[ToolCall | str]]:
        """Return the reader of the calls that the chat template writes; raise ValueError if there is none."""
        other = "--tool_call_pattern reads calls of a form that the prompts themselves ask for"
        if not self.has_template:
            raise ValueError(f"is missing, so that it shows no tools; {other}")
        if self._render([QUESTION]) == self.tokenizer.apply_chat_template([QUESTION], tokenize=False):
            raise ValueError(f"does not show tools; {other}")
        prompt, call = self._render([QUESTION], prompt=True), ToolCall(self.schemas[0]["function"]["name"], {"x": "1"})
        if getattr(self.tokenizer, "response_template", None):
            reader = response_template_reader(self.tokenizer, prompt, self.schemas)
        else:
            reader = hermes_reader(prompt)
        tool_calls = [{"id": "call00000", "type": "function", "function": vars(call)}]
        text = self._render([QUESTION, {"role": "assistant", "content": "", "tool_calls": tool_calls}])
        if reader(text[len(os.path.commonprefix([text, prompt])) :]) != [call]:
            raise ValueError(f"writes calls in another form than <tool_call>; {other}")
        return reader

    def _check_follows(self, role: str) -> None:
        """Raise ValueError if the chat template does not show a message of a role after a turn."""
        if "A-RESULT" not in self._between([{"role": role, "name": "x", "content": "A-RESULT"}]):
            raise ValueError(f"does not show messages of {role} after a turn")

    def _render(self, messages: list[dict], prompt: bool = False) -> str:
        """Return messages as text, with the generation prompt if asked for."""
        tools = self.schemas or None
        return self.tokenizer.apply_chat_template(messages, tools, tokenize=False, add_generation_prompt=prompt)

    def _between(self, messages: list[dict]) -> str:
        """Return the text between a turn and the next one: end of turn, messages, generation prompt.

        Raises:
            ValueError: if the template changes the turn for them. It may raise other exceptions by itself.
        """
        before = self._render([QUESTION, TURN])
        after = self._render([QUESTION, TURN, *messages], prompt=True)
        if not ("A-THOUGHT" in before and after.startswith(before)):
            raise ValueError("changes earlier turns, such as by dropping thoughts, once messages follow")
        return after[before.rindex(MARK) + len(MARK) :]

    def observation_ids(self, messages: list[dict], last_token: int) -> list[int]:
        """Return the token ids between the turn just sampled and the next one; without chat template, of the contents.

        Raise EnvironmentFailure if the template raises an exception.

        Args:
            messages: {"role", "content"}, those of tools with their "name".
            last_token: of the turn. If it is a stop token, the one that the template writes there is left out.
        """
        joined = lambda separator: separator.join(message["content"] for message in messages)
        if not self.has_template:
            return self._encode(joined(""))
        if self.result_role == "user":
            messages = [{"role": "user", "content": joined("\n")}]
        try:
            ids = self._encode(self._between(messages))
        except Exception as error:  # templates may raise any exception
            raise EnvironmentFailure(f"the chat template of --model refuses messages: {first_line(error)}") from error
        has_end = last_token in self.stop_ids and ids and ids[0] in self.stop_ids
        return ids[1:] if has_end else ids

    def _encode(self, text: str) -> list[int]:
        """Return the token ids of a text; half of a surrogate pair, which models can write in JSON, becomes "?"."""
        return self.tokenizer.encode(text.encode(errors="replace").decode(), add_special_tokens=False)
