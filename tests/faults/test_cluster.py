"""A cluster on one machine: its nodes are network namespaces (tests/support/cluster.py).

What each fault gives is the table of docs/evidence.md#a-cluster-with-faults.
"""

import asyncio
import contextlib
import os
import re
import shutil
import socket
import socketserver
import subprocess
import sys
import threading
import time
import types
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import forked_python
import helpers
import pytest
import test_reward_client
from cluster import Cluster, enter
from helpers import ROOT
from test_reward_client import Server

from extras import reward_servers
from extras.vllm import servers as vllm_servers

ROW = {"prompt": "p", "answer": "2", "columns": {}}


@pytest.fixture(scope="module")
def nodes():
    cluster = Cluster(2)
    yield cluster
    cluster.end()


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict:
    values = helpers.workspace(tmp_path_factory.mktemp("cluster"))
    values |= {"shard": "fsdp", "precision": "float64"}
    return {**values, "num_epochs": 1, "save_every": 1, "total_episodes": 16, "eval_every": 0}


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory) -> dict:
    """Flags of the run of one process on one machine."""
    values = helpers.variant(base, tmp_path_factory.mktemp("whole"))
    helpers.run(values)
    return values


def difference(values: dict, whole: dict) -> float:
    return helpers.largest_difference(values, whole, ("checkpoints/step_2", "final"))[0]


@pytest.mark.parametrize("ahead", [False, True])
def test_torchrun_on_two_nodes_trains_as_one_process_does(
    nodes, base, whole, tmp_path, long, ahead
):
    """Also where the clock of node 1 is an hour ahead."""
    if ahead and not long:
        pytest.skip("runs with --long")
    values = helpers.variant(base, tmp_path)
    launch = "-m torch.distributed.run --nnodes 2 --nproc_per_node 1".split()
    launch += ["--rdzv_endpoint", "10.77.0.1:29500", "--node_rank"]
    script = [str(ROOT / "grpo.py"), *helpers.words(values)]
    clock = hour_ahead(tmp_path) if ahead else {}
    with forked_python.python() as program, open(tmp_path / "log", "w") as log:
        if ahead:  # only a new interpreter loads the library
            program = sys.executable
        environment = os.environ | {"PYTHON_EXEC": program, "GLOO_SOCKET_IFNAME": "eth0"}
        running = [
            subprocess.Popen(
                [*nodes.inside(node), program, *launch, str(node), *script],
                stdout=log,
                stderr=log,
                env=environment | (clock if node == 1 else {}),
            )
            for node in (0, 1)
        ]
        try:
            codes = [each.wait(240) for each in running]
        finally:
            for each in running:
                each.kill()
    assert codes == [0, 0], (tmp_path / "log").read_text()
    assert difference(values, whole) < 1e-9


def hour_ahead(folder: Path) -> dict:
    """Return the environment of processes whose wall clock is an hour ahead."""
    if not (compiler := shutil.which("cc")):
        pytest.skip("needs a C compiler")
    library = f"{folder}/clock.so"
    line = [compiler, "-shared", "-fPIC", "tests/faults/clock.c", "-o", library]
    subprocess.run(line, check=True, cwd=ROOT)
    environment = {"LD_PRELOAD": library}
    now = [sys.executable, "-c", "from datetime import *; print(datetime.now().timestamp())"]
    assert float(subprocess.check_output(now, env=environment)) - time.time() > 3000
    return environment


def on_node(holder: int, rank: int, folder: Path, place: str = "", command: str = "") -> None:
    """Let this process be a rank on a node. It begins once both are there, so that what one waits
    for the other is short. At the n-th call of a function one may run a shell command.
    """
    enter(holder)
    (folder / f"ready{rank}").touch()
    while len(list(folder.glob("ready*"))) < 2:
        time.sleep(0.01)
    if command:
        function, number = place.split(":")
        act = lambda calls: calls == int(number) and subprocess.run(command, shell=True)
        helpers._before(function, act)


def start_on_nodes(
    cluster: Cluster, values: dict, folder: Path, faults: dict
) -> list[helpers.Running]:
    """Start rank 0 on node 0 and rank 1 on node 1. `faults`: {rank: (place, command)}."""
    environment = {
        "MASTER_ADDR": "10.77.0.1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }
    places = {
        rank: partial(on_node, cluster.holders[rank].pid, rank, folder, *faults.get(rank, ()))
        for rank in (0, 1)
    }
    return helpers.start_ranks(values, 2, places, environment)


STEP = "utils.Optimizer.step:3"  # in step 2
SAVE = "checkpoints.save_model:2"  # of step 2
DOWN = "ip link set eth0 down"
BACK = f"{DOWN}; (sleep 5; ip link set eth0 up) >/dev/null 2>&1 &"
LATE = r"ranks \[1\] have not come, last seen in the phase '\w+'"
SILENT = "rank 0's machine does not answer"
# Rank and place of a fault, and what it does there; each rank's exit code.
FAULTS = {
    "link down": (1, STEP, DOWN, (2, 2)),
    "link down for 5 s": (1, STEP, BACK, (0, 0)),
    "machine 1 gone while the other saves": (1, SAVE, f"{DOWN}; kill -9 $PPID", (2, -9)),
    "machine 0 gone while it saves": (0, SAVE, f"{DOWN}; kill -9 $PPID", (-9, 2)),
    "rank 1 stands still": (1, STEP, "kill -STOP $PPID", (2, -9)),
    "rank 1 is busy": (1, STEP, "sleep 20; kill -9 $PPID", (2, -9)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_a_node(nodes, base, whole, tmp_path, long, fault):
    if fault != "link down" and not long:
        pytest.skip("runs with --long")
    victim, place, command, codes = FAULTS[fault]
    # 12 s: far longer than a rank of these runs waits for another one
    values = helpers.variant(base, tmp_path, collective_timeout=0.2)
    for node in (0, 1):
        nodes.ip(node, "link set eth0 up")
    ranks = start_on_nodes(nodes, values, tmp_path, {victim: (place, command)})
    if "STOP" in command:
        ranks[0].wait()
        ranks[1].process.kill()
    print("\n----\n".join(rank.wait().err for rank in ranks))
    assert tuple(rank.code for rank in ranks) == codes
    for number, (rank, late) in enumerate(zip(ranks, (LATE, SILENT))):
        if rank.code == 2 or command == BACK:
            where = rf"rank {number} of 2, in the phase '\w+'"
            assert re.search(f"warning: {where}: {late}", rank.err)
            errors = [] if command == BACK else [f"error: {where}.*: --collective_timeout: {late}"]
            assert len(errors) == len(rank.errors)
            assert all(re.match(*pair) for pair in zip(errors, rank.errors))
    if codes != (0, 0):
        assert "step_1" in helpers.steps_of(values)
        helpers.run({**values, "resume": True})
    assert difference(values, whole) < 1e-9


NODE_OF_VLLM, NODE_OF_REWARDS, NODE_OF_AGENT = 2, 3, 4  # nodes 0 and 1 train


@pytest.fixture
def five_nodes(tmp_path, long, monkeypatch):
    """A vLLM server, a reward server and the program of an agent, each on a node of its own."""
    if not long:
        pytest.skip("runs with --long")
    (tmp_path / "reward.py").write_text(helpers.REWARD)
    for name in ("VLLM_API_KEY", "REWARD_API_KEY"):
        monkeypatch.setenv(name, "a long key")
    environment = os.environ | helpers.VLLM_ON_CPU
    with helpers.vllm_preloaded(), forked_python.python() as python:
        cluster = Cluster(5)
        vllm = ["scripts/vllm_server.py", "--model", "assets/guess", "--host", "10.77.0.3"]
        vllm += ["--precision", "float32", "--kv_cache_gb", "0.02", "--max_length", "250"]
        rewards = ["scripts/reward_server.py", "--reward", f"{tmp_path}/reward.py:score"]
        commands = {
            NODE_OF_VLLM: [*vllm, *helpers.SERVER_ON_CPU],
            NODE_OF_REWARDS: [*rewards, "--host", "10.77.0.4"],
            NODE_OF_AGENT: ["tests/support/far_agent.py"],
        }
        running = [
            subprocess.Popen([*cluster.inside(node), python, *line], env=environment, cwd=ROOT)
            for node, line in commands.items()
        ]
        yield cluster
        for each in running:
            each.kill()
            each.wait(10)
        cluster.end()


def test_servers_and_an_agent_on_other_nodes(five_nodes, tmp_path):
    """Weights go to vLLM by gloo, and the tokens that it samples are those that train."""
    values = {
        "model": str(ROOT / "assets/guess"),
        "dataset": str(ROOT / "assets/guess/train.jsonl"),
        "agent": f"{ROOT / 'tests/support/far_agent.py'}:play",
        "rollout_backend": "server",
        "rollout_servers": "http://10.77.0.3:8000",
        "reward": ("http://10.77.0.4:8731", "episode"),
        "output_dir": str(tmp_path / "runs"),
        "run_name": "run",
        "rollout_batch_size": 4,
        "group_size": 4,
        "total_episodes": 48,
        "max_response_length": 64,
        "learning_rate": 1e-3,
        "kl_coef": 0.0,
        "eval_every": 0,
        "save_every": 0,
        "shard": "fsdp",
    }
    ranks = start_on_nodes(five_nodes, values, tmp_path, {})
    seen = "\n----\n".join(rank.wait().err for rank in ranks)
    assert [rank.code for rank in ranks] == [0, 0], seen
    rows = helpers.metrics_of(values)
    assert len(rows) == 3
    for row in rows:
        assert row["val/missing_scores"] == 0 and row["rollout/logprob_diff_max"] < 1e-3
        assert 0 < row["reward/episode"] <= 1 and row["rollout/sync_gb"] > 0


def test_the_address_at_which_servers_reach_a_run(monkeypatch):
    """That of a connection to a server on another machine, where there is one."""
    connected = []

    @contextlib.contextmanager
    def connect(address):
        connected.append(address)
        own = "127.0.0.1" if address[0] == "localhost" else "10.0.0.9"
        yield types.SimpleNamespace(getsockname=lambda: (own, 4000))

    monkeypatch.setattr(vllm_servers.socket, "create_connection", connect)
    urls = ["http://localhost:8000", "https://far", "http://never-asked:1"]
    assert vllm_servers.own_address(urls[:1]) == "127.0.0.1"
    assert vllm_servers.own_address(urls) == "10.0.0.9" and connected[-1] == ("far", 443)
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.7")
    assert vllm_servers.own_address(urls) == "10.0.0.7"


# ---- servers behind a network that harms ---------------------------------------------------------


class Proxy(helpers.Threads, socketserver.TCPServer):
    """Passes each connection on to a server, and its answer, through `harm(number of the connection,
    bytes)`, back; None closes the connection.
    """

    def __init__(self, url: str, harm):
        self.to = urlsplit(url)
        self.harm = harm
        self.connections = 0
        super().__init__(("127.0.0.1", 0), None)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def finish_request(self, request, client_address) -> None:
        self.connections += 1
        number = self.connections
        with socket.create_connection((self.to.hostname, self.to.port)) as server:
            threading.Thread(target=self.copy, args=(request, server), daemon=True).start()
            answer = b"".join(iter(lambda: server.recv(1 << 16), b""))
            if harmed := self.harm(number, answer):
                request.sendall(harmed)

    def copy(self, source, to) -> None:
        with contextlib.suppress(OSError):
            for data in iter(lambda: source.recv(1 << 16), b""):
                to.sendall(data)


def later(number: int, answer: bytes) -> bytes:
    time.sleep(0.3)
    return answer


# What happens to the answers of a server, and whether the client gets what the server said: whole,
# or nothing.
HARMS = {
    "delays": (later, True),
    "cuts the first connection": (lambda number, answer: None if number == 1 else answer, True),
    "cuts the first answer": (lambda number, answer: answer[: -5 if number == 1 else None], True),
    "corrupts a header": (lambda n, answer: answer if n > 1 else b"\0" + answer[1:], True),
    "corrupts every answer": (lambda n, answer: answer.replace(b"[", b"\xff"), False),
    "cuts every answer": (lambda number, answer: answer[:-5], False),
}


@pytest.fixture
def no_pauses(monkeypatch):
    """Clients ask again at once, and for half a second."""
    nap = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: nap(0.01))


def source_at(url: str) -> reward_servers.ServerSource:
    source = reward_servers.ServerSource.__new__(reward_servers.ServerSource)
    source.name, source.timeout, source.failure = url, 60.0, ""
    return source


@pytest.mark.parametrize("harm", HARMS)
def test_answers_that_a_network_harms(harm, monkeypatch, no_pauses):
    """A score or a response is what the server said, or none: never a zero, never half a
    response.
    """
    change, arrives = HARMS[harm]
    scores = Server(lambda question, _: test_reward_client.right(question))
    logprobs = {"content": [{"logprob": -0.5}] * 3}
    spans = [{"version": "4", "start": 0, "end": 3}]
    choice = {"finish_reason": "stop", "weight_versions": spans}
    choice |= {"token_ids": [0, 1, 2], "logprobs": logprobs}
    samples = Server(lambda *_: (200, {"choices": [choice]}, {}))
    for module in (vllm_servers, reward_servers):
        monkeypatch.setattr(module, "SERVER_PATIENCE", 60.0 if arrives else 0.5)
    proxies = [Proxy(server.url, change) for server in (scores, samples)]
    source = source_at(proxies[0].url)
    batch = [types.SimpleNamespace(row=ROW | {"prompt": str(i)}, text="x") for i in (3, 5)]
    got = asyncio.run(source.score(batch))
    assert got == ([3.0, 5.0] if arrives else [None, None]) and bool(source.failure) != arrives
    servers = vllm_servers.Servers.__new__(vllm_servers.Servers)
    servers.last_heard = {}
    sample = servers._sample(proxies[1].url, {})
    if arrives:
        assert asyncio.run(sample)[0].tolist() == [0, 1, 2]
    else:
        with pytest.raises(RuntimeError, match="generate failed"):
            asyncio.run(sample)
    for server in (*proxies, scores, samples):
        server.shutdown()
        server.server_close()


def test_a_name_that_does_not_resolve(no_pauses, monkeypatch):
    """No score; a vLLM server is awaited for as long as one that starts."""
    monkeypatch.setattr(reward_servers, "SERVER_PATIENCE", 0.5)
    source = source_at("http://nobody.invalid:80")
    batch = [types.SimpleNamespace(row=ROW, text="x")]
    assert asyncio.run(source.score(batch)) == [None]
    assert "nobody.invalid" in source.failure
    with pytest.raises(RuntimeError, match=r"/health failed for \d+ s .*nobody.invalid"):
        asyncio.run(vllm_servers.ask_server("http://nobody.invalid:80", "/health", patience=0.01))
