"""One rank of two that is killed, raises, is slow or has numbers that are not finite; and data that leave ranks without
work. What torchrun makes of a rank that fails is in tests/test_failing_ranks.py."""

import math
import os
import random
import re
import signal
import time
from functools import partial

import helpers
import pytest
import torch
from helpers import folder_of, largest_difference, metrics_of, run_ranks, same_weights
from test_scripts import write_pairs

import utils
from plumbing.run import ranks as of_ranks


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict:
    values = helpers.workspace(tmp_path_factory.mktemp("ranks"))
    return {**values, "total_episodes": 8, "num_epochs": 1, "save_every": 1}


# ---- a rank that ends ------------------------------------------------------------------------------------------------

PHASES = {  # where a rank ends -> the phase that it is in
    "models.load_tokenizer:1": "load",
    "models.load_model:1": "load",
    "models.load_model:2": "load",  # the reference
    "data.load_train_and_eval:1": "load",
    "torch.searchsorted:3": "evaluate",
    "sources.Rewards.score:1": "evaluate",
    "grpo.generate:3": "rollout",
    "sources.Rewards.score:3": "rollout",
    "grpo.forward_batch:1": "logprobs",
    "grpo.policy_loss:2": "training",
    "utils.Optimizer.step:1": "training",
    "utils.Sums.totals:1": "training",
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
                raise ValueError("no such luck")
            os.kill(os.getpid(), getattr(signal, kind))

    helpers._before(function, act)


def test_all_end_where_one_does(base, tmp_path, long):
    """Soon, whatever the phase. A rank that raises says rank and phase after its traceback; the other one, which has
    lost it, says in one line where."""
    faults = [(p, k, v, s) for p in PHASES for k in ("SIGKILL", "raises") for v in (0, 1) for s in ("none", "fsdp")]
    for number, (place, kind, victim, shard) in enumerate(faults if long else random.Random(3).sample(faults, 4)):
        values = {**base, "output_dir": str(tmp_path), "run_name": f"{number}", "shard": shard}
        both = helpers.start_ranks(values, 2, {victim: partial(ends, place, kind)})
        for rank in both:
            rank.wait(60)
        first, other = both[victim], both[1 - victim]
        fault = f"{place} {kind} {victim} {shard}\n{first.err[-2000:]}\n----\n{other.err[-2000:]}"
        assert first.code == (1 if kind == "raises" else -9), fault
        told = f"rank {victim} of 2, in the phase '{PHASES[place]}'"
        end = [line.removeprefix(f"[rank{victim}]: ") for line in first.err.splitlines()[-2:]]
        assert kind != "raises" or end == ["ValueError: no such luck", f"({told})"], fault
        if other.code:  # rank 1 has nothing more to do once the last checkpoint is saved
            (line,) = other.errors
            assert other.code == 2 and "Traceback" not in other.err, fault
            assert re.match(rf"error: rank {1 - victim} of 2, in the phase '\w+': another rank has ended", line), fault
        else:
            assert place == "checkpoints.save_final:1", fault


# ---- a rank that is slow ---------------------------------------------------------------------------------------------


def slow(place: str, seconds: float) -> None:
    """Let this process wait before the n-th call of a function; what it says when others wait comes soon."""
    of_ranks.STUCK_AFTER = 1.0
    function, number = place.split(":")
    helpers._before(function, lambda calls: time.sleep(seconds) if calls == int(number) else None)


SLOW = {
    "models.load_model:1": "load",
    "sources.Rewards.score:3": "rollout",
    "utils.Optimizer.step:1": "training",
    "checkpoints.save_model:1": "save",
}


def test_a_slow_rank_is_waited_for(base, tmp_path, long):
    """It says where it is, and the run is the same."""
    run_ranks({**base, "run_name": "straight"}, 2, (0, 0))
    for place in SLOW if long else ("models.load_model:1",):
        values = {**base, "output_dir": str(tmp_path), "run_name": place}
        both = run_ranks(values, 2, (0, 0), {1: partial(slow, place, 3.5)})
        said = both[1].err
        assert f"rank 1 of 2, in the phase '{SLOW[place]}' for 2 seconds, is here:\n" in said, said[-2000:]
        assert " in <lambda>\n" in said
        assert metrics_of(values) == metrics_of({**base, "run_name": "straight"})
        assert same_weights(folder_of(values) / "final", folder_of(base | {"run_name": "straight"}) / "final")


# ---- numbers that are not finite, on one rank ------------------------------------------------------------------------


def not_finite(value: float, update: int) -> None:
    """Make the token losses, or a gradient, of one update not finite."""
    import grpo

    updates = []
    helpers._before("utils.Optimizer.step", updates.append)
    policy_loss = grpo.policy_loss

    def loss(*args, **options):
        losses, clipped = policy_loss(*args, **options)
        return losses * (value if len(updates) == update else 1.0), clipped

    grpo.policy_loss = loss


@pytest.mark.parametrize("shard", ["none", "fsdp"])
def test_a_loss_that_is_not_finite_on_one_rank(base, tmp_path, shard):
    """All ranks skip the same update, which is counted, and go on with equal weights."""
    values = {**base, "output_dir": str(tmp_path), "run_name": shard, "shard": shard, "total_episodes": 16}
    values |= {"num_epochs": 2, "eval_every": 0}
    weights = tmp_path / "weights"
    weights.mkdir()
    run_ranks(
        values, 2, (0, 0), {0: partial(watched, str(weights), 0, 0.0), 1: partial(watched, str(weights), 1, math.inf)}
    )
    assert [row["val/skipped_updates"] for row in metrics_of(values)] == [1, 0]
    ours, theirs = (torch.load(weights / f"{rank}.pt") for rank in (0, 1))
    assert len(ours) == 8 and ours == theirs  # after each update
    assert ours[1] == ours[0] and len(set(ours)) == 7 and all(map(math.isfinite, ours))


def watched(folder: str, rank: int, value: float) -> None:
    """Write down a sum of all weights after each update; make a loss not finite if a value is given."""
    if value:
        not_finite(value, 1)
    sums, step = [], utils.Optimizer.step

    def and_sum(optimizer) -> None:
        step(optimizer)
        total = sum(
            utils.full_tensor(parameter.detach()).double().abs().sum().item() for parameter in optimizer.parameters
        )
        sums.append(total)
        torch.save(sums, f"{folder}/{rank}.pt")

    utils.Optimizer.step = and_sum


# ---- ranks without work ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def few(tmp_path_factory) -> dict[str, dict]:
    """Flags of runs with less of everything than four ranks: one prompt to train on, one to evaluate on, two responses
    a step and one an update; two pairs. In ppo a single response is all of a step."""
    folder = tmp_path_factory.mktemp("few")
    common = helpers.workspace(folder)
    common |= {"model": helpers.tiny_model(folder / "neox", "gpt_neox"), "precision": "float64", "learning_rate": 1e-3}
    common |= {"dataset": helpers.write_rows(folder / "one.jsonl", helpers.ROWS[:1]), "eval_prompts": 1}
    small = {"rollout_batch_size": 1, "group_size": 2, "mini_batch_size": 1, "total_episodes": 5, "eval_samples": 1}
    kept = ("model", "precision", "system_prompt", "output_dir", "eval_every", "save_every", "micro_batch_tokens")
    pairs = {"dataset": write_pairs(folder / "pairs.jsonl", helpers.ROWS, 2), "batch_size": 2, "num_epochs": 2}
    pairs |= {"eval_dataset": write_pairs(folder / "held_out.jsonl", helpers.HELD_OUT, 1)}
    return {
        "grpo": {**common, **small, "filter_groups": "refill", "max_refills": 1},
        "rloo": {**common, **small, "advantage": "remax", "rollout_batch_size": 3, "total_episodes": 13},
        "ppo": {
            **common,
            **small,
            "group_size": 1,
            "ptx_dataset": common["dataset"],
            "ptx_coef": 0.1,
            "ptx_batch_size": 1,
        },
        "reward_model": {**{name: common[name] for name in kept}, **pairs},
    }


def test_more_ranks_than_work(few, long):
    """In step with one rank, to rounding: nobody waits for a rank that has no rows, and none counts twice."""
    cases = [(script, shard) for script in few for shard in ("none", "fsdp")]
    for script, shard in cases if long else random.Random(1).sample(cases, 1):
        one, four = ({**few[script], "run_name": f"{script} {shard} {name}"} for name in ("one", "four"))
        helpers.run(one, script=script)
        run_ranks({**four, "shard": shard}, 4, (0,) * 4, script=script)
        worst, where = largest_difference(four, one, ("final",))
        assert worst < 1e-9, (script, shard, where)
