"""What a run of several ranks says, and how soon it ends, when one of them is gone."""

import time

import helpers
import pytest
from helpers import run_ranks


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
