"""The rollout on vLLM servers: real ones on the CPU, started by scripts/vllm_server.py, weights
sent over gloo.

The order of the tests matters: later ones take the servers over, and the last one kills a server.
"""

import asyncio
import copy
import importlib.util
import itertools
import os
import signal
import subprocess
import threading
import time
import types
from dataclasses import replace

import engine_checks
import forked_python
import helpers
import numpy as np
import pytest
import torch
import transformers
import urllib3
import vllm_server
from datasets import Dataset
from engine_checks import (
    alike,
    converse,
    failure_of,
    greedy,
    largest_difference,
    spoken,
    sync_in_flight,
)
from helpers import ROOT, free_port, refused, tiny_model
from test_reward_client import Server
from tiny_models import WORLD, random_model

import distill
from extras.lora import add_lora
from extras.vllm import sampling as vllm_sampling
from extras.vllm import servers as vllm_servers
from extras.vllm.servers import Servers
from extras.vllm.teacher import ServedTeacher
from grpo import Args
from plumbing.models import sharding
from plumbing.rollout.batch import Sample

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)
import gloo_transfer  # noqa: E402, F401

ARGS = Args(
    max_prompt_length=40,
    max_response_length=24,
    temperature=0.7,
    model=str(ROOT / "assets" / "tiny"),
)
STOP = [1]
LONG = {"max_response_length": 200, "min_response_length": 200}
KEY = {"Authorization": "Bearer one that is long"}


def prompts(count: int, length: int = 20) -> list[list[int]]:
    """Longer than a block of the prefix cache, and alike at the start."""
    numbers = torch.Generator().manual_seed(0)
    return [
        [5] * 16 + torch.randint(3, 250, (length - 16,), generator=numbers).tolist()
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """{address: process} of two servers, which require a key, and their model."""
    folder = tmp_path_factory.mktemp("servers")
    # heads of 32, as vLLM requires
    model = tiny_model(folder / "model", tie_word_embeddings=True, hidden_size=64)
    environment = os.environ | helpers.VLLM_ON_CPU | {"VLLM_API_KEY": "one that is long"}
    started = {}
    with (
        helpers.vllm_preloaded(),
        forked_python.python() as python,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("VLLM_API_KEY", "one that is long")
        for number in range(2):
            port = free_port()
            flags = {"model": model, "port": port, "precision": "float32", "kv_cache_gb": 0.02}
            flags |= {"max_length": 250, "lora_rank": 8}
            command = [python, ROOT / "scripts/vllm_server.py", *helpers.words(flags)]
            with open(folder / f"log{number}", "w") as log:
                process = subprocess.Popen(
                    [*command, *helpers.SERVER_ON_CPU], stderr=log, env=environment
                )
            started[f"http://127.0.0.1:{port}"] = process
        try:
            yield started, model
        finally:
            for process in started.values():
                process.kill()
                process.wait(10)


@pytest.fixture(scope="module")
def engine(running):
    """(Servers, its model), after a run that has ended as by a crash: the new one takes the servers
    over.
    """
    started, path = running
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for seed in range(2):
        servers = connect(*started)
        perturb(model, seed)
        servers.sync(model, 0)
    return servers, model


def connect(*urls: str, **values) -> Servers:
    return Servers(replace(ARGS, rollout_servers=urls, **values), WORLD, None)


def sample(servers, queries, seeds, *interrupted, **values):
    args = replace(ARGS, **values)
    return engine_checks.sample(servers, queries, seeds, STOP, args, *interrupted)


def perturb(model, seed: int, which: str = "") -> None:
    numbers = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if which in name:
                parameter += 0.05 * torch.randn(parameter.shape, generator=numbers)


def test_responses_are_of_the_sampled_distribution(engine):
    servers, model = engine
    queries = prompts(40)
    responses, _ = sample(servers, queries[:12], None)
    assert responses == [greedy(model, query, STOP, 24) for query in queries[:12]]
    responses, logprobs = sample(servers, queries, list(range(40)))
    assert largest_difference(model, queries, responses, logprobs, 0.7) < 1e-4
    assert len(set(map(tuple, responses))) > 20
    assert all(STOP[0] not in response[:-1] for response in responses)
    lengths = [
        len(response)
        for response in sample(servers, queries, list(range(40)), min_response_length=24)[0]
    ]
    assert lengths == [24] * 40
    assert sample(servers, [], []) == ([], [])


def test_sync_brings_the_new_weights_to_all_servers(engine):
    servers, model = engine
    queries = prompts(16)
    for seed in (2, 3):
        perturb(model, seed)
        responses, logprobs = sample(servers, queries, list(range(16)))
        # stale, and in the prefix cache
        assert largest_difference(model, queries, responses, logprobs, 0.7) > 0.05
        servers.sync(model, 0)
        responses, logprobs = sample(servers, queries, list(range(16)))
        assert largest_difference(model, queries, responses, logprobs, 0.7) < 1e-4
    numbers = sum(weight.numel() for weight in model.parameters())  # the tied head once
    assert servers.metrics()["rollout/sync_gb"] * 1e9 == 4 * numbers


def test_weights_arrive_while_requests_run(engine):
    servers, model = engine
    args = replace(ARGS, max_response_length=200)
    difference, of_others, mixed = sync_in_flight(servers, model, prompts(40), args)
    assert difference < 1e-3 and of_others > 0.1 and mixed > 0


def test_an_interrupt_ends_a_rollout(engine):
    """Its requests, of which there are 256 for each server at once, are cancelled."""
    servers, _ = engine
    tasks = []  # a response is one, and a request

    def interrupted() -> bool:
        tasks.append(len(asyncio.all_tasks(servers.loop)))
        return len(tasks) > 10

    assert sample(servers, prompts(1000), list(range(1000)), interrupted, **LONG) is None
    assert 1500 < max(tasks) < 1600
    assert any(time.sleep(0.1) or not asyncio.all_tasks(servers.loop) for _ in range(600))
    # and the servers go on
    assert not servers.failure and sample(servers, prompts(8), list(range(8)))


def test_turns_of_conversations(engine, monkeypatch):
    """All of a conversation on one server, which has it in its cache; a turn that fails."""
    servers, model = engine
    seeds = list(range(12))
    asked = set()
    request = Servers._sample

    async def record(self, url: str, body: dict):
        asked.add((body["sampling_params"]["seed"] // 1000, url))
        return await request(self, url, body)

    with monkeypatch.context() as patch:
        patch.setattr(Servers, "_sample", record)
        whole = converse(servers, prompts(12), seeds, STOP, ARGS)
    assert len(asked) == 12 and len({url for _, url in asked}) == 2
    turns = [turn for each in whole for turn in each]
    assert largest_difference(model, *zip(*turns), 0.7) < 1e-4
    late = [0.05 * (i % 4) for i in range(12)]
    assert alike(
        spoken(converse(servers, prompts(12)[::-1], seeds[::-1], STOP, ARGS, late)[::-1]),
        spoken(whole),
    )

    # it is too long
    assert converse(servers, prompts(1, length=300), [0], STOP, ARGS) == [[None] * 4]
    assert sample(servers, prompts(4), list(range(4))) is None
    failure = failure_of(servers)
    assert "300" in failure and "/inference/v1/generate failed" in failure


def test_every_path_but_health_requires_the_key(running, engine, capsys, monkeypatch):
    url = list(running[0])[0]
    paths = urllib3.request("GET", f"{url}/openapi.json", headers=KEY, timeout=60).json()["paths"]
    assert {
        "/collective_rpc",
        "/init_weight_transfer_engine",
        "/update_weights",
        "/v1/completions",
    } < {*paths}
    for path, method in itertools.product([*paths, "/docs", "/metrics", "/"], ("GET", "POST")):
        if path != "/health":
            answer = urllib3.request(
                method, url + path, headers={"Authorization": "Bearer another"}, timeout=60
            )
            assert answer.status == 401 and b"VLLM_API_KEY" in answer.data, path
    assert urllib3.request("GET", f"{url}/health", timeout=60).status == 200
    for key in ("another", ""):
        monkeypatch.setenv("VLLM_API_KEY", key)
        line = refused(capsys, connect, url)
        assert (
            f"{url}/get_world_size failed" in line
            and "VLLM_API_KEY is not the one of the server" in line
        )


@pytest.mark.parametrize("top_k", [0, 3, 1000])
def test_a_server_teaches(engine, running, top_k):
    """Log-probabilities of sampled and most likely tokens; 1000 is more than there are."""
    servers, model = engine
    servers.sync(model, 0)
    size = model.config.vocab_size
    tokenizer = transformers.AutoTokenizer.from_pretrained(running[1])
    args = distill.Args(
        model=running[1],
        teacher=servers.urls[0],
        teacher_top_k=min(top_k, size) or 20,
        estimator="exact" if top_k else "sampled",
        max_response_length=20,
    )
    rows = Dataset.from_dict({"query": [20], "teacher_query": [20]})
    queries = prompts(4)
    samples = [
        Sample({"query": query, "teacher_query": []}, np.array(query[5:]), {}, stopped=True)
        for query in queries
    ]
    ServedTeacher(args, tokenizer, rows).ask(samples, WORLD, lambda: False)
    for query, sample in zip(queries, samples):
        with torch.no_grad():
            logits = model(torch.tensor([query + sample.response.tolist()])).logits
        expected = logits[0, len(query) - 1 : -1].log_softmax(-1)
        tokens, logprobs = (
            torch.tensor(sample.outputs[f"teacher_{name}"]) for name in ("tokens", "logprobs")
        )
        assert tokens[:, 0].tolist() == sample.response.tolist()
        assert (logprobs - expected.gather(1, tokens.long())).abs().max() < 1e-4
        known = [set(row) for row in tokens.long().tolist()]
        assert all(
            {*row.topk(min(top_k, size)).indices.tolist()} <= x for row, x in zip(expected, known)
        )


def test_adapters_go_to_all_servers(running, engine):
    """Beside the base, which only the first sync brings. A new connection ends that of `engine`."""
    model = copy.deepcopy(engine[1])
    add_lora(model, replace(ARGS, lora_rank=3))
    adapter = 4 * sum(x.numel() for x in model.parameters() if x.requires_grad)
    servers = connect(*running[0], lora_rank=3)
    queries = prompts(8)
    difference = lambda: largest_difference(
        model, queries, *sample(servers, queries, list(range(8))), 0.7
    )
    servers.sync(model, 0)
    assert servers.synced > 10 * adapter and difference() < 1e-4
    for seed in range(2):
        perturb(model, seed, ".lora_")
        assert difference() > 0.05
        servers.sync(model, 0)
        assert difference() < 1e-4 and adapter < servers.synced < 1.5 * adapter
    assert not connect(*running[0], lora_rank=9).sends_adapter


@pytest.mark.parametrize("async_steps, ranks, lora_rank", [(0, 1, 4), (2, 2, 0)])
def test_a_run(running, tmp_path, async_steps, ranks, lora_rank):
    """The servers sample with the weights that the run trains, also while it trains and for several
    ranks.
    """
    values = helpers.workspace(tmp_path) | {
        "model": running[1],
        "rollout_backend": "server",
        "run_name": "run",
        "lora_rank": lora_rank,
    }
    values |= {
        "rollout_servers": tuple(running[0]),
        "max_prompt_length": 64,
        "async_steps": async_steps,
    }
    # conversations, each of which goes on as soon as its turn is answered; weights that are sharded
    if ranks == 2:
        values |= {
            "environment": helpers.GAME,
            "reward": "episode",
            "max_response_length": 20,
            "shard": "fsdp",
        }
    helpers.run_ranks(values, ranks, (0,) * ranks)
    rows = helpers.metrics_of(values)[1:]
    assert all(row["rollout/staleness_max"] <= async_steps for row in rows)
    assert any(row["rollout/staleness"] for row in rows) == (async_steps > 0)
    for row in rows:
        assert async_steps or row["rollout/logprob_diff_max"] < 1e-4
        assert row["rollout/sync_gb"] > 0


def test_bad_addresses(running, engine, capsys, monkeypatch):
    monkeypatch.setattr(vllm_servers, "SERVER_START", 1.0)
    model = running[1]
    url = list(running[0])[0]
    nobody = f"http://127.0.0.1:{free_port()}"
    assert f"{nobody}/health failed for" in refused(capsys, connect, url, nobody, model=model)


def test_what_a_server_answers():
    """429 and 5xx are asked again, no other status; a response that another client aborts is an
    error, and so is one of a server that has started anew.
    """
    abort = {"finish_reason": "abort"}
    anew = {"finish_reason": "stop", "weight_versions": [{"version": "default"}]}
    answers = [(429, {}), (503, {}), (200, abort), (404, {}), (200, anew)]
    server = Server(lambda *_: (answers[0][0], {"choices": [answers.pop(0)[1]]}, {}))
    servers = Servers.__new__(Servers)
    servers.urls = [server.url]
    servers.last_heard = {}
    for why, left in (("another client aborts", 2), ("status 404", 1), ("has started anew", 0)):
        with pytest.raises(RuntimeError, match=why):
            asyncio.run(servers._sample(server.url, {}))
        assert len(answers) == left
    server.shutdown()


def test_a_server_is_silent_if_it_answers_none_of_its_requests(monkeypatch):
    now = [0.0]
    clock = types.SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(vllm_servers, "time", clock)
    choice = {"finish_reason": "stop", "weight_versions": []}
    choice |= {"token_ids": [], "logprobs": {"content": []}}
    answers = [threading.Event() for _ in range(3)]

    def behave(question, _):
        answers[question["number"]].wait(60)
        return 200, {"choices": [choice]}, {}

    server = Server(behave)
    servers = Servers.__new__(Servers)
    servers.last_heard = {}

    async def ask() -> None:
        requests = [servers._sample(server.url, {"number": number}) for number in range(3)]
        first, second = map(asyncio.create_task, requests[:2])
        await asyncio.sleep(0.1)
        now[0] = 1000.0
        answers[0].set()
        await first
        now[0] = 2000.0
        await asyncio.sleep(1.2)  # longer than a look at the clock
        assert not second.done()
        answers[1].set()
        await second
        third = asyncio.create_task(requests[2])
        await asyncio.sleep(0.1)
        now[0] = 4000.0
        with pytest.raises(RuntimeError, match="gave no answer for 1500 s"):
            await third
        answers[2].set()  # its thread ends

    asyncio.run(ask())
    server.shutdown()


def test_a_server_that_others_reach_requires_a_key(capsys, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("the server starts"))
    args = vllm_server.Args(model="model", host="0.0.0.0")
    assert "VLLM_API_KEY" in refused(capsys, lambda: vllm_server.main(args, []))
    args = vllm_server.Args(model="model")
    for word in ("--host=0.0.0.0", "--hos=0.0.0.0", "--config=flags.yaml"):
        assert "has to stand before" in refused(capsys, vllm_server.main, args, [word])
    with pytest.raises(ValueError, match="port"):
        vllm_server.Args(model="model", port=0)


def test_a_failed_sync_ends_the_rollouts_of_all_ranks():
    """Else those of the others would wait for servers that stay paused."""
    gather = lambda failures: [*failures, "it broke"]
    servers = Servers.__new__(Servers)
    servers.world = types.SimpleNamespace(barrier=lambda: None, all_gather=gather)
    servers.sender = types.SimpleNamespace(send_weights=lambda: None)
    servers.dtype = torch.float32
    servers.sync(random_model("qwen2"), 1)
    # and every rank has gathered every weight
    assert servers.failure == "it broke" and not servers.weights


def test_weights_that_a_server_is_not_sent_are_an_error(engine, running, monkeypatch):
    servers = connect(*list(running[0])[:1])
    sent = [entry for entry in sharding.base_weights(engine[1]) if "layers.1.mlp" not in entry[0]]
    monkeypatch.setattr(vllm_sampling, "sent_weights", lambda model: sent)
    servers.sync(engine[1], 0)
    assert "2 of its weights are none of the trained model's: model.layers.1.mlp." in failure_of(
        servers
    )


def test_a_server_that_is_killed_ends_an_asynchronous_run(running, tmp_path, capsys, monkeypatch):
    """With rollouts of two steps under way: one line, and the steps so far are saved."""
    monkeypatch.setattr(vllm_servers, "SERVER_PATIENCE", 2.0)
    url, process = list(running[0].items())[0]
    values = helpers.workspace(tmp_path) | {
        "model": running[1],
        "rollout_backend": "server",
        "rollout_servers": url,
        "async_steps": 2,
        "total_episodes": 80_000,
        "max_response_length": 100,
        "eval_every": 0,
        "save_every": 0,
        "run_name": "run",
    }
    metrics = helpers.folder_of(values) / "metrics.jsonl"

    def kill() -> None:
        while not metrics.exists() or metrics.read_text().count("\n") < 3:
            time.sleep(0.05)
        os.killpg(forked_python.FORKED[process.pid], signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    line = refused(capsys, helpers.run_here, values, noisy=True)
    assert line.startswith(f"error: --rollout_backend server: vLLM failed (RuntimeError: {url}/")
    assert len(helpers.steps_of(values)) == 1 and len(helpers.metrics_of(values)) >= 3
