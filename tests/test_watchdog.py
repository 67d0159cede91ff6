"""What a run of several ranks says, and how soon it ends, when one of them is gone; and where they wait."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import helpers
import pytest
from helpers import run_ranks

import utils
from plumbing import run_log
from plumbing.rewards import Rewards


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict:
    return {**helpers.workspace(tmp_path_factory.mktemp("watchdog")), "eval_every": 0, "total_episodes": 4000}


@pytest.mark.parametrize("place, phase", [("utils.Optimizer.step", "update"), ("grpo.Sampler.__call__", "rollout")])
def test_a_killed_rank_ends_all_and_is_named(base, tmp_path, place, phase):
    """Within a minute, in one line by the first rank that is left."""
    begin = time.monotonic()
    values = {**base, "output_dir": str(tmp_path), "run_name": "run"}
    ranks = run_ranks(values, 3, (1, -9, 1), {1: f"{place}:5:SIGKILL"})
    assert time.monotonic() - begin < 60
    first, _, last = (rank.errors for rank in ranks)
    assert len(first) == 1 and not last, (first, last)
    assert first[0].startswith(f"error: rank 1 (last phase: {phase}) is gone; rank 0 was in phase ")


def test_the_first_rank_is_named_too(base, tmp_path):
    """It holds what the ranks tell each other, so what the other has heard of it may be a second old."""
    values = {**base, "output_dir": str(tmp_path), "run_name": "run"}
    ranks = run_ranks(values, 2, (-9, 1), {0: "utils.Optimizer.step:80:SIGKILL"})
    assert len(ranks[1].errors) == 1 and ranks[1].errors[0].startswith("error: rank 0 (last phase: ")


DEADLY = """
import os, signal
def score(prompts, responses, **columns):
    marker = os.environ["MARKER"]
    if os.environ["RANK"] == "1" and os.path.exists(marker):  # once
        os.remove(marker)
        os.kill(os.getppid(), signal.SIGKILL)
    return [float(len(response) % 3) for response in responses]
"""


def test_torchrun_starts_again_and_resumes(base, tmp_path):
    """With --max_restarts a killed rank ends all and the next start goes on from the newest checkpoint by itself."""
    (tmp_path / "deadly.py").write_text(DEADLY)
    marker = tmp_path / "marker"
    values = {**base, "output_dir": str(tmp_path), "run_name": "run", "total_episodes": 48, "save_every": 1}
    values |= {"reward": f"{tmp_path / 'deadly.py'}:score", "resume": True}
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--max_restarts", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MARKER": str(marker)}
    log = tmp_path / "log"
    with open(log, "w") as file:
        running = subprocess.Popen(
            [sys.executable, *words, str(helpers.ROOT / "grpo.py"), *helpers.flags(values)],
            stdout=file, stderr=file, env=environment,
        )  # fmt: skip
        metrics = helpers.folder_of(values) / "metrics.jsonl"
        while running.poll() is None and not (metrics.exists() and len(metrics.read_text().splitlines()) > 2):
            time.sleep(0.05)
        marker.touch()
        assert running.wait(120) == 0, log.read_text()[-3000:]
    assert not marker.exists() and "goes on after step" in log.read_text()
    assert [row["step"] for row in helpers.metrics_of(values)] == [1, 2, 3, 4, 5, 6]


def a_rank(rank: int, port: int, log: str) -> None:
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    sys.stderr = open(2, "w", closefd=False)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    world = utils.setup_processes()
    time.sleep(rank)  # one that still loads is not gone
    watchdog = run_log.Watchdog(world, silence=3.0, patience=2.0)
    watchdog.enter("rollout")
    if rank == 1:
        rewards = SimpleNamespace(names=("slow",), models=(), _score=lambda *_: time.sleep(9))
        Rewards.score(rewards, [], [], [])
    world.barrier()
    watchdog.enter("update")
    world.barrier()
    time.sleep(1.5)
    watchdog.close()
    world.barrier()


def test_ranks_that_wait_say_where():
    """One rank hangs in a reward and the other waits for it: every so often a line names phase and place of both, and
    nobody is ended."""
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    logs = [f"{helpers._logs.name}/waiting{rank}" for rank in range(2)]
    ranks = [helpers._server().Process(target=a_rank, args=(rank, port, logs[rank])) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(60)
        each.kill()
    said = [Path(log).read_text() for log in logs]
    assert [each.exitcode for each in ranks] == [0, 0], said
    lines = said[0].splitlines()
    assert 2 <= len(lines) <= 4 and "warning" not in said[1], said
    for line in lines:
        assert line.startswith("warning: no rank has entered another phase for 0."), line
        assert (
            "rank 0 in rollout (barrier, utils.py line " in line
            and "rank 1 in rollout (<lambda>, test_watchdog.py" in line
        )
