"""rloo.py: its loss, its advantages and its flags against loops over plain Python numbers, and whole runs of it."""

import itertools
import math
import random
import statistics

import helpers
import pytest
import torch
from helpers import folder_of, metrics_of, read_lines, run, run_here, run_ranks, same_weights, weights_of
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

import rloo
from rloo import clipped_loss, leave_one_out, minus_mean, reward_to_go, token_advantages, whiten

NAN, INF = math.nan, math.inf
KINDS = ["rloo", "reinforce++", "reinforce++-baseline", "remax", "opo"]
COMPARING = ["rloo", "reinforce++-baseline", "opo"]  # these compare the responses to a prompt with each other


def double(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def close(got, expected, tolerance=1e-12):
    got, expected = (torch.as_tensor(x, dtype=torch.float64) for x in (got, expected))
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def mask_of(lengths: list[int], width: int) -> torch.Tensor:
    return torch.arange(width) < torch.tensor(lengths)[:, None]


# ---- the loss ---------------------------------------------------------------------------------------------------


def loss_by_hand(log_ratio: float, A: float, low: float, high: float, dual_clip: float) -> tuple[float, bool]:
    """(loss, clipped) of one token."""
    ratio = math.exp(min(max(log_ratio, -20.0), 20.0))
    plain, clipped = -A * ratio, -A * min(max(ratio, 1 - low), 1 + high)
    loss, flag = (clipped, True) if clipped > plain else (plain, False)
    return (-A * dual_clip, True) if dual_clip and A < 0 and loss > -A * dual_clip else (loss, flag)


LOG_RATIOS = [0.0, 1e-4, 0.1, -0.1, 0.21, -0.21, 0.26, -0.26, 1.05, 1.2, -1.2, 3.0, 19.9, -19.9, 25.0, -25.0, 800.0]


@pytest.mark.parametrize("low, high, dual_clip", [(0.2, 0.2, 0.0), (0.2, 0.28, 0.0), (0.3, 0.28, 3.0), (0.2, 9, 1.25)])
def test_clipped_loss_by_loops(low, high, dual_clip):
    """Values, flags, and the gradient against finite differences; beyond an exponent of 20 there is none."""
    x = double(*[LOG_RATIOS] * 5).requires_grad_()
    A = [-2.0, -0.5, 0.0, 0.7, 3.0]
    losses, clipped = clipped_loss(x, double(*A)[:, None].expand_as(x), low, high, dual_clip)
    (gradient,) = torch.autograd.grad(losses.sum(), x)
    by_hand = lambda shift: [[loss_by_hand(r + shift, a, low, high, dual_clip) for r in LOG_RATIOS] for a in A]
    value = lambda shift: double(*[[loss for loss, _ in row] for row in by_hand(shift)])
    close(losses, value(0.0))
    assert clipped.tolist() == [[flag for _, flag in row] for row in by_hand(0.0)]
    close(gradient, (value(1e-6) - value(-1e-6)) / 2e-6, 1e-6)
    assert gradient[clipped].eq(0).all() and gradient[x.abs() > 20].eq(0).all()


# ---- what advantages are made of ---------------------------------------------------------------------------------


def whiten_by_hand(values: list[float]) -> list[float]:
    mean = math.fsum(values) / len(values)
    variance = math.fsum((v - mean) ** 2 for v in values) / max(1, len(values) - 1)
    return [(v - mean) / math.sqrt(variance + 1e-8) for v in values]


@pytest.mark.parametrize("scale", [1e-5, 1e-4, 1.0, 1e3])  # the small ones tell where the 1e-8 stands
@pytest.mark.parametrize("junk", [NAN, INF, 1e30])
def test_whiten_by_loops(scale, junk):
    torch.manual_seed(0)
    mask = torch.rand(4, 6) < 0.6
    x = ((torch.randn(4, 6, dtype=torch.float64) + 3) * scale).masked_fill(~mask, junk)
    got = whiten(x, mask)
    close(got[mask], whiten_by_hand(x[mask].tolist()))
    assert got[~mask].eq(0).all()
    order = torch.tensor([2, 0, 3, 1])
    close(whiten(x[order], mask[order]), got[order])  # one batch, however its rows are ordered
    close(whiten(x.view(8, 3), mask.view(8, 3)), got.view(8, 3))  # or cut
    assert not torch.allclose(torch.cat([whiten(a, b) for a, b in zip(x.split(2), mask.split(2))]), got)


def test_whiten_of_next_to_nothing():
    alone = torch.tensor([[False, True, False]])
    for mask, x in ((alone, [NAN, 7.0, INF]), (~alone, [3.0, NAN, 3.0]), (alone & ~alone, [NAN, INF, 1.0])):
        assert whiten(double(x), mask).eq(0).all()  # a single entry, all equal, none
    close(whiten(double([1.0, NAN, 3.0]), ~alone), [[-1 / math.sqrt(2), 0, 1 / math.sqrt(2)]], 1e-8)  # ddof 1


def to_go_by_hand(rewards: list[float], gamma: float) -> list[float]:
    return [math.fsum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))]


@pytest.mark.parametrize("junk", [NAN, INF, 1e30])
@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_reward_to_go_by_loops(gamma, junk):
    """Rows that end anywhere; what is masked before a row's end is stepped over."""
    torch.manual_seed(0)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [1, 1, 1, 0, 0], [0, 1, 0, 1, 1]]).bool()
    rewards = torch.randn(4, 5, dtype=torch.float64).masked_fill(~mask, junk)
    got = reward_to_go(rewards, mask, gamma)
    for row, x, m in zip(got, rewards, mask):
        close(row[m], to_go_by_hand(x[m].tolist(), gamma))
    assert got[~mask].eq(0).all()


GROUPS = [[1.0, 0.0, 0.25], [0.5, -2.0, 7.25], [1.0, NAN, 0.0], [INF, 1.0, 5.0], [-INF, 0.1, 0.1]]
WEIGHTS = [[1, 2, 3], [5, 1, 1], [4, 9, 2], [7, 1, 3], [6, 2, 3]]


def test_baselines_by_loops():
    scores, weights = double(*GROUPS), torch.tensor(WEIGHTS)
    for *rows, alone, mean in zip(GROUPS, WEIGHTS, leave_one_out(scores), minus_mean(scores, weights)):
        kept = [(s, w, i) for i, (s, w) in enumerate(zip(*rows)) if math.isfinite(s)]
        for s, _, i in kept:
            close(alone[i], s - statistics.fmean(other for other, _, j in kept if j != i))
            close(mean[i], s - math.fsum(other * w for other, w, _ in kept) / sum(w for _, w, _ in kept))
    close(leave_one_out(scores[:2]), 3 / 2 * (scores - scores.mean(1, keepdim=True))[:2])


def test_leave_one_out_of_a_lone_score():
    assert leave_one_out(double([3.0, NAN, NAN]))[0, 0] == 0


# ---- advantages -------------------------------------------------------------------------------------------------


def advantages_by_hand(kind, scores, greedy, kl, lengths, size, beta, gamma) -> list[list[float]]:
    """Of each response, a list of its tokens' advantages."""
    kl = kl or [[0.0] * n for n in lengths]
    totals = [score - beta * math.fsum(row[:n]) for score, row, n in zip(scores, kl, lengths)]
    there, rows = [math.isfinite(total) for total in totals], []
    for i, (total, n) in enumerate(zip(totals, lengths)):
        group = [j for j in range(i - i % size, i - i % size + size) if there[j]]
        if kind == "remax":
            A = total - greedy[i] if math.isfinite(greedy[i]) else 0.0
        elif len({totals[j] for j in group}) < 2:
            A = 0.0
        elif kind == "rloo":
            A = total - statistics.fmean(totals[j] for j in group if j != i) if there[i] else 0.0
        else:
            weights = [lengths[j] if kind == "opo" else 1 for j in group]
            A = total - math.fsum(w * totals[j] for w, j in zip(weights, group)) / sum(weights)
        rows.append([A if there[i] else 0.0] * n)
        if kind == "reinforce++" and there[i]:
            rows[i] = to_go_by_hand([(t == n - 1) * scores[i] - beta * kl[i][t] for t in range(n)], gamma)
    if kind.startswith("reinforce++"):
        flat = iter(whiten_by_hand([a for row, present in zip(rows, there) if present for a in row]))
        rows = [[next(flat) for _ in row] if present else row for row, present in zip(rows, there)]
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
@pytest.mark.parametrize("beta, gamma", [(None, 1.0), (None, 0.9), (0.3, 1.0), (0.3, 0.9)])
@pytest.mark.parametrize("kind, size", SIZES)
def test_advantages_by_loops(kind, size, beta, gamma, scores):
    """With and without KL, which is junk under the mask, as some scores are, too."""
    rng, lengths = random.Random(0), [3, 1, 6, 2, 5, 4]
    mask = mask_of(lengths, 7)
    kl = None if beta is None else [[rng.gauss(0, 1) if m else rng.choice([NAN, INF]) for m in row] for row in mask]
    for greedy in ([0.5, 0.5, 0.5, 1.0, 1.0, 1.0], [-1.0, 2.0, NAN, 7.0, 0.0, INF]):
        rest = (size, beta or 0.0, gamma)
        got = token_advantages(kind, double(*scores), double(*greedy), kl and double(*kl), mask, *rest)
        expected = advantages_by_hand(kind, scores, greedy, kl, lengths, *rest)
        close(got, [row + [0.0] * (7 - len(row)) for row in expected], 1e-11)
        assert got[~mask].eq(0).all() and got[~double(*scores).isfinite()].eq(0).all() and got.ne(0).any()


@pytest.mark.parametrize("kind", COMPARING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_scores_have_advantage_exactly_zero(kind, dtype):
    """In a group beside another; the mean of equal floats is often another number."""
    for size, value in itertools.product((2, 3, 7), (0.1, 0.3, 0.7, 1 / 3, 123.456)):
        scores, mask = torch.full((2 * size,), value, dtype=dtype), mask_of(list(range(2 * size, 0, -1)), 2 * size)
        assert token_advantages(kind, scores, None, None, mask, size, 0.0, 1.0).eq(0).all()
        scores[:size] = torch.linspace(0, 1, size, dtype=dtype)
        first, equal = token_advantages(kind, scores, None, None, mask, size, 0.0, 1.0).split(size)
        assert first.ne(0).any() and len(equal[mask[size:]].unique()) == 1
        assert kind == "reinforce++-baseline" or equal.eq(0).all()


numbers = st.floats(-9, 9) | st.sampled_from([0.0, 1.0, NAN])
responses = st.lists(st.tuples(numbers, st.integers(1, 5)), min_size=9, max_size=9)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(responses, st.permutations(range(3)), st.permutations(range(3)), st.tuples(*[st.floats(-5, 5)] * 3))
def test_properties_of_advantages(rows, groups, within, shifts):
    """The order of the groups and in the groups does not matter, nor does what all scores of a group have in common."""
    scores, lengths = double(*[score for score, _ in rows]), [n for _, n in rows]
    mask, shift = mask_of(lengths, 5), double(*shifts).repeat_interleave(3)
    order = [3 * g + i for g in groups for i in within]
    for kind in KINDS:
        got = token_advantages(kind, scores, shift, None, mask, 3, 0.0, 1.0)
        moved = token_advantages(kind, scores[order], shift[order], None, mask[order], 3, 0.0, 1.0)
        close(moved, got[order], 1e-9)
        if kind != "reinforce++":
            close(token_advantages(kind, scores + shift, 2 * shift, None, mask, 3, 0.0, 1.0), got, 1e-9)


# ---- whole runs -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("rloo")
    values = helpers.workspace(folder)
    (folder / "gaps.py").write_text(helpers.REWARD.replace("% 7 / 7", "% 7 % 5 / 7 or None"))
    model = AutoModelForCausalLM.from_pretrained(values["model"])
    model.lm_head.weight.data[model.config.eos_token_id] *= 4  # responses of many lengths
    model.save_pretrained(values["model"])
    values["ref_model"] = helpers.tiny_model(folder / "other", initializer_range=0.1)
    return {**values, "kl_coef": 0.01, "total_episodes": 16}


def variant(base: dict, tmp_path, **changes) -> dict:
    return {**base, "output_dir": str(tmp_path), "run_name": "run", **changes}


def record(monkeypatch, name: str) -> list:
    """The arguments and results of all calls of a function of rloo.py, which still does what it does."""
    calls, original = [], getattr(rloo, name)
    monkeypatch.setattr(rloo, name, lambda *args: calls.append((args, original(*args))) or calls[-1][1])
    return calls


@pytest.mark.parametrize("kl_in", ["reward", "loss"])
@pytest.mark.parametrize("kind, size", [(kind, 4) for kind in KINDS] + [("reinforce++", 1), ("remax", 1)])
def test_what_a_run_trains_on(base, tmp_path, monkeypatch, kind, kl_in, size):
    """The advantages of each step are those of its own scores, some of them missing, greedy scores, KL and beta."""
    gaps = base["reward"].replace("reward.py", "gaps.py")
    values = variant(base, tmp_path, advantage=kind, kl_in=kl_in, reward=gaps, group_size=size, gamma=0.9)
    values.update(rollout_batch_size=8 // size, precision="float64", kl_estimator="k2", kl_controller="adaptive")
    steps, losses = record(monkeypatch, "token_advantages"), record(monkeypatch, "clipped_loss")
    run_here(values, "rloo")
    rows, samples = metrics_of(values), read_lines(folder_of(values) / "samples.jsonl")
    assert helpers.finite_or_null(rows) and helpers.all_finite(folder_of(values) / "final") and len(steps) == 2
    assert any(row["val/missing_scores"] for row in rows[1:])
    trained = {tuple(row) for (_, A, *_), _ in losses for row in A.tolist()}
    for step, ((how, scores, greedy, kl, mask, group, beta, gamma), got) in enumerate(steps, 1):
        row, own = rows[step], samples[8 * step - 8 : 8 * step]
        assert (how, group, beta, gamma) == (kind, size, row["objective/kl_coef"], 0.9)
        assert [sample[gaps] for sample in own] == [None if math.isnan(s) else s for s in scores.tolist()]
        assert row["val/missing_scores"] == scores.isnan().sum()
        assert (kl is None) == (kl_in == "loss") == (row["objective/loss"] != row["loss/policy_avg"])
        present = scores.isfinite() if greedy is None else scores.isfinite() & greedy.isfinite()
        if kl is not None:
            assert kl[mask].gt(0).any() and row["objective/kl"] == pytest.approx(
                kl[present][mask[present]].sum().item() / present.sum().item(), rel=1e-9
            )
        lists = [None if x is None else x.tolist() for x in (scores, greedy, kl, mask.sum(1))]
        expected = advantages_by_hand(kind, *lists, size, beta, gamma)
        close(got, [each + [0.0] * (mask.shape[1] - len(each)) for each in expected], 1e-5)  # scores are float32
        close([sample["advantage"] for sample in own], [statistics.fmean(each) for each in expected], 1e-5)
        assert {tuple(each) for each in got[present].to(torch.float64).tolist()} <= trained
    for (log_ratio, A, *_), _ in losses:
        for x, a in zip(log_ratio, A):  # each response has its own advantages, which end where it does
            assert x.abs().max() < 1e-9 or a.eq(0).all() or torch.equal(x != 0, a != 0)


def test_remax_compares_with_the_greedy_response(base, tmp_path, monkeypatch):
    """By transformers' own greedy generation, of one prompt at a time; a greedy response can lack a stop, too."""
    calls = record(monkeypatch, "token_advantages")
    values = variant(base, tmp_path, advantage="remax", rollout_batch_size=12, group_size=2, mini_batch_size=24)
    values.update(non_stop_penalty=True, penalty_reward_value=-1.0, total_episodes=24, log_samples=24)
    values.update(max_response_length=4, num_epochs=1)
    run_here(values, "rloo")
    (((_, _, greedy_scores, _, mask, *_), got),) = calls
    model, tokenizer = (kind.from_pretrained(base["model"]) for kind in (AutoModelForCausalLM, AutoTokenizer))
    expected = []
    for row in read_lines(folder_of(values) / "samples.jsonl"):
        ids = tokenizer(row["prompt"], return_tensors="pt").input_ids
        output = model.generate(ids, do_sample=False, max_new_tokens=4)[0, ids.shape[1] :]
        text = row["prompt"] + tokenizer.decode(output, skip_special_tokens=True)
        expected.append(sum(map(ord, text)) % 7 / 7 if output[-1] == tokenizer.eos_token_id else -1.0)
    close(greedy_scores, expected, 1e-6)
    assert len(set(expected)) > 2 and -1.0 in expected
    # With one update a rollout the ratio is 1, and the loss the mean of -A over the tokens.
    assert metrics_of(values)[1]["loss/policy_avg"] == pytest.approx(-(got.sum() / mask.sum()).item(), rel=1e-5)


def test_the_ratio_of_a_sequence(base, tmp_path, monkeypatch):
    """After an update that is the same for both ratios, that of a sequence is the product of those of its tokens."""
    calls = record(monkeypatch, "clipped_loss")
    exact = dict(precision="float64", micro_batch_tokens=1000, num_epochs=1, total_episodes=8, kl_coef=0)
    exact.update(clip_high=0.3, dual_clip=1.5)
    for ratio, how in (("token", dict(loss_aggregation="sequence_sum")), ("sequence", {})):
        run_here(variant(base, tmp_path, **exact, run_name=ratio, ratio=ratio, **how), "rloo")
    (_, tokens, _, sequences) = [args for args, _ in calls]
    assert all(args[2:] == (0.2, 0.3, 1.5) for args, _ in calls)
    close(sequences[0], [[math.fsum(row)] * len(row) for row in tokens[0].tolist()], 1e-7)
    close(calls[0][0][0], calls[2][0][0], 1e-9)  # before the first update both are 0
    assert tokens[0].abs().max() > 0.01 and calls[0][0][0].abs().max() < 1e-9
    close(sequences[1], tokens[1])


@pytest.mark.parametrize("kind, ratio", [("reinforce++", "token"), ("remax", "sequence")])
def test_ranks_and_micro_batches_change_nothing(base, tmp_path, kind, ratio):
    exact = dict(precision="float64", total_episodes=24, save_every=3, advantage=kind, ratio=ratio, gamma=0.95)
    one = variant(base, tmp_path, run_name="one", **exact, micro_batch_tokens=1)
    cut = variant(base, tmp_path, run_name="cut", **exact, micro_batch_tokens=10_000, generation_batch_size=3)
    cut["loss_aggregation"] = ratio  # which is the default
    two = variant(base, tmp_path, run_name="two", **exact)
    started = [helpers.start(values, script="rloo") for values in (one, cut)]
    run_ranks(two, 2, (0, 0), script="rloo")
    assert [each.wait().code for each in started] == [0, 0]
    expected = weights_of(folder_of(one) / "checkpoints/step_3")
    for values in (cut, two):
        for ours, theirs in zip(metrics_of(values), metrics_of(one), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-11)
        for name, weights in weights_of(folder_of(values) / "checkpoints/step_3").items():
            torch.testing.assert_close(weights, expected[name], rtol=1e-9, atol=1e-11)


def test_resume_of_remax(base, tmp_path):
    """Four steps, against two, SIGTERM in the greedy rollout of the third, and two more: bit for bit."""
    straight = variant(base, tmp_path, run_name="straight", advantage="remax", total_episodes=32)
    straight.update(kl_controller="adaptive", kl_horizon=20, lr_schedule="linear")
    stopped = {**straight, "run_name": "stopped"}
    running = helpers.start(straight, script="rloo")
    # Calls of generate: 2 an evaluation (before step 1, after step 2) and 2 a step, the second of them greedy.
    run(stopped, code=75, script="rloo", place="rloo.generate:10:SIGTERM")
    done = run({**stopped, "resume": True}, script="rloo")
    assert "goes on after step 2" in done.out and running.wait().code == 0
    assert metrics_of(stopped) == metrics_of(straight) and len(metrics_of(straight)) == 5
    ours, theirs = (read_lines(folder_of(each) / "samples.jsonl") for each in (stopped, straight))
    assert ours == theirs and same_weights(folder_of(stopped) / "final", folder_of(straight) / "final")
