"""An --agent that plays an environment of the package verifiers 0.4. The package is in a virtual
environment of its own, in which this file runs as a server beside the training:

    python3 -m venv hub && hub/bin/pip install verifiers==0.4.0 ENVIRONMENT
    hub/bin/python scripts/train/verifiers_agent.py CONFIG.json tasks.jsonl &
    python grpo.py --agent scripts/train/verifiers_agent.py:play --dataset tasks.jsonl --reward episode

CONFIG.json is verifiers' config of an environment, such as {"taskset": {"id": "gsm8k-v1"}, "agent":
{"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": 10}}. Its key "select"
chooses among the tasks. The server writes a row for each task, with the number of the task, and
plays at the port VERIFIERS_PORT. Every agent that names no model of its own is the policy.
"""

import json
import os
import sys
import urllib.request

PORT = int(os.environ.get("VERIFIERS_PORT", 8741))


def play(base_url, task):
    """Return the reward of an episode: the mean of those of its agents that train."""
    body = json.dumps({"base_url": base_url, "task": task}).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}", body) as answer:
        result = json.load(answer)
    if result["errors"]:
        raise RuntimeError(result["errors"][-1])
    return sum(result["rewards"]) / len(result["rewards"])


def serve(config, rows):
    """Write the rows of an environment's tasks and play them, without end; see above for the
    arguments, the paths of two files.
    """
    import verifiers.v1 as vf
    from aiohttp import web

    with open(config) as file:
        given = json.load(file)
    select = vf.SelectConfig(**given.pop("select", {}))
    env = vf.load_environment(vf.resolve_env_config(given))
    tasks = list(env.taskset.select(select))
    with open(rows, "w") as file:
        for i, task in enumerate(tasks):
            # A task without a prompt has one that its environment writes.
            print(json.dumps({"prompt": task.data.prompt_text or "-", "task": i}), file=file)

    async def episode(request):
        asked = await request.json()
        client = vf.EvalClientConfig(base_url=asked["base_url"])
        (slot,) = env.slots(tasks[asked["task"]])
        played = await env.run_slot(slot, vf.ModelContext("policy", client))
        failed = [played, *played.traces] if not played.ok else ()
        errors = [f"{error.type}: {error.message}" for x in failed for error in x.errors]
        rewards = [trace.reward for trace in played.traces if trace.agent.trainable]
        return web.json_response({"rewards": rewards, "errors": errors})

    async def serving(_):
        async with env.serving():
            yield

    app = web.Application()
    app.router.add_post("/", episode)
    app.cleanup_ctx.append(serving)
    # An episode ends where its --agent_timeout does, or the run.
    web.run_app(app, host="127.0.0.1", port=PORT, handler_cancellation=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])
