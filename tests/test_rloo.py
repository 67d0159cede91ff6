"""rloo.py: its advantages against loops over plain Python numbers, and whole runs (resumed:
tests/test_scripts.py).
"""

import itertools
import math
import random
import statistics
import types

import helpers
import pytest
import torch
from helpers import folder_of, metrics_of, read_lines, recorded, run_here, variant
from test_equations import close, double, mask_of
from tiny_models import CPU
from transformers import AutoModelForCausalLM, AutoTokenizer

import rloo
from plumbing.rollout.batch import Batch, Sample
from rloo import token_advantages, token_rewards, whiten

NAN = math.nan
INF = math.inf
KINDS = ["rloo", "reinforce++", "reinforce++-baseline", "remax", "opo"]
# these compare the responses to a prompt with each other
COMPARING = ["rloo", "reinforce++-baseline", "opo"]


# ---- what advantages are made of -----------------------------------------------------------------


def whiten_by_hand(values: list[float]) -> list[float]:
    mean = math.fsum(values) / len(values)
    variance = math.fsum((v - mean) ** 2 for v in values) / max(1, len(values) - 1)
    return [(v - mean) / math.sqrt(variance + 1e-8) for v in values]


def test_whiten_of_next_to_nothing():
    """And of little spread, which tells where the 1e-8 stands."""
    alone = torch.tensor([[False, True, False]])
    for mask, x in (
        (alone, [NAN, 7.0, INF]),
        (~alone, [3.0, NAN, 3.0]),
        (alone & ~alone, [NAN, INF, 1.0]),
    ):
        assert whiten(double(x), mask).eq(0).all()  # a single entry, all equal, none
    equal = torch.full((1000,), 0.7)  # their mean in float32 is another number
    assert whiten(equal, equal > 0).eq(0).all()
    # the variance is 2e-8
    close(whiten(double([1e-4, NAN, 3e-4]), ~alone), [[-1 / math.sqrt(3), 0, 1 / math.sqrt(3)]])


def to_go_by_hand(rewards: list[float], gamma: float) -> list[float]:
    return [
        math.fsum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards)))
        for t in range(len(rewards))
    ]


# ---- advantages ----------------------------------------------------------------------------------


def advantages_by_hand(kind, scores, greedy, kl, lengths, size, beta, gamma) -> list[list[float]]:
    """Of each response, a list of its tokens' advantages."""
    kl = kl or [[0.0] * n for n in lengths]
    totals = [score - beta * math.fsum(row) for score, row in zip(scores, kl)]
    scored = [math.isfinite(total) for total in totals]
    rows = []
    for i, (total, n) in enumerate(zip(totals, lengths)):
        group = [j for j in range(i - i % size, i - i % size + size) if scored[j]]
        if kind == "remax":
            A = total - greedy[i]
        elif len({totals[j] for j in group}) < 2:
            A = 0.0
        elif kind == "rloo":
            A = total - statistics.fmean(totals[j] for j in group if j != i) if scored[i] else 0.0
        else:
            weights = [lengths[j] if kind == "opo" else 1 for j in group]
            A = total - math.fsum(w * totals[j] for w, j in zip(weights, group)) / sum(weights)
        rows.append([A if scored[i] else 0.0] * n)
        if kind == "reinforce++" and scored[i]:
            rows[i] = to_go_by_hand(
                [(t == n - 1) * scores[i] - beta * kl[i][t] for t in range(n)], gamma
            )
    if kind.startswith("reinforce++"):
        flat = iter(whiten_by_hand([a for row, counts in zip(rows, scored) if counts for a in row]))
        rows = [[next(flat) for _ in row] if counts else row for row, counts in zip(rows, scored)]
    return rows


SCORES = {
    "all": [1.0, 0.0, 0.25, 0.5, -2.0, 7.25],
    "missing": [1.0, NAN, 0.0, INF, 2.0, 5.0],
    "lone": [1.0, NAN, -INF, 2.0, 3.0, 7.0],
    "none in a group": [NAN, INF, NAN, 2.0, 3.0, 7.0],
    "equal": [0.1, 0.1, 0.1, 3.0, 1.0, 0.5],
}
SIZES = [(kind, 3) for kind in KINDS] + [("rloo", 2), ("opo", 2), ("reinforce++", 1), ("remax", 1)]


@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("beta, gamma", [(None, 0.9), (0.3, 1.0), (0.3, 0.9), (0.3, 0.0)])
@pytest.mark.parametrize("kind, size", SIZES)
def test_advantages_by_loops(kind, size, beta, gamma, scores):
    """With and without KL, which is junk outside of the mask; also of a mask with holes,
    observations of a tool.
    """
    rng = random.Random(0)
    lengths = [3, 1, 6, 2, 5, 4]
    with_holes = torch.zeros(6, 9, dtype=torch.bool)
    for row, n in zip(with_holes, lengths):
        row[rng.sample(range(9), n)] = True
    for mask in (mask_of(lengths, 7), with_holes):
        for greedy in ([0.5, 0.5, 0.5, 1.0, 1.0, 1.0], [-1.0, 2.0, NAN, 7.0, 0.0, INF]):
            kl = None
            kl_table = None
            if beta is not None:
                kl = [[rng.gauss(0, 1) for _ in range(n)] for n in lengths]
                kl_table = torch.full(mask.shape, rng.choice([NAN, INF]), dtype=torch.float64)
                kl_table[mask] = torch.tensor(sum(kl, []), dtype=torch.float64)
            rest = (size, beta or 0.0, gamma)
            given = [
                s if kind != "remax" or math.isfinite(g) else NAN for s, g in zip(scores, greedy)
            ]
            rewards = token_rewards(double(*given), kl_table, mask, rest[1])
            advantages = token_advantages(
                kind, double(*given), double(*greedy), rewards, mask, size, gamma
            )
            expected = advantages_by_hand(kind, given, greedy, kl, lengths, *rest)
            close(advantages[mask], sum(expected, []), 1e-11)
            assert (
                advantages[~mask].eq(0).all() and advantages[~double(*given).isfinite()].eq(0).all()
            )
            assert advantages.ne(0).any()


def advantages_of_scores(kind, scores, mask, size):
    return token_advantages(
        kind, scores, None, token_rewards(scores, None, mask, 0.0), mask, size, 1.0
    )


@pytest.mark.parametrize("kind", COMPARING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_scores_have_advantage_exactly_zero(kind, dtype):
    """In a group next to another; the mean of equal floats is often another number."""
    for size, value in itertools.product((2, 3, 7), (0.1, 0.3, 0.7, 1 / 3, 123.456)):
        scores = torch.full((2 * size,), value, dtype=dtype)
        mask = mask_of(list(range(2 * size, 0, -1)), 2 * size)
        assert advantages_of_scores(kind, scores, mask, size).eq(0).all()
        scores[:size] = torch.linspace(0, 1, size, dtype=dtype)
        first, equal = advantages_of_scores(kind, scores, mask, size).split(size)
        assert first.ne(0).any() and len(equal[mask[size:]].unique()) == 1
        assert kind == "reinforce++-baseline" or equal.eq(0).all()


# ---- whole runs ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("rloo")
    values = helpers.workspace(folder) | {"model": helpers.tiny_model(folder / "model", stop=4)}
    (folder / "gaps.py").write_text(helpers.REWARD.replace("% 7 / 7", "% 7 % 5 / 7 or None"))
    values["ref_model"] = helpers.tiny_model(folder / "other", initializer_range=0.1)
    return {**values, "kl_coef": 0.01, "total_episodes": 16, "run_name": "run"}


@pytest.mark.parametrize(
    "kind, size, kl_in", [("reinforce++", 4, "reward"), ("opo", 4, "loss"), ("remax", 1, "reward")]
)
def test_what_a_run_trains_on(base, tmp_path, monkeypatch, kind, kl_in, size):
    """The advantages of each step are those of its scores, some of them missing, greedy scores, KL
    and beta.
    """
    gaps = base["reward"].replace("reward.py", "gaps.py")
    values = variant(base, tmp_path, advantage=kind, kl_in=kl_in, reward=gaps)
    values["gamma"] = 0.9 if kind == "reinforce++" else 1.0
    values |= dict(
        group_size=size, rollout_batch_size=8 // size, precision="float64", kl_estimator="k2"
    )
    values |= dict(kl_target=0.01, eval_every=0, clip_high=0.3, dual_clip=1.5)
    steps = recorded(monkeypatch, rloo, "token_advantages")
    losses = recorded(monkeypatch, rloo, "clipped_loss")
    rewarded = recorded(monkeypatch, rloo, "token_rewards")
    run_here(values, "rloo")
    rows = metrics_of(values)
    samples = read_lines(folder_of(values) / "samples.jsonl")
    assert helpers.all_finite(folder_of(values) / "final") and len(steps) == 2
    assert any(row["val/missing_scores"] for row in rows)
    set_of = lambda A: {str(row).rstrip("0., ]-") for row in A.tolist()}  # without the padding
    trained = set.union(*(set_of(A) for (_, A, *_), _ in losses))
    for step, ((how, scores, greedy, _, mask, group, gamma), advantages) in enumerate(steps):
        (_, kl, _, beta, _), _ = rewarded[step]
        row = rows[step]
        of_step = samples[8 * step : 8 * step + 8]
        assert (how, group, beta) == (kind, size, row["objective/kl_coef"])
        assert gamma == values["gamma"]
        given = [sample["gaps.py:score"] for sample in of_step]
        counts = scores.isfinite()
        has_baseline = [True] * 8 if greedy is None else greedy.isfinite().tolist()
        assert [s if has else None for s, has in zip(given, has_baseline)] == [
            None if math.isnan(s) else s for s in scores.tolist()
        ]
        assert row["val/missing_scores"] == given.count(None)
        assert (
            (kl is None) == (kl_in == "loss") == (row["objective/loss"] != row["loss/policy_avg"])
        )
        if kl is not None:
            total = kl[counts][mask[counts]].sum().item()
            assert kl[mask].gt(0).any() and row["objective/kl"] == pytest.approx(
                total / counts.sum().item(), rel=1e-9
            )
            kl = [each[m].tolist() for each, m in zip(kl, mask)]
        lists = [None if x is None else x.tolist() for x in (scores, greedy)]
        expected = advantages_by_hand(kind, *lists, kl, mask.sum(1).tolist(), size, beta, gamma)
        close(advantages[mask], sum(expected, []), 1e-9)
        close(
            [sample["advantage"] for sample in of_step],
            [statistics.fmean(each) for each in expected],
            1e-5,
        )
        assert set_of(advantages[counts].to(torch.float64)) <= trained
    for (log_ratio, A, *clips), _ in losses:
        assert clips == [0.2, 0.3, 1.5]
        # each response has its own advantages, which end where it does
        for x, a in zip(log_ratio, A):
            assert x.abs().max() < 1e-9 or a.eq(0).all() or torch.equal(x != 0, a != 0)


def test_greedy_responses_without_scores_end_the_run():
    """The others have some; the greedy tokens count as sampled, and train nothing."""
    samples = [
        Sample(row, [2], {}, True, greedy=score is None, scores={"exact": score or math.nan})
        for row in [{"query": [1]}] * 2
        for score in (1.0, 2.0, None)
    ]
    sampler = types.SimpleNamespace(
        args=rloo.Args(advantage="remax", reward=("exact",), rollout_batch_size=2, group_size=2),
        reward_sources=types.SimpleNamespace(why_missing="{}: it is away".format),
        rollout=lambda *_, **__: Batch.from_samples(samples, CPU),
    )
    found = rloo.collect(sampler, [{"query": [1]}] * 2, 1, {})
    assert found.unscored == "exact: it is away" and found.sampled_tokens == 12
    assert found.metrics["val/missing_greedy_scores"] == 2
    assert len(found.batch.samples) == 4 and found.batch.scores.isnan().all()


@pytest.mark.parametrize("masked", [False, True])
def test_remax_compares_with_the_greedy_response(base, tmp_path, monkeypatch, masked):
    """By transformers' own greedy generation, of one prompt at a time; a greedy response can lack a
    stop, too: --mask_truncated does not leave it out.
    """
    calls = recorded(monkeypatch, rloo, "token_advantages")
    values = variant(base, tmp_path, advantage="remax", rollout_batch_size=12, group_size=2)
    values |= dict(
        mini_batch_size=24, num_epochs=1, total_episodes=24, max_response_length=4, log_samples=24
    )
    values |= dict(
        non_stop_penalty=True, penalty_reward_value=-1.0, mask_truncated=masked, ratio="sequence"
    )
    run_here(values, "rloo")
    (((_, scores, baselines, _, mask, *_), advantages),) = calls
    model, tokenizer = (
        kind.from_pretrained(base["model"]) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    expected = []
    for row in read_lines(folder_of(values) / "samples.jsonl"):
        ids = tokenizer(row["prompt"], return_tensors="pt").input_ids
        output = model.generate(ids, do_sample=False, max_new_tokens=4)[0, ids.shape[1] :]
        text = row["prompt"] + tokenizer.decode(output, skip_special_tokens=True)
        expected.append(
            sum(map(ord, text)) % 7 / 7 if output[-1] == tokenizer.eos_token_id else -1.0
        )
    close(baselines, expected, 1e-6)
    assert len(set(expected)) > 2 and -1.0 in expected
    # With one update a rollout the ratio is 1, and the loss of --ratio sequence the mean of -A over
    # the responses.
    trained = scores.isfinite()
    assert trained.all() != masked
    mean = (advantages.sum(1) / mask.sum(1))[trained].mean().item()
    assert metrics_of(values)[1]["loss/policy_avg"] == pytest.approx(-mean, rel=1e-5)
