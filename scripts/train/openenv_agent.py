"""An --agent that plays the environment of an OpenEnv server, in a session of its own for each
response. The protocol is JSON, so the package openenv is not needed here:

    OPENENV_URL=http://127.0.0.1:8000 python grpo.py --agent scripts/train/openenv_agent.py:play \
        --dataset rows.jsonl --reward episode

A row has a prompt, to which the observation of `reset` is added; its other columns are arguments of
`reset`. Turns of the model are actions: JSON objects, or the value of the first required field. An
environment of tools (MCP) gets its calls, and ends with a turn without any. The reward is the sum
of the steps. The server needs a session for each of --generation_batch_size episodes
(`max_concurrent_envs`).
"""

import json
import os

import aiohttp

URL = os.environ.get("OPENENV_URL", "http://127.0.0.1:8000")


def as_text(observation):
    """Return an observation as the model reads it: its only text, or JSON."""
    values = list(observation.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(observation)


def as_action(text, schema):
    """Return a turn as an action; the server says what is wrong with it."""
    try:
        action = json.loads(text)
    except ValueError:
        action = text
    return action if isinstance(action, dict) else {schema["required"][0]: action}


async def play(base_url, prompt, **row):
    """Return the sum of an episode's rewards."""
    async with (
        aiohttp.ClientSession() as http,
        http.ws_connect(f"{URL}/ws", max_msg_size=0) as server,
    ):

        async def ask(kind, data):
            await server.send_json({"type": kind, "data": data})
            answer = await server.receive_json()
            if answer["type"] == "error" and answer["data"]["code"] != "VALIDATION_ERROR":
                raise RuntimeError(f"OpenEnv: {answer['data']['message']}")
            wrong = {"observation": answer["data"], "reward": None, "done": False}
            return wrong if answer["type"] == "error" else answer["data"]

        async with http.get(f"{URL}/schema") as answer:
            schema = (await answer.json())["action"]
        tools = []
        if schema["title"] in ("Action", "CallToolAction", "ListToolsAction"):
            for tool in (await ask("step", {"type": "list_tools"}))["observation"]["tools"]:
                function = {x: tool[x] for x in ("name", "description")}
                function["parameters"] = tool["input_schema"]
                tools.append({"type": "function", "function": function})
        result = await ask("reset", row)
        first = f"{prompt}\n\n{as_text(result['observation'])}"
        messages = [{"role": "user", "content": first}]
        total = 0.0
        while not result["done"]:
            body = {"messages": messages, "tools": tools}
            async with http.post(f"{base_url}/chat/completions", json=body) as answer:
                if answer.status != 200 and len(messages) == 1:
                    raise RuntimeError(await answer.text())
                if answer.status != 200:  # --max_turns is reached, or the context is full
                    break
                message = (await answer.json())["choices"][0]["message"]
            messages.append(message)
            actions = [(as_action(message["content"], schema), {"role": "user"})]
            if tools:
                calls = [(call["function"], call["id"]) for call in message.get("tool_calls", ())]
                actions = [
                    (
                        {
                            "type": "call_tool",
                            "tool_name": function["name"],
                            "arguments": json.loads(function["arguments"]),
                        },
                        {"role": "tool", "tool_call_id": identity},
                    )
                    for function, identity in calls
                ]
            if not actions:
                break
            for action, reply in actions:
                result = await ask("step", action)
                total += result["reward"] or 0.0
                messages.append({**reply, "content": as_text(result["observation"])})
                if result["done"]:
                    break
    return total
