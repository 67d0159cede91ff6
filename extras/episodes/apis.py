"""The APIs at an agent's address (--agent): OpenAI's Chat Completions and Responses, and Anthropic's
Messages.

Pure functions of JSON: a request becomes one of Chat Completions, whose answer becomes one of the
API, or the text of its stream. What has no counterpart stays in the request: agents.py refuses it by
its name. In the answers of the two younger APIs a thought is apart from the text.

Sources: platform.openai.com/docs/api-reference, docs.anthropic.com/en/api/messages
"""

import json
from typing import Callable, NamedTuple

USAGE = {"prompt_tokens": "input_tokens", "completion_tokens": "output_tokens"}


class Api(NamedTuple):
    path: str
    to_chat: Callable[[dict], dict]
    from_chat: Callable[[dict], dict]
    stream: Callable[[dict], str]  # of an answer of the API, each part of which comes whole
    thoughts_apart: bool = True


def renamed(body: dict, names: dict[str, str]) -> dict:
    """Return an object with other names of its fields, {old: new}."""
    return {names.get(name, name): value for name, value in body.items()}


def as_events(events: list[dict]) -> str:
    """Return server-sent events that have types."""
    return "".join(f"event: {x['type']}\ndata: {json.dumps(x)}\n\n" for x in events)


def chat_request(body: dict, system: str, turns: list[dict], schema: str) -> dict:
    """Return a request as one of Chat Completions.

    Args:
        system: the field of the system's text. turns: the other messages, as in Messages.
        schema: the field of a tool that describes its parameters.
    """
    request = {**body, "messages": [], "tools": []}
    if text := request.pop(system, None):
        turns = [{"role": "system", "content": text}, *turns]
    for turn in turns:
        add_turn(request["messages"], turn)
    for tool in body.get("tools") or ():
        function = {"name": tool["name"], "description": tool.get("description") or ""}
        function["parameters"] = tool[schema]
        request["tools"].append({"type": "function", "function": function})
    return request


def add_turn(messages: list[dict], turn: dict) -> None:
    """Add a message of Messages to those of Chat Completions: to the last one, if both are of the
    assistant. The results of tools, parts of the user's message, are messages before it.
    """
    message = {"role": turn["role"], "content": [], "tool_calls": []}
    if messages and turn["role"] == "assistant" == messages[-1]["role"]:
        message = messages.pop()
    for part in parts(turn["content"]):
        kind = part.get("type")
        if kind == "thinking":
            message["reasoning_content"] = part["thinking"]
        elif kind == "tool_use":
            function = {"name": part["name"], "arguments": part["input"]}
            message["tool_calls"].append({"id": part["id"], "function": function})
        elif kind == "tool_result":
            content = parts(part.get("content") or "")
            result = {"role": "tool", "tool_call_id": part["tool_use_id"], "content": content}
            messages.append(result)
        else:
            message["content"].append(part)
    if message["content"] or turn["role"] == "assistant":
        messages.append(message)


def parts(content: str | list[dict]) -> list[dict]:
    """Return a content as parts: what texts say, without marks for caches and citations; others,
    such as images, as they are.
    """
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [{"type": "text", "text": part["text"]} if "text" in part else part for part in content]


def said(answer: dict) -> tuple[list[str], list[str], list[dict], str]:
    """Return the thoughts, texts and calls of an answer of Chat Completions, and why it ended."""
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = message.get("tool_calls", [])
    texts = [message["content"]] if message["content"] or not calls else []
    thoughts = [message["reasoning_content"]] if "reasoning_content" in message else []
    return thoughts, texts, calls, choice["finish_reason"]


# ---- Chat Completions ----------------------------------------------------------------------------


def chat_stream(answer: dict) -> str:
    choices = [renamed(choice, {"message": "delta"}) for choice in answer["choices"]]
    chunk = {**answer, "object": "chat.completion.chunk", "choices": choices}
    return f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"


# ---- Responses -----------------------------------------------------------------------------------


def responses_to_chat(body: dict) -> dict:
    request = renamed(body, {"max_output_tokens": "max_tokens"})
    items = request.pop("input")
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    return chat_request(request, "instructions", list(map(turn_of, items)), "parameters")


def turn_of(item: dict) -> dict:
    """Return an item of a request of Responses as a message of Messages."""
    kind = item.get("type", "message")
    if kind == "message":
        role = "system" if item["role"] == "developer" else item["role"]
        return {"role": role, "content": item["content"]}
    if kind == "function_call_output":
        part = renamed(item, {"call_id": "tool_use_id", "output": "content"})
        return {"role": "user", "content": [{**part, "type": "tool_result"}]}
    if kind == "function_call":
        part = renamed({**item, "id": item["call_id"]}, {"arguments": "input"})
        return {"role": "assistant", "content": [{**part, "type": "tool_use"}]}
    if kind == "reasoning":
        thought = "".join(part["text"] for part in item.get("content") or ())
        return {"role": "assistant", "content": [{"type": "thinking", "thinking": thought}]}
    raise ValueError(f"input: an item of type {kind!r} is not supported")


def responses_from_chat(answer: dict) -> dict:
    thoughts, texts, calls, reason = said(answer)
    content = [{"type": "output_text", "text": text, "annotations": []} for text in texts]
    thought = [{"type": "reasoning_text", "text": text} for text in thoughts]
    output = [
        *({"type": "reasoning", "summary": [], "content": thought} for _ in thoughts),
        *({"type": "message", "role": "assistant", "content": content} for _ in texts),
        *({"type": "function_call", "call_id": x["id"], **x["function"]} for x in calls),
    ]
    status = "incomplete" if reason == "length" else "completed"
    return {
        "id": answer["id"],
        "object": "response",
        "created_at": answer["created"],
        "model": answer["model"],
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if reason == "length" else None,
        "output": [
            {"id": f"{answer['id']}-{i}", "status": status, **item} for i, item in enumerate(output)
        ],
        "usage": renamed(answer["usage"], USAGE),
    }


def responses_stream(answer: dict) -> str:
    begun = {**answer, "status": "in_progress", "output": []}
    items = [
        {"type": f"response.output_item.{state}", "output_index": i, "item": item}
        for i, item in enumerate(answer["output"])
        for state in ("added", "done")
    ]
    ended = {"type": f"response.{answer['status']}", "response": answer}
    return as_events([{"type": "response.created", "response": begun}, *items, ended])


# ---- Messages ------------------------------------------------------------------------------------


def messages_to_chat(body: dict) -> dict:
    request = renamed(body, {"stop_sequences": "stop"})
    if choice := body.get("tool_choice"):
        request["tool_choice"] = choice["type"]
    return chat_request(request, "system", body["messages"], "input_schema")


def messages_from_chat(answer: dict) -> dict:
    thoughts, texts, calls, reason = said(answer)
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    return {
        "id": answer["id"],
        "type": "message",
        "role": "assistant",
        "model": answer["model"],
        "content": [
            *({"type": "thinking", "thinking": text, "signature": "none"} for text in thoughts),
            *({"type": "text", "text": text} for text in texts),
            *(tool_use(call["id"], **call["function"]) for call in calls),
        ],
        "stop_reason": reasons[reason],
        "stop_sequence": None,
        "usage": renamed(answer["usage"], USAGE),
    }


def tool_use(identity: str, name: str, arguments: str) -> dict:
    """Return a call of a tool as a part of an answer of Messages."""
    return {"type": "tool_use", "id": identity, "name": name, "input": json.loads(arguments)}


def messages_stream(answer: dict) -> str:
    begun = {**answer, "content": [], "stop_reason": None}
    events: list[dict] = [{"type": "message_start", "message": begun}]
    for i, part in enumerate(answer["content"]):
        kind = part["type"]
        empty = {**part, kind: ""}  # a text or a thought, in a field of the type's name
        delta = {"type": f"{kind}_delta", kind: part.get(kind)}
        if kind == "tool_use":
            empty = {**part, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(part["input"])}
        events += [
            {"type": "content_block_start", "index": i, "content_block": empty},
            {"type": "content_block_delta", "index": i, "delta": delta},
            {"type": "content_block_stop", "index": i},
        ]
    delta = {"stop_reason": answer["stop_reason"], "stop_sequence": None}
    ended = {"type": "message_delta", "delta": delta, "usage": answer["usage"]}
    return as_events([*events, ended, {"type": "message_stop"}])


APIS = (
    Api("chat/completions", dict, dict, chat_stream, thoughts_apart=False),
    Api("responses", responses_to_chat, responses_from_chat, responses_stream),
    Api("messages", messages_to_chat, messages_from_chat, messages_stream),
)
