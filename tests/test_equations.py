"""Every equation of grpo.py against hand values and against loops over plain Python numbers, values and gradients."""

import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import utils
from grpo import (
    VARIANTS,
    Args,
    adapt_kl_coef,
    aggregate,
    correction_weights,
    entropy_from_logprobs,
    equal_scores,
    exact_kl,
    final_scores,
    group_advantages,
    kl_estimate,
    masked_mean,
    masked_sum,
    policy_loss,
    weighted_sum,
)
from plumbing.data import mixture as data
from plumbing.run import evaluation

NAN, INF = math.nan, math.inf
quick = settings(max_examples=60, deadline=None, derandomize=True)


def double(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def close(got, expected, tolerance=1e-12):
    torch.testing.assert_close(
        torch.as_tensor(got, dtype=torch.float64), torch.as_tensor(expected, dtype=torch.float64),
        rtol=tolerance, atol=tolerance, equal_nan=True,
    )  # fmt: skip


# ---- masked reductions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("junk", [NAN, INF, -INF, 1e30])
def test_masked_reductions_leak_neither_value_nor_gradient(junk):
    mask = torch.tensor([[True, False, True], [False, False, False], [True, True, False]])
    values = [[1.0, junk, 2.0], [junk, junk, junk], [-4.0, 0.5, junk]]
    x = double(*values).requires_grad_()
    close(masked_sum(x, mask), 1 + 2 - 4 + 0.5)
    close(masked_sum(x, mask, 1), [3.0, 0.0, -3.5])
    close(masked_sum(x, mask, 0), [-3.0, 0.5, 2.0])
    close(masked_mean(x, mask), -0.5 / 4)
    close(masked_mean(x, mask, 1), [1.5, 0.0, -1.75])  # a row without any is 0 and not NaN
    (gradient,) = torch.autograd.grad(masked_sum(x, mask), x)
    assert torch.equal(gradient, mask.double())
    (gradient,) = torch.autograd.grad(masked_mean(x, mask, 1).sum(), x)
    assert torch.equal(gradient, double([0.5, 0, 0.5], [0, 0, 0], [0.5, 0.5, 0]))


@quick
@given(st.lists(st.lists(st.tuples(st.floats(-9, 9), st.booleans()), min_size=3, max_size=3), min_size=1, max_size=4))
def test_masked_reductions_by_loops(rows):
    x, mask = double(*[[v for v, _ in row] for row in rows]), torch.tensor([[m for _, m in row] for row in rows])
    kept = [[v for v, m in row if m] for row in rows]
    everything = [v for row in kept for v in row]
    close(masked_sum(x, mask), math.fsum(everything))
    close(masked_sum(x, mask, 1), [math.fsum(row) for row in kept])
    close(masked_mean(x, mask), math.fsum(everything) / max(1, len(everything)))
    close(masked_mean(x, mask, 1), [math.fsum(row) / max(1, len(row)) for row in kept])


# ---- advantages -------------------------------------------------------------------------------------------------


def advantages_by_hand(scores: list[float], group_size: int, scale: str) -> list[float]:
    result = []
    everything = [s for s in scores if math.isfinite(s)]
    for start in range(0, len(scores), group_size):
        group = scores[start : start + group_size]
        present = [s for s in group if math.isfinite(s)]
        for score in group:
            if not math.isfinite(score) or len(set(present)) == 1:
                result.append(0.0)
                continue
            spread = {"group": present, "batch": everything}.get(scale)
            divisor = 1.0 if spread is None else statistics.stdev(spread) + 1e-6
            result.append((score - statistics.fmean(present)) / divisor)
    return result


GROUPS = [
    [1.0, 0.0, 0.0, 1.0, 1.0, 0.0],
    [0.5, -2.0, 7.25, 3.0, 3.0, 3.0],
    [1.0, NAN, 0.0, NAN, NAN, NAN],  # one missing, all missing
    [1.0, NAN, NAN, 2.0, INF, 5.0],  # one left, one infinite
    [-INF, 1.0, 1.0, 0.25, 0.5, NAN],
    [1e-4, 2e-4, 3e-4, 0.0, 1e-7, 0.0],  # a spread near the 1e-6 below the line
]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("scores", GROUPS)
def test_group_advantages_by_loops(scores, scale):
    close(group_advantages(double(*scores), 3, scale), advantages_by_hand(scores, 3, scale))
    close(group_advantages(torch.tensor(scores), 3, scale), advantages_by_hand(scores, 3, scale), 2e-5)


def test_group_advantages_by_hand():
    # mean 1/4, deviations 3/4 and -1/4, unbiased variance (9 + 1 + 1 + 1) / 16 / 3 = 1/4
    close(group_advantages(double(1, 0, 0, 0), 4, "group"), [0.75 / 0.500001] + [-0.25 / 0.500001] * 3)
    close(group_advantages(double(1, 0, 0, 0), 4, "none"), [0.75, -0.25, -0.25, -0.25])
    # the batch's standard deviation is of the scores, not of the deviations from the groups' means
    close(group_advantages(double(0, 2, 10, 12), 2, "batch"), [x / (math.sqrt(104 / 3) + 1e-6) for x in (-1, 1, -1, 1)])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_scores_have_advantage_exactly_zero(scale, dtype):
    treacherous = 0
    for value in (0.1, 0.3, 0.7, 1 / 3, 1.1, -0.9, 123.456):
        for size in (2, 3, 5, 7):
            group = torch.full((size,), value, dtype=dtype)
            treacherous += bool(((group - group.sum() / size) != 0).any())  # what a float mean would make of it
            scores = torch.cat([group, torch.linspace(0, 1, size, dtype=dtype)])
            advantages = group_advantages(scores, size, scale)
            assert advantages[:size].eq(0).all() and advantages[size:].ne(0).any()
    assert treacherous > 3


def test_a_missing_score_changes_nothing_but_itself():
    with_missing = group_advantages(double(1, NAN, 0, 0.5), 4, "group")
    close(with_missing[[0, 2, 3]], group_advantages(double(1, 0, 0.5), 3, "group"))
    assert with_missing[1] == 0


def test_equal_scores_by_loops():
    values = [0.0, 0.1, 1.0, NAN, INF]
    groups = list(itertools.product(values, repeat=3))
    expected = [len({s for s in group if math.isfinite(s)}) <= 1 for group in groups]
    assert equal_scores(double(*groups)).tolist() == expected


# ---- KL ---------------------------------------------------------------------------------------------------------


def kl_by_hand(d: float, estimator: str) -> float:
    if estimator == "k3":
        return math.exp(min(-d, 20.0)) + max(d, -20.0) - 1
    return {"k1": d, "abs": abs(d), "k2": d * d / 2}[estimator]


DIFFERENCES = [0.0, 1e-6, -1e-6, 0.5, -0.5, 2.0, -2.0, 8.0, -3.0, 15.0, -15.0, 25.0, -25.0, 1e3, -1e3, -6e8]


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
def test_kl_estimate_by_loops(estimator):
    ref = [-0.3 - 0.1 * i for i in range(len(DIFFERENCES))]
    logprobs = [r + d for r, d in zip(ref, DIFFERENCES)]
    expected = [kl_by_hand(lp - r, estimator) for lp, r in zip(logprobs, ref)]
    close(kl_estimate(double(*logprobs), double(*ref), estimator), expected)


def test_k3_by_hand_and_its_clamp():
    close(kl_estimate(double(0.0), double(0.0), "k3"), [0.0])
    close(kl_estimate(double(-1.0), double(-2.0), "k3"), [math.exp(-1)])  # exp(-1) + 1 - 1
    close(kl_estimate(double(-2.0), double(-1.0), "k3"), [math.e - 2])  # which policy is subtracted matters
    d = double(0.0, 30.0, 400.0, -5.0, -12.0, -30.0, -1e9).requires_grad_()
    values = kl_estimate(d, torch.zeros_like(d), "k3")
    most = math.exp(20) - 21
    close(values, [0.0, 29.0, 399.0, math.exp(5) - 6, math.exp(12) - 13, most, most], 1e-11)
    (gradient,) = torch.autograd.grad(values.sum(), d)  # 1 - exp(-d): it grows with how far the policy has run away
    close(gradient, [0.0, 1.0, 1.0, 1 - math.exp(5), 1 - math.exp(12), 0.0, 0.0], 1e-11)
    for far in (-200.0, -INF):  # exp(200) is inf in float32
        assert kl_estimate(torch.tensor([far]), torch.tensor([0.0]), "k3").item() == pytest.approx(most)


def test_exact_kl_by_enumeration_and_the_estimators_expectations():
    torch.manual_seed(0)
    p, q = (torch.randn(2, 3, 5, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    expected = [
        [math.fsum(math.exp(a) * (a - b) for a, b in zip(row_p, row_q)) for row_p, row_q in zip(*rows)]
        for rows in zip(p.tolist(), q.tolist())
    ]
    close(exact_kl(p, q), expected)
    assert exact_kl(p, p).eq(0).all() and exact_kl(p, q).gt(0).all()
    for estimator in ("k1", "k3"):  # unbiased: their expectation over all tokens is the exact KL
        close((p.exp() * kl_estimate(p, q, estimator)).sum(-1), expected)


def test_exact_kl_with_masked_tokens():
    """Logits of -inf: as torch.distributions has it, and the gradient as if the masked tokens did not exist."""
    torch.manual_seed(2)
    p, q = torch.randn(2, 3, 6, dtype=torch.float64)
    p[:, :2], q[:, 1:3] = -INF, -INF  # the policy alone, both, the reference alone
    p[:2, 2] = double([-INF, -800.0])[0]  # both once more; a probability that underflows
    found = exact_kl(p.requires_grad_().log_softmax(-1), q.log_softmax(-1))
    categorical = torch.distributions.Categorical
    close(found, torch.distributions.kl_divergence(categorical(logits=p), categorical(logits=q)))
    assert found.isfinite().tolist() == [True, True, False]
    (gradient,) = torch.autograd.grad(found[:2].sum(), p)
    # A masked token of the policy has no gradient; of the others the policy alone decides.
    kept = p.detach()[:2, 3:].requires_grad_()
    normaliser = q[:2].logsumexp(-1, keepdim=True)
    expected = (kept.softmax(-1) * (kept.log_softmax(-1) - q[:2, 3:] + normaliser)).sum()
    close(gradient[:2, 3:], torch.autograd.grad(expected, kept)[0])
    assert gradient[:2, :3].eq(0).all()


def test_gradients_of_the_kl_estimators_on_policy():
    """What kl_estimate's docstring says of them, by enumerating all tokens under the policy's own probabilities."""
    torch.manual_seed(1)
    logits, other = torch.randn(5, dtype=torch.float64, requires_grad=True), torch.randn(5, dtype=torch.float64)
    p, q = logits.log_softmax(-1), other.log_softmax(-1)

    def gradient(x):
        return torch.autograd.grad(x, logits, retain_graph=True)[0]

    expected = {e: gradient((p.exp().detach() * kl_estimate(p, q, e)).sum()) for e in ("k1", "k2", "k3")}
    close(expected["k1"], torch.zeros(5))
    close(expected["k2"], gradient(exact_kl(p, q)))
    close(expected["k3"], gradient(exact_kl(q, p)))
    assert not torch.allclose(expected["k3"], expected["k2"], rtol=0.05)


def test_adapt_kl_coef():
    assert adapt_kl_coef(0.5, 0.1, 0.1, 100, 1000) == 0.5
    assert adapt_kl_coef(0.5, 0.11, 0.1, 100, 1000) == pytest.approx(0.5 * (1 + 0.1 * 0.1), rel=1e-12)
    assert adapt_kl_coef(0.5, 9.0, 0.1, 100, 1000) == pytest.approx(0.5 * 1.02, rel=1e-12)  # at most + 20 %
    assert adapt_kl_coef(0.5, 0.0, 0.1, 100, 1000) == pytest.approx(0.5 * 0.98, rel=1e-12)
    assert adapt_kl_coef(0.5, 9.0, 0.1, 50, 10_000) == pytest.approx(0.5 * 1.001, rel=1e-12)
    assert adapt_kl_coef(0.5, NAN, 0.1, 100, 1000) == adapt_kl_coef(0.5, INF, 0.1, 100, 1000) == 0.5


# ---- policy losses ----------------------------------------------------------------------------------------------


def token_loss_by_hand(kind, logprob, log_ratio, A, low, high, dual_clip, taus):
    """(loss, its derivative by this token's log-probability, clipped) of one token."""
    ratio = math.exp(min(max(log_ratio, -20.0), 20.0))
    slope = ratio if -20 <= log_ratio <= 20 else 0.0
    clipped_ratio = min(max(ratio, 1 - low), 1 + high)
    if kind == "reinforce":
        return -A * logprob, -A, False
    if kind == "cispo":
        return -clipped_ratio * A * logprob, -clipped_ratio * A, clipped_ratio != ratio
    if kind == "sapo":
        tau = taus[0] if A > 0 else taus[1]
        gate = 1 / (1 + math.exp(-tau * (ratio - 1))) if tau * (ratio - 1) > -700 else 0.0
        return -4 / tau * gate * A, -4 * gate * (1 - gate) * A * slope, False
    loss, derivative, clipped = -A * ratio, -A * slope, False
    if -A * clipped_ratio > loss:
        loss, derivative, clipped = -A * clipped_ratio, 0.0, True
    if dual_clip and A < 0 and loss > -A * dual_clip:
        loss, derivative, clipped = -A * dual_clip, 0.0, True
    return loss, derivative, clipped


LOG_RATIOS = [0.0, 1e-4, -1e-4, 5e-4, 0.1, -0.1, 0.21, -0.21, 0.26, -0.26, 1.2, -1.2, 3.0, 19.9, -19.9, 25.0, -25.0]
ADVANTAGES = [-2.0, -0.5, 0.0, 0.7, 3.0]
SETTINGS = [
    ("ppo", 0.2, 0.2, 0.0), ("ppo", 0.2, 0.28, 0.0), ("ppo", 0.2, 0.28, 3.0), ("ppo", 0.2, 0.2, 1.25),
    ("cispo", 1.0, 4.0, 0.0), ("cispo", 0.2, 0.28, 0.0), ("sapo", 0.0, 0.0, 0.0), ("reinforce", 0.0, 0.0, 0.0),
]  # fmt: skip


@pytest.mark.parametrize("kind, low, high, dual_clip", SETTINGS)
def test_policy_loss_by_loops(kind, low, high, dual_clip):
    old = [[-0.5 - 0.2 * t for t in range(len(LOG_RATIOS))] for _ in ADVANTAGES]
    logprobs = double(*[[o + d for o, d in zip(row, LOG_RATIOS)] for row in old]).requires_grad_()
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    taus = (1.0, 1.05)
    losses, clipped = policy_loss(
        logprobs, double(*old), double(*ADVANTAGES)[:, None], mask, kind, low, high, dual_clip, *taus
    )
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    expected = [
        [token_loss_by_hand(kind, lp, lp - o, A, low, high, dual_clip, taus) for lp, o in zip(*rows)]
        for *rows, A in zip(logprobs.tolist(), old, ADVANTAGES)
    ]
    close(losses, [[loss for loss, _, _ in row] for row in expected], 1e-11)
    close(gradient, [[slope for _, slope, _ in row] for row in expected], 1e-11)
    assert clipped.tolist() == [[flag for _, _, flag in row] for row in expected]
    assert clipped.any() == (kind in ("ppo", "cispo"))


def test_policy_loss_by_hand():
    def loss(kind, ratio, A, low=0.2, high=0.2, dual_clip=0.0, logprob=-2.0):
        lp = double([logprob])
        return policy_loss(
            lp, lp - math.log(ratio), double([A]), torch.ones(1, 1, dtype=torch.bool), kind, low, high, dual_clip
        )[0].item()

    assert loss("ppo", 1.1, 2.0) == pytest.approx(-2.2)
    assert loss("ppo", 1.25, 2.0) == pytest.approx(-2.4)  # clipped at 1.2
    assert loss("ppo", 1.25, 2.0, high=0.28) == pytest.approx(-2.5)  # clip-higher lets it through
    assert loss("ppo", 1.25, -2.0) == pytest.approx(2.5)  # the larger loss wins
    assert loss("ppo", 0.5, -2.0) == pytest.approx(1.6)  # clipped at 0.8
    assert loss("ppo", 0.5, 2.0) == pytest.approx(-1.0)
    assert loss("ppo", 5.0, -2.0) == pytest.approx(10.0)
    assert loss("ppo", 5.0, -2.0, dual_clip=3.0) == pytest.approx(6.0)
    assert loss("ppo", 5.0, 2.0, dual_clip=3.0) == pytest.approx(-2.4)  # dual clip is for negative advantages
    assert loss("cispo", 7.0, 2.0, low=1.0, high=4.0) == pytest.approx(5 * 2 * 2)
    assert loss("cispo", 0.5, 2.0, low=1.0, high=4.0) == pytest.approx(0.5 * 2 * 2)
    assert loss("sapo", 1.0, 2.0) == pytest.approx(-4.0) and loss("sapo", 1.0, -2.0) == pytest.approx(4 / 1.05)
    assert loss("reinforce", 9.0, 3.0) == pytest.approx(6.0)


def test_exponents_are_clamped_at_20():
    old, A = double([0.0, 0.0]), double([-1.0])
    logprobs = double([400.0, -400.0]).requires_grad_()
    losses, _ = policy_loss(logprobs, old, A, torch.ones(1, 2, dtype=torch.bool), "ppo", INF, INF)
    close(losses, [[math.exp(20), math.exp(-20)]])
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    assert gradient.tolist() == [[0.0, 0.0]]
    losses, _ = policy_loss(logprobs, old, A, torch.ones(1, 2, dtype=torch.bool), "cispo", 1e9, 1e9)
    close(losses, [[math.exp(20) * 400, math.exp(-20) * -400]])


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo", "sapo"])
def test_on_policy_the_ratio_is_exactly_one(kind):
    """Right after a rollout every loss but SAPO's constant factor 2 is -A, and its gradient REINFORCE's, to the bit."""
    torch.manual_seed(0)
    logprobs = (torch.randn(4, 6) * 5 - 6).requires_grad_()
    A, mask = torch.randn(4, 1), torch.rand(4, 6) < 0.7
    low, high = VARIANTS[kind if kind in VARIANTS else "grpo"][3:]
    losses, clipped = policy_loss(logprobs, logprobs.detach(), A, mask, kind, low, high, 0.0, 1.0, 1.0)
    expected = {"cispo": -A * logprobs.detach(), "sapo": -2 * A}.get(kind, -A).expand(4, 6)
    assert torch.equal(losses, expected) and not clipped.any()
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    assert torch.equal(gradient, (-A).expand(4, 6))


def test_gspo_gradient_is_that_of_the_sequence_ratio():
    torch.manual_seed(0)
    lengths = [5, 2, 7, 1, 4]
    mask = torch.arange(7) < torch.tensor(lengths)[:, None]
    old = -torch.rand(5, 7, dtype=torch.float64) * 3
    shift = double([1e-4], [2e-3], [-2e-3], [3e-3], [-3e-3])  # inside, and outside of the clip range on either side
    logprobs = (old + shift + 1e-4 * torch.randn(5, 7, dtype=torch.float64)).requires_grad_()
    A = [1.0, 2.0, -1.5, -2.0, 0.5]
    low, high = 3e-4, 4e-4

    expected = 0.0
    for row, length in enumerate(lengths):
        s = torch.exp(sum(logprobs[row, t] - old[row, t] for t in range(length)) / length)
        expected = expected + torch.max(-A[row] * s, -A[row] * s.clamp(1 - low, 1 + high)) / 5
    (expected_gradient,) = torch.autograd.grad(expected, logprobs)

    losses, clipped = policy_loss(logprobs, old, double(*A)[:, None], mask, "gspo", low, high)
    got = aggregate(losses, mask, "sequence", sum(lengths), 5, 7)
    (gradient,) = torch.autograd.grad(got, logprobs)
    close(got, expected)
    close(gradient, expected_gradient)
    assert gradient[~mask].eq(0).all()
    # The second has A > 0 above the range, the third A < 0 below it; the others are inside or on the harmless side.
    assert [row[m].unique().tolist() for row, m in zip(clipped, mask)] == [[False], [True], [True], [False], [False]]
    assert gradient[1].eq(0).all() and gradient[3, 0].ne(0)


def test_gspo_with_advantages_of_tokens_and_junk_under_the_mask():
    old = double([-1.0, -2.0, NAN], [-1.0, INF, NAN])
    logprobs = double([-0.9, -2.3, NAN], [-1.5, -INF, 3.0])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    A = double([1.0, -1.0, 5.0], [2.0, 7.0, 7.0])
    losses, _ = policy_loss(logprobs, old, A, mask, "gspo", 10.0, 10.0)
    s = [math.exp((0.1 - 0.3) / 2), math.exp(-0.5)]
    close(masked_sum(losses, mask, 1), [-s[0] + s[0], -2 * s[1]])


def test_gspo_ratio_is_one_number_a_sequence():
    """In float32 too: its clip range is 3e-4, and (s + logp) - logp would round s differently for each token."""
    torch.manual_seed(0)
    old = -torch.rand(3, 50) * 12
    logprobs = old + 2e-4 * torch.randn(3, 50)
    losses, _ = policy_loss(logprobs, old, torch.ones(3, 1), torch.ones(3, 50, dtype=torch.bool), "gspo", 3e-4, 4e-4)
    assert [len(row.unique()) for row in losses] == [1, 1, 1]


def test_cispo_weight_is_detached():
    old = double([-1.0, -1.0, -1.0])
    logprobs = double([-0.9, -3.0, -0.2]).requires_grad_()
    losses, clipped = policy_loss(logprobs, old, double([2.0]), torch.ones(1, 3, dtype=torch.bool), "cispo", 0.2, 0.28)
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    close(gradient, [[-2 * math.exp(0.1), -2 * 0.8, -2 * 1.28]])  # clipped tokens go on learning
    assert clipped.tolist() == [[False, True, True]]


def test_clipped_tokens_have_no_gradient_and_only_these():
    torch.manual_seed(0)
    old = -torch.rand(8, 40, dtype=torch.float64) * 3
    logprobs = (old + torch.randn(8, 40, dtype=torch.float64)).requires_grad_()
    A = torch.randn(8, 1, dtype=torch.float64)
    for dual_clip in (0.0, 1.5):
        losses, clipped = policy_loss(
            logprobs, old, A, torch.ones(8, 40, dtype=torch.bool), "ppo", 0.2, 0.28, dual_clip
        )
        (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
        assert torch.equal(gradient == 0, clipped) and 0 < clipped.sum() < clipped.numel()


def test_variants_have_their_papers_clip_ranges():
    assert VARIANTS["grpo"] == ("ppo", "sequence", "group", 0.2, 0.2)
    assert VARIANTS["dr_grpo"][:3] == ("ppo", "constant", "none")
    assert VARIANTS["dapo"] == ("ppo", "step_token", "group", 0.2, 0.28)
    assert VARIANTS["bnpo"][:2] == ("ppo", "token")
    assert VARIANTS["gspo"] == ("gspo", "sequence", "group", 3e-4, 4e-4)
    assert {name: kind for name, (kind, *_) in VARIANTS.items() if kind == name} == {
        name: name for name in ("gspo", "cispo", "sapo", "reinforce")
    }


# ---- aggregation ------------------------------------------------------------------------------------------------


def aggregate_by_hand(rows: list[list[float]], how: str, tokens: float, sequences: int, max_length: int) -> float:
    if how == "sequence":
        return sum(sum(row) / len(row) for row in rows) / sequences
    if how == "sequence_sum":
        return sum(sum(row) for row in rows) / sequences
    return sum(sum(row) for row in rows) / (sequences * max_length if how == "constant" else tokens)


HOWS = ["token", "step_token", "sequence", "sequence_sum", "constant"]


@pytest.mark.parametrize("how", HOWS)
def test_aggregate_by_loops_and_in_any_cut(how):
    torch.manual_seed(0)
    lengths = [3, 1, 6, 2, 4]
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    x = torch.randn(5, 6, dtype=torch.float64).masked_fill(~mask, NAN)
    rows = [row[:n] for row, n in zip(x.tolist(), lengths)]
    tokens = 37.5 if how == "step_token" else 16
    whole = aggregate(x, mask, how, tokens, 5, 10)
    close(whole, aggregate_by_hand(rows, how, tokens, 5, 10))
    for cut in ([[0, 1, 2], [3, 4]], [[2], [0], [4], [1], [3]], [[4, 0], [], [1, 3, 2]]):
        close(sum(aggregate(x[part], mask[part], how, tokens, 5, 10) for part in cut), whole)


def test_aggregate_by_hand():
    mask = torch.tensor([[True, True, True], [True, False, False]])
    x = double([1.0, 2.0, 3.0], [10.0, NAN, NAN])
    got = {how: aggregate(x, mask, how, 8, 2, 5).item() for how in HOWS}
    assert got == {"token": 2.0, "step_token": 2.0, "sequence": 6.0, "sequence_sum": 8.0, "constant": 1.6}


# ---- entropy ----------------------------------------------------------------------------------------------------


def test_entropy_by_loops():
    torch.manual_seed(0)
    logits = torch.randn(3, 7, dtype=torch.float64) * 3
    expected = []
    for row in logits.tolist():
        weights = [math.exp(z) for z in row]
        expected.append(-math.fsum(w / sum(weights) * math.log(w / sum(weights)) for w in weights))
    entropy = lambda x: entropy_from_logprobs(x.log_softmax(-1))  # noqa: E731
    close(entropy(logits), expected)
    close(entropy(logits + 1e4), expected, 1e-8)  # shifted logits, which overflow exp
    close(entropy(torch.zeros(1, 9, dtype=torch.float64)), [math.log(9)])
    close(entropy(double([1000.0, 0.0, 0.0])), [0.0])


def test_entropy_with_masked_tokens():
    """Logits of -inf: as torch.distributions has it, also with a loss that fp16 scales; NaN stays NaN."""
    torch.manual_seed(3)
    logits = torch.randn(3, 6, dtype=torch.float64) * 3
    logits[0, 2], logits[1, :5] = -INF, -INF
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        x = logits.to(dtype).requires_grad_()
        found = entropy_from_logprobs(x.log_softmax(-1))
        expected = torch.distributions.Categorical(logits=x, validate_args=False).entropy()
        close(found, expected, tolerance)
        gradients = [torch.autograd.grad(y.sum(), x)[0] for y in (found, expected)]
        close(*gradients, tolerance)
        scaled = entropy_from_logprobs(x.log_softmax(-1)) * 2.0**16
        close(torch.autograd.grad(scaled.sum(), x)[0], gradients[1] * 2.0**16, tolerance * 2.0**16)
    bad = double([NAN, 0.0], [INF, 0.0], [-INF, -INF])
    assert entropy_from_logprobs(bad.log_softmax(-1)).isnan().all()


# ---- off-policy correction --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["none", "truncate", "mask", "sequence_mask"])
@pytest.mark.parametrize("cap", [1.5, 3.0])
def test_correction_weights_by_loops(kind, cap):
    """Of each token, or of the response's sum; what stands outside of the mask does not count; without gradient."""
    lengths, width = [4, 1, 3, 2], 4
    differences = [[0.0, 0.3, -0.3, 0.5], [2.0, 9.0, 9.0, 9.0], [-2.0, 0.2, 1.2, NAN], [0.41, 0.4, NAN, NAN]]
    rollout = torch.full((4, width), -1.5, dtype=torch.float64)
    old = (rollout + double(*differences)).requires_grad_()
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    got = correction_weights(old, rollout, mask, kind, cap)
    assert not got.requires_grad
    for row, own, length in zip(got.tolist(), differences, lengths):
        whole = math.exp(sum(own[:length]))
        for weight, difference in zip(row[:length], own):
            rho = math.exp(difference)
            expected = {
                "none": 1.0, "truncate": min(rho, cap), "mask": rho if 1 / cap <= rho <= cap else 0.0,
                "sequence_mask": whole if whole <= cap else 0.0,
            }[kind]  # fmt: skip
            assert weight == pytest.approx(expected, rel=1e-12)


# ---- scores -----------------------------------------------------------------------------------------------------


def test_weighted_sum():
    components = {"a": torch.tensor([1, 0, NAN, 2]), "b": torch.full((4,), 0.5), "c": torch.tensor([NAN, 1, 1, 1])}
    total = lambda **options: weighted_sum(components, Args(reward=("a", "b", "c"), **options)).tolist()
    close(total(), [NAN, 1.5, NAN, 3.5])
    close(total(reward_weights=(2.0, -1.0, 0.0)), [1.5, -0.5, NAN, 3.5])  # c is only measured


def test_final_scores():
    """Normalised by all scores so far, clipped, replaced without a stop, less the overlong penalty, left out."""
    scores, lengths = torch.tensor([1.5, 0.5, NAN, NAN, 2.5], dtype=torch.float64), torch.tensor([8, 7, 8, 10, 10])
    stopped = torch.tensor([True, True, True, False, False])
    so_far = [5, 1.0, 9.0]  # standard deviation 1.5

    def score(**options):
        args = Args(max_response_length=10, **{"non_stop_penalty": False, **options})
        return final_scores(scores, lengths, stopped, so_far, args).tolist()

    close(score(), [1.5, 0.5, NAN, NAN, 2.5], 1e-7)
    close(score(non_stop_penalty=True), [1.5, 0.5, NAN, 0.0, 0.0])  # replaced, whatever it was
    close(score(non_stop_penalty=True, penalty_reward_value=-1.0), [1.5, 0.5, NAN, -1.0, -1.0], 1e-7)
    normal = [1 / 3, -1 / 3, NAN, NAN, 1.0]
    close(score(reward_normalization=True), normal, 1e-7)
    close(score(reward_clip=1.0), [1.0, 0.5, NAN, NAN, 1.0], 1e-7)
    close(score(reward_normalization=True, reward_clip=0.5), [1 / 3, -1 / 3, NAN, NAN, 0.5], 1e-7)
    # From 7 tokens (no penalty) to 10 (a penalty of 1).
    close(score(overlong_buffer=3), [1.5 - 1 / 3, 0.5, NAN, NAN, 1.5], 1e-7)
    close(score(overlong_buffer=1), [1.5, 0.5, NAN, NAN, 1.5], 1e-7)  # no bonus for what is shorter
    close(score(overlong_buffer=10), [0.7, -0.2, NAN, NAN, 1.5], 1e-7)
    every = dict(non_stop_penalty=True, penalty_reward_value=-1.0, overlong_buffer=3, reward_clip=1.0)
    close(score(**every), [2 / 3, 0.5, NAN, -2.0, -2.0], 1e-7)
    close(score(**every, mask_truncated=True), [2 / 3, 0.5, NAN, NAN, NAN], 1e-7)


def test_pass_at_k_by_enumeration():
    for n in range(1, 7):
        for correct in range(n + 1):
            outcomes = [True] * correct + [False] * (n - correct)
            for k in range(1, n + 1):
                subsets = list(itertools.combinations(outcomes, k))
                assert evaluation.pass_at_k(n, correct, k) == pytest.approx(
                    sum(map(any, subsets)) / len(subsets), abs=1e-12
                )


# ---- schedule, cuts, order of the prompts -----------------------------------------------------------------------


def test_lr_factor():
    def course(schedule, total=9, warmup=0.25):
        return [utils.lr_factor(update, total, warmup, schedule) for update in range(total)]

    warm = [1 / 3, 2 / 3, 1.0]  # ceil(0.25 * 9) = 3 updates, the first of which moves already
    assert course("constant") == pytest.approx(warm + [1.0] * 6)
    assert course("linear") == pytest.approx(warm + [1.0, 0.8, 0.6, 0.4, 0.2, 0.0])
    cosine = [0.5 * (1 + math.cos(math.pi * i / 5)) for i in range(6)]
    assert course("cosine") == pytest.approx(warm + cosine)
    assert course("linear", 5, 0.0) == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])
    for schedule in ("constant", "linear", "cosine"):
        assert course(schedule, 1) == [1.0] and course(schedule, 4, 1.0) == [0.25, 0.5, 0.75, 1.0]
        assert all(0 <= factor <= 1 for factor in course(schedule, 50, 0.1))


def test_weight_decay_is_for_matrices():
    layer = torch.nn.Linear(3, 2)
    weight, bias = (parameter.detach().clone() for parameter in layer.parameters())
    optimizer = utils.Optimizer(layer, Args(weight_decay=0.5, learning_rate=0.1, warmup_ratio=0.0), 1)
    (0 * (layer.weight.sum() + layer.bias.sum())).backward()
    optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), 0.95 * weight)
    assert torch.equal(layer.bias, bias)


@quick
@given(st.lists(st.integers(2, 40), min_size=1, max_size=30), st.integers(1, 200), st.integers(1, 5))
def test_micro_batches(lengths, budget, size):
    cuts = [utils.micro_batches(lengths, budget, utils.World(rank, size, torch.device("cpu"))) for rank in range(size)]
    assert sorted(i for cut in cuts for rows in cut for i in rows) == list(range(len(lengths)))  # each row once
    assert len({len(cut) for cut in cuts}) == 1  # the same number of passes on every rank
    assert any(all(cut) for cut in cuts)  # and none that is empty on all of them
    shares = [sum(len(rows) for rows in cut) for cut in cuts]
    assert max(shares) - min(shares) <= 1
    for cut in cuts:
        full = [rows for rows in cut if rows]
        assert cut == full + [[]] * (len(cut) - len(full))
        for rows in full:
            assert len(rows) == 1 or len(rows) * max(lengths[i] for i in rows) <= budget


@quick
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=20), st.integers(1, 9000), st.integers(1, 3))
def test_micro_batches_have_the_least_padding(lengths, budget, size):
    """Of all cuts of the sorted rows; one more pass counts as PASS tokens, and the slowest rank decides."""
    longest = sorted(lengths, reverse=True)[::size][:9]
    lengths = sorted(lengths, reverse=True)[: size * len(longest)]
    cuts = [utils.micro_batches(lengths, budget, utils.World(rank, size, torch.device("cpu"))) for rank in range(size)]
    padded = lambda parts: sum(len(part) * part[0] + utils.PASS_TOKENS for part in parts)  # noqa: E731
    ours = padded([[lengths[i] for i in rows] for rows in cuts[0]])
    assert all(padded([[lengths[i] for i in rows] for rows in cut if rows]) <= ours for cut in cuts)
    found = []
    for places in itertools.product((False, True), repeat=len(longest) - 1):
        parts = [[longest[0]]]
        for cut, length in zip(places, longest[1:]):
            parts.append([length]) if cut else parts[-1].append(length)
        if all(len(part) == 1 or len(part) * part[0] <= budget for part in parts):
            found.append(padded(parts))
    assert ours == min(found)


@pytest.mark.parametrize("count", [1, 3, 7, 10, 23])
def test_take_prompts_goes_through_all_in_each_pass(count):
    size, passes = 7, 5
    prompts = [{"query": [i]} for i in range(size)]
    stream = []
    while len(stream) < passes * size:
        stream += [row["query"][0] for row in data.take_prompts(prompts, len(stream), count, seed=1)]
    orders = [tuple(stream[i : i + size]) for i in range(0, passes * size, size)]
    assert all(sorted(order) == list(range(size)) for order in orders)
    assert len(set(orders)) == passes
    assert stream[: passes * size] == [
        data.take_prompts(prompts, i, 1, seed=1)[0]["query"][0] for i in range(passes * size)
    ]
    assert stream[:size] != [row["query"][0] for row in data.take_prompts(prompts, 0, size, seed=2)]


def test_generator_depends_on_its_key_alone():
    draw = lambda *key: utils.generator(*key).random(4).tolist()  # noqa: E731
    first = draw("rollout", 1, 2)
    torch.rand(10)
    assert draw("rollout", 1, 2) == first
    keys = [("rollout", 1, 2), ("rollout", 2, 1), ("rollout", 1, 12), ("rollout", 11, 2), ("prompts", 1, 2)]
    assert len({tuple(draw(*key)) for key in keys}) == 5
