"""SIGKILL, SIGTERM and SIGINT at random instants of runs, again and again, each time where the
resumed run got to.

An instant is the call of a function of some phase and up to 30,000 further calls of any function
after it. Each process ends within a few steps, so a chain of kills costs little more than the
undisturbed run. An instant that a process does not reach lets it finish; the next chain begins with
an empty folder.
"""

import os
import re
import time
from pathlib import Path

import helpers
import numpy as np
import pytest
from helpers import MOVING, OF_PPO, folder_of, processes_of

import utils
from plumbing.run import log

STEPS, STOPS = 12, 30  # of each kind of run, with --long
STEPS_IN_CI = 4
STOPS_IN_CI = 3
SIGNALS = ("SIGKILL", "SIGTERM SIGINT")  # of a run, one drawn each time
IN_CI = ("sharded", "SIGKILL")  # of one rank: test_run.py; of conversations: test_signals.py

# What the random instants come after: functions, each with the number of calls from which one is
# drawn.
RUNNING = {
    "folder.find_origin": 1,
    "folder.open_folder": 1,
    "checkpoints.save_checkpoint": 2,
    "checkpoints.save_model": 4,
    "torch.distributed.checkpoint.save": 2,
    "os.rename": 4,
    "log.RunLog.log": 2,
    "log.append": 4,
    "checkpoints.save_final": 1,
    "utils.Optimizer.step": 6,
}
LOADING = {"checkpoints.load_checkpoint": 1, "checkpoints.load_optimizer": 1}  # a checkpoint
OF_RANK_0 = {"folder.find_origin", "folder.open_folder", "os.rename", "log.append"}
SAMPLING = {"grpo.generate": 3, "sources.Scoring.finish": 3, "grpo.forward_batch": 3}
GAME = {"environment": helpers.GAME, "reward": "episode", "max_response_length": 30}
RANKS = {"micro_batch_tokens": 200, "num_epochs": 1}
# Script, ranks, flags, and what instants come after besides RUNNING.
KINDS = {
    "one rank": ("grpo", 1, MOVING, SAMPLING | {"grpo.sync_reference": 1}),
    "conversations": ("grpo", 1, GAME, SAMPLING),
    "sharded": ("grpo", 2, MOVING | RANKS | {"shard": "fsdp"}, SAMPLING),
    "sharded conversations": ("grpo", 2, GAME | RANKS | {"shard": "fsdp"}, SAMPLING),
    "LoRA": ("grpo", 1, {"lora_rank": 4}, SAMPLING),
    "ppo": (
        "ppo",
        1,
        MOVING | OF_PPO,
        {"ppo.generate": 3, "ppo.forward_batch": 4, "ppo.update_critic": 4},
    ),
    "rloo": (
        "rloo",
        1,
        MOVING | {"advantage": "remax"},
        {"rloo.generate": 4, "rloo.forward_batch": 3},
    ),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory, long) -> dict:
    steps = STEPS if long else STEPS_IN_CI
    return helpers.workspace(tmp_path_factory.mktemp("kills")) | {
        "save_every": 1,
        "total_episodes": 8 * steps,
    }


class Chain:
    """A run that is stopped again and again, and the undisturbed one."""

    def __init__(self, values: dict, whole: dict, kind: str):
        self.values = values
        self.whole = whole
        self.script, self.size, *_ = KINDS[kind]
        self.step = 0  # that a resumed run has to go on after, at least

    def start(self, places: dict) -> list[helpers.Running]:
        """Start or resume the run, with signals to itself at `places`, by rank."""
        values = {**self.values, "resume": True}
        if self.size == 1:
            return [helpers.Running(values, script=self.script, place=places.get(0, ""))]
        return helpers.start_ranks(values, self.size, places, script=self.script)

    def stop(self, draw: np.random.Generator, how: str, instants: dict) -> bool:
        """Start the run and send it a signal at a random instant; return whether that ended it.
        Check what is left.
        """
        ranks = [int(draw.integers(self.size))]
        # as torchrun does, or as somebody does to one rank
        if how != "SIGKILL" and draw.random() < 0.5:
            ranks = list(range(self.size))
        if (folder_of(self.values) / "checkpoints").exists():
            instants = instants | LOADING
        name = draw.choice(list(instants))
        ranks = [0] if name in OF_RANK_0 else ranks
        place = (
            f"{name}:{draw.integers(instants[name]) + 1}:{how}+{int(10 ** draw.uniform(0, 4.5))}"
        )
        running = self.start(dict.fromkeys(ranks, place))
        first = running[ranks[0]].wait()
        # a machine ends all at once or nearly; alone, a rank ends as it misses the other
        for other in running:
            other.process.join(
                60.0 if first.code in (0, 75) else draw.choice([0.0, draw.uniform(0, 0.5), 60.0])
            )
            other.process.kill()
            other.process.join(60)
        codes = [each.code for each in running]
        saved = [
            int(step) for step in re.findall(r"interrupted: step (\d+) is saved", running[0].out)
        ]
        print(f"rank {ranks} at {place}: exit codes {codes}, saved: {saved}")
        errors = place, [each.err for each in running]
        stopped = codes != [0] * self.size
        assert not stopped or first.code == (-9 if how == "SIGKILL" else 75), errors
        if saved:  # else it had not begun a step
            assert codes == [75] * self.size and not any(
                "Traceback" in each.err for each in running
            ), errors
        self.check(running, place)
        self.step = saved[0] if saved else self.step
        return stopped

    def check(self, running: list[helpers.Running], place) -> None:
        """The run went on where it has to; rows of the undisturbed run, and no process, are
        left.
        """
        after = re.findall(r"goes on after step (\d+)", running[0].out)
        assert not after or int(after[0]) >= self.step, place
        for part in ("metrics", "samples"):
            ours, theirs = (
                rows_of(folder_of(each) / f"{part}.jsonl") for each in (self.values, self.whole)
            )
            assert ours == theirs[: len(ours)], (place, part)
            if part == "metrics" and ours:
                self.step = max(self.step, ours[-1]["step"] if self.values["save_every"] else 0)
        end = time.monotonic() + 60
        while (
            left := [x for each in running for x in processes_of(each)]
        ) and time.monotonic() < end:
            time.sleep(0.05)
        assert not left, place

    def finish(self) -> None:
        """The run that nobody kills any more ends like the undisturbed one, bit for bit, clocks
        aside.
        """
        # else it has ended for good
        if self.values["save_every"] or not (folder_of(self.values) / "final").exists():
            running = self.start({})
            assert [each.wait().code for each in running] == [0] * self.size, [
                each.err for each in running
            ]
            self.check(running, "the end")
        helpers.assert_same_run(self.values, self.whole)


def rows_of(path: Path) -> list[dict]:
    """The rows of a log, without a last one that a kill cut short, and without the numbers of
    clocks.
    """
    rows = log.read_log(path.parent, path.name)
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/"))} for row in rows]


@pytest.fixture(scope="module")
def undisturbed(base, tmp_path_factory):
    """A function kind -> flags of the undisturbed run of a kind, which is made once."""
    made = {}

    def run(kind: str) -> dict:
        if kind not in made:
            values = helpers.variant(base, tmp_path_factory.mktemp("whole"), **KINDS[kind][2])
            if KINDS[kind][0] == "ppo":
                values["ptx_dataset"] = base["dataset"]
            Chain(values, values, kind).finish()
            made[kind] = values
        return made[kind]

    return run


@pytest.mark.parametrize("how", SIGNALS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_stopped_again_and_again(undisturbed, tmp_path, long, kind, how):
    """In every second run that gets SIGTERM and SIGINT they alone save."""
    if (kind, how) != IN_CI and not long:
        pytest.skip("runs with --long")
    whole = undisturbed(kind)
    draw = utils.generator("kills", kind, how, os.environ.get("SEED", "1"))
    wanted = STOPS if long else STOPS_IN_CI
    count = chains = 0
    while count < wanted:
        chains += 1
        changes = {"run_name": f"run_{chains}", "save_every": 1 if how == "SIGKILL" else chains % 2}
        chain = Chain({**whole, **changes, "output_dir": str(tmp_path)}, whole, kind)
        while count < wanted and chain.stop(
            draw, draw.choice(how.split()), RUNNING | KINDS[kind][3]
        ):
            count += 1
        chain.finish()
    print(f"{kind}, {how}: {count} in {chains} runs")
