"""What a mean says where scores are missing, and what a run warns of when nothing is measured or trained on."""

import math
from collections import defaultdict

import pytest
import torch

import grpo
from plumbing.rollout.batch import Batch
from plumbing.run import evaluation

NAN = math.nan


def batch_of(scores: list[float], stopped: list[bool] | None = None) -> Batch:
    """Responses of one token to the prompt "p", scored by the verifier `exact` and by a function."""
    n = len(scores)
    components = {"exact": torch.tensor(scores), "f.py:f": torch.ones(n)}
    tokens = {"response_mask": torch.ones(n, 1, dtype=torch.bool)}
    rows = [{"prompt": "p", "query": [1]}] * n
    stops = torch.tensor(stopped or [True] * n)
    return Batch(rows, [[7]] * n, ["7"] * n, stops, components, tokens, verifiers=("exact", "f.py:f"))


def evaluated(greedy: list[float], sampled: list[float]) -> dict:
    """Metrics of an evaluation of as many prompts as there are greedy scores."""
    sample = lambda rows, samples, key: batch_of(sampled if samples else greedy)
    args = grpo.Args(eval_samples=len(sampled) // len(greedy))
    return evaluation.evaluate(sample, [{}] * len(greedy), args)[0]


def test_all_scores_are_there(capsys):
    found = evaluated([1.0, 0.0], [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    expected = {"eval/greedy_accuracy": 0.5, "eval/accuracy": 5 / 8, "eval/pass@2": (0.5 + 1) / 2, "eval/pass@4": 1.0}
    assert {key: found[key] for key in expected} == pytest.approx(expected)
    assert found["eval/missing_scores"] == 0 and capsys.readouterr().err == ""


def test_some_scores_are_missing(capsys):
    """Means are over the others; pass@k over the prompts that have k scored responses."""
    found = evaluated([NAN, 0.0], [1.0, 0.0, NAN, NAN, 1.0, 0.0, 0.0, 0.0])
    assert found["eval/greedy_accuracy"] == 0.0 and found["eval/accuracy"] == pytest.approx(2 / 6)
    assert found["eval/pass@2"] == pytest.approx((1 + 0.5) / 2) and found["eval/pass@4"] == 1.0
    assert found["eval/missing_scores"] == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("warning: --reward exact: gave 1 of 2 greedy responses of the evaluation no score")
    assert second.startswith("warning: --reward exact: gave 2 of 8 sampled responses of the evaluation no score")


def test_no_score_is_there(capsys):
    found = evaluated([NAN], [NAN] * 2)
    names = ("greedy_accuracy", "accuracy", "pass@2", "reward/exact")
    assert all(math.isnan(found[f"eval/{name}"]) for name in names) and found["eval/reward/f.py:f"] == 1.0
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_means_of_a_step_leave_out_what_has_no_score():
    found = evaluation.batch_metrics(batch_of([1.0, NAN, 0.0, NAN, 1.0], [True, True, True, True, False]))
    assert found["objective/verifiable_correct_rate"] == pytest.approx(1 / 3)  # the last one did not stop
    assert [found["reward_correct/exact"], found["reward/exact"]] == pytest.approx([2 / 3] * 2)
    assert found["val/missing_scores"] == 2 and found["reward_correct/f.py:f"] == 1.0
    found = evaluation.batch_metrics(batch_of([NAN]))
    for name in ("objective/verifiable_correct_rate", "reward/exact", "reward_std/exact", "reward_correct/exact"):
        assert math.isnan(found[name]), name


@pytest.mark.parametrize("changes, named", [({"mask_truncated": True}, "--mask_truncated"), ({}, "filtered out")])
def test_a_step_in_which_nothing_trains_is_warned_of(capsys, changes, named):
    totals = defaultdict(lambda: NAN)
    evaluation.policy_metrics(totals, 1, 8, grpo.Args(**changes), 0.0, 0.0)
    assert capsys.readouterr().err == ""
    evaluation.policy_metrics(totals, 0, 0, grpo.Args(**changes), NAN, 0.0)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: no response of this step trains") and named in line
