"""What a mean says where scores are missing, and what a run warns of."""

import dataclasses
import math
from types import SimpleNamespace

import helpers
import numpy as np
import pytest
import torch
from tiny_models import CPU, WORLD

import grpo
import utils
from plumbing.rollout.batch import Batch, Sample
from plumbing.rollout.sampler import Sampler
from plumbing.run import evaluation
from plumbing.run.metrics import add_rollout, batch_metrics, mismatch_metrics

NAN = math.nan
REWARDS = SimpleNamespace(sources=("exact", "f.py:f"), verifiers=("exact", "f.py:f"))


def batch_of(scores: list[float], stopped: list[bool] | None = None, names: str = "") -> Batch:
    """Responses of one token to the prompt "p", of data sets by one letter, scored by `exact` and
    by a function.
    """
    rows = [{"prompt": "p", "query": [1], "dataset": name} for name in names or "a" * len(scores)]
    samples = [
        Sample(
            row,
            [7],
            {"rollout_logprobs": [0.0]},
            stop,
            text="7",
            scores={"exact": score, "f.py:f": 1.0},
        )
        for row, score, stop in zip(rows, scores, stopped or [True] * len(scores))
    ]
    return Batch.from_samples(samples, CPU)


def evaluated(greedy: list[float], sampled: list[float], names: str = "") -> dict:
    """Metrics of an evaluation of as many prompts as there are greedy scores."""
    samples = batch_of(sampled, None, names).samples
    for sample in batch_of(greedy).samples:
        sample.greedy = True
        samples.append(sample)
    rollout = lambda *_, greedy: Batch.from_samples(samples, CPU)
    args = grpo.Args(eval_samples=len(sampled) // len(greedy))
    sampler = SimpleNamespace(reward_sources=REWARDS, args=args, rollout=rollout)
    REWARDS.waited = 1.0
    metrics, _ = evaluation.evaluate(sampler, [{}] * len(greedy))
    assert REWARDS.waited == 0.0  # for scores, which is counted for a step
    return metrics


def test_all_scores_are_there():
    metrics = evaluated([1.0, 0.0], [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    expected = {
        "eval/greedy_accuracy": 0.5,
        "eval/accuracy": 5 / 8,
        "eval/pass@2": (0.5 + 1) / 2,
        "eval/pass@4": 1.0,
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected)
    assert metrics["eval/missing_scores"] == 0 and "eval/accuracy/a" not in metrics


def test_an_evaluation_has_its_own_sampling(tmp_path):
    """A low temperature and a small nucleus are both greedy; training stays as it is."""
    values = {**helpers.workspace(tmp_path), "eval_every": 1, "total_episodes": 8}
    evaluations, lengths = [], set()
    for flags in ({}, {"eval_temperature": 1e-7}, {"eval_top_p": 1e-9}):
        values["run_name"] = " ".join(["run", *flags])
        helpers.run_here(values | flags)
        row = helpers.metrics_of(values)[-1]
        evaluations.append({name: row[name] for name in row if name.startswith("eval/")})
        lengths.add(row["val/sequence_lengths"])
    assert evaluations[0] != evaluations[1] == evaluations[2] and len(lengths) == 1


def test_conversations_of_an_evaluation_have_its_flags():
    args = grpo.Args()
    fields = {field.name: None for field in dataclasses.fields(Sampler)}
    sampler = Sampler(**{**fields, "args": args, "conversations": SimpleNamespace(args=args)})
    other = sampler.with_args(top_p=0.5)
    assert other.args.top_p == other.conversations.args.top_p == 0.5
    assert sampler.args.top_p == sampler.conversations.args.top_p == 1.0


def test_pass_at_n_is_not_rounded_to_float32():
    assert evaluated([0.0], [1.0, 0.0, 0.0])["eval/pass@2"] == 1 - 1 / 3


def test_some_scores_are_missing():
    """Means are over the others; pass@k over the prompts that have k scored responses."""
    metrics = evaluated([NAN, 0.0], [1.0, 0.0, NAN, NAN, 1.0, 0.0, 0.0, 0.0], "aaaabbbb")
    assert metrics["eval/accuracy/a"] == 0.5 and metrics["eval/accuracy/b"] == 0.25
    assert metrics["eval/greedy_accuracy"] == 0.0 and metrics["eval/accuracy"] == pytest.approx(
        2 / 6
    )
    assert metrics["eval/pass@2"] == pytest.approx((1 + 0.5) / 2) and metrics["eval/pass@4"] == 1.0
    assert metrics["eval/missing_scores"] == 2


def test_no_score_is_there():
    metrics = evaluated([NAN], [NAN] * 2)
    names = ("greedy_accuracy", "accuracy", "pass@2", "reward/exact")
    assert (
        all(math.isnan(metrics[f"eval/{name}"]) for name in names)
        and metrics["eval/reward/f.py:f"] == 1.0
    )


def metrics_of(*batch) -> dict:
    batch = batch_of(*batch)
    return batch_metrics(batch, REWARDS)


def test_means_of_a_step_leave_out_what_has_no_score():
    metrics = metrics_of([1.0, NAN, 0.0, NAN, 1.0], [True, True, True, True, False])
    # the last one did not stop
    assert metrics["objective/verifiable_correct_rate"] == pytest.approx(1 / 3)
    assert [metrics["reward_correct/exact"], metrics["reward/exact"]] == pytest.approx([2 / 3] * 2)
    assert metrics["val/missing_scores"] == 2 and metrics["reward_correct/f.py:f"] == 1.0
    metrics = metrics_of([NAN])
    for name in (
        "objective/verifiable_correct_rate",
        "reward/exact",
        "reward_std/exact",
        "reward_correct/exact",
    ):
        assert math.isnan(metrics[name]), name


@pytest.mark.parametrize("difference, staleness", [(0.021, 0), (0.5, 1)])
def test_disagreement_of_rollout_and_trainer(difference, staleness):
    """In a token's probability. Padding does not count."""
    sums = utils.Sums(WORLD)
    mask = torch.tensor([[True, True], [True, False]])
    engine = torch.tensor([[0.5, 0.25], [0.5, NAN]], dtype=torch.float64)
    trainer = engine + difference * torch.tensor([[2.0, 1.0], [0.0, 9.0]])
    for rows in (slice(1), slice(1, 2)):
        micro = {"rollout_logprobs": engine[rows].log(), "response_mask": mask[rows]}
        add_rollout(sums, micro, trainer[rows].log())
    tokens = {"response_mask": mask, "rollout_logprobs": engine.log()}
    tokens["policy_steps"] = torch.full((2, 2), 2.0 - staleness)
    batch = SimpleNamespace(tokens=tokens, response_mask=mask)
    metrics = mismatch_metrics(sums.totals(), 3, batch)
    logs = (trainer.log() - engine.log())[mask]
    assert metrics == pytest.approx(
        {
            "rollout/staleness": staleness,
            "rollout/staleness_max": staleness,
            "rollout/mixed_policies": 0,
            "rollout/logprob_diff_mean": logs.mean().item(),
            "rollout/logprob_diff_max": logs.max().item(),
            "rollout/prob_diff_mean": difference,
        }
    )
    assert mismatch_metrics({"compared": 0.0}, 3, batch) == {}  # no response was sampled


def test_staleness_counts_sampled_tokens():
    """Not padding, observations or rows that nobody sampled, which may be the longest."""
    samples = []
    tokens = [([4, 4, 5], [1, 1, 1]), ([5, 5], [1, 1]), ([5, 0, 5], [1, 0, 1]), ([0] * 4, [1] * 4)]
    for steps, mask in tokens:
        samples.append(Sample.of_row({"response": steps, "mask": mask}))
        logprobs = np.zeros(len(steps))
        samples[-1].outputs |= {"policy_steps": np.array(steps), "rollout_logprobs": logprobs}
    samples[-1].outputs = {"rollout_logprobs": logprobs * NAN}
    batch = Batch.from_samples(samples, CPU)
    total = {"mismatch_probability": 0.0, "compared": 1.0, "mismatch": 0.0, "max_mismatch": 0.0}
    measured = lambda: list(mismatch_metrics(total, 7, batch).values())[:-3]
    assert measured() == [(2 * 2 + 5) / 7, 2, 1 / 4]  # no float32
    del batch.tokens["policy_steps"]  # the model itself sampled
    assert measured() == [0]
