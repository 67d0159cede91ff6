"""The text between the turns of a conversation: calls of tools are read from a turn, results become token ids.

What was sampled is never tokenised again. What stands between two turns is the difference of two renderings of the chat
template, in which MARK takes the place of the turn.

Imports utils and plumbing.answers (what of a turn is a thought).
"""

import itertools
import json
import os
import re
from dataclasses import dataclass
from typing import Callable

from plumbing.answers import after_thought
from utils import fail, first_line

MARK = "SAMPLED-TURN"  # stands where a rendering holds what was sampled
THOUGHT = "A-THOUGHT"
RESULT = "A-RESULT"
QUESTION = {"role": "user", "content": "x"}


@dataclass
class ToolCall:
    """A call as the model wrote it; whether there is such a tool, and whether the arguments fit, is not checked."""

    name: str
    arguments: dict


# ---- calls in a turn -------------------------------------------------------------------------------------------------


def read_call(value) -> ToolCall | str:
    """Return the call that a JSON value describes, or the text of the error."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return 'a call has to be a JSON object with "name" and "arguments"'
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # some models write the object as a string
        arguments = load_json(arguments)
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        return f"the arguments of {value['name']} have to be a JSON object"
    return ToolCall(value["name"], arguments)


def load_json(text: str):
    """Return the value of a JSON text, or the text itself if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # the second: brackets in thousands of brackets
        return text


def hermes_calls(text: str) -> list[ToolCall | str]:
    """Return the calls <tool_call>{"name": ..., "arguments": {...}}</tool_call>, the form of Hermes and Qwen."""
    calls = []
    for part in text.split("<tool_call>")[1:]:
        body, closed, _ = part.partition("</tool_call>")
        try:
            calls.append(read_call(json.loads(body)) if closed else "<tool_call> is not closed by </tool_call>")
        except (ValueError, RecursionError) as error:
            calls.append(f"the call is no valid JSON ({first_line(error)})")
    return calls


def llama_calls(text: str) -> list[ToolCall | str]:
    """Return the calls of a turn that begins with {"name": ..., "parameters": {...}}, the form of Llama 3.1.

    <|python_tag|> may stand before the first one, and semicolons between them. Any other JSON object is no call.
    """
    _, tag, tagged = text.partition("<|python_tag|>")
    text, calls, decoder = (tagged if tag else text).strip(), [], json.JSONDecoder()
    while text.startswith("{"):
        try:
            value, end = decoder.raw_decode(text)
        except (ValueError, RecursionError) as error:
            if tag or re.match(r'\{\s*"name"', text):
                calls.append(f"the call is no valid JSON ({first_line(error)})")
            break
        if "name" not in value:
            break
        calls.append(read_call(value))
        text = text[end:].lstrip("; \n\t")
    if tag and not calls:
        calls = ['a call has to be a JSON object with "name" and "parameters"']
    return calls


def pattern_reader(pattern: str, schemas: list[dict]) -> Callable[[str], list[ToolCall | str]]:
    """Return the function that reads the calls which match --tool_call_pattern.

    The group "arguments" holds a JSON object with names of the tool's parameters, or else the value of the only
    parameter. The group "name" names the tool; without it the only tool is meant. A dot matches line ends, too. End the
    run if the pattern lacks what it needs.
    """
    flag = f"--tool_call_pattern {pattern!r}"
    tools = {schema["function"]["name"]: schema["function"] for schema in schemas}
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except (re.error, RecursionError, OverflowError) as error:
        fail(f"{flag}: is no regular expression ({first_line(error)})")
    if "arguments" not in compiled.groupindex:
        fail(f"{flag}: has no group (?P<arguments>...), which holds the arguments of a call")
    if "name" not in compiled.groupindex and len(tools) > 1:
        fail(f"{flag}: has no group (?P<name>...), which says which of {', '.join(tools)} is called")
    if compiled.search(""):
        fail(f"{flag}: matches the empty text, and so every response would hold calls")

    def read(match: re.Match) -> ToolCall | str:
        groups = match.groupdict(default="")
        name = groups.get("name", next(iter(tools))).strip()
        if name not in tools:
            return f"there is no tool {name!r}, there are {', '.join(tools)}"
        parameters = tools[name]["parameters"]["properties"]
        text = groups["arguments"].strip()
        value = load_json(text)
        is_object = isinstance(value, dict)
        if len(parameters) == 1 and not (is_object and value.keys() == parameters.keys()):
            [(parameter, schema)] = parameters.items()
            return ToolCall(name, {parameter: text if schema.get("type") == "string" else value})
        if not is_object and (text or parameters):
            return f"the arguments of {name} have to be a JSON object"
        return ToolCall(name, value if is_object else {})

    return lambda text: [read(match) for match in compiled.finditer(text)]


# ---- what stands between two turns -----------------------------------------------------------------------------------


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
        self.tails: dict[int, str] = {}
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
            if schemas:
                self.check_results()
            if args.environment and has_step:
                self.check_follows({"role": "user", "content": RESULT})
            turn = self.try_render([QUESTION, self.turn(0)])
            self.end_ids = self.encode(self.after(turn, 0))

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

        readers = [lambda text: hermes_calls(after_thought(opened + text))]
        readers += [lambda text: llama_calls(after_thought(opened + text))]
        if getattr(self.tokenizer, "response_template", None):
            readers.insert(0, of_response_template)
        turn = self.turn(1)
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
        calls = int(message["role"] == "tool")
        self.try_render([QUESTION, self.turn(calls), *numbered([message])], prompt=True)
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
        calls = int(message["role"] == "tool")
        turn = self.turn(calls)
        turn["content"] = f"<think>\n{THOUGHT}\n</think>\n\n{turn['content']}"
        alone = self.render([QUESTION, turn])
        followed = self.render([QUESTION, turn, *numbered([message])], prompt=True)
        if not calls and THOUGHT not in followed:  # a turn with a call may have no place for other text
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

    def turn(self, calls: int, names: tuple[str, ...] = ()) -> dict:
        """Return a turn of the model in which MARK is the text, or the last argument of each of its calls."""
        if not calls:
            return {"role": "assistant", "content": MARK}
        names = names or (self.tool_name,) * calls
        functions = [{"name": name, "arguments": {"x": MARK}} for name in names]
        tool_calls = [{"id": call_id(i), "type": "function", "function": f} for i, f in enumerate(functions)]
        return {"role": "assistant", "content": "", "tool_calls": tool_calls}

    def after(self, text: str, calls: int) -> str:
        """Return what follows the last MARK of a turn with so many calls; raise ValueError if one is missing."""
        marks = max(calls, 1)
        parts = text.split(MARK, marks)
        if len(parts) <= marks:
            raise ValueError("it does not show the turn before them")
        return parts[-1]

    def tail(self, calls: int) -> str:
        """Return what the template writes between the last argument of a turn's last call and the end of the turn."""
        if calls == 0:
            return ""
        if calls not in self.tails:
            end = self.after(self.render([QUESTION, self.turn(0)]), 0)
            text = self.after(self.render([QUESTION, self.turn(calls)]), calls)
            if not text.endswith(end):
                raise ValueError("it ends a turn with calls differently")
            self.tails[calls] = text.removesuffix(end)
        return self.tails[calls]

    def between(self, messages: list[dict]) -> str:
        """Return the text between the end of a turn and the next one: end of turn, messages, generation prompt.

        Raise ValueError if the template refuses the messages, or changes the turn for them.
        """
        names = tuple(m.get("name") or self.tool_name for m in messages if m["role"] == "tool")[: self.most_calls]
        calls = len(names)
        try:
            text = self.after(self.render([QUESTION, self.turn(calls, names), *numbered(messages)], prompt=True), calls)
            tail = self.tail(calls)
        except Exception as error:  # templates raise whatever they like
            raise ValueError(f"the chat template of --model refuses the messages ({first_line(error)})") from error
        if not text.startswith(tail):
            raise ValueError("the chat template of --model changes a turn with calls once their results follow")
        return text.removeprefix(tail)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    # What a conversation uses

    def calls(self, text: str) -> list[ToolCall | str]:
        """Return the calls in the text of a turn, in order; a str says why one cannot be read.

        Thoughts hold no calls, unless --tool_call_pattern says what a call is.
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
        if last_token in self.stop_ids and ids[:1] in ([last_token], self.end_ids[:1]) and ids[0] in self.stop_ids:
            ids = ids[1:]
        return ids


def numbered(messages: list[dict]) -> list[dict]:
    """Return messages in which those of tools name the calls that they answer."""
    ids = map(call_id, itertools.count())
    return [{**m, "tool_call_id": next(ids)} if m["role"] == "tool" else m for m in messages]


def call_id(number: int) -> str:
    """Return the name of a call; Mistral's templates ask for nine letters and digits."""
    return f"call{number:05d}"
