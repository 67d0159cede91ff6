"""The rollout on vLLM servers: real ones on the CPU, started by scripts/vllm_server.py, weights pushed over gloo."""

import importlib.util
import itertools
import os
import queue
import re
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import forked_python
import helpers
import pytest
import requests
import torch
import transformers
import vllm_server
from helpers import ROOT, tiny_model

import utils
from plumbing import command_line
from plumbing.rollout import vllm_servers
from plumbing.rollout.vllm_servers import Servers

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

ARGS = SimpleNamespace(
    max_prompt_length=40, max_response_length=24, min_response_length=0, temperature=0.7, top_p=1.0, top_k=0,
    repetition_penalty=1.0,
)  # fmt: skip
WORLD = utils.World(0, 1, torch.device("cpu"))
STOP = [1]
SHAPE = {"hidden_size": 64}  # heads of 32: vLLM has no attention over heads of 16 on CPUs
KEY = {"Authorization": "Bearer one that is long"}
MODELS = {"tied": {"tie_word_embeddings": True, **SHAPE}, "first": SHAPE, "second": SHAPE}


def changed(**values) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(ARGS), **values})


def prompts(count: int, length: int = 20) -> list[list[int]]:
    """Longer than a block of the prefix cache, and alike at the start."""
    numbers = torch.Generator().manual_seed(0)
    return [[5] * 16 + torch.randint(3, 250, (length - 16,), generator=numbers).tolist() for _ in range(count)]


def start(python: str, folder, model: str, *words: str) -> tuple[subprocess.Popen, queue.SimpleQueue]:
    command = [python, ROOT / "scripts/vllm_server.py", "--model", model, "--port", "0"]
    command += ["--kv_cache_gb", "0.02", "--max_length", "250", *words]
    with open(f"{folder}/log", "w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    lines = queue.SimpleQueue()
    threading.Thread(target=lambda: [lines.put(line) for line in process.stdout], daemon=True).start()
    return process, lines


def ready(started) -> str:
    """The address in the line that a server prints once it answers."""
    while not (line := started[1].get(timeout=600)).startswith("serving "):
        pass
    return line.split()[-1]


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """{name: (process, address, model)} of three servers, which take a key."""
    os.environ["VLLM_API_KEY"] = "one that is long"
    folders = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    models = {name: tiny_model(folder / "model", **MODELS[name]) for name, folder in folders.items()}
    with helpers.vllm_preloaded(), forked_python.python() as python:
        started = {name: start(python, folders[name], models[name]) for name in MODELS}
        try:
            yield {name: (started[name][0], ready(started[name]), models[name]) for name in MODELS}
        finally:
            del os.environ["VLLM_API_KEY"]
            for process, _ in started.values():
                process.kill()
                process.wait(10)


@pytest.fixture(scope="module")
def engines(running):
    """{name: (Servers, its model)}: one server with a tied model, and two with another."""
    named = {"tied": ("tied",), "two": ("first", "second")}
    made = {}
    for name, members in named.items():
        model = transformers.AutoModelForCausalLM.from_pretrained(running[members[0]][2], dtype=torch.float32)
        servers = Servers(changed(rollout_servers=tuple(running[member][1] for member in members)), WORLD, None)
        servers.sync(model)
        made[name] = (servers, model)
    return made


def sample(servers, queries, seeds, interrupted=lambda: False, **values):
    return servers.generate(queries, seeds, STOP, changed(**values), interrupted)


def largest_difference(model, queries, responses, logprobs, temperature: float) -> float:
    """Between the log-probs that servers gave and those of the model."""
    worst = 0.0
    for query, response, given in zip(queries, responses, logprobs, strict=True):
        assert len(response) == len(given) > 0
        with torch.no_grad():
            logits = model(torch.tensor([query + response])).logits[0, len(query) - 1 : -1] / temperature
        ours = logits.log_softmax(-1)[range(len(response)), response]
        worst = max(worst, (ours - torch.tensor(given)).abs().max().item())
    return worst


def perturb(model, seed: int) -> None:
    numbers = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=numbers)


def one_line_end(capsys, call) -> str:
    """What the run that `call` ends says."""
    with pytest.raises(SystemExit) as end:
        call()
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert end.value.code == 2 and len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize("name", ["tied", "two"])
def test_greedy_equals_transformers(engines, name):
    servers, model = engines[name]
    queries = prompts(12)
    responses, _ = sample(servers, queries, None)
    for query, response in zip(queries, responses):
        ids = list(query)
        while len(ids) < len(query) + 24 and (len(ids) == len(query) or ids[-1] not in STOP):
            with torch.no_grad():
                ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
        assert ids[len(query) :] == response


@pytest.mark.parametrize("name", ["tied", "two"])
def test_logprobs_are_those_of_the_sampled_distribution(engines, name):
    servers, model = engines[name]
    queries = prompts(40)
    responses, logprobs = sample(servers, queries, list(range(40)))
    assert largest_difference(model, queries, responses, logprobs, 0.7) < 1e-4
    assert len(set(map(tuple, responses))) > 20
    assert all(STOP[0] not in response[:-1] for response in responses)


def test_a_response_depends_on_its_seed_alone(engines):
    servers, _ = engines["two"]
    queries, seeds = prompts(32), [2**62 + 17 * i for i in range(32)]
    once = sample(servers, queries, seeds)
    assert sample(servers, queries, seeds) == once
    backwards = sample(servers, queries[::-1], seeds[::-1])  # on the other server, too
    assert (backwards[0][::-1], backwards[1][::-1]) == once
    alone = sample(servers, queries[7:8], seeds[7:8])
    assert (alone[0][0], alone[1][0]) == (once[0][7], once[1][7])
    assert sample(servers, queries, [seed + 1 for seed in seeds])[0] != once[0]


def test_limits_and_options_reach_the_server(engines):
    servers, _ = engines["two"]
    queries = prompts(16)
    lengths = [len(response) for response in sample(servers, queries, list(range(16)), min_response_length=24)[0]]
    assert lengths == [24] * 16
    greedy = sample(servers, queries, None)[0]
    assert sample(servers, queries, list(range(16)), top_k=1)[0] == greedy
    assert sample(servers, queries, list(range(16)), top_p=1e-6)[0] == greedy
    assert sample(servers, queries, None, repetition_penalty=3.0)[0] != greedy
    assert sample(servers, [], []) == ([], [])


@pytest.mark.parametrize("name", ["tied", "two"])
def test_sync_brings_the_new_weights_to_all_servers(engines, name):
    servers, model = engines[name]
    queries = prompts(16)
    for seed in (1, 2):
        perturb(model, seed)
        responses, logprobs = sample(servers, queries, list(range(16)))
        assert largest_difference(model, queries, responses, logprobs, 0.7) > 0.05  # stale, and in the prefix cache
        servers.sync(model)
        responses, logprobs = sample(servers, queries, list(range(16)))
        assert largest_difference(model, queries, responses, logprobs, 0.7) < 1e-4
    numbers = sum(weight.numel() for weight in model.state_dict().values())
    assert servers.metrics()["rollout/sync_gb"] * 1e9 == 4 * numbers


def test_an_interrupt_ends_a_rollout_within_seconds(engines):
    servers, model = engines["two"]
    begin = time.monotonic()
    flag = lambda: time.monotonic() > begin + 0.3
    long = {"max_response_length": 200, "min_response_length": 200}
    assert sample(servers, prompts(2000), list(range(2000)), flag, **long) is None
    assert time.monotonic() - begin < 15  # all of it would take longer
    responses, logprobs = sample(servers, prompts(8), list(range(8)))  # and the servers go on
    assert largest_difference(model, prompts(8), responses, logprobs, 0.7) < 1e-4


def test_what_another_client_aborts_is_asked_for_again(engines, running):
    servers, model = engines["two"]
    queries, seeds = prompts(8), list(range(8))
    long = {"max_response_length": 200, "min_response_length": 200}
    whole = sample(servers, queries, seeds, **long)
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(sample, servers, queries, seeds, **long)
        time.sleep(0.2)
        for name in ("first", "second"):
            requests.post(f"{running[name][1]}/abort_requests", json={}, headers=KEY, timeout=10)
        assert again.result(30) == whole


def test_turns_of_conversations(engines, monkeypatch):
    """All of a conversation on one server, which has it in its cache; its end by a string; an interrupt."""
    servers, model = engines["two"]
    args, seeds, asked = changed(turn_stop=()), list(range(12)), set()
    request = Servers._sample

    async def record(self, url: str, body: dict):
        asked.add((body["sampling_params"]["seed"] // 1000, url))
        return await request(self, url, body)

    with monkeypatch.context() as patch:
        patch.setattr(Servers, "_sample", record)
        whole = helpers.converse(servers, prompts(12), seeds, STOP, args)
    assert len(asked) == 12 and len({url for _, url in asked}) == 2
    turns = [turn for said in whole for turn in said]
    assert largest_difference(model, *zip(*turns), 0.7) < 1e-4
    late = [0.05 * (i % 4) for i in range(12)]
    assert helpers.converse(servers, prompts(12)[::-1], seeds[::-1], STOP, args, late) == whole[::-1]

    tokenizer = transformers.AutoTokenizer.from_pretrained(model.config._name_or_path)
    pairs = [tokenizer.decode(ids[2:4]) for (_, ids, _), *_ in whole]
    stop = next(text for text in pairs if text.isascii() and len(text) == 2)
    ended = helpers.converse(servers, prompts(12), seeds, STOP, changed(turn_stop=("<unk>", stop)), turns=1)
    for ((_, full, logprobs), *_), ((_, ids, theirs),) in zip(whole, ended):
        ends = (n for n in range(1, 9) if any(text in tokenizer.decode(full[:n]) for text in ("<unk>", stop)))
        length = next(ends, 8)
        assert (ids, theirs) == (full[:length], logprobs[:length])
    assert [said[0] for said in ended] != [said[0] for said in whole]

    begin = time.monotonic()
    flag = lambda: time.monotonic() > begin + 0.3
    said = helpers.converse(servers, prompts(100), range(100), [], args, interrupted=flag, turns=2, length=100)
    assert time.monotonic() - begin < 15 and not any(turns[-1] for turns in said) and not servers.failure
    assert helpers.converse(servers, prompts(12), seeds, STOP, args) == whole


def test_a_turn_that_fails_ends_all_conversations(engines):
    servers, _ = engines["two"]
    args, queries, waits = changed(turn_stop=()), [*prompts(100), *prompts(1, length=300)], [0.0] * 100 + [0.05]
    said = helpers.converse(servers, queries, range(101), [], args, waits, turns=2, length=100)
    assert not any(turns[-1] for turns in said) and not said[100][0] and "300" in servers.failure
    servers.failure = ""


def test_weights_of_another_run_are_a_failure(engines, running):
    servers, model = engines["tied"]
    url = running["tied"][1]
    requests.post(f"{url}/update_weight_version", json={"new_version": "other"}, headers=KEY, timeout=10)
    assert sample(servers, prompts(4), [0, 1, 2, 3]) is None
    assert url in servers.failure and "other weights" in servers.failure
    servers.failure = ""
    servers.sync(model)
    assert sample(servers, prompts(4), [0, 1, 2, 3])


def test_every_path_but_health_takes_the_key(running, capsys, monkeypatch):
    url = running["tied"][1]
    paths = requests.get(f"{url}/openapi.json", headers=KEY, timeout=10).json()["paths"]
    assert {"/collective_rpc", "/init_weight_transfer_engine", "/update_weights", "/v1/completions"} < {*paths}
    wrong = {"Authorization": "Bearer another"}
    for path, method, headers in itertools.product([*paths, "/docs", "/metrics", "/"], ("GET", "POST"), ({}, wrong)):
        if path != "/health":
            answer = requests.request(method, url + path, headers=headers, timeout=10)
            assert answer.status_code == 401 and "VLLM_API_KEY" in answer.text, path
    assert requests.get(f"{url}/health", timeout=10).ok
    for key in ("another", ""):
        monkeypatch.setenv("VLLM_API_KEY", key)
        said = one_line_end(capsys, lambda: Servers(changed(rollout_servers=(url,)), WORLD, None))
        assert "/collective_rpc failed (VLLM_API_KEY is not the one of the server)" in said


def test_a_new_run_takes_a_server_over(engines, running):
    """As after a crash: the group of the run before it is gone."""
    _, model = engines["tied"]
    servers = Servers(changed(rollout_servers=(running["tied"][1],)), WORLD, None)
    perturb(model, 5)
    servers.sync(model)
    responses, logprobs = sample(servers, prompts(8), list(range(8)))
    assert largest_difference(model, prompts(8), responses, logprobs, 0.7) < 1e-4
    engines["tied"] = (servers, model)


def test_prompts_that_do_not_fit_together(engines):
    """More tokens than vLLM takes at a time by default, each request with a seed."""
    servers, model = engines["tied"]
    queries = prompts(60, length=220)
    found = sample(servers, queries, list(range(60)))
    assert found is not None, servers.failure
    responses, logprobs = found
    assert largest_difference(model, queries, responses, logprobs, 0.7) < 1e-4


@pytest.mark.parametrize("async_steps, ranks", [(0, 1), (1, 1), (1, 2)])
def test_a_run(running, tmp_path, async_steps, ranks):
    """The servers sample with the weights that the run trains, also beside the training and for several ranks."""
    values = helpers.workspace(tmp_path)
    values |= {"model": running["tied"][2], "rollout_backend": "server", "rollout_servers": running["tied"][1]}
    values |= {"max_prompt_length": 64, "async_steps": async_steps, "total_episodes": 32, "run_name": "run"}
    if ranks == 2:  # conversations, each of which goes on as soon as its own turn is answered
        values |= {
            "environment": helpers.GAME,
            "reward": "environment",
            "max_turn_length": 3,
            "max_response_length": 20,
        }
    if ranks == 1:
        helpers.run(values)
    else:
        helpers.run_ranks(values, 2, (0, 0))
    rows = helpers.metrics_of(values)[1:]
    assert [row["rollout/staleness"] for row in rows] == [0] + [async_steps] * 3
    for row in rows:
        assert row["rollout/staleness"] or row["rollout/logprob_diff_max"] < 1e-4
        assert row["rollout/sync_gb"] > 0 and row.get("conversation/turns", 3) == 3


def test_bad_addresses_and_servers(running, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(vllm_servers, "SERVER_START", 1.0)
    url = running["tied"][1]
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"

    def end(*servers: str, **values) -> str:
        return one_line_end(capsys, lambda: Servers(changed(rollout_servers=servers, **values), WORLD, None))

    assert "localhost:8000" in end("localhost:8000")
    assert f"{nobody}: /health failed" in end(url, nobody)
    assert "same server" in end(url, url.replace("127.0.0.1", "localhost"))
    assert "250 tokens" in end(url, max_prompt_length=300)
    other = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_model(tmp_path / "other", intermediate_size=80, **SHAPE)
    )
    servers = Servers(changed(rollout_servers=(url,)), WORLD, None)
    said = one_line_end(capsys, lambda: servers.sync(other))
    assert "intermediate_size is 64 there, 80 here" in said


def test_a_prompt_that_does_not_fit_is_a_failure_with_the_servers_words(engines):
    servers, _ = engines["two"]
    assert sample(servers, prompts(3, length=300), [0, 1, 2]) is None
    assert "300" in servers.failure and "/inference/v1/generate failed" in servers.failure
    servers.failure = ""


@pytest.mark.parametrize(
    "words, said",
    [
        (["--max_length", "999"], "256 tokens"),
        (["--host", "300.1.1.1"], "cannot listen"),
        (["--host", "0.0.0.0"], "VLLM_API_KEY"),
    ],
)
def test_bad_flags_of_the_server_are_one_line(running, capsys, monkeypatch, words, said):
    monkeypatch.delenv("VLLM_API_KEY")
    for name in ("fork", "execve"):
        monkeypatch.setattr(os, name, lambda *_: pytest.fail("the server starts"))
    args = command_line.parse_ungrouped(vllm_server.Args, ["--model", running["tied"][2], "--port", "0", *words])
    assert said in one_line_end(capsys, lambda: vllm_server.main(args, []))


# The two that end servers.


def test_a_server_that_is_killed_in_the_middle_is_a_failure(engines, running, monkeypatch):
    monkeypatch.setattr(vllm_servers, "SERVER_PATIENCE", 3.0)
    servers, model = engines["two"]
    process, url, _ = running["second"]
    threading.Timer(0.5, os.killpg, (forked_python.FORKED[process.pid], signal.SIGKILL)).start()
    long = {"max_response_length": 200, "min_response_length": 200}
    begin = time.monotonic()
    assert sample(servers, prompts(2000), list(range(2000)), **long) is None
    assert url in servers.failure and re.search(r"failed for [3-9] s", servers.failure)
    assert time.monotonic() - begin < 20
    servers.failure = ""
    servers.sync(model)  # which ends as well
    assert f"{url}: /start_weight_update failed" in servers.failure


def test_sigterm_ends_all_of_a_server(running):
    process, _, _ = running["tied"]
    process.terminate()
    process.wait(20)
    deadline = time.monotonic() + 10
    with pytest.raises(ProcessLookupError):  # the group is empty: nothing of it is left
        while time.monotonic() < deadline:
            os.killpg(forked_python.FORKED[process.pid], 0)
            time.sleep(0.1)
