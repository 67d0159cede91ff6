"""What torchrun says of a rank that is killed or raises, and how it starts again; what a rank says that is stuck.

Each phase in which a rank can fail is in tests/faults/test_ranks.py.
"""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import forked_python
import helpers
import pytest

import grpo
import utils
from plumbing.run import log as run_log
from plumbing.run import ranks as of_ranks
from plumbing.run import resume

# Rank 1 kills itself, or raises, before a call of a function.
FAILING = """
import os, signal, sys
sys.path[:0] = {paths!r}
import helpers
import grpo
from plumbing import command_line

def fail(calls):
    if calls == {number} and os.environ["RANK"] == "1":
        open({marker!r}, "w").close()
        if {raises}:
            raise ValueError("no such luck")
        os.kill(os.getpid(), signal.SIGKILL)

helpers._before({function!r}, fail)
grpo.main(command_line.parse(grpo.Args))
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict:
    return {**helpers.workspace(tmp_path_factory.mktemp("ranks")), "eval_every": 0, "total_episodes": 4000}


@pytest.fixture(scope="module")
def torchrun():
    """A function that starts two ranks, whose output goes to a file. All processes are forked ones."""
    with forked_python.python() as python:

        def start(log: Path, script, values: dict, *options: str, **environment) -> subprocess.Popen:
            words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *options, str(script)]
            settings = {"OMP_NUM_THREADS": "1", "PYTHON_EXEC": python, **environment}
            with open(log, "a") as file:
                return subprocess.Popen(
                    [python, *words, *helpers.words(values)], stdout=file, stderr=file, env={**os.environ, **settings}
                )

        yield start


@pytest.mark.parametrize("function, raises", [("data.take_prompts", False), ("utils.Optimizer.step", True)])
def test_a_rank_that_fails_ends_all_and_is_named(base, tmp_path, torchrun, function, raises):
    """By torchrun, soon, with its rank and the signal, or the exception and where it was raised."""
    values = {**base, "output_dir": str(tmp_path), "run_name": "run"}
    script, log, marker = (tmp_path / name for name in ("failing.py", "log", "marker"))
    paths = [str(path) for path in helpers.PATHS]
    script.write_text(FAILING.format(paths=paths, marker=str(marker), function=function, number=5, raises=raises))
    code = torchrun(log, script, values).wait(120)
    text = log.read_text()
    assert code == 1 and time.time() - marker.stat().st_mtime < 60, text[-3000:]
    cause = text[text.index("Root Cause (first observed failure)") :]
    assert "rank      : 1 (local_rank: 1)" in cause, text[-3000:]
    said = ("ValueError: no such luck", "in main\n", "(rank 1 of 2, in the phase 'training')")
    assert all(line in cause for line in said) if raises else "(SIGKILL)" in cause, cause


@pytest.mark.parametrize("script", ["grpo", "rloo", "ppo", "reward_model"])
def test_torchrun_learns_of_an_exception_in_any_script(script, tmp_path, monkeypatch):
    """By the file that it names in the environment, from which it makes its report."""
    module, file = __import__(script), tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with pytest.raises(AttributeError):
        module.main(None)  # has no flags
    message = json.loads(file.read_text())["message"]
    assert "AttributeError" in message["message"] and f"{script}.py" in message["extraInfo"]["py_callstack"]


DEADLY = """
import os, signal
def score(prompts, responses, **columns):
    marker = os.environ["MARKER"]
    if os.environ["RANK"] == "1" and os.path.exists(marker):  # once
        os.remove(marker)
        os.kill(os.getppid(), signal.SIGKILL)
    return [float(len(response) % 3) for response in responses]
"""


def test_torchrun_starts_again_and_resumes(base, tmp_path, torchrun):
    """With --max_restarts a killed rank ends all and the next start goes on from the newest checkpoint by itself."""
    (tmp_path / "deadly.py").write_text(DEADLY)
    marker, log = tmp_path / "marker", tmp_path / "log"
    values = {**base, "output_dir": str(tmp_path), "run_name": "run", "total_episodes": 48, "save_every": 1}
    values |= {"reward": f"{tmp_path / 'deadly.py'}:score", "resume": True}
    running = torchrun(log, helpers.ROOT / "grpo.py", values, "--max_restarts", "1", MARKER=str(marker))
    metrics = helpers.folder_of(values) / "metrics.jsonl"
    while running.poll() is None and not (metrics.exists() and len(metrics.read_text().splitlines()) > 2):
        time.sleep(0.05)
    marker.touch()
    assert running.wait(120) == 0, log.read_text()[-3000:]
    assert not marker.exists() and "goes on after step" in log.read_text()
    assert [row["step"] for row in helpers.metrics_of(values)] == [1, 2, 3, 4, 5, 6]


def slow_reward() -> None:
    time.sleep(3.5)


def a_rank(rank: int, port: int, folder: str) -> None:
    """Rank 1 hangs in a reward, for which rank 0 waits."""
    os.dup2(os.open(f"{folder}/{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    sys.stderr = open(2, "w", closefd=False)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    world = utils.setup_processes()
    of_ranks.STUCK_AFTER = 1.0
    log = run_log.RunLog(resume.Origin(folder, {}), grpo.Args(), world, 1, 0, {"prompts": [1]})
    log.phase("rollout")
    if rank == 1:
        slow_reward()
    world.barrier()
    log.phase("training")  # does not last long enough
    world.barrier()
    log.close("done")
    time.sleep(2.5)  # the run is over
    world.barrier()


def test_ranks_that_wait_say_where(tmp_path):
    """Each prints its traceback every so often, and none is ended."""
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [helpers._server().Process(target=a_rank, args=(rank, port, str(tmp_path))) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(60)
        each.kill()
    said = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert [each.exitcode for each in ranks] == [0, 0], said
    for rank, function in enumerate(("barrier", "slow_reward")):
        lines = re.findall(rf"^rank {rank} of 2, in the phase 'rollout' for (\d+) seconds, is here:$", said[rank], re.M)
        assert lines == [["1", "2", "3"], ["2"]][rank] and said[rank].count(", in the phase") == len(lines), said[rank]
        assert f" in {function}\n" in said[rank] and " in a_rank\n" in said[rank]
