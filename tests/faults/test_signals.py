"""SIGTERM and SIGINT where a run waits for others, and under torchrun: 75 within its grace.

What comes at random instants is in test_kills.py; each phase of a step, of one process, in
tests/test_run.py; the start of a run in tests/test_resume.py.
"""

import contextlib
import multiprocessing
import os
import re
import signal
import time
from pathlib import Path

import forked_python
import helpers
import pytest
from helpers import assert_same_run, processes_of, steps_of
from tiny_models import WORLD

from plumbing.run.ranks import Interrupt

# Sleeps where a file says so, and leaves another one to say that it does.
SLOW = """
import os, time

def wait():
    if os.path.exists({marker!r}):
        open({marker!r} + ".reached", "w").close()
        time.sleep(600)

def score(prompts, responses, **columns):
    if len(responses) > 2:  # not the trial call
        wait()
    return [len(response) % 5 / 5 for response in responses]

class Game:
    def reset(self, **row):
        self.turns = 0

    def step(self, response):
        wait()
        self.turns += 1
        return ">", len(response) / 10, self.turns == 2
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("signals")
    changes = {
        "total_episodes": 16,
        "eval_every": 0,
        "save_every": 0,
        "timeout": 500.0,
        "run_name": "run",
    }
    return {**helpers.workspace(folder), **changes}


@pytest.fixture
def marker(tmp_path) -> Path:
    marker = tmp_path / "marker"
    (tmp_path / "slow.py").write_text(SLOW.format(marker=str(marker)))
    return marker


def wait_for(path: Path, alive) -> None:
    for _ in range(6000):
        if path.exists():
            return
        assert alive(), "ended before it waited"
        time.sleep(0.02)
    raise AssertionError(f"no {path.name} after two minutes")


CONVERSATION = {"reward": "episode", "max_response_length": 20}
WAITS = {
    "reward function": {"reward": "slow.py:score"},
    "environment": {"environment": "slow.py:Game"} | CONVERSATION,
}


@pytest.mark.parametrize("name", WAITS)
def test_a_run_that_waits(base, tmp_path, marker, name):
    """It ends at once where all its processes get SIGTERM, as from Slurm; the run that goes on
    repeats the rollout, and does not show it.
    """
    changes = WAITS[name]
    values = {**base, **changes, "output_dir": str(tmp_path)}
    values |= {key: str(tmp_path / x) for key, x in changes.items() if str(x).startswith("slow.py")}
    marker.touch()
    running = helpers.Running(values)
    wait_for(Path(f"{marker}.reached"), running.process.is_alive)
    marker.unlink()
    for process in [running.process.pid, *processes_of(running)]:
        with contextlib.suppress(ProcessLookupError):  # ended by the one before
            os.kill(process, signal.SIGTERM)
    assert running.wait(100).code == 75, running.err
    assert steps_of(values) == ["step_0"]
    assert "Traceback" not in running.err and not running.errors, running.err
    whole = {**values, "run_name": "whole"}
    helpers.run(whole)
    helpers.run({**values, "resume": True})
    assert_same_run(values, whole)


# ---- torchrun ------------------------------------------------------------------------------------

# Rank 0 sends torchrun SIGTERM before it scores the first rollout, and waits until torchrun has
# passed it on.
SENDING = """
import os, signal, sys, time
import helpers
import grpo
from plumbing.run import log as run_log
from plumbing.run.command import parse, report_errors

def send(calls):
    if calls == 2 and os.environ["RANK"] == "0":
        os.kill(int(open({torchrun!r}).read()), signal.SIGTERM)
        while not passed_on:
            time.sleep(0.05)

passed_on = []
run_log.RunLog.draw = lambda self: None
helpers._before("ranks.Interrupt._handle", passed_on.append)
helpers._before("sources.Scoring.finish", send)
with report_errors():
    grpo.main(parse(grpo.Args))
"""


def test_torchrun(base, tmp_path):
    """Two ranks are gone, with their last step saved, within its 30 seconds of grace; then they go
    on.
    """
    values = {**base, "output_dir": str(tmp_path), "shard": "fsdp", "eval_every": 1}
    script, log, torchrun = (tmp_path / name for name in ("sending.py", "log", "torchrun"))
    script.write_text(SENDING.format(torchrun=str(torchrun)))
    with forked_python.torchrun(script, values, log) as running:
        torchrun.write_text(str(running.pid))
        code = running.wait(120)
    text = log.read_text()
    assert code == 1 and "forcefully exiting" not in text and "SIGTERM: " in text, text[-3000:]
    assert re.findall(r"interrupted: step (\d+) is saved", text) == ["0"], text[-3000:]
    whole = {**values, "run_name": "whole"}
    for each in (whole, {**values, "resume": True}):
        helpers.run_ranks(each, 2, (0, 0))
    assert_same_run(values, whole)


def test_a_forked_process_ends_at_once(capfd):
    """Such as those of datasets, which have the handlers of the run; and it says nothing."""
    handled = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    Interrupt(WORLD, __file__).can_save = True
    fork = multiprocessing.get_context("fork")
    begun = fork.Event()
    child = fork.Process(target=lambda: begun.set() or time.sleep(60))
    child.start()
    assert begun.wait(60)  # Python drops a signal that arrives while it forks
    child.terminate()
    child.join(30)
    for number, handler in handled.items():
        signal.signal(number, handler)
    assert child.exitcode == -signal.SIGTERM and not capfd.readouterr().err
