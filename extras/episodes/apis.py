"""The APIs at an agent's address (--agent): OpenAI's Chat Completions and Responses, and Anthropic's
Messages.

Pure functions of JSON. A request of Responses becomes one of Messages, and a request of Messages one
of Chat Completions, which agents.py answers; the answer goes the same way back. A field without a
counterpart stays in the request: agents.py refuses it by its name. In the answers of Messages and
Responses a thought is apart from the text.

Sources: platform.openai.com/docs/api-reference, docs.anthropic.com/en/api/messages
"""

import json
from typing import Callable, Iterator, NamedTuple


class Api(NamedTuple):
    path: str
    to_chat: Callable[[dict], dict]
    from_chat: Callable[[dict], dict]
    # The events of an answer of the API, in which each part comes whole.
    stream: Callable[[dict], Iterator[str]]
    # Else they stay in the text: a client of Chat Completions may drop a field that it does not know,
    # and its next request would not begin with the answer.
    thoughts_apart: bool = True


def renamed(body: dict, names: dict[str, str]) -> dict:
    """Return an object with other names of its fields, {old: new}."""
    return {names.get(name, name): value for name, value in body.items()}


def event(kind: str, **fields) -> str:
    """Return a server-sent event that has a type."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"


# ---- Chat Completions ----------------------------------------------------------------------------


def chat_stream(answer: dict) -> Iterator[str]:
    choices = [renamed(choice, {"message": "delta"}) for choice in answer["choices"]]
    chunk = {**answer, "object": "chat.completion.chunk", "choices": choices}
    yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"


# ---- Messages ------------------------------------------------------------------------------------


def messages_to_chat(body: dict) -> dict:
    request = renamed(body, {"stop_sequences": "stop"})
    if choice := body.get("tool_choice"):
        request["tool_choice"] = choice["type"]
        if choice.get("disable_parallel_tool_use"):
            request["parallel_tool_calls"] = False
    turns = body["messages"]
    if system := request.pop("system", None):
        turns = [{"role": "system", "content": system}, *turns]
    request["messages"] = []
    for turn in turns:
        add_turn(request["messages"], turn)
        # An answer would go on in the assistant's last turn, which is refused by this name.
        request["continue_final_message"] = turn["role"] == "assistant"
    request["tools"] = [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description") or "",
                "parameters": tool["input_schema"],
            },
        }
        for tool in body.get("tools") or ()
    ]
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
            # As text, in which a key that is null is kept, as in the call that the policy wrote.
            function = {"name": part["name"], "arguments": json.dumps(part["input"])}
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


def messages_from_chat(answer: dict) -> dict:
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = message.get("tool_calls", [])
    content = []
    if "reasoning_content" in message:
        thought = message["reasoning_content"]
        content.append({"type": "thinking", "thinking": thought, "signature": "none"})
    if message["content"] or not calls:
        content.append({"type": "text", "text": message["content"]})
    for call in calls:
        function = call["function"]
        arguments = json.loads(function["arguments"])
        part = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments}
        content.append(part)
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    return {
        "id": answer["id"],
        "type": "message",
        "role": "assistant",
        "model": answer["model"],
        "content": content,
        "stop_reason": reasons[choice["finish_reason"]],
        "stop_sequence": None,
        "usage": renamed(
            answer["usage"], {"prompt_tokens": "input_tokens", "completion_tokens": "output_tokens"}
        ),
    }


def messages_stream(answer: dict) -> Iterator[str]:
    yield event("message_start", message={**answer, "content": [], "stop_reason": None})
    for i, part in enumerate(answer["content"]):
        kind = part["type"]
        if kind == "tool_use":
            begun = {**part, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(part["input"])}
        else:  # a text or a thought, in a field of the type's name
            begun = {**part, kind: ""}
            delta = {"type": f"{kind}_delta", kind: part[kind]}
        yield event("content_block_start", index=i, content_block=begun)
        yield event("content_block_delta", index=i, delta=delta)
        yield event("content_block_stop", index=i)
    ended = {"stop_reason": answer["stop_reason"], "stop_sequence": None}
    yield event("message_delta", delta=ended, usage=answer["usage"])
    yield event("message_stop")


# ---- Responses -----------------------------------------------------------------------------------


def responses_to_chat(body: dict) -> dict:
    request = renamed(body, {"max_output_tokens": "max_tokens", "instructions": "system"})
    items = request.pop("input")
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    request["messages"] = list(map(turn_of, items))
    tools = body.get("tools") or ()
    request["tools"] = [renamed(tool, {"parameters": "input_schema"}) for tool in tools]
    if choice := body.get("tool_choice"):
        request["tool_choice"] = {"type": choice}
    return messages_to_chat(request) | {"continue_final_message": False}  # it never does there


def turn_of(item: dict) -> dict:
    """Return an item of a request of Responses as a message of Messages."""
    kind = item.get("type", "message")
    if kind == "message":
        role = "system" if item["role"] == "developer" else item["role"]
        return {"role": role, "content": item["content"]}
    if kind == "reasoning":
        thought = "".join(part["text"] for part in item.get("content") or ())
        return {"role": "assistant", "content": [{"type": "thinking", "thinking": thought}]}
    if kind == "function_call":
        part = {**item, "id": item["call_id"], "input": json.loads(item["arguments"] or "{}")}
        return {"role": "assistant", "content": [{**part, "type": "tool_use"}]}
    if kind == "function_call_output":
        part = renamed(item, {"call_id": "tool_use_id", "output": "content"})
        return {"role": "user", "content": [{**part, "type": "tool_result"}]}
    raise ValueError(f"input: an item of type {kind!r} is not supported")


def responses_from_chat(answer: dict) -> dict:
    message = messages_from_chat(answer)
    is_cut = message["stop_reason"] == "max_tokens"
    status = "incomplete" if is_cut else "completed"
    return {
        "id": answer["id"],
        "object": "response",
        "created_at": answer["created"],
        "model": answer["model"],
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": [
            {"id": f"{answer['id']}-{i}", "status": status, **item_of(part)}
            for i, part in enumerate(message["content"])
        ],
        "usage": message["usage"],
    }


def item_of(part: dict) -> dict:
    """Return a part of an answer of Messages as an item of one of Responses."""
    if part["type"] == "thinking":
        content = [{"type": "reasoning_text", "text": part["thinking"]}]
        return {"type": "reasoning", "summary": [], "content": content}
    if part["type"] == "text":
        content = [{"type": "output_text", "text": part["text"], "annotations": []}]
        return {"type": "message", "role": "assistant", "content": content}
    call = {"type": "function_call", "call_id": part["id"], "name": part["name"]}
    return {**call, "arguments": json.dumps(part["input"])}


def responses_stream(answer: dict) -> Iterator[str]:
    begun = {**answer, "status": "in_progress", "incomplete_details": None, "output": []}
    yield event("response.created", response=begun)
    for i, item in enumerate(answer["output"]):
        for state in ("added", "done"):
            yield event(f"response.output_item.{state}", output_index=i, item=item)
    yield event(f"response.{answer['status']}", response=answer)


APIS = (
    Api("chat/completions", dict, dict, chat_stream, thoughts_apart=False),
    Api("responses", responses_to_chat, responses_from_chat, responses_stream),
    Api("messages", messages_to_chat, messages_from_chat, messages_stream),
)
