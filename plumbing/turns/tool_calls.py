"""Calls of tools, read from the text of a turn.

A reader returns the calls in order: a ToolCall each, or a text for the model with the reason why a call cannot be read.
"""

import json
import re
from dataclasses import dataclass
from typing import Callable

from plumbing.rewards.answers import after_thought
from utils import first_line


@dataclass
class ToolCall:
    """A call as the model wrote it; whether there is such a tool, and whether the arguments fit, is not checked."""

    name: str
    arguments: dict


def read_call(value) -> ToolCall | str:
    """Return the call in a JSON value, or the text of the error."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return 'a call has to be a JSON object with "name" and "arguments"'
    arguments = value.get("arguments") or {}
    arguments = json_or_text(arguments) if isinstance(arguments, str) else arguments  # some models write it as a string
    if not isinstance(arguments, dict):
        return f"the arguments of {value['name']} have to be a JSON object"
    return ToolCall(value["name"], arguments)


def json_or_text(text: str):
    """Return the value of a JSON text, or the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # the second: brackets in thousands of brackets
        return text


def hermes_reader(prompt: str) -> Callable[[str], list[ToolCall | str]]:
    """Return a reader of <tool_call>{"name": ..., "arguments": {...}}</tool_call>, the form of Hermes and Qwen.

    Thoughts hold no calls.

    Args:
        prompt: any prompt, which may end with the beginning of a thought.
    """
    opened = "<think>" if prompt.rstrip().endswith("<think>") else ""

    def read(text: str) -> list[ToolCall | str]:
        calls = []
        for part in after_thought(opened + text).split("<tool_call>")[1:]:
            body, closed, _ = part.partition("</tool_call>")
            try:
                calls.append(read_call(json.loads(body)) if closed else "<tool_call> is not closed by </tool_call>")
            except (ValueError, RecursionError) as error:
                calls.append(f"the call is not valid JSON ({first_line(error)})")
        return calls

    return read


def response_template_reader(tokenizer, prompt: str, schemas: list[dict]) -> Callable[[str], list[ToolCall | str]]:
    """Return a reader of the form that the tokenizer's response template describes."""

    def read(text: str) -> list[ToolCall | str]:
        try:
            message = tokenizer.parse_response(text, prefix=prompt, tools=schemas)
        except Exception as error:  # the template names the functions that read its parts; they may raise any error
            return [f"the call cannot be read ({first_line(error)})"]
        return [read_call(call.get("function")) for call in message.get("tool_calls") or []]

    return read


def pattern_reader(pattern: str, schemas: list[dict]) -> Callable[[str], list[ToolCall | str]]:
    """Return a reader of the calls that match --tool_call_pattern; raise ValueError if the pattern lacks a group.

    The group "arguments" holds a JSON object with names of the tool's parameters, or else the value of the only
    parameter. The group "name" names the tool; without it the only tool is meant. A dot matches line ends, too.
    """
    tools = {schema["function"]["name"]: schema["function"]["parameters"]["properties"] for schema in schemas}
    compiled = re.compile(pattern, re.DOTALL)
    if "arguments" not in compiled.groupindex:
        raise ValueError("requires a group (?P<arguments>...), which holds the arguments of a call")
    if "name" not in compiled.groupindex and len(tools) != 1:
        raise ValueError("requires a group (?P<name>...), which names the tool, unless there is exactly one")

    def read(match: re.Match) -> ToolCall | str:
        groups = match.groupdict(default="")
        name, text = groups.get("name", next(iter(tools), "")).strip(), groups["arguments"].strip()
        value, parameters = json_or_text(text), tools.get(name, {})
        if len(parameters) == 1 and not (isinstance(value, dict) and value.keys() == parameters.keys()):
            [(parameter, schema)] = parameters.items()
            return ToolCall(name, {parameter: text if schema.get("type") == "string" else value})
        return read_call({"name": name, "arguments": value})

    return lambda text: [read(match) for match in compiled.finditer(text)]
