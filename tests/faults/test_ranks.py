"""One rank of two that is killed or raises, in each phase. What is printed of it is in
tests/test_failing_ranks.py.
"""

import os
import random
import re
import signal
from functools import partial

import helpers
import pytest


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict:
    values = helpers.workspace(tmp_path_factory.mktemp("ranks"))
    return {**values, "total_episodes": 8, "num_epochs": 1, "save_every": 1}


PHASES = {  # where a rank ends -> the phase that it is in
    "tokenizer.load_tokenizer:1": "load",
    "loading.load_model:2": "load",  # the reference
    "torch.searchsorted:3": "evaluation",
    "sources.Scoring.finish:2": "rollout",
    "grpo.forward_batch:1": "logprobs",
    "utils.Optimizer.step:1": "training",
    "checkpoints.save_model:1": "save",
    "torch.distributed.checkpoint.save:1": "save",
    "checkpoints.save_final:1": "save",
}


def ends(place: str, kind: str) -> None:
    """Let this process end before the n-th call of a function."""
    function, number = place.split(":")

    def act(calls: int) -> None:
        if calls == int(number):
            if kind == "raises":
                raise RuntimeError("no such luck")
            os.kill(os.getpid(), getattr(signal, kind))

    helpers._before(function, act)


def test_all_end_where_one_does(base, tmp_path, long):
    """Soon, whatever the phase. A rank that raises prints rank and phase after its traceback; the
    other one, which has lost it, prints in one line where.
    """
    faults = [
        (p, k, v, s)
        for p in PHASES
        for k in ("SIGKILL", "raises")
        for v in (0, 1)
        for s in ("none", "fsdp")
    ]
    for number, (place, kind, victim, shard) in enumerate(
        faults if long else random.Random(3).sample(faults, 3)
    ):
        values = {**base, "output_dir": str(tmp_path), "run_name": f"{number}", "shard": shard}
        both = helpers.start_ranks(values, 2, {victim: partial(ends, place, kind)})
        for rank in both:
            rank.wait()
        first = both[victim]
        other = both[1 - victim]
        fault = f"{place} {kind} {victim} {shard}\n{first.err}\n----\n{other.err}"
        assert first.code == (1 if kind == "raises" else -9), fault
        end = [line.removeprefix(f"[rank{victim}]: ") for line in first.err.splitlines()[-2:]]
        note = rf"RuntimeError: no such luck\(rank {victim} of 2, in the phase '{PHASES[place]}'(; .* saved.*)?\)"
        assert kind != "raises" or re.fullmatch(note, "".join(end)), fault
        if other.code:  # rank 1 has nothing more to do once the last checkpoint is saved
            (line,) = other.errors
            assert other.code == 2 and "Traceback" not in other.err, fault
            assert re.match(
                rf"error: rank {1 - victim} of 2, in the phase '\w+'.*: another rank has ended",
                line,
            ), fault
        else:
            assert place == "checkpoints.save_final:1", fault
