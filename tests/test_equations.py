"""The equations of grpo.py against hand values and against loops over plain Python numbers, values
and gradients.

What is not here is in tests/agreement; the functions of the same names in rloo.py and ppo.py are
the same, see test_drift.py.
"""

import itertools
import math
import statistics
import types

import datasets
import helpers
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import CPU

import grpo
import ppo
import rloo
import utils
from grpo import (
    entropy_from_logprobs,
    group_advantages,
    kl_estimate,
    masked_mean,
    masked_sum,
    policy_loss,
    turn_advantages,
    weighted_sum,
)
from plumbing.data.mixture import mix, next_prompts, take_prompts
from plumbing.rollout.batch import Batch, Sample

NAN = math.nan
INF = math.inf
quick = settings(max_examples=60, deadline=None, derandomize=True)


@pytest.fixture(scope="module", autouse=True)
def device(request):
    """That of --device, on which every tensor is made."""
    torch.set_default_device(request.config.getoption("--device"))
    yield
    torch.set_default_device(None)


def double(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def close(result, expected, tolerance=1e-12):
    result, expected = (torch.as_tensor(x, dtype=torch.float64) for x in (result, expected))
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def mask_of(lengths: list[int], width: int) -> torch.Tensor:
    return torch.arange(width) < torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("junk", [NAN, INF, -INF, 1e30])
def test_masked_reductions_leak_neither_value_nor_gradient(junk):
    mask = torch.tensor([[True, False, True], [False, False, False], [True, True, False]])
    x = double([1.0, junk, 2.0], [junk, junk, junk], [-4.0, 0.5, junk]).requires_grad_()
    close(masked_sum(x, mask), 1 + 2 - 4 + 0.5)
    close(masked_sum(x, mask, 1), [3.0, 0.0, -3.5])
    close(masked_sum(x, mask, 0), [-3.0, 0.5, 2.0])
    close(masked_mean(x, mask), -0.5 / 4)
    close(masked_mean(x, mask, 1), [1.5, 0.0, -1.75])  # a row without any is 0 and not NaN
    (gradient,) = torch.autograd.grad(masked_sum(x, mask), x)
    assert torch.equal(gradient, mask.double())
    (gradient,) = torch.autograd.grad(masked_mean(x, mask, 1).sum(), x)
    assert torch.equal(gradient, double([0.5, 0, 0.5], [0, 0, 0], [0.5, 0.5, 0]))


# ---- advantages ----------------------------------------------------------------------------------


def advantages_by_hand(scores: list[float], group_size: int, scale: str) -> list[float]:
    result = []
    all_scored = [s for s in scores if math.isfinite(s)]
    for start in range(0, len(scores), group_size):
        group = scores[start : start + group_size]
        scored = [s for s in group if math.isfinite(s)]
        for score in group:
            if not math.isfinite(score) or len(set(scored)) == 1:
                result.append(0.0)
                continue
            if scale == "maxrl":
                mean = statistics.fmean(scored)
                result.append((score - mean) / mean if mean > 0 else 0.0)
                continue
            if scale == "passk":
                *_, second, best = sorted(scored)
                gain = best - second if score == best else 0.0
                result.append(gain / (statistics.stdev(scored) + 1e-6))
                continue
            spread = {"group": scored, "batch": all_scored}.get(scale)
            divisor = 1.0 if spread is None else statistics.stdev(spread) + 1e-6
            result.append((score - statistics.fmean(scored)) / divisor)
    return result


GROUPS = [
    [1.0, 0.0, 0.0, 1.0, 1.0, 0.0],
    [0.5, -2.0, 7.25, 3.0, 3.0, 3.0],
    [1.0, NAN, 0.0, NAN, NAN, NAN],  # one missing, all missing
    [1.0, NAN, NAN, 2.0, INF, 5.0],  # one left, one infinite
    [-INF, 1.0, 1.0, 0.25, 0.5, NAN],
    [1e-4, 2e-4, 3e-4, 0.0, 1e-7, 0.0],  # a spread near the 1e-6 below the line
]


@pytest.mark.parametrize("scale", ["group", "batch", "none", "maxrl", "passk"])
@pytest.mark.parametrize("scores", GROUPS)
def test_group_advantages_by_loops(scores, scale):
    close(group_advantages(double(*scores), 3, scale), advantages_by_hand(scores, 3, scale))
    close(
        group_advantages(torch.tensor(scores), 3, scale), advantages_by_hand(scores, 3, scale), 2e-5
    )


@pytest.mark.parametrize("scale", ["group", "batch", "none", "maxrl", "passk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_scores_have_advantage_exactly_zero(scale, dtype):
    """Also where the float mean of equal numbers is another number."""
    for value, size in itertools.product((0.1, 0.3, 0.7, 1 / 3, 1.1, -0.9, 123.456), (2, 3, 5, 7)):
        scores = torch.cat(
            [torch.full((size,), value, dtype=dtype), torch.linspace(0, 1, size, dtype=dtype)]
        )
        equal, others = group_advantages(scores, size, scale).split(size)
        assert equal.eq(0).all() and others.ne(0).any()


def test_scores_that_differ_by_rounding_are_equal():
    """As sums in another order do, or with gdpo rewards that cancel."""
    args = grpo.Args(reward=("a", "b"), group_size=3, advantage_scale="gdpo")
    scores = zip((1, 0, 0), (0, 1, 1))
    samples = [Sample({}, [1], {}, True, scores=dict(zip("ab", pair))) for pair in scores]
    batch = Batch.from_samples(samples, torch.get_default_device())
    batch.scores = torch.zeros(3)
    for outcomes in (double(0.1 + 0.2, 0.3, 0.3), grpo.outcomes_of(batch, args)):
        assert len(outcomes.unique()) > 1 and grpo.equal_scores(outcomes[None]).all()
        assert group_advantages(outcomes, 3, "gdpo").eq(0).all()


TURNS = [  # the reward of each turn
    *([1.0, 0.5], [0.0, 0.5, 2.0], [-1.0]),  # the third turn has no other
    *([0.1, 0.1, 0.3], [0.2], [0.3, 0.1, 0.3]),  # the later turns earn the same
    *([0.0, 1.0, 0.0, 0.25], [2.0, 2.0, 2.0], [0.0, 0.0]),  # the second one has no score
]


@pytest.mark.parametrize("gap", [0, 1])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_turn_advantages_by_loops(scale, gap):
    """A first turn of one token, others of two, and between them observations, or nothing; the second
    response has a penalty, too.
    """
    penalties = [0.0, 0.25, *[0.0] * 5, NAN, 0.0]
    scores = [sum(x) - y for x, y in zip(TURNS, penalties)]
    rewards, expected, turns = torch.zeros(3, len(TURNS), 12, dtype=torch.float64)
    mask = torch.zeros(rewards.shape, dtype=torch.bool)
    for j in range(4):
        returns = [sum(x[j:]) - y if len(x) > j else NAN for x, y in zip(TURNS, penalties)]
        for i, advantage in enumerate(advantages_by_hand(returns, 3, scale)):
            if len(TURNS[i]) > j:
                end = 1 + (2 + gap) * j
                tokens = slice(max(0, end - 2), end)
                mask[i, tokens] = True
                turns[i, tokens] = j
                expected[i, tokens] = advantage
                rewards[i, end - 1] = TURNS[i][j]
    close(turn_advantages(double(*scores), rewards, turns, mask, 3, scale), expected, 1e-9)
    assert (expected[:, 2 + gap] != 0).sum() == 4


def gdpo_by_hand(sources: list[list[float]], weights: tuple, group_size: int) -> list[float]:
    """As the paper has it, with the mean over the batch, of which a response is left out that lacks
    any score.
    """
    scored = [
        all(math.isfinite(x) for x, w in zip(scores, weights) if w) for scores in zip(*sources)
    ]
    sources = [[x if y else NAN for x, y in zip(scores, scored)] for scores in sources]
    parts = [advantages_by_hand(scores, group_size, "group") for scores in sources]
    sums = [sum(w * x for x, w in zip(column, weights)) for column in zip(*parts)]
    kept = [x for x, y in zip(sums, scored) if y]
    mean = statistics.fmean(kept)
    spread = statistics.stdev(kept) + 1e-6
    return [(x - mean) / spread if y else 0.0 for x, y in zip(sums, scored)]


@pytest.mark.parametrize(
    "weights", [(1.0, -0.5, 0.0), (0.0, 2.0, 1.0), (1.0, 1.0, 1.0), (1.0, 0.0, 0.0)]
)
def test_gdpo_by_loops(weights):
    """Missing scores, penalties, and a group that the last two sources do not score, where they are
    0.
    """
    a = [1, 0, 0, 1, 1, NAN, 0, 0, 0, 1, 0, 1]
    b = [0.5, 0.1, 0.1, 9, 2, 3, 4, NAN, 0, 0, 0, 0]
    sources = [a, b, [0.25] * 7 + [0.5] + [0] * 4]
    lengths = [1, 5, 9, 10, 8, 2, 9, 3, 10, 7, 9, 10]
    args = grpo.Args(
        reward=("a", "b", "c"), reward_weights=weights, group_size=4, max_response_length=10
    )
    args.advantage_scale = "gdpo"
    args.overlong_buffer = 4
    args.penalty_reward_value = -1.0
    samples = [
        Sample(
            {"sources": ["a"] if i > 7 else None},
            [1] * n,
            {},
            n < 10,
            scores=dict(zip(args.reward, scores)),
        )
        for i, (n, *scores) in enumerate(zip(lengths, *sources))
    ]
    batch = Batch.from_samples(samples, torch.get_default_device())
    sums = weighted_sum(batch.reward_components, args)
    batch.scores = grpo.final_scores(sums, batch.response_lengths, batch.stopped, args)
    final = lambda x, n: (x if n < 10 else -1.0) - max(0, n - 6) / 4
    penalized = [[final(*pair) for pair in zip(scores, lengths)] for scores in sources]
    penalized[1:] = [scores[:8] + [0.0] * 4 for scores in penalized[1:]]
    advantages = group_advantages(grpo.outcomes_of(batch, args), 4, "gdpo")
    close(advantages, gdpo_by_hand(penalized, weights, 4))
    if weights == (1.0, 0.0, 0.0):  # one reward: GRPO's advantages, at another scale
        plain = group_advantages(batch.scores, 4, "group")
        close(advantages, plain / (plain[batch.scores.isfinite()].std() + 1e-6))


# ---- KL and entropy ------------------------------------------------------------------------------


def test_k3_is_clamped_where_it_would_overflow_and_no_earlier():
    """Other numbers, and the other estimators, are in tests/agreement."""
    d = double(0.0, 30.0, 400.0, -5.0, -12.0, -30.0, -1e9).requires_grad_()
    kl = kl_estimate(d, torch.zeros_like(d), "k3")
    close(kl.detach(), [math.exp(-x) + x - 1 for x in (0, 30, 400, -5, -12, -20, -20)])
    (gradient,) = torch.autograd.grad(kl.sum(), d)
    # 1 - exp(-d): it grows with how far the policy has run away
    close(gradient, [0.0, 1.0, 1.0, 1 - math.exp(5), 1 - math.exp(12), 0.0, 0.0], 1e-11)
    # exp(200) is inf in float32
    assert kl_estimate(torch.tensor([-200.0]), torch.zeros(1), "k3").isfinite()


def test_expectations_and_gradients_of_the_kl_estimators():
    """Times the ratio all have the gradient of the reverse KL, also from samples of another policy,
    or weighted by rho.

    All tokens are enumerated.
    """
    torch.manual_seed(1)
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    other = torch.randn(5, dtype=torch.float64)
    p = logits.log_softmax(-1)
    q = other.log_softmax(-1)
    exact = lambda a, b: (a.exp() * (a - b)).sum()

    def gradient(x):
        return torch.autograd.grad(x, logits, retain_graph=True)[0]

    moved, sampler = torch.randn(2, 5, dtype=torch.float64).log_softmax(-1)
    policies = [(p.detach(), p.detach()), (moved, moved), (moved, sampler)]
    for estimator, (old, sampled) in itertools.product(("k1", "k2", "k3"), policies):
        weights = sampled.exp() * (old - sampled).exp()
        mean = (weights * grpo.kl_ratio(p, old, estimator) * kl_estimate(p, q, estimator)).sum()
        close(gradient(mean), gradient(exact(p, q)))
        assert estimator == "k2" or mean.item() == pytest.approx(exact(p, q).item(), rel=1e-12)


@pytest.mark.parametrize(
    "async_steps, correction, updates, expected",
    [
        (0, "none", 1, "current"),
        (0, "truncate", 2, "start"),
        (2, "none", 1, "rollout"),
        (2, "none", 2, "rollout"),
        (2, "truncate", 1, "current"),
        (2, "truncate", 2, "start"),
    ],
)
def test_to_which_policy_the_ratio_is(async_steps, correction, updates, expected):
    assert grpo.old_policy(grpo.Args(async_steps=async_steps), correction, updates) == expected


def test_a_kl_that_is_not_finite_leaves_its_coefficient():
    """Of others tests/agreement has it."""
    adaptive_kl = utils.AdaptiveKL(grpo.Args(kl_coef=0.5, kl_target=0.1), {})
    for kl in (NAN, INF):
        adaptive_kl.update(kl, 100)
    assert adaptive_kl.coef == 0.5


def test_adaptive_entropy():
    """A bonus below the target or at it, none after a step above; it goes on from the run's state."""
    state = {}
    args = grpo.Args(entropy_coef=0.007, entropy_target=0.2)
    controller = utils.AdaptiveEntropy(args, state)
    coefs = [controller.coef]
    for entropy in (0.1, 0.2, NAN, 0.3, 0.25, 0.3, 0.19):
        controller.update(entropy)
        coefs.append(utils.AdaptiveEntropy(args, state).coef)
    assert coefs == pytest.approx([0.007, 0.012, 0.007, 0.007, 0, 0, 0, 0.005])
    assert utils.AdaptiveEntropy(grpo.Args(entropy_coef=0.007), state).coef == 0.007


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_entropy_with_masked_tokens(dtype, tolerance):
    """Logits of -inf: as torch.distributions has it, also with a loss that fp16 scales; NaN stays
    NaN.
    """
    torch.manual_seed(3)
    logits = (torch.randn(3, 6, dtype=torch.float64) * 3).to(dtype)
    logits[0, 2] = -INF
    logits[1, :5] = -INF
    logits.requires_grad_()
    entropy = entropy_from_logprobs(logits.log_softmax(-1))
    expected = torch.distributions.Categorical(logits=logits, validate_args=False).entropy()
    close(entropy.detach(), expected.detach(), tolerance)
    gradients = [torch.autograd.grad(x.sum(), logits)[0] for x in (entropy, expected)]
    close(*gradients, tolerance)
    scaled = entropy_from_logprobs(logits.log_softmax(-1)) * 2.0**16
    close(torch.autograd.grad(scaled.sum(), logits)[0], gradients[1] * 2.0**16, tolerance * 2.0**16)
    bad = double([NAN, 0.0], [INF, 0.0], [-INF, -INF])
    assert entropy_from_logprobs(bad.log_softmax(-1)).isnan().all()


# ---- policy losses -------------------------------------------------------------------------------


def token_loss_by_hand(kind, logprob, log_ratio, A, low, high, dual_clip):
    """(loss, its derivative by this token's log-probability, clipped) of one token."""
    ratio = math.exp(min(max(log_ratio, -20.0), 20.0))
    slope = ratio if -20 <= log_ratio <= 20 else 0.0
    clipped_ratio = min(max(ratio, 1 - low), 1 + high)
    if kind == "reinforce":
        return -A * logprob, -A, False
    if kind == "cispo":  # the weight has no gradient, and clipped tokens go on learning
        return -clipped_ratio * A * logprob, -clipped_ratio * A, clipped_ratio != ratio
    if kind == "sapo":
        tau = 1.0 if A > 0 else 1.05
        gate = 1 / (1 + math.exp(-tau * (ratio - 1))) if tau * (ratio - 1) > -700 else 0.0
        return -4 / tau * gate * A, -4 * gate * (1 - gate) * A * slope, False
    loss = -A * ratio
    derivative = -A * slope
    clipped = False
    if -A * clipped_ratio > loss:
        loss = -A * clipped_ratio
        derivative = 0.0
        clipped = True
    if dual_clip and A < 0 and loss > -A * dual_clip:
        loss = -A * dual_clip
        derivative = 0.0
        clipped = True
    return loss, derivative, clipped


LOG_RATIOS = "0 1e-4 -1e-4 5e-4 .1 -.1 .21 -.21 .26 -.26 1.05 1.2 -1.2 3 19.9 -19.9 25 -25 800 -800"
LOG_RATIOS = list(map(float, LOG_RATIOS.split()))
ADVANTAGES = [-2.0, -0.5, 0.0, 0.7, 3.0]
SETTINGS = [
    ("ppo", 0.2, 0.2, 0.0),
    ("ppo", 0.2, 0.28, 0.0),
    ("ppo", 0.3, 0.28, 3.0),
    ("ppo", 0.2, 9.0, 1.25),
    ("cispo", 1.0, 4.0, 0.0),
    ("cispo", 0.2, 0.28, 0.0),
    ("sapo", 0.0, 0.0, 0.0),
    ("reinforce", 0.0, 0.0, 0.0),
]


@pytest.mark.parametrize("kind, low, high, dual_clip", SETTINGS)
def test_token_losses_by_loops(kind, low, high, dual_clip):
    """Values, gradients and flags; beyond an exponent of 20 there is no gradient. "ppo" is
    rloo.py's and ppo.py's.
    """
    old = [[-0.5 - 0.2 * t for t in range(len(LOG_RATIOS))] for _ in ADVANTAGES]
    logprobs = double(*[[o + d for o, d in zip(row, LOG_RATIOS)] for row in old]).requires_grad_()
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    A = double(*ADVANTAGES)[:, None]
    expected = [
        [token_loss_by_hand(kind, lp, lp - o, a, low, high, dual_clip) for lp, o in zip(*rows)]
        for *rows, a in zip(logprobs.tolist(), old, ADVANTAGES)
    ]
    results = [policy_loss(logprobs, double(*old), A, mask, kind, low, high, dual_clip)]
    if kind == "ppo":
        log_ratio = logprobs - double(*old)
        results += [
            script.clipped_loss(log_ratio, A.expand_as(mask), low, high, dual_clip)
            for script in (rloo, ppo)
        ]
    for losses, clipped in results:
        (gradient,) = torch.autograd.grad(losses.sum(), logprobs, retain_graph=True)
        close(losses.detach(), [[loss for loss, _, _ in row] for row in expected], 1e-11)
        close(gradient, [[slope for _, slope, _ in row] for row in expected], 1e-11)
        assert clipped.tolist() == [[flag for _, _, flag in row] for row in expected]
        assert clipped.any() == (kind in ("ppo", "cispo"))


@pytest.mark.parametrize("kind, low, high", [("dppo", 0.15, 0.2), ("dppo_kl", 0.04, 0.05)])
def test_dppo_by_loops(kind, low, high):
    """A rare token may get 30 times as likely; a frequent one may not get twice as likely."""
    probabilities = [1e-7, 3e-6, 0.01, 0.2, 0.34, 0.41, 0.6, 0.999]
    cases = list(itertools.product(probabilities, probabilities, ADVANTAGES))
    expected = []
    for q, p, A in cases:
        kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        change = abs(p - q) if kind == "dppo" else kl
        left_out = change > high and p > q if A > 0 else change > low and p < q
        weight = 0.0 if left_out else min(p / q, 20.0)
        expected.append((-weight * A * math.log(p), -weight * A, left_out))
    q, p, A = double(*cases).T
    logprobs = p.log().requires_grad_()
    losses, left_out = policy_loss(logprobs, q.log(), A, A > 0, kind, low, high)
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    loss, slope, flags = zip(*expected)
    close(losses.detach(), loss)
    close(gradient, slope)
    assert left_out.tolist() == list(flags)
    certain = torch.tensor([-1e-9])  # whose probability is 1 in float32
    _, left_out = policy_loss(certain, torch.tensor([-1e-3]), A[-1:], A > 0, kind, low, high)
    assert not left_out


def test_gspo_ratio_is_one_number_a_sequence():
    """In float32 too: its clip range is 3e-4, and (s + logp) - logp would round s differently for
    each token.

    With junk outside of the mask. Values and gradients in float64 are in tests/agreement.
    """
    torch.manual_seed(0)
    mask = mask_of([5, 2, 50, 1, 4], 50)
    # inside of the clip range, and on either side
    shift = torch.tensor([[1e-4], [2e-3], [-2e-3], [3e-3], [-3e-3]])
    old = -torch.rand(5, 50) * 12
    logprobs = (old + shift + 1e-4 * torch.randn(5, 50)).masked_fill(~mask, 5.0)
    A = torch.tensor([[1.0], [2.0], [-1.5], [-2.0], [0.5]])
    losses, clipped = policy_loss(logprobs, old, A, mask, "gspo", 3e-4, 4e-4)
    assert all(len(row[m].unique()) == 1 for row, m in zip(losses, mask))
    # The second has A > 0 above the range, the third A < 0 below it; the others are inside or on
    # the harmless side.
    assert [row[m].unique().tolist() for row, m in zip(clipped, mask)] == [
        [x in (1, 2)] for x in range(5)
    ]


# ---- scores --------------------------------------------------------------------------------------


def test_weighted_sum():
    components = {
        "a": torch.tensor([1, 0, NAN, 2]),
        "b": torch.full((4,), 0.5),
        "c": torch.tensor([NAN, 1, 1, 1]),
    }
    total = lambda **options: weighted_sum(
        components, grpo.Args(reward=("a", "b", "c"), **options)
    ).tolist()
    close(total(), [NAN, 1.5, NAN, 3.5])
    close(total(reward_weights=(2.0, -1.0, 0.0)), [1.5, -0.5, NAN, 3.5])  # c is only measured


FINAL = helpers.table("final_scores.yaml")


@pytest.mark.parametrize("script", [grpo, rloo, ppo])
def test_final_scores(script):
    """Normalised by all scores so far, clipped, replaced without a stop, less the overlong penalty,
    left out.
    """
    scores = double(1.5, 0.5, NAN, NAN, 2.5, -2.0)
    lengths = torch.tensor([8, 7, 8, 10, 10, 10])
    stopped = torch.tensor([True, True, True, False, False, False])
    # count, mean, squared deviations: standard deviation 1.5
    so_far = [[5, 1.0, 9.0]] if script is ppo else []
    for options, expected in FINAL["all scripts"] + FINAL["ppo"] * (script is ppo):
        args = script.Args(**{"max_response_length": 10, "non_stop_penalty": False, **options})
        close(script.final_scores(scores, lengths, stopped, *so_far, args), expected, 1e-8)


@pytest.mark.parametrize("script", [grpo, rloo])
def test_length_penalties_by_loops(script):
    scores = [1.0, 0.0, 1.0, 0.5, NAN, 1.0, -1.0, -3.0, 0.0, NAN, NAN, NAN]
    lengths = [4, 8, 2, 5, 90, 3, 7, 7, 1, 2, 3, 4]
    expected = []
    for start in range(0, 12, 3):
        group = [(s, n) for s, n in zip(scores, lengths)][start : start + 3]
        scored = [(s, n) for s, n in group if not math.isnan(s)] or [(0.0, 1)]
        mean = max(0.0, statistics.fmean(s for s, _ in scored))
        most = max(n for _, n in scored)
        expected += [NAN if math.isnan(s) else 0.25 * mean * n / most for s, n in group]
    close(script.length_penalties(double(*scores), torch.tensor(lengths), 3, 0.25), expected)


# ---- schedule, cuts, order of the prompts --------------------------------------------------------


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


def test_a_step_ends_with_its_last_place_in_the_schedule():
    """Of two updates a step; where responses are left out, there are fewer, or none."""
    layer = torch.nn.Linear(2, 1)
    args = grpo.Args(learning_rate=1.0, lr_schedule="linear", warmup_ratio=0.0)
    optimizer = utils.Optimizer(layer, args, 4, 2)
    rates = []
    for step, updates in ((1, 2), (2, 1), (3, 0), (4, 2)):
        optimizer.begin_step(step, updates)
        for _ in range(updates):
            optimizer.backward(layer.weight.sum())
            optimizer.step()
            rates.append(optimizer.lr)
    assert rates == pytest.approx([1 - place / 7 for place in (0, 1, 3, 6, 7)])


def test_weight_decay_is_for_matrices():
    layer = torch.nn.Linear(3, 2)
    weight, bias = (parameter.detach().clone() for parameter in layer.parameters())
    optimizer = utils.Optimizer(
        layer, grpo.Args(weight_decay=0.5, learning_rate=0.1, warmup_ratio=0.0), 1
    )
    (1e-18 * (layer.weight.sum() + layer.bias.sum())).backward()
    optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), 0.95 * weight)
    assert torch.equal(layer.bias, bias)


@pytest.mark.parametrize("prefix", ["", "critic_"])
def test_a_gradient_that_is_not_finite_is_skipped(prefix):
    """And counted: the next update is as if it had not been. (On one of several ranks:
    test_failing_ranks.py, with fp16: test_shard.py.)
    """
    layer = torch.nn.Linear(3, 2)
    optimizer = utils.Optimizer(layer, ppo.Args(), 9, prefix=prefix)
    weights = [layer.weight.detach().clone()]
    for factor in (1.0, INF, 1.0):
        optimizer.backward((factor * layer.weight).sum())
        optimizer.step()
        weights.append(layer.weight.detach().clone())
    assert [torch.equal(*pair) for pair in itertools.pairwise(weights)] == [False, True, False]
    metrics = optimizer.metrics()
    assert metrics[f"val/{prefix}skipped_updates"] == 1 and weights[-1].isfinite().all()
    assert metrics[f"loss/{prefix}grad_norm"] == pytest.approx(6**0.5)


@quick
@given(
    st.lists(st.integers(2, 40), min_size=1, max_size=30), st.integers(1, 200), st.integers(1, 5)
)
def test_micro_batches(lengths, budget, size):
    cuts = [
        utils.micro_batches(lengths, budget, utils.World(rank, size, CPU)) for rank in range(size)
    ]
    # each row once
    assert sorted(i for cut in cuts for rows in cut for i in rows) == list(range(len(lengths)))
    assert len({len(cut) for cut in cuts}) == 1  # the same number of passes on every rank
    assert any(all(cut) for cut in cuts)  # and none that is empty on all of them
    shares = [sum(len(rows) for rows in cut) for cut in cuts]
    assert max(shares) - min(shares) <= 1
    for rows in (rows for cut in cuts for rows in cut):
        assert len(rows) <= 1 or len(rows) * max(lengths[i] for i in rows) <= budget


@quick
@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=20), st.integers(1, 9000), st.integers(1, 3)
)
def test_micro_batches_have_the_least_padding(lengths, budget, size):
    """Of all cuts of the sorted rows; one more pass counts as PASS_TOKENS, and the slowest rank
    decides.
    """
    longest = sorted(lengths, reverse=True)[::size][:9]
    lengths = sorted(lengths, reverse=True)[: size * len(longest)]
    cuts = [
        utils.micro_batches(lengths, budget, utils.World(rank, size, CPU)) for rank in range(size)
    ]
    padded = lambda parts: sum(len(part) * part[0] + utils.PASS_TOKENS for part in parts)
    cost = padded([[lengths[i] for i in rows] for rows in cuts[0]])
    assert all(padded([[lengths[i] for i in rows] for rows in cut if rows]) <= cost for cut in cuts)
    costs = []
    for places in itertools.product((False, True), repeat=len(longest) - 1):
        parts = [[longest[0]]]
        for cut, length in zip(places, longest[1:]):
            parts.append([length]) if cut else parts[-1].append(length)
        if all(len(part) == 1 or len(part) * part[0] <= budget for part in parts):
            costs.append(padded(parts))
    assert cost == min(costs)


@pytest.mark.parametrize(
    "count, size, epochs",
    [(8, 4, 2), (7, 3, 3), (1, 4, 1), (0, 4, 2), (10, 4, 1), (9, 0, 2), (0, 0, 1)],
)
def test_mini_batches(count, size, epochs):
    """Each item once an epoch, in an order that depends on key and epoch; sizes differ by one at
    most.
    """
    items = [10 * i for i in range(count)]
    updates = utils.mini_batches(items, size, epochs, (1, 2))
    assert updates == utils.mini_batches(items, size, epochs, (1, 2))
    orders = [[i for epoch, part in updates if epoch == e for i in part] for e in range(epochs)]
    assert all(sorted(order) == items for order in orders)
    sizes = [len(part) for _, part in updates]
    assert not sizes or max(sizes) <= (size or count) and max(sizes) - min(sizes) <= 1
    assert len(sizes) == (utils.count_updates(count, size, epochs) if count else 0)
    if count > 6:
        assert len(set(map(str, orders))) == epochs and updates != utils.mini_batches(
            items, size, epochs, (1, 3)
        )


@pytest.mark.parametrize("count", [1, 3, 7, 10, 23])
def test_take_prompts_goes_through_all_in_each_pass(count):
    size = 7
    passes = 5
    prompts = [{"query": [i]} for i in range(size)]
    stream = []
    take = lambda *where: [row["query"][0] for row in take_prompts(prompts, *where)]
    while len(stream) < passes * size:
        stream += take(len(stream), count, 1)
    orders = [tuple(stream[i : i + size]) for i in range(0, passes * size, size)]
    assert (
        all(sorted(order) == list(range(size)) for order in orders) and len(set(orders)) == passes
    )
    assert stream[: passes * size] == [take(i, 1, 1)[0] for i in range(passes * size)]
    assert stream[:size] != take(0, size, 2)


def test_prompts_in_the_order_of_the_file():
    rows = [{"i": i} for i in range(7)]
    taken = take_prompts(rows, 5, 11, 1, shuffle=False)
    assert [row["i"] for row in taken] == [(5 + i) % 7 for i in range(11)]
    parts = [(datasets.Dataset.from_list(rows[:3]), 0.5), (datasets.Dataset.from_list(rows[3:]), 1)]
    mixed = mix(parts, 1, shuffle=False)["i"]
    passes = [i for i in mixed if i < 3], [i for i in mixed if i >= 3]
    assert passes[0] == [0, 1, 2][: len(passes[0])] and passes[1][:4] == [3, 4, 5, 6]


def test_prompts_drawn_by_pass_rates():
    """One after the other by their weights, anew in each step; all once before any comes twice, and
    the same however many are taken at once.
    """
    rows = [{"i": i} for i in range(4)]
    args = types.SimpleNamespace(pass_rates=(0.25, 0.75), seed=1)
    state = {"position": 8, "pass_rates": {1: 0.25, 2: 0.2, 3: 0.8}}
    weights = [1.0, 1.0, 0.1, 0.1]

    def take(step: int, *where) -> list[int]:
        taken = next_prompts(rows, step, state, *where, args)
        assert all(row["i"] == row["place"] for row in taken)
        return [row["i"] for row in taken]

    drawn = [take(step, 0, 2) for step in range(6000)]
    for a, b in itertools.permutations(range(4), 2):
        expected = weights[a] * weights[b] / 2.2 / (2.2 - weights[a])
        assert drawn.count([a, b]) / 6000 == pytest.approx(expected, abs=0.02)
    order = take(7, 0, 10)
    assert sorted(order[:4]) == [0, 1, 2, 3]
    assert order == [*take(7, 0, 3), *take(7, 3, 7)] == (3 * order[:4])[:10]


def test_generator_depends_on_its_key_alone():
    draw = lambda *key: utils.generator(*key).random(4).tolist()
    first = draw("rollout", 1, 2)
    torch.rand(10)
    assert draw("rollout", 1, 2) == first
    keys = [("rollout", 1, 2), ("rollout", 2, 1), ("rollout", 1, 12), ("rollout", 11, 2)]
    assert len({tuple(draw(*key)) for key in keys}) == 4
