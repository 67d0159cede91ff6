"""What stands between the turns of a conversation, as token ids, and the calls of tools in a turn.

What was sampled is never tokenised again. What stands between two turns is what follows MARK, which takes the place of
the turn, in a rendering of the chat template.

Imports utils, plumbing.rewards.answers (what of a turn is a thought) and plumbing.turns.tool_calls (forms of calls).
"""

import functools
import itertools
import os
from typing import Callable

from plumbing.rewards.answers import after_thought
from plumbing.turns.tool_calls import ToolCall, hermes_calls, llama_calls, pattern_reader, read_call, xml_calls
from utils import fail, first_line

MARK = "SAMPLED-TURN"  # stands where a rendering holds what was sampled
THOUGHT = "A-THOUGHT"
RESULT = "A-RESULT"
QUESTION = {"role": "user", "content": "x"}


class Turns:
    """What stands between the turns of a conversation, as token ids, and the calls in a turn."""

    def __init__(self, tokenizer, stop_ids: list[int], schemas: list[dict], args, has_step: bool = True):
        """End the run if the chat template cannot hold such conversations, or if its calls cannot be read.

        Args:
            stop_ids: tokens that end a turn.
            schemas: of all tools, as transformers' `get_json_schema` makes them.
            args: --tools, --environment, --tool_call_pattern, --rewritten_turns and --chat_template.
            has_step: whether the environment, if there is one, answers with messages of its own.
        """
        self.tokenizer, self.stop_ids, self.schemas, self.args = tokenizer, stop_ids, schemas, args
        self.flag = "--tools" if args.tools else "--environment"
        self.has_template = tokenizer.chat_template is not None and args.chat_template != "none"
        self.tool_name = schemas[0]["function"]["name"] if schemas else ""
        self.most_calls = 1_000_000  # that the template takes in one turn
        self.reader, self.results_as_user = None, False
        pattern = args.tool_call_pattern
        if pattern:
            if not schemas:
                fail(f"--tool_call_pattern {pattern!r}: there are no tools to call")
            self.reader = pattern_reader(pattern, schemas)
        elif schemas:
            self.check_tools_are_shown()
            self.reader = self.template_reader()
        if self.has_template:
            self.end = self.try_render([QUESTION, self.turn()]).rpartition(MARK)[2]  # what the template ends a turn by
            if schemas:
                self.check_results()
            if args.environment and has_step:
                self.check_follows({"role": "user", "content": RESULT})

    # The checks at the start

    def check_tools_are_shown(self) -> None:
        """End the run if the chat template does not show the tools to the model."""
        other = "--tool_call_pattern reads calls of a form that the prompts themselves ask for"
        if not self.has_template:
            fail(f"{self.flag}: there is no chat template to show tools to the model; {other}")
        if self.try_render([QUESTION]) == self.tokenizer.apply_chat_template([QUESTION], tokenize=False):
            fail(f"{self.flag}: the chat template of --model does not show tools to it; {other}")

    def template_reader(self) -> Callable[[str], list[ToolCall | str]]:
        """Return the function that reads the calls which the chat template writes; end the run if there is none."""
        prompt = self.try_render([QUESTION], prompt=True)
        opened = "<think>" if prompt.rstrip().endswith("<think>") else ""  # a thought that the prompt begins

        def of_response_template(text: str) -> list[ToolCall | str]:
            try:
                message = self.tokenizer.parse_response(text, prefix=prompt, tools=self.schemas)
            except Exception as error:  # the template names the functions that read its parts; what they raise is open
                return [f"the call cannot be read ({first_line(error)})"]
            return [read_call(call.get("function")) for call in message.get("tool_calls") or []]

        forms = (hermes_calls, llama_calls, functools.partial(xml_calls, schemas=self.schemas))
        readers = [lambda text, form=form: form(after_thought(opened + text)) for form in forms]
        if getattr(self.tokenizer, "response_template", None):
            readers.insert(0, of_response_template)
        turn = self.turn((self.tool_name,))
        text = self.try_render([QUESTION, turn])
        text = text[len(os.path.commonprefix([text, prompt])) :]
        call = ToolCall(self.tool_name, turn["tool_calls"][0]["function"]["arguments"])
        for reader in readers:
            if reader(text) == [call]:
                return reader
        fail(f"{self.flag}: the chat template of --model writes calls in no known form; --tool_call_pattern takes one")

    def check_results(self) -> None:
        """Find out how the template shows results of tools; end the run if it does not."""
        result = {"role": "tool", "name": self.tool_name, "content": RESULT}
        template = self.tokenizer.get_chat_template(tools=self.schemas)
        if self.args.tool_call_pattern and not ("tool" in template and self.shows([result])):
            self.results_as_user = True
            self.check_follows({"role": "user", "content": RESULT})
            return
        self.check_follows(result)
        if not self.shows([result, result]):
            self.most_calls = 1  # Llama's raises for more; their results are shown behind one call

    def check_follows(self, message: dict) -> None:
        """End the run if the template cannot show a message after a turn, or changes earlier turns for it."""
        self.try_render([QUESTION, self.turn(self.called([message])), *numbered([message])], prompt=True)
        if not self.shows([message]):
            fail(f"{self.flag}: the chat template of --model does not show messages of {message['role']} after a turn")
        if self.args.rewritten_turns == "error" and self.rewrites(message):
            fail(
                "--rewritten_turns error: the chat template of --model renders earlier turns differently, such as "
                f"without their thoughts, once messages of {message['role']} follow; keep leaves them as sampled"
            )

    def shows(self, messages: list[dict]) -> bool:
        """Return whether the chat template shows messages that follow a turn."""
        try:
            return self.between(messages).count(RESULT) == len(messages)
        except ValueError:
            return False

    def rewrites(self, message: dict) -> bool:
        """Return whether a turn, or what stands before it, changes in the chat template once a message follows."""
        called = self.called([message])
        turn = self.turn(called)
        turn["content"] = f"<think>\n{THOUGHT}\n</think>\n\n{turn['content']}"
        alone = self.render([QUESTION, turn])
        followed = self.render([QUESTION, turn, *numbered([message])], prompt=True)
        if not called and THOUGHT not in followed:  # a turn with a call may have no place for other text
            return True
        return not followed.startswith(alone[: alone.rindex(MARK)])

    # Renderings

    def render(self, messages: list[dict], prompt: bool = False) -> str:
        """Return messages as text, with the generation prompt if asked for."""
        tools = self.schemas or None
        return self.tokenizer.apply_chat_template(messages, tools, tokenize=False, add_generation_prompt=prompt)

    def try_render(self, messages: list[dict], prompt: bool = False) -> str:
        """Return messages as text; end the run if the template raises."""
        try:
            return self.render(messages, prompt)
        except Exception as error:  # templates are programs of their own and raise whatever they like
            roles = ", ".join(message["role"] for message in messages)
            fail(f"{self.flag}: the chat template of --model refuses messages of {roles} ({first_line(error)})")

    def called(self, messages: list[dict]) -> tuple[str, ...]:
        """Return the names of the tools whose results are among the messages, as many as the template takes."""
        names = tuple(message.get("name") or self.tool_name for message in messages if message["role"] == "tool")
        return names[: self.most_calls]

    def turn(self, called: tuple[str, ...] = ()) -> dict:
        """Return a turn of the model in which MARK is the text, or an argument of each of its calls."""
        if not called:
            return {"role": "assistant", "content": MARK}
        functions = [{"name": name, "arguments": {"x": MARK}} for name in called]
        tool_calls = [{"id": call_id(i), "type": "function", "function": f} for i, f in enumerate(functions)]
        return {"role": "assistant", "content": "", "tool_calls": tool_calls}

    def between(self, messages: list[dict]) -> str:
        """Return the text between the end of a turn and the next one: end of turn, messages, generation prompt.

        Raise ValueError if the template refuses the messages, or changes the turn for them.
        """
        called = self.called(messages)
        before = [QUESTION, self.turn(called)]
        try:
            followed = after_marks(self.render([*before, *numbered(messages)], prompt=True), len(called))
            alone = after_marks(self.render(before), len(called)) if called else self.end
        except Exception as error:  # templates raise whatever they like
            raise ValueError(f"the chat template of --model refuses the messages ({first_line(error)})") from error
        closing = alone.removesuffix(self.end)  # what closes the last call
        if not (alone.endswith(self.end) and followed.startswith(closing)):
            raise ValueError("the chat template of --model changes turns with calls once results follow")
        return followed.removeprefix(closing)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    # What a conversation uses

    def calls(self, text: str) -> list[ToolCall | str]:
        """Return the calls in a turn, in order; a str says why one cannot be read.

        Thoughts hold no calls, unless --tool_call_pattern says what a call is.

        Args:
            text: decoded with special tokens, which may be part of a call, but without the stop token at its end.
        """
        return self.reader(text) if self.reader else []

    def observation_ids(self, messages: list[dict], last_token: int) -> list[int]:
        """Return the token ids between the turn just sampled and the next one; without chat template, of the contents.

        Raise ValueError if the template refuses the messages.

        Args:
            messages: {"role", "content"}, those of tools with their "name".
            last_token: of the turn. If it is a stop token, the one that the template writes there is left out.
        """
        # A tool may return half of a surrogate pair, which no tokenizer takes.
        messages = [{**m, "content": m["content"].encode(errors="replace").decode()} for m in messages]
        contents = [message["content"] for message in messages]
        if not self.has_template:
            return self.encode("".join(contents))
        if self.results_as_user and any(message["role"] == "tool" for message in messages):
            messages = [{"role": "user", "content": "\n".join(contents)}]
        ids = self.encode(self.between(messages))
        ends = {last_token, *self.encode(self.end)[:1]} & set(self.stop_ids)
        return ids[1:] if last_token in ends and ends.issuperset(ids[:1]) else ids


def after_marks(text: str, calls: int) -> str:
    """Return what follows the last MARK of a turn with so many calls; raise ValueError if one is missing."""
    marks = max(calls, 1)
    parts = text.split(MARK, marks)
    if len(parts) <= marks:
        raise ValueError("it does not show the turn before them")
    return parts[-1]


def numbered(messages: list[dict]) -> list[dict]:
    """Return messages in which those of tools name the calls that they answer."""
    ids = map(call_id, itertools.count())
    return [{**m, "tool_call_id": next(ids)} if m["role"] == "tool" else m for m in messages]


def call_id(number: int) -> str:
    """Return the name of a call; Mistral's templates ask for nine letters and digits."""
    return f"call{number:05d}"
