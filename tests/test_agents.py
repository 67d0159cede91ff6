"""Agents behind an address: the rows that their requests become, and what bad ones do not break."""

import asyncio
import json
import os
import re
import socket
import subprocess
import textwrap
import threading
import time
import types

import numpy as np
import pytest
import torch
from helpers import ROOT, free_port, table
from test_turns import ADD, QWEN25
from test_turns import tokenizer_of as tokenizer_of  # a fixture
from tiny_models import CPU, WORLD, random_model

import grpo
from extras.episodes import agents
from extras.episodes.agents import Agents, plain
from extras.episodes.conversations import Conversation
from plumbing.processes import run_all
from plumbing.rollout.batch import Batch, Sample, forward_batch

# Runs the code of its row, which may call ask(messages..., options of the API).
AGENT = """
import json, os, signal, socket, threading, time, urllib.request
import anthropic, openai
import anthropic.resources.messages, openai.resources.responses  # slow, once

CLIENT = openai.OpenAI(base_url="http://127.0.0.1", api_key="none", max_retries=0)

def user(text):
    return {"role": "user", "content": text}

def side_by_side(*calls):
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
        time.sleep(0.05)  # they begin in this order
    for thread in threads:
        thread.join()

def play(base_url, code, tools=()):
    client = CLIENT.with_options(base_url=base_url)
    def ask(*messages, **options):
        answer = client.chat.completions.create(model="m", messages=list(messages), **options)
        return answer.choices[0]
    names = {**globals(), "ask": ask, "client": client, "url": base_url, "tools": tools}
    exec(code, names)
    return names.get("reward", 1.0)
"""


class Engine:
    """Says what comes next of some texts; all requests are kept in `asked`."""

    def __init__(self, tokenizer, texts: tuple, seconds: float):
        self.tokenizer = tokenizer
        self.texts = texts
        self.seconds = seconds  # of a response
        self.asked = []

    async def sample(self, place, query, seed, length, stop_ids, args):
        text = self.texts[min(len(self.asked), len(self.texts) - 1)]
        ids = [*self.tokenizer.encode(text), stop_ids[0]][:length]
        sampling = dict(temperature=args.temperature, stops=args.turn_stop)
        self.asked.append(dict(query=query, seed=seed, length=length, ids=ids, **sampling))
        await asyncio.sleep(self.seconds)
        return np.array(ids), {"rollout_logprobs": [-0.5] * len(ids), "further": ids}

    def run_all(self, calls, interrupted) -> None:
        asyncio.run(run_all(calls, interrupted))


@pytest.fixture(scope="module")
def play(tokenizer_of, tmp_path_factory):
    """A function: codes of agents, or columns of rows; what the engine says; flags ->
    conversations, engine.
    """
    path = tmp_path_factory.mktemp("agent") / "agent.py"
    path.write_text(AGENT)
    tokenizer = tokenizer_of(QWEN25)
    made = {}

    def play(
        *codes, says=("ok",), script=grpo, seconds=0.2, **flags
    ) -> tuple[list[Conversation], Engine]:
        key = str(flags)
        if key not in made:
            args = script.Args(**{"agent": f"{path}:play", "reward": ("episode",)} | flags)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(agents, "positions_of", lambda _: 1000)
                stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
                made[key] = Agents(args, tokenizer, [stop])
        engine = Engine(tokenizer, says, seconds)
        rows = [
            {
                "query": [5],
                "prompt": "",
                "columns": code if isinstance(code, dict) else {"code": code, "tools": [ADD]},
            }
            for code in codes
        ]
        ended = {}
        draws = np.arange(7, 7 + len(rows))[:, None]
        made[key].sample(rows, [1] * len(rows), draws, lambda: False, ended.__setitem__, engine)
        return [ended[place] for place in range(len(rows))], engine

    return play


def contexts_of(conversation: Conversation) -> list[tuple]:
    """(all token ids, those that train) of each context."""
    x = conversation
    sample = Sample(x.row, x.response, x.outputs, True, x, starts=x.starts)
    return [
        ([*query, *ids], [token for token, sampled in zip(ids, mask) if sampled])
        for query, ids, mask in sample.contexts
    ]


CALL = '<tool_call>\n{"name":   "add", "arguments": {"a":1,"b" : null}}\n</tool_call>'
LINEAR = """
first = ask(user("1+2?"), tools=tools)
assert first.finish_reason == "tool_calls" and first.message.content == "", first
call, = first.message.tool_calls
assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": None})
again = {"role": "assistant", "content": None, "refusal": None, "annotations": [], "tool_calls": [
    {"id": call.id, "type": "function", "function": {"name": "add", "arguments": '{"b":null, "a" : 1}'}}]}
result = {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "3<|im_end|>"}]}
second = ask(user("1+2?"), again, result, tools=tools)
assert second.finish_reason == "tool_calls"
third = ask(user("1+2?"), again, result, again, result, tools=tools)
assert third.finish_reason == "stop" and third.message.content == "It is 3."
reward = 0.5
"""


def test_a_conversation_keeps_its_tokens(play):
    """Calls that the model writes oddly and a client in another way, and a result that spells a
    special token: one context, of the tokens as they were sampled.
    """
    [one], engine = play(LINEAR, says=(CALL, CALL, "It is 3."))
    assert (one.error, one.stop_reason, one.reward, one.starts) == ("", "done", 0.5, [])
    queries, sampled = zip(*[(request["query"], request["ids"]) for request in engine.asked])
    for before, ids, after in zip(queries, sampled, queries[1:]):
        assert after[: len(before) + len(ids)] == before + ids
    assert contexts_of(one) == [(queries[2] + sampled[2], sum(sampled, []))]
    assert one.row["query"] == queries[0] and {len(x) for x in one.outputs.values()} == {
        len(one.response)
    }
    stop = engine.tokenizer.convert_tokens_to_ids("<|im_end|>")
    between = queries[1][len(queries[0]) + len(sampled[0]) :]
    assert between.count(stop) == 1 and "3<|im_end|>" in engine.tokenizer.decode(between)
    assert [message["content"] for message in one.turns] == ["", "", "It is 3."]
    assert one.metrics()["tool_calls"] == 2
    trained = [x for x, m in zip(one.outputs["further"], one.outputs["response_mask"]) if m]
    assert trained == list(map(float, sum(sampled, [])))


# A conversation by other APIs: thoughts and calls come back, and a sum as the result of a tool.
CLIENTS = {
    "responses": """
function = {"type": "function", "strict": True, **tools[0]["function"]}
options = dict(model="m", instructions="Add.", tools=[function])
while True:
    if STREAM:
        with client.responses.stream(input=given, **options) as stream:
            answer = stream.get_final_response()
    else:
        answer = client.responses.create(input=given, **options)
    given += answer.output
    calls = [item for item in answer.output if item.type == "function_call"]
    if not calls:
        break
    assert json.loads(calls[0].arguments) == {"a": 1, "b": None} and not answer.output_text
    given += [{"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in calls]
assert answer.output[0].content[0].text == "Sure." and answer.usage.output_tokens > 10
said.append(answer.output_text)
def cut():
    options = dict(model="m", input="y", max_output_tokens=1)
    begun, *_, ended = client.responses.create(stream=True, **options)
    assert begun.response.incomplete_details is None and ended.type == "response.incomplete"
    return ended.response.incomplete_details.reason
""",
    "messages": """
client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0)
function = dict(tools[0]["function"])
function["input_schema"] = function.pop("parameters")
system = [{"type": "text", "text": "Add.", "cache_control": {"type": "ephemeral"}}]
options = dict(model="m", max_tokens=199, system=system, tools=[function], tool_choice={"type": "auto"})
while True:
    if STREAM:
        with client.messages.stream(messages=given, **options) as stream:
            answer = stream.get_final_message()
    else:
        answer = client.messages.create(messages=given, **options)
    given.append({"role": "assistant", "content": answer.content})
    calls = [block for block in answer.content if block.type == "tool_use"]
    if not calls:
        break
    assert calls[0].input == {"a": 1, "b": None} and answer.stop_reason == "tool_use"
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "3"} for call in calls]
    given.append({"role": "user", "content": results})
thought, text = answer.content
assert (thought.thinking, answer.stop_reason, answer.usage.output_tokens > 10) == ("Sure.", "end_turn", True)
said.append(text.text)
cut = lambda: client.messages.create(model="m", messages=[user("y")], max_tokens=1).stop_reason
""",
    "agents": """
import agents, asyncio
agents.set_tracing_disabled(True)
asked = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
agents.set_default_openai_client(asked, use_for_tracing=False)
@agents.function_tool
def add(a: int, b: int | None) -> int:
    return 3
adder = agents.Agent(name="adder", instructions="Add.", tools=[add])
async def run():
    if not STREAM:
        return await agents.Runner.run(adder, given)
    result = agents.Runner.run_streamed(adder, given)
    async for _ in result.stream_events():
        pass
    return result
said.append(asyncio.run(run()).final_output)
cut = lambda: ask(user("y"), max_tokens=1).finish_reason
""",
}
TWICE = """
said = []
for STREAM in (False, True):
    given = [user(f"1+2? {STREAM}")]
    CODE
assert said == ["It is 3."] * 2, said
reward = ("length", "max_tokens", "max_output_tokens").index(cut())
"""


@pytest.mark.parametrize("reward, api", [*enumerate(["agents", "messages", "responses"])])
def test_other_apis_keep_the_tokens(play, api, reward):
    """Thoughts and calls that come back are the tokens that were sampled; streamed or not."""
    if api == "agents":
        pytest.importorskip("agents")  # openai-agents, which tests do not install
    says = (
        f"<think>\nI call.\n</think>\n\n{CALL}",
        f"<think>again</think>{CALL}",
        "<think>\nSure.\n</think>\n\nIt is 3.",
    )
    code = TWICE.replace("CODE", textwrap.indent(CLIENTS[api], "    ").lstrip())
    [one], engine = play(code, says=says * 2 + ("ok",))
    assert (one.error, one.reward, len(one.starts)) == ("", reward, 2)
    queries, sampled = zip(*[(request["query"], request["ids"]) for request in engine.asked])
    for last in (2, 5):
        whole = queries[last] + sampled[last], sum(sampled[last - 2 : last + 1], [])
        assert whole in contexts_of(one)
        first = engine.tokenizer.decode(queries[last - 2])
        assert "<|im_start|>system\nAdd.<|im_end|>" in first and '"name": "add"' in first
    thoughts = sorted(turn.get("reasoning_content", "") for turn in one.turns)
    assert thoughts == ["", *["I call."] * 2, *["Sure."] * 2, *["again"] * 2]


BRANCHES = """
plan = ask(user("x")).message
side_by_side(
    lambda: ask(user("x"), plan, user("left")),
    lambda: ask(user("x"), plan, user("right")),
    lambda: ask(user("same")),
    lambda: ask(user("same")),
)
ask(user("a summary of all"), plan, user("go on"))
ask(user("x"), plan, user("on"), tools=tools)
"""


def test_other_requests_are_contexts_and_each_turn_trains_once(play):
    """Whatever the order of the requests, the numbers that are drawn are the same."""
    turned = BRANCHES.replace('user("left")', "LEFT").replace('user("right")', 'user("left")')
    turned = turned.replace("LEFT", 'user("right")')
    (one, other), engine = play(BRANCHES, turned)
    for x in (one, other):
        assert (x.error, len(x.starts)) == ("", 5)
        trained = [ids for _, ids in contexts_of(x)]
        assert sorted(map(len, trained)) == [3, 3, 3, 3, 3, 6]  # "ok" and a stop token each
    assert contexts_of(one) == contexts_of(other)
    seeds = [request["seed"] for request in engine.asked]
    assert len(set(seeds)) == len(seeds) == 14  # of two rows with different numbers
    [again], engine = play(turned)
    assert {x["seed"] for x in engine.asked} < set(seeds)
    assert '"add"' in engine.tokenizer.decode(engine.asked[-1]["query"])
    assert {tuple(x["query"]) for x in engine.asked} == {
        tuple(all_ids[:-3]) for all_ids, _ in contexts_of(again)
    } | {tuple(engine.asked[0]["query"])}


REQUESTS = table("requests.json")
API = (
    f"requests = {REQUESTS}"
    + """
one = ask(user("x"), temperature=0.1)
two = ask(user("x"), temperature=1.5, max_tokens=1, stop="k", seed=3, user="me", top_p=1.0)
assert (two.finish_reason, two.message.content) == ("length", "o")
three = ask(user("x"), stop=["k"], tool_choice="none", tools=tools)
assert (three.finish_reason, three.message.content) == ("stop", "o")
chunks = list(client.chat.completions.create(model="m", messages=[user("y")], stream=True))
assert [chunk.choices[0].delta.content for chunk in chunks] == ["ok"]
assert chunks[0].usage.total_tokens == chunks[0].usage.prompt_tokens + 3
assert client.models.list().data[0].id
for options in requests["read"]:
    client.chat.completions.create(model="m", messages=[user("x")], extra_body=options)
for method, body, words in requests["refused by others"]:
    try:
        client.post(f"/{method}", cast_to=object, body=body)
    except openai.BadRequestError as error:
        assert words in error.body["message"], error
    else:
        raise AssertionError(body)
refused = [*requests["refused"], [{"messages": [user("x" * 1100)]}, "is 1000"]]
for options, words in refused:
    try:
        client.chat.completions.create(model="m", messages=[user("x")], extra_body=options)
    except openai.BadRequestError as error:
        assert words in error.body["message"], error
    else:
        raise AssertionError(options)
try:
    ask(user("x" * 70_000))
except openai.APIStatusError as error:
    assert error.status_code == 413 and "size 64000 exceeded" in str(error), (error.status_code, str(error))
else:
    raise AssertionError("not refused")
"""
)


def test_what_the_api_offers(play):
    """What is drawn at a lower temperature than the run's does not train."""
    [one], engine = play(API)
    assert not one.error, one.error
    asked = engine.asked
    assert [request["temperature"] for request in asked] == [0.1] + [1.0] * 8
    assert [request["stops"] for request in asked][:4] == [(), ("k",), ("k",), ()]
    assert asked[1]["length"] == 1
    trained = sorted(len(ids) for _, ids in contexts_of(one))
    assert trained == [0, 1, *[3] * 7]


def test_prompts_are_made_beside_the_event_loop(play, monkeypatch):
    """Else a long one stops all agents. (The loop runs in the main thread here.)"""
    threads = []
    prompt = Agents._prompt
    spy = lambda *given: threads.append(threading.current_thread()) or prompt(*given)
    monkeypatch.setattr(Agents, "_prompt", spy)
    play("ask(user('x'))")
    assert threads and threading.main_thread() not in threads


def test_reported_requests(play, tmp_path, monkeypatch):
    """What changes nothing is read; what would, and cannot, is named."""
    monkeypatch.chdir(tmp_path)  # where the agent writes its answers
    agent = f"{ROOT}/tests/data/reported/26_agent_requests.py:play"
    [one], _ = play("", seconds=0.0, agent=agent, max_turns=99)
    assert not one.error
    answers = json.loads((tmp_path / "agent.log").read_text())
    refused = {name: text for name, (status, text) in answers.items() if status != 200}
    assert refused.keys() == REQUESTS["reported"].keys() and len(answers) == 39
    for name, words in REQUESTS["reported"].items():
        assert answers[name][0] == 400 and words in refused[name], refused[name]


@pytest.mark.parametrize("call, arguments", REQUESTS["calls"])
def test_calls_of_requests(call, arguments):
    """Arguments are objects for the template; a result has the name of its call."""
    turn = {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": call}]}
    turn, answer = plain([turn, {"role": "tool", "tool_call_id": "c1", "content": "3"}])
    (said,) = turn["tool_calls"]
    assert said["function"] == {"name": "f", "arguments": arguments}
    assert turn["content"] == "" and answer == {"role": "tool", "content": "3", "name": "f"}


def server_of(*command, port: int, **variables) -> subprocess.Popen:
    """A server in a process of its own, once it listens."""
    process = subprocess.Popen(list(map(str, command)), env=os.environ | variables)
    while process.poll() is None:
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return process
        time.sleep(0.1)
    raise AssertionError(f"{command} has ended")


def python_of(hub: str) -> str:
    """The interpreter of a virtual environment that has a hub's package, which tests do not
    install: as in VERIFIERS_PYTHON=hub/bin/python.
    """
    name = f"{hub.upper()}_PYTHON"
    return os.environ.get(name) or pytest.skip(f"{name} is not set")


def test_an_environment_of_verifiers(play, tmp_path, monkeypatch):
    python = python_of("verifiers")
    port = free_port()
    monkeypatch.setenv("VERIFIERS_PORT", str(port))
    config = {"taskset": {"id": "sums"}, "select": {"limit": 3}}
    config["agent"] = {"runtime": {"type": "subprocess"}}
    (tmp_path / "sums.json").write_text(json.dumps(config))
    rows = tmp_path / "tasks.jsonl"
    agent = f"{ROOT}/scripts/train/verifiers_agent.py"
    command = python, agent, tmp_path / "sums.json", rows
    server = server_of(*command, port=port, PYTHONPATH=f"{ROOT}/tests/support")
    try:
        first, *_, last = map(json.loads, rows.read_text().splitlines())
        assert (first, last["task"]) == ({"prompt": "100+103=", "task": 0}, 2)
        (right, wrong), engine = play(first, last, says=["203"], agent=f"{agent}:play")
        (failed,), _ = play(
            {"task": 0}, agent=f"{agent}:play", max_prompt_length=1, max_response_length=1
        )
    finally:
        server.kill()
        server.wait()
    assert (right.error, right.reward, wrong.error, wrong.reward) == ("", 1.0, "", 0.0)
    questions = [engine.tokenizer.decode(request["query"]) for request in engine.asked]
    assert sorted(map(bool, map(re.compile("100[+]103=").search, questions))) == [False, True]
    assert "ProviderError" in failed.error and "maximum context length" in failed.error


def test_a_server_of_openenv(play, monkeypatch):
    """The game of assets/guess."""
    python = python_of("openenv")
    port = free_port()
    monkeypatch.setenv("OPENENV_URL", f"http://127.0.0.1:{port}")
    server = server_of(python, ROOT / "tests/support/openenv_game.py", port, port=port)
    row = {"prompt": "1-31:", "secret": 7}
    agent = f"{ROOT}/scripts/train/openenv_agent.py:play"
    says = ["9", '{"guess": 1}', '{"response": "7"}']
    try:
        (found,), engine = play(row, says=says, agent=agent)
        (lost,), _ = play(row, agent=agent, max_turns=2)
    finally:
        server.kill()
        server.wait()
    assert (found.error, found.reward, lost.error, lost.reward) == ("", 1.0, "", 0.0)
    assert "\nlower <|im_end|>" in engine.tokenizer.decode(engine.asked[1]["query"])
    assert "Invalid" in engine.tokenizer.decode(engine.asked[2]["query"])


LEAVES = """
try:
    ask(user("x"), timeout=0.1)
except openai.APITimeoutError:
    ask(user("x"))
"""


def test_an_answer_that_never_arrived_does_not_count(play):
    """And asked again, the agent gets the same one."""
    [one], engine = play(LEAVES, seconds=0.5, max_turns=1)
    assert (one.error, one.starts, one.metrics()["turns"]) == ("", [], 1)
    assert contexts_of(one)[0][1] == engine.asked[1]["ids"]
    assert engine.asked[0] == engine.asked[1]


HALF = """
ask(user("x"))
host, path = url[7:].split("/", 1)
host, port = host.split(":")
threading.kept = s = socket.create_connection((host, int(port)))
head = f"POST /{path}/chat/completions HTTP/1.1", "Host: x", "Content-Length: 99", "", "{"
s.sendall("\\r\\n".join(head).encode())
ask(user("y"))
"""


def test_a_request_that_play_has_left_does_not_count(play):
    [one], _ = play(HALF)
    assert (one.error, one.metrics()["turns"]) == ("", 2)


HANGING = {
    "hangs": ("ask(user('x')); time.sleep(60)", "play: TimeoutError .*: no answer in time"),
    "is deaf": (
        "signal.signal(signal.SIGALRM, signal.SIG_IGN); time.sleep(60)",
        "play(: TimeoutError .*| gave no answer within 4 s)",  # interrupted before, if it is slow
    ),
}
BAD = {
    "raises": ("ask(user('x')); 1 / 0", "play: ZeroDivisionError .*: division by zero"),
    "ends": ("ask(user('x')); os._exit(0)", "play: the process of the call has ended, .*"),
    "asks nothing": ("pass", "play asked for nothing that trains"),
    "asks coldly": ("ask(user('x'), temperature=0)", "play asked for nothing that trains"),
    "returns text": ("ask(user('x')); reward = 'good'", "play: ValueError: could not convert.*"),
    "speaks no HTTP": (
        "host, port = url[7:].split('/', 1)[0].split(':')\n"
        "s = socket.create_connection((host, int(port)))\n"
        "s.sendall(b'POST / HTTP/1.1\\r\\nHost x\\r\\n\\r\\n')\n"
        "assert b' 400 ' in s.recv(99)",
        "play asked for nothing that trains",
    ),
    "does not wait": (
        "threading.Thread(target=ask, args=[user('x')], daemon=True).start(); time.sleep(0.1)",
        "play asked for nothing that trains",
    ),
    "floods": (
        "for _ in range(99): ask(user('x'))",
        "play: BadRequestError .*at most --max_turns 10 requests.*",
    ),
}


def test_bad_agents_fail_alone(play, caplog):
    """And a good one beside them is answered. What is no HTTP is a line of the log."""
    (good, *bad), _ = play("ask(user('x'))", *(code for code, _ in BAD.values()))
    hanging, _ = play(*(code for code, _ in HANGING.values()), agent_timeout=4.0)
    for (name, (_, error)), x in zip((BAD | HANGING).items(), bad + hanging, strict=True):
        assert x.stop_reason == "error" and np.isnan(x.reward), name
        assert re.fullmatch(error, x.error), (name, x.error)
    assert (good.stop_reason, good.reward) == ("done", 1.0)
    assert re.search("Invalid header token: +b'Host x'", caplog.text)
    assert "Traceback" not in caplog.text


# ---- training ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def batch() -> Batch:
    """Three responses; the second has three contexts, and observations."""
    draw = np.random.default_rng(0)
    samples = []
    for starts, length in (((), 4), ((5, 9), 13), ((), 7)):
        mask = draw.random(length) < 0.6
        for start in starts:
            mask[start] = False  # the first token of a prompt
        outputs = {"response_mask": mask, "rollout_logprobs": np.zeros(length)}
        row = {"query": draw.integers(3, 20, 3).tolist()}
        response = draw.integers(3, 20, length)
        samples.append(Sample(row, response, outputs, True, scores={}, starts=starts))
    return Batch.from_samples(samples, CPU)


@pytest.mark.parametrize("budget", [1, 48, 10_000])
@pytest.mark.parametrize("how", ["token", "step_token", "sequence", "sequence_sum", "constant"])
def test_contexts_weigh_as_their_response(batch, how, budget):
    """Against loops over the responses, the tokens of each of them and what stands before."""
    model = random_model("qwen2").double()
    policy = grpo.Policy(
        model, types.SimpleNamespace(temperature=0.7, gradient_checkpointing=False, entropy_coef=0)
    )
    args = grpo.Args(micro_batch_tokens=budget)
    logprobs = forward_batch(policy, batch, "logprobs", args, WORLD)
    assert not logprobs[~batch.response_mask].any()
    losses = torch.randn(
        logprobs.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    by_response = []
    for i, x in enumerate(batch.samples):
        of_response = []
        before = x.row["query"]
        for t, token in enumerate(x.response.tolist()):
            if t in x.starts:
                before = []
            if x.outputs["response_mask"][t]:
                logits = model(torch.tensor([before])).logits[0, -1] / 0.7
                expected = logits.log_softmax(-1)[token].item()
                assert logprobs[i, t].item() == pytest.approx(expected, abs=1e-9)
                of_response.append(losses[i, t].item())
            before = [*before, token]
        by_response.append(of_response)
    flat = sum(by_response, [])
    wanted = {
        "token": sum(flat) / len(flat),
        "step_token": sum(flat) / len(flat),
        "sequence": sum(sum(x) / len(x) for x in by_response) / 3,
        "sequence_sum": sum(flat) / 3,
        "constant": sum(flat) / (3 * 20),
    }[how]
    mask = batch.response_mask
    reduce = grpo.loss_reduction(how, mask, [0, 1, 2], [(0, [0, 1, 2])], 20)
    batch.tokens["losses"] = losses
    found = 0.0
    count = 0
    for (ids, read), micro, _ in batch.micro_batches([0, 1, 2], args, WORLD):
        count += 1
        assert read.sum() == micro["response_mask"].sum() and len(ids) >= len(micro["losses"])
        assert ids.numel() <= budget or len(micro["losses"]) == 1
        found += reduce(micro["losses"], micro["response_mask"]).item()
    assert found == pytest.approx(wanted, abs=1e-12) and count == {1: 3, 48: 2}.get(budget, 1)
