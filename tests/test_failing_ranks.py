"""Ranks that fail: torchrun names the one, starts again; the others end soon; one others wait for
prints where it is.

Each phase in which a rank can fail is in tests/faults/test_ranks.py.
"""

import json
import os
import time
from functools import partial
from unittest import mock

import forked_python
import helpers
import pytest
import torch
from helpers import variant

import utils
from plumbing.run import command
from plumbing.run import ranks as of_ranks


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict:
    return {**helpers.workspace(tmp_path_factory.mktemp("ranks")), "eval_every": 0, "num_epochs": 1}


@pytest.mark.parametrize("script", ["grpo", "rloo", "ppo", "reward_model"])
def test_torchrun_learns_of_an_exception_in_any_script(script, tmp_path, monkeypatch):
    """By the file that it names in the environment, from which it makes its report."""
    module = __import__(script)
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with pytest.raises(AttributeError), command.report_errors():
        module.main(None)  # has no flags
    message = json.loads(file.read_text())["message"]
    assert (
        "AttributeError" in message["message"]
        and f"{script}.py" in message["extraInfo"]["py_callstack"]
    )


HANDLED = {  # what `main` raises in a phase, and the line that the run ends with
    "load": (
        OSError("nobody/nothing is not a folder\nmore"),
        "error: nobody/nothing is not a folder (mock.py line",
    ),
    "training": (
        torch.OutOfMemoryError("CUDA out of memory."),
        "error: rank 0 of 1, in the phase 'training': a GPU",
    ),
    "sync": (
        RuntimeError("[gloo/transport/tcp] closed"),
        "error: rank 0 of 1, in the phase 'sync': another rank",
    ),
}


@pytest.mark.parametrize("phase", HANDLED)
def test_errors_that_are_one_line(phase, monkeypatch, capsys):
    error, line = HANDLED[phase]
    monkeypatch.setattr(of_ranks.status, "phase", phase)
    monkeypatch.setattr(command.time, "sleep", lambda seconds: None)
    assert helpers.refused(capsys, mock.Mock(side_effect=error)).startswith(line)


DEADLY = """
import os, signal
def score(prompts, responses, **columns):
    metrics = os.environ["METRICS"]
    steps = len(open(metrics).readlines()) if os.path.exists(metrics) else 0
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and steps > 2:
        with open(f"/proc/{os.getppid()}/stat") as server:  # of which the trainer is the parent
            os.kill(int(server.read().rpartition(")")[2].split()[1]), signal.SIGKILL)
    return [float(len(response) % 3) for response in responses]
"""


def test_torchrun_starts_again_and_resumes(base, tmp_path):
    """With --max_restarts a killed rank ends all, after the first one has saved; the next start
    goes on by itself.
    """
    (tmp_path / "deadly.py").write_text(DEADLY)
    log = tmp_path / "log"
    values = variant(base, tmp_path, total_episodes=48, save_every=0, resume=True)
    values["reward"] = f"{tmp_path / 'deadly.py'}:score"
    metrics = str(helpers.folder_of(values) / "metrics.jsonl")
    restarts = ("--max_restarts", "1")
    with forked_python.torchrun(
        helpers.ROOT / "grpo.py", values, log, *restarts, METRICS=metrics
    ) as running:
        assert running.wait(300) == 0, log.read_text()[-3000:]
    assert "goes on after step" in log.read_text()
    assert [row["step"] for row in helpers.metrics_of(values)] == [1, 2, 3, 4, 5, 6]


def stuck(until: str) -> None:
    """Let this rank print tracebacks soon, and wait in its first reward for a file; "" for none."""
    of_ranks.STUCK_AFTER = 1.0

    def wait(calls: int) -> None:
        while calls == 1 and until and not os.path.exists(until):
            time.sleep(0.05)

    helpers._before("sources.Scoring.finish", wait)


def test_ranks_that_wait_print_where(base, tmp_path):
    """The one that is stuck and the one that waits for it, again and again; the run goes on."""
    values = variant(base, tmp_path, total_episodes=8, save_every=0)
    mark = tmp_path / "mark"
    places = {0: partial(stuck, ""), 1: partial(stuck, str(mark))}
    waits, is_stuck = helpers.start_ranks(values, 2, places)
    while is_stuck.err.count("Timeout (0:00:0") < 2 or "distributed_c10d.py" not in waits.err:
        assert waits.process.is_alive() and is_stuck.process.is_alive(), waits.err + is_stuck.err
        time.sleep(0.05)
    mark.touch()
    assert [rank.wait().code for rank in (waits, is_stuck)] == [0, 0]
    assert " in wait\n" in is_stuck.err


# ---- numbers that are not finite, on one rank ----------------------------------------------------


def watched(folder: str, rank: int, factor: float) -> None:
    """Write down a sum of all weights after each update; multiply the token losses of the second
    update.
    """
    import grpo

    sums = []
    step = utils.Optimizer.step
    policy_loss = grpo.policy_loss

    def and_sum(optimizer) -> None:
        step(optimizer)
        weights = [
            utils.full_tensor(parameter.detach()).double() for parameter in optimizer.parameters
        ]
        sums.append(sum(weight.abs().sum().item() for weight in weights))
        torch.save(sums, f"{folder}/{rank}.pt")

    def loss(*args, **options):
        losses, clipped = policy_loss(*args, **options)
        return losses * (factor if len(sums) == 1 else 1.0), clipped

    utils.Optimizer.step = and_sum
    grpo.policy_loss = loss


@pytest.mark.parametrize("shard", ["none", "fsdp"])
def test_a_loss_that_is_not_finite_on_one_rank(base, tmp_path, shard):
    """All ranks skip the same update, which is counted, and go on with equal weights."""
    values = variant(base, tmp_path, shard=shard, total_episodes=16, num_epochs=2)
    watch = {
        rank: partial(watched, str(tmp_path), rank, factor)
        for rank, factor in enumerate((1.0, float("inf")))
    }
    helpers.run_ranks(values, 2, (0, 0), watch)
    assert [row["val/skipped_updates"] for row in helpers.metrics_of(values)] == [1, 0]
    ours, theirs = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert len(ours) == 8 and ours == theirs  # after each update
    assert ours[1] == ours[0] and len(set(ours)) == 7
