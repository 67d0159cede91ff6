"""Calls of tools, read from the text of a turn in the forms in which models write them.

A reader returns the calls in order. Of one that cannot be read it returns a text that says why, for the model.

Imports utils only.
"""

import json
import re
from dataclasses import dataclass
from typing import Callable

from utils import fail, first_line


@dataclass
class ToolCall:
    """A call as the model wrote it; whether there is such a tool, and whether the arguments fit, is not checked."""

    name: str
    arguments: dict


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


def xml_calls(text: str, schemas: list[dict]) -> list[ToolCall | str]:
    """Return the calls <tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>.

    It is the form of Qwen3-Coder, Qwen3.5 and Nemotron 3, which write JSON for values that are no text.
    """
    calls, tools = [], {schema["function"]["name"]: schema["function"] for schema in schemas}
    for part in text.split("<tool_call>")[1:]:
        body, closed, _ = part.partition("</tool_call>")
        function = re.fullmatch(r"\s*<function=([^>\n]+)>(.*)</function>\s*", body, re.DOTALL)
        if not closed or not function:
            calls.append("a call has to be <tool_call>, <function=NAME>, its parameters, </function>, </tool_call>")
            continue
        name, parameters = function[1].strip(), function[2]
        properties = tools[name]["parameters"]["properties"] if name in tools else {}
        written = re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", parameters, re.DOTALL)
        values = {key.strip(): value_of(value, properties.get(key.strip(), {})) for key, value in written}
        calls.append(ToolCall(name, values))
    return calls


def value_of(text: str, schema: dict):
    """Return the value that a text stands for, by the schema of its parameter; the text where it stands for none."""
    if schema.get("type") == "string":
        return text
    words = {"True": True, "False": False, "None": None}  # as templates written for Python have them
    return words[text] if text in words else load_json(text)


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
            return ToolCall(name, {parameter: value_of(text, schema)})
        if not is_object and (text or parameters):
            return f"the arguments of {name} have to be a JSON object"
        return ToolCall(name, value if is_object else {})

    return lambda text: [read(match) for match in compiled.finditer(text)]
