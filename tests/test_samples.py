"""Which samples train: groups dropped and replaced, truncated responses left out, sources that give
no scores.
"""

import math
import statistics
import types

import helpers
import pytest
import torch
from helpers import folder_of, metrics_of, recorded, run_here, variant, weights_of
from tiny_models import CPU

import grpo
import utils
from plumbing.data import mixture
from plumbing.rollout import sampler
from plumbing.rollout.batch import Batch, Sample
from plumbing.run.metrics import batch_metrics

NAN = math.nan
SCRIPTS = ["grpo", "rloo", "ppo"]


# ---- collect: what is asked of the sampler, and what comes of it ---------------------------------


class Rollout:
    """Stands for `Sampler.rollout`: prompt i gets `table[i % len(table)]`; a response is as long as
    its place.
    """

    def __init__(self, sources: tuple[str, ...], table: list[list[float]], end: int | None = None):
        self.sources = sources
        self.table = table
        self.end = end
        self.calls = []

    def __call__(self, rows, count, key):
        self.calls.append(([row["i"] for row in rows], count, key))
        if len(self.calls) == self.end:
            raise utils.Interrupted
        scores = lambda score: dict(zip(self.sources, (score, -2 * score)))
        samples = [
            Sample(
                row,
                [7] * (n + 1),
                {"rollout_logprobs": [-0.5] * (n + 1)},
                n + 1 < count,
                scores=scores(score),
            )
            for row in rows
            for n, score in enumerate(self.table[row["i"] % len(self.table)])
        ]
        return Batch.from_samples(samples, CPU)


REWARDS = types.SimpleNamespace(
    why_missing=lambda name: f"{name}: it returned None", verifiers=("exact",), sources=("exact",)
)


@pytest.fixture
def collected(monkeypatch):
    """A function that collects a step from a table of scores: (Experience, calls of `rollout`,
    order of prompts).
    """

    def collect(table, position=0, end=None, max_refills=9, **flags):
        size = len(table[0])
        monkeypatch.setattr(grpo, "MAX_REFILLS", max_refills)
        common = {
            "reward": ("exact",),
            "rollout_batch_size": 4,
            "non_stop_penalty": False,
            "group_size": size,
        }
        args = grpo.Args(**{"mini_batch_size": 4 * size, **common, **flags})
        rollout = Rollout(args.reward, table, end)
        sampler = types.SimpleNamespace(args=args, reward_sources=REWARDS, rollout=rollout)
        prompts = [{"i": i, "query": [i]} for i in range(40)]
        order = [row["i"] for row in mixture.take_prompts(prompts, 0, 80, sampler.args.seed)]
        return grpo.collect(sampler, prompts, 3, {"position": position}), rollout.calls, order

    return collect


def groups_of(experience) -> list[int]:
    return [sample.row["i"] for sample in experience.batch.samples[::2]]


def by_table(table, order) -> list[bool]:
    """Whether a prompt's scores differ."""
    return [len({s for s in table[i % len(table)] if not math.isnan(s)}) > 1 for i in order]


def test_drop_leaves_out_the_groups_that_teach_nothing(collected, monkeypatch):
    table = [[0.0, 1.0], [1.0, 1.0], [NAN, 1.0], [3.0, 2.0]]
    got, calls, order = collected(table, filter_groups="drop")
    expected = [i for i, teaches in zip(order[:4], by_table(table, order)) if teaches]
    assert (
        len(calls) == 1
        and 0 < len(expected) < 4
        and groups_of(got) == expected
        and got.state["position"] == 4
    )
    assert got.batch.scores.tolist() == [s for i in expected for s in table[i % 4]]
    assert got.sampled_tokens == 4 * (2 + 3) and got.metrics["val/sampled_prompts"] == 4
    # whose sum is always 0
    two = dict(reward=("exact", "f.py:f"), reward_weights=(2.0, 1.0), filter_groups="drop")
    assert groups_of(collected(table, advantage_scale="gdpo", **two)[0]) == expected
    # also where the --loss of a fork says so
    monkeypatch.setitem(
        grpo.VARIANTS, "grpo", grpo.VARIANTS["grpo"]._replace(advantage_scale="gdpo")
    )
    assert groups_of(collected(table, **two)[0]) == expected


def test_a_length_penalty_makes_equal_scores_differ(collected):
    """Response n has n + 1 tokens."""
    got, *_ = collected([[2.0, 2.0]], filter_groups="drop", length_penalty=0.5)
    assert got.batch.scores.tolist() == [1.5, 1.0] * 4
    assert got.sampled.reward_components["length_penalty"].tolist() == [-0.5, -1.0] * 4
    for sample in got.sampled.samples:  # it is of each response, whichever sources a row names
        sample.row["sources"] = ["exact"]
    assert batch_metrics(got.sampled, REWARDS)["reward/length_penalty"] == -0.75


@pytest.mark.parametrize("differing", [(0,), (1, 2, 4)])
def test_refill_samples_other_prompts_until_the_step_is_full(collected, differing):
    """As many as it takes if the share of groups with differing scores stays the same, and never
    more than a step's.
    """
    table = [[0.0 if i in differing else 1.0, 1.0] for i in range(5)]
    got, calls, order = collected(table, position=2, filter_groups="refill", max_refills=50)
    asked = 4
    found = 0
    position = 2
    for number, (prompts, samples, key) in enumerate(calls):
        assert prompts == order[position : position + asked] and samples == 2
        assert key == (("rollout", 1, 3, number) if number else ("rollout", 1, 3))
        position += asked
        found = sum(by_table(table, order[2:position]))
        asked = min(4, math.ceil((4 - found) * (position - 2) / max(1, found)))
    assert (
        found >= 4
        and len(calls) > (3 if differing == (0,) else 1)
        and got.state["position"] == position
    )
    assert len(calls[-1][0]) == (4 if differing == (0,) else 2)
    expected = [i for i in order[2:position] if i % 5 in differing][:4]
    assert groups_of(got) == expected and got.batch.scores.tolist() == [0.0, 1.0] * 4
    assert got.batch.lengths == [2, 3] * 4 and got.batch.stopped.tolist() == [True, False] * 4
    assert torch.equal(got.batch.response_mask, torch.tensor([[True, False], [True, True]] * 4))
    assert torch.equal(got.batch.tokens["rollout_logprobs"], got.batch.response_mask * -0.5)
    # Metrics are of all that was sampled. The first response of each group stopped.
    groups = position - 2
    groups_of_ones = position - 2 - found
    scores = [s for i in order[2:position] for s in table[i % 5]]
    metrics = got.metrics | batch_metrics(got.sampled, REWARDS)
    assert metrics == pytest.approx(
        {
            "val/zero_std_fraction": groups_of_ones / groups,
            "val/sampled_prompts": groups,
            "objective/verifiable_correct_rate": groups_of_ones / (2 * groups),
            "val/sequence_lengths": 1.5,
            "val/num_stop_token_ids": groups,
            "val/missing_scores": 0,
            "reward/exact": statistics.fmean(scores),
            "reward_std/exact": statistics.stdev(scores),
            "reward_correct/exact": statistics.fmean(scores),
            "reward/stopped": statistics.fmean(scores[::2]),
            "reward/cut_off": statistics.fmean(scores[1::2]),
        }
    )
    assert got.sampled_tokens == groups * (2 + 3)


@pytest.mark.parametrize("how", ["drop", "refill"])
def test_a_step_that_trains_on_few_responses_or_none_says_so(collected, how, capsys):
    got, calls, order = collected([[1.0, 1.0]], filter_groups=how, max_refills=2)
    scores = got.batch.scores
    assert len(calls) == (3 if how == "refill" else 1) and scores.isnan().all() and len(scores) == 8
    assert got.sampled.scores.nanmean().item() == 1
    assert capsys.readouterr().err.startswith("warning: step 3 trains on 0 of 8 responses: ")
    collected([[1.0] + [NAN] * 7])
    assert "step 3 trains on 4 of 32 responses" in capsys.readouterr().err


def test_a_dead_source_is_not_asked_again(collected):
    got, calls, _ = collected([[NAN, NAN]], filter_groups="refill")
    assert (
        len(calls) == 1
        and got.unscored == "exact: it returned None"
        and batch_metrics(got.sampled, REWARDS)["val/missing_scores"] == 8
    )
    unscored = lambda weight: sampler.unscored(
        got.batch, REWARDS, grpo.Args(reward_weights=(weight,))
    )
    assert unscored(1.0) == got.unscored and unscored(0.0) == ""


def test_an_interrupt_while_refilling(collected):
    with pytest.raises(utils.Interrupted):
        collected([[1.0, 1.0]], end=2, filter_groups="refill")


def test_groups_are_compared_after_masking_and_penalties(collected):
    """The last response of each group has no stop token, and the overlong penalty tells equal
    scores apart.
    """
    table = [[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    got, *_ = collected(table, mask_truncated=True, filter_groups="drop")
    assert {sample.row["i"] % 2 for sample in got.batch.samples} == {1}
    assert got.batch.scores.isnan().view(-1, 3).tolist()[0] == [0, 0, 1]
    got, *_ = collected(
        [[1.0, 1.0]], overlong_buffer=2, max_response_length=2, filter_groups="drop"
    )
    assert got.batch.scores.tolist() == [0.5, 0.0] * 4


# ---- whole runs ----------------------------------------------------------------------------------

SCORES = """
def coarse(prompts, responses, **columns):
    return [float(sum(map(ord, prompt + response)) % 7 == 3) for prompt, response in zip(prompts, responses)]

equal = lambda prompts, responses, **columns: [1.0] * len(responses)
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict:
    """Responses of many lengths, some of them truncated, whose scores are often all equal in a
    group.
    """
    folder = tmp_path_factory.mktemp("samples")
    values = {**helpers.workspace(folder), "precision": "float64", "kl_coef": 0.01}
    values |= {"rollout_batch_size": 4, "num_epochs": 1, "eval_every": 0}
    (folder / "scores.py").write_text(SCORES)
    values["model"] = helpers.tiny_model(folder / "neox", "gpt_neox", stop=4)
    return {**values, "reward": f"{folder / 'scores.py'}:coarse", "ref_model": values["model"]}


@pytest.mark.parametrize("script", SCRIPTS)
def test_only_what_has_a_score_is_in_the_means(base, tmp_path, script, monkeypatch):
    """The tokens of the losses are those of responses that stopped, in groups that are not
    dropped.
    """
    collects, reductions = (
        recorded(monkeypatch, __import__(script), name) for name in ("collect", "loss_reduction")
    )
    values = variant(
        base, tmp_path, filter_groups="drop", mask_truncated=True, micro_batch_tokens=10_000
    )
    values |= {
        "rollout_batch_size": 8,
        "mini_batch_size": 32,
        "total_episodes": 32,
        "max_response_length": 4,
        "log_samples": 32,
    }
    run_here(values, script)
    ((_, experience),) = collects
    kept = [i for i, score in enumerate(experience.batch.scores.tolist()) if not math.isnan(score)]
    samples = experience.batch.samples
    lengths = [len(samples[i].response) for i in kept]
    assert 0 < len(samples) < 32 and len(kept) < len(samples)
    assert all(experience.batch.stopped[i] for i in kept)
    for (_, mask, mini, *_), _ in reductions:
        assert sorted(mini) == kept and sorted(mask[mini].sum(1).tolist()) == sorted(lengths)
    tokens = helpers.read_lines(folder_of(values) / "tokens.jsonl")
    assert [row["sample"] for row in tokens if 1 in row["trains"]] == kept


@pytest.mark.parametrize("script", ["grpo", "ppo"])
def test_the_weight_of_supervised_rows(base, tmp_path, script):
    """Where the policy's loss has no gradient, that of the update is in proportion to --ptx_coef."""
    reward = base["reward"].replace(":coarse", ":equal")
    values = variant(base, tmp_path, reward=reward, mini_batch_size=0)  # one update
    values |= {"ptx_dataset": base["dataset"], "total_episodes": 16, "kl_coef": 0.0}
    values |= {"gae_lambda": 1.0} if script == "ppo" else {}
    norms = []
    for weight in (0.1, 0.2):
        values |= {"ptx_coef": weight, "run_name": f"weight {weight}", "ref_model": ""}
        run_here(values, script)
        norms.append(metrics_of(values)[0]["loss/grad_norm"])
    assert norms[0] > 0 and norms[1] == pytest.approx(2 * norms[0], rel=1e-3)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_correction_weighs_the_policy_loss_alone(base, tmp_path, script, monkeypatch):
    """With weights of 3, the policy's part of the loss is three times as large; the KL's part is
    not.
    """
    module = __import__(script)
    rows = {}
    values = {
        "kl_in": "loss",
        "kl_coef": 0.5,
        "learning_rate": 1e-9,
        "mini_batch_size": 16,
        "total_episodes": 16,
    }
    values["reward"] = base["reward"].replace("scores.py:coarse", "reward.py:score")
    # The mean that advantages of mean 0 do not cancel in: over tokens they have it in ppo, in a
    # group elsewhere.
    values["loss_aggregation"] = "sequence" if script == "ppo" else "token"
    values |= {
        "ref_model": helpers.tiny_model(tmp_path / "other", "gpt_neox", initializer_range=0.1)
    }
    for factor in (1, 3):
        constant = lambda old, *_, factor=factor: torch.full_like(old, factor)
        monkeypatch.setattr(module, "correction_weights", constant)
        run = variant(base, tmp_path, **values, run_name=f"{factor}")
        run_here(run, script)
        (rows[factor],) = metrics_of(run)
    policy = {factor: row["loss/policy_avg"] for factor, row in rows.items()}
    others = {factor: row["objective/loss"] - policy[factor] for factor, row in rows.items()}
    assert abs(policy[1]) > 1e-9 and policy[3] == pytest.approx(3 * policy[1], rel=1e-6)
    assert others[1] > 1e-3 and others[3] == pytest.approx(others[1], rel=1e-6)
    assert rows[3]["rollout/correction_mean"] == pytest.approx(3)
    if script == "grpo":  # --kl_weighting ratio is for samples of the engine, too
        run = {**run, "kl_weighting": "ratio", "run_name": "ratio"}
        run_here(run)
        (row,) = metrics_of(run)
        assert row["objective/loss"] - row["loss/policy_avg"] == pytest.approx(
            3 * others[1], rel=1e-6
        )


@pytest.mark.parametrize("masked", [False, True], ids=["equal scores", "a mask of no token"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_step_without_any_signal_changes_nothing(
    base, tmp_path, script, masked, monkeypatch, capfd
):
    """Not even Adam's momentum and the weight decay; the log has null for what was not computed."""
    values = {"kl_coef": 0.0, "ref_model": "", "weight_decay": 0.5, "total_episodes": 16}
    if masked:
        nothing = lambda logprobs, *_: torch.zeros_like(logprobs, dtype=torch.bool)
        monkeypatch.setattr(__import__(script), "off_policy_mask", nothing)
        values["off_policy_delta"] = 0.5
    else:
        reward = base["reward"].replace(":coarse", ":equal")
        values |= {"filter_groups": "drop", "reward": reward}
    run_here(values := variant(base, tmp_path, **values), script)
    (row,) = metrics_of(values)
    if masked:
        assert row["rollout/left_out"] == 1
        assert "its gradient has norm 0.0" in capfd.readouterr().err
    else:
        names = ("loss/policy_avg", "loss/grad_norm", "rollout/prob_diff_mean")
        assert [row[name] for name in names] == [None] * 3
        assert row["objective/scores"] == row["val/zero_std_fraction"] == 1
    before, after = (weights_of(x) for x in (base["model"], folder_of(values) / "final"))
    assert all(torch.equal(before[name], after[name]) for name in after)


def test_maxrl_refuses_a_negative_score(base, tmp_path, capfd):
    """But not a rounding error."""
    values = {"reward_weights": -1e-12, "non_stop_penalty": False, "max_response_length": 2}
    values = variant(base, tmp_path, **values, advantage_scale="maxrl")
    run_here(values)
    with pytest.raises(SystemExit):
        run_here({**values, "reward_weights": -1e-3, "run_name": "other"})
    said = capfd.readouterr().err
    assert "--advantage_scale maxrl: a score is negative, of a response to '" in said


def test_the_schedule_goes_by_steps(base, tmp_path):
    """A step in which groups were dropped has fewer updates; the learning rate ends where it should
    all the same.
    """
    values = variant(base, tmp_path, filter_groups="drop", lr_schedule="linear", total_episodes=64)
    run_here(values)
    rows = metrics_of(values)
    assert any(row["val/zero_std_fraction"] for row in rows) and rows[-1]["lr"] == pytest.approx(
        0, abs=1e-3
    )
    assert rows[0]["lr"] > rows[1]["lr"] > rows[2]["lr"] > rows[3]["lr"]
