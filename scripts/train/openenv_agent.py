"""An --agent that plays the environment of an OpenEnv server, in a session of its own for each
response. The protocol is JSON, so the package openenv is not needed here:

    OPENENV_URL=http://127.0.0.1:8000 python grpo.py --agent scripts/train/openenv_agent.py:play \
        --dataset rows.jsonl --reward episode

A row has a prompt that says what the actions are. The observation of `reset` is added to it; the
row's other columns are the arguments of `reset`. A turn of the model is an action: a JSON object, or
the value of the first required field. The reward is the sum of the steps. The server needs a session
for each of --generation_batch_size episodes (`max_concurrent_envs`).
"""

import json
import os

import aiohttp

URL = os.environ.get("OPENENV_URL", "http://127.0.0.1:8000")


def as_text(observation):
    """Return an observation as the model reads it: its only value if that is a text, else JSON."""
    values = list(observation.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(observation)


def as_action(text, schema):
    """Return a turn of the model as an action, whose JSON schema is given."""
    try:
        action = json.loads(text)
    except ValueError:
        action = None
    return action if isinstance(action, dict) else {schema.get("required", ["text"])[0]: text}


async def play(base_url, prompt, **row):
    """Return the sum of an episode's rewards."""
    async with (
        aiohttp.ClientSession() as http,
        http.ws_connect(f"{URL}/ws", max_msg_size=0) as server,
    ):

        async def ask(kind, data):
            await server.send_json({"type": kind, "data": data})
            answer = await server.receive_json()
            said = answer["data"]
            if answer["type"] != "error":
                return said
            if said["code"] != "VALIDATION_ERROR":  # that of an action, for the model to read
                raise RuntimeError(f"OpenEnv: {said['message']}")
            return {"observation": {"error": said["message"]}, "reward": 0.0, "done": False}

        async with http.get(f"{URL}/schema") as answer:
            schema = (await answer.json())["action"]
        result = await ask("reset", row)
        text = f"{prompt}{as_text(result['observation'])}"
        messages = []
        total = 0.0
        while not result["done"]:
            messages.append({"role": "user", "content": text})
            body = {"messages": messages}
            async with http.post(f"{base_url}/chat/completions", json=body) as answer:
                if answer.status != 200 and len(messages) == 1:
                    raise RuntimeError(await answer.text())
                if answer.status != 200:  # --max_turns is reached, or the context is full
                    break
                message = (await answer.json())["choices"][0]["message"]
            messages.append(message)
            result = await ask("step", as_action(message["content"], schema))
            total += result["reward"] or 0.0
            text = as_text(result["observation"])
    return total
