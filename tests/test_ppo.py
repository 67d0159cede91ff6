"""ppo.py: its equations, its critic, one whole step against plain loops, and runs in any cut, resumed and refused."""

import contextlib
import math
import statistics
from types import SimpleNamespace

import helpers
import numpy as np
import pytest
import torch
from helpers import folder_of, metrics_of, read_lines, run, run_here, run_ranks, same_weights, scalar_folder, weights_of
from test_policy import EXACT, gradient_of, plain_logprobs, random_batch, relative
from tiny_models import CPU
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GenerationConfig

import plumbing.models.critic
import ppo
import utils
from plumbing.data import mixture as data
from plumbing.models import loading as models
from plumbing.models.critic import Critic, explained_variance, has_stopped_rising, least_squares, warn_of_low
from plumbing.rollout.batch import pad_rows
from ppo import filter_weights, gae, length_adaptive_lambda, resample, token_rewards, whiten

NAN, INF, F64 = math.nan, math.inf, torch.float64


def double(*rows):
    return torch.tensor(rows, dtype=F64)


def close(got, expected, tolerance=1e-12):
    got, expected = (torch.as_tensor(x, dtype=F64) for x in (got, expected))
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


# ---- rewards, advantages, values --------------------------------------------------------------------------------


def gae_by_hand(rewards: list, values: list, gamma: float, lam: float) -> list[float]:
    """The sum of eq. 16 itself, forwards from each token of a row without holes."""
    after = [*values[1:], 0.0]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, after, values)]
    return [sum((gamma * lam) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))]


# rows that end early, at the last position, not at all; one of a token; one with holes at the start and in the middle
MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [0, 1, 0, 0, 1]]).bool()


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.7), (1.0, 1.0), (0.8, 1.0), (0.9, 0.0)])
@pytest.mark.parametrize("junk", [7.0, NAN, INF])
def test_gae_by_loops(gamma, lam, junk):
    """Whatever stands outside of the mask does not leak; a hole hands value and advantage on."""
    torch.manual_seed(0)
    rewards, values = (torch.where(MASK, torch.randn(5, 5, dtype=F64), junk) for _ in range(2))
    advantages, returns = gae(rewards, values, MASK, gamma, lam)
    assert advantages[~MASK].eq(0).all() and returns[~MASK].eq(0).all()
    for r, v, m, A, R in zip(rewards, values, MASK, advantages, returns):
        r, v = r[m].tolist(), v[m].tolist()
        close(A[m], gae_by_hand(r, v, gamma, lam))
        close(R[m], [a + b for a, b in zip(A[m].tolist(), v)])
        if lam == 1:  # reward-to-go minus the value
            close(R[m], [sum(gamma**k * x for k, x in enumerate(r[t:])) for t in range(len(r))])
        if lam == 0:  # what one step shows
            close(A[m], [x + gamma * n - b for x, n, b in zip(r, [*v[1:], 0.0], v)])


@pytest.mark.parametrize("alpha", [0.05, 0.3, 2.0])
def test_length_adaptive_lambda_by_loops(alpha):
    """A lambda for each row, 0 for a short one; GAE takes it for that row alone."""
    torch.manual_seed(0)
    rewards, values = torch.randn(2, 5, 5, dtype=F64)
    lams = length_adaptive_lambda(MASK, alpha)
    advantages, returns = gae(rewards, values, MASK, 0.9, lams)
    for r, v, m, lam, A, R in zip(rewards, values, MASK, lams.tolist(), advantages, returns):
        length = sum(m.tolist())
        assert lam == pytest.approx(max(0.0, 1 - 1 / (alpha * length)) if length else 0.0)
        r, v = r[m].tolist(), v[m].tolist()
        close(A[m], gae_by_hand(r, v, 0.9, lam))
        close(R[m], [a + b for a, b in zip(A[m].tolist(), v)])


def test_token_rewards():
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]]).bool()
    scores, kl = double(5, -2, NAN), double([1, 2, 3], [4, NAN, NAN], [1, 1, INF])
    close(token_rewards(scores, None, mask, 0.5), double([0, 0, 5], [-2, 0, 0], [0, NAN, 0]))
    close(token_rewards(scores, kl, mask, 0.5), double([-0.5, -1, 3.5], [-4, 0, 0], [-0.5, NAN, 0]))


def test_whiten_by_loops():
    """Without shift_mean the mean stays and only the scale changes; what is masked counts for nothing."""
    torch.manual_seed(1)
    x = torch.where(MASK, 3 + 2 * torch.randn(5, 5, dtype=F64), NAN)
    kept = x[MASK].tolist()
    mean, scale = statistics.fmean(kept), math.sqrt(statistics.variance(kept) + 1e-8)
    for shift, back in ((True, 0.0), (False, mean)):
        got = whiten(x, MASK, shift_mean=shift)
        close(got[MASK], [(v - mean) / scale + back for v in kept])
        assert got[~MASK].eq(0).all()


@pytest.mark.parametrize("clip", [0.0, 0.2, 0.5])
def test_value_loss_by_loops(clip):
    """Values, flags, and the gradient against finite differences."""
    cases = [(v, old, r) for v in (-1.0, -0.1, 0.15, 0.4, 2.0) for old in (0.0, 0.3) for r in (-3.0, 0.05, 0.25, 3.0)]
    values, old, returns = double(*zip(*cases))
    values.requires_grad_()

    def by_hand(v, o, r):
        plain = (v - r) ** 2
        clipped = (min(max(v, o - clip), o + clip) - r) ** 2 if clip else plain
        return 0.5 * max(plain, clipped), clipped > plain

    losses, raised = ppo.value_loss(values, old, returns, clip)
    close(losses, [by_hand(*case)[0] for case in cases])
    assert raised.tolist() == [by_hand(*case)[1] for case in cases] and raised.any() == (clip > 0)
    (gradient,) = torch.autograd.grad(losses.sum(), values)
    slope = [(by_hand(v + 1e-6, o, r)[0] - by_hand(v - 1e-6, o, r)[0]) / 2e-6 for v, o, r in cases]
    close(gradient, slope, 1e-6)


def test_explained_variance():
    values, returns, mask = double([1, 2, NAN], [0, 4, 9]), double([2, 2, 5], [1, 7, NAN]), torch.ones(2, 3).bool()
    mask[:, 2] = False
    expected = 1 - statistics.variance([1, 0, 1, 3]) / statistics.variance([2, 2, 1, 7])
    assert explained_variance(values, returns, mask) == pytest.approx(expected)
    assert explained_variance(returns, returns, mask) == 1 and explained_variance(mask + 2.0, returns, mask) == 0
    assert math.isnan(explained_variance(values, mask + 0.0, mask))  # all returns agree


def test_update_statistics_in_pieces_and_at_once():
    """Near 1e6, where sums of squares would lose the variance; what is not finite does not count."""
    scores = [1e6 + x for x in (0.25, 0.5, -1.0, 3.0, 0.125, 2.0, -7.0)]
    pieces = [scores[:1], [NAN, INF], scores[1:4], [], [scores[4], -INF, scores[5]], scores[6:]]
    running = [0.0, 0.0, 0.0]
    for piece in pieces:
        running = utils.update_statistics(running, double(*piece) if piece else torch.zeros(0))
    for got in (running, utils.update_statistics([0.0, 0.0, 0.0], double(*sum(pieces, [])))):
        assert got[0] == 7 and got[1] == pytest.approx(statistics.fmean(scores), rel=1e-15)
        assert got[2] == pytest.approx(6 * statistics.variance(scores), rel=1e-9)


def odds_by_hand(scores: list[float], kind: str, power: float) -> list[float]:
    present = [i for i, s in enumerate(scores) if math.isfinite(s)]
    best = [i for i in present if scores[i] == max(scores[j] for j in present)]
    worst = [i for i in present if scores[i] == min(scores[j] for j in present)]
    odds = [0.0] * len(scores)
    if kind == "pow":
        for i in present:
            odds[i] = abs(scores[i]) ** power
    else:
        for half in (best, worst if kind == "max_min" else [i for i in present if i not in best]):
            for i in half:
                odds[i] += 1 / len(half)
    if sum(odds) == 0:
        odds = [float(i in present or not present) for i in range(len(scores))]
    return [x / sum(odds) for x in odds]


GROUPS = [
    [1.0, 3.0, -2.0, 0.5], [2.0, 2.0, -1.0, 0.0], [0.0, 5.0, -7.0, -7.0], [0.0] * 4, [-1.0] * 4, [NAN, 1.0, 0.0, INF],
    [NAN, 0.0, 0.0, NAN], [NAN] * 4, [NAN, -3.0, NAN, -INF], [NAN, -3.0, -1.0, NAN],
]  # fmt: skip


@pytest.mark.parametrize("kind, power", [("pow", 1.0), ("pow", 2.5), ("max_min", 1.0), ("max_random", 1.0)])
def test_filter_weights_by_loops(kind, power):
    got = filter_weights(double(*GROUPS), kind, power)
    close(got, [odds_by_hand(group, kind, power) for group in GROUPS])
    close(got.sum(1), [1.0] * len(GROUPS))
    assert filter_weights(torch.tensor(GROUPS), kind, power).dtype == F64  # numpy wants sums of 1 within 1e-8


def test_resample():
    """Each row gives as many as it has, its own ones, as often as its weights say, and not the same every step."""
    weights = double([0, 0.25, 0.75, 0], [1, 0, 0, 0], [0.1, 0.2, 0.3, 0.4])
    draws = [resample(weights, utils.generator("filter", 1, step)) for step in range(1500)]
    for row, expected in enumerate(weights.tolist()):
        mine = [i for draw in draws for i in draw[4 * row : 4 * row + 4]]
        assert {i // 4 for i in mine} == {row}
        assert [mine.count(4 * row + i) / 6000 for i in range(4)] == pytest.approx(expected, abs=0.03)
    assert all(len(draw) == 12 for draw in draws) and draws[0] != draws[1]


# ---- the critic -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt2"])
def test_values_are_read_where_each_token_is_predicted(model_folder, tmp_path, family):
    """Token by token from the hidden states of each row alone: no padding matters, and no dropout (gpt2's is 0.2)."""
    folder = scalar_folder(model_folder(family), tmp_path)
    scalar, new = models.load_scalar_model("--value_model", folder, F64, CPU)
    assert not new and torch.equal(scalar.model.score.weight.float(), weights_of(folder)["score.weight"])
    critic, batch, near = Critic(scalar).train(), random_batch(), EXACT.get(family, 1e-6)
    ids, mask = batch.collate(list(range(8)))
    flat = critic(ids, mask)["values"]
    values = pad_rows(flat, batch.response_mask)
    for i, (query, response) in enumerate(zip(batch.queries, batch.responses)):
        hidden = scalar.model.base_model(input_ids=torch.tensor([query + response])).last_hidden_state[0]
        expected = [scalar.model.score(hidden[len(query) + t - 1]).item() for t in range(len(response))]
        close(values[i, : len(response)].detach(), expected, near)
        ids[i, len(query) + len(response) :] = 9  # other padding
    assert torch.equal(critic(ids, mask)["values"], flat) and flat.std() > 0.1
    empty = critic(*batch.collate([]))["values"]  # a rank that has nothing to do
    empty.sum().backward()
    assert empty.shape == (0,) and all(p.grad.eq(0).all() for p in critic.parameters())


@pytest.mark.parametrize("scale, offset, noise", [(17.0, 3.0, 0.0), (-0.2, 0.5, 0.3), (0.0, 1.0, 1.0)])
def test_least_squares_by_numpy(scale, offset, noise):
    """What is masked, NaN included, does not count; a constant x is shifted and not scaled."""
    torch.manual_seed(0)
    x = torch.where(MASK, torch.randn(5, 5, dtype=F64) - 17, NAN)
    y = scale * x + offset + noise * torch.randn(5, 5, dtype=F64)
    close(least_squares(x, y, MASK), np.polyfit(x[MASK].numpy(), y[MASK].numpy(), 1), 1e-9)
    close(least_squares(0 * x + 2, y, MASK), [1.0, y[MASK].mean() - 2])
    assert least_squares(x, y, MASK & False) == (1.0, 0.0)


RISES = {  # explained variances, patience -> whether they have stopped rising
    ((), 2): False, ((0.1,), 1): False, ((0.1, 0.1), 1): True, ((0.1, 0.2), 1): False, ((0.1, 0.1), 0): False,
    ((0.1, 0.2, 0.15), 2): False, ((0.1, 0.2, 0.15, 0.205), 2): True, ((0.3, 0.1, 0.2), 2): True,
}  # fmt: skip


@pytest.mark.parametrize("history, patience", RISES)
def test_has_stopped_rising(history, patience):
    assert has_stopped_rising(list(history), patience) == RISES[history, patience]


def test_a_critic_that_explains_nothing_is_warned_of_once_in_50_steps(capsys):
    """At step 50, not again at 51; after a better step it takes another 50. NaN, for equal returns, is not low."""
    warned = []
    history = [0.0] * 60 + [0.4] + [-0.1] * 55 + [NAN] + [0.01] * 49
    for step in range(len(history) + 1):
        warn_of_low(history[:step])
        warned += [step] if capsys.readouterr().err else []
    assert warned == [50, 111]


# ---- PTX --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget, ranks", [(1, 1), (14, 1), (1000, 1), (1, 2), (1000, 2), (1000, 12)])
def test_ptx_loss_adds_the_gradient_of_the_cross_entropy(load, budget, ranks):
    """At temperature 1 under a policy of 0.6, on top of what is there, in any cut and on more ranks than rows."""
    policy, batch = ppo.Policy(load("gpt_neox", F64), 0.6, 3), random_batch()
    pairs = list(zip(batch.queries, batch.responses))
    losses = [-plain_logprobs(policy.model, q, r, 1.0)[range(len(r)), r].sum() for q, r in pairs]
    expected = sum(losses) / sum(len(r) for _, r in pairs)
    (0.3 * expected).backward()
    gradient, got = gradient_of(policy), 0.0
    policy.model.get_output_embeddings().weight.grad = before = torch.ones(32, 16, dtype=F64)
    rows = [{"query": q, "response": r} for q, r in pairs]
    args = SimpleNamespace(ptx_coef=0.3, micro_batch_tokens=budget)
    optimizer = SimpleNamespace(backward=torch.Tensor.backward)
    for rank in range(ranks):
        world = utils.World(rank, ranks, CPU)
        got += ppo.ptx_loss(policy, rows, args, optimizer, world, contextlib.nullcontext).item()
    before -= 1
    assert relative(gradient_of(policy) / ranks, gradient) < 1e-10 and got == pytest.approx(expected.item(), rel=1e-12)


def supervised(tmp_path, rows, chat=False):
    tokenizer = helpers.make_tokenizer()
    if chat:
        tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}>"
    path = helpers.write_rows(tmp_path / "ptx.jsonl", rows)
    args = ppo.Args(
        model=str(helpers.ROOT / "assets" / "tiny"), ptx_dataset=path, system_prompt="", max_prompt_length=40,
        max_response_length=6, overlong_prompts="error",
    )  # fmt: skip
    return data.load_supervised(args, tokenizer, [tokenizer.eos_token_id, 7]), tokenizer


def test_load_supervised(tmp_path):
    rows = [{"prompt": "1+1=", "answer": "2"}, {"problem": "?", "solution": "yes!!"}]
    made, tokenizer = supervised(tmp_path, rows)
    ids = lambda text: tokenizer.encode(text, add_special_tokens=False)
    assert made[0] == {"query": ids("1+1="), "response": [*ids("2"), tokenizer.eos_token_id]}
    assert made[1] == {"query": ids("?"), "response": [*ids("yes!!"), tokenizer.eos_token_id]}
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    made, _ = supervised(tmp_path, [{"messages": turns}, {"messages": turns[:1], "answer": "ha"}], chat=True)
    assert [tokenizer.decode(row["query"]) for row in made] == ["[user]hi>"] * 2
    assert [tokenizer.decode(row["response"]) for row in made] == ["ho<eos>", "ha<eos>"]


@pytest.mark.parametrize(
    "row, words",
    [
        ({"prompt": "a"}, "no text to imitate"),
        ({"prompt": "a", "answer": " "}, "no text to imitate"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no text to imitate"),
        ({"messages": ["a"]}, ""),
        ({"answer": "b"}, "a prompt is text"),
        ({"prompt": "a", "answer": "b" * 6}, "has 7 tokens, over --max_response_length 6"),
        ({"prompt": "a" * 41, "answer": "b"}, "has 41 tokens, over --max_prompt_length 40"),
    ],
)
def test_a_supervised_row_that_cannot_be_used_is_named(tmp_path, capsys, row, words):
    with pytest.raises(SystemExit) as end:
        supervised(tmp_path, [{"prompt": "a", "answer": "b"}, row])
    line = capsys.readouterr().err
    assert end.value.code == 2 and line.count("\n") == 1
    assert line.startswith(f"error: --ptx_dataset {tmp_path / 'ptx.jsonl'} row 2: ") and words in line


# ---- one whole step ---------------------------------------------------------------------------------------------

SOME = """
def score(prompts, responses, **columns):
    return [None if i % 4 == 1 else sum(map(ord, p + r)) % 7 / 7 for i, (p, r) in enumerate(zip(prompts, responses))]
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict:
    """The small run with a model that is exact in float64, and so many end tokens that responses differ in length."""
    folder = tmp_path_factory.mktemp("ppo")
    values = helpers.workspace(folder)
    (folder / "some.py").write_text(SOME)
    models = {name: helpers.tiny_model(folder / name, "gpt_neox") for name in ("neox", "reference")}
    reference = AutoModelForCausalLM.from_pretrained(models["reference"])
    for parameter in reference.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    reference.save_pretrained(models["reference"])
    GenerationConfig(eos_token_id=list(range(1, 25)), pad_token_id=0).save_pretrained(models["neox"])
    helpers.write_rows(folder / "ptx.jsonl", helpers.ROWS)
    return {**values, "model": models["neox"], "ref_model": models["reference"], "eval_every": 0, "run_name": "run"}


def beside(base: dict, name: str) -> str:
    return str(helpers.Path(base["model"]).parent / name)


@pytest.fixture
def batches(monkeypatch) -> list:
    """The rollouts of a run in this process."""
    seen, rollout = [], ppo.rollout
    monkeypatch.setattr(ppo, "rollout", lambda *args, **options: seen.append(rollout(*args, **options)) or seen[-1])
    return seen


def whitened(rows: list[list[float]], keep_mean: bool) -> list[list[float]]:
    everything = [x for row in rows for x in row]
    mean, scale = statistics.fmean(everything), math.sqrt(statistics.variance(everything) + 1e-8)
    return [[(x - mean) / scale + keep_mean * mean for x in row] for row in rows]


STEPS = {
    "plain": dict(whiten_advantages=False, kl_estimator="k2"),
    "whitened": dict(whiten_rewards=True, gamma=0.9, gae_lambda=0.8, kl_estimator="abs"),
    "KL in the loss": dict(kl_in="loss", kl_estimator="full", loss_aggregation="sequence"),
    "pf_ppo": dict(pf_ppo="max_random", kl_estimator="k1"),
    "decoupled, fitted": dict(
        critic_gae_lambda=1.0, length_adaptive_lambda=0.6, fit_value_model=True, kl_estimator="k2", gamma=0.9
    ),
    "updates": dict(
        mini_batch_size=4, num_epochs=2, learning_rate=1e-12, critic_learning_rate=1e-12, kl_estimator="k1",
        loss_aggregation="step_token",
    ),
}  # fmt: skip


@pytest.mark.parametrize("changes", STEPS.values(), ids=STEPS)
def test_a_step_by_plain_loops(base, batches, tmp_path, changes):
    """Scores missing, penalties, KL, GAE, whitening, PF-PPO and both losses, to the norms of both gradients."""
    values = {
        **base, "output_dir": str(tmp_path), "reward": f"{beside(base, 'some.py')}:score", "precision": "float64",
        "total_episodes": 8, "save_every": 0, "mini_batch_size": 8, "num_epochs": 1, "non_stop_penalty": True,
        "penalty_reward_value": -0.5, "value_model": scalar_folder(base["model"], tmp_path / "critic"),
        "fit_value_model": False, **changes,
    }  # fmt: skip
    run_here(values, "ppo")
    ((row,), (batch,)) = metrics_of(values), batches
    policy, reference = (models.load_model("", base[name], F64, CPU) for name in ("model", "ref_model"))
    critic = models.load_scalar_model("", values["value_model"], F64, CPU)[0].model
    parts, in_loss, how = (
        batch.reward_components[values["reward"]].tolist(),
        "kl_in" in changes,
        changes["kl_estimator"],
    )
    scores = [s if stop else -0.5 for s, stop in zip(parts, batch.stopped.tolist())]
    trained = [i for i, s in enumerate(scores) if not math.isnan(s)]
    lengths = [len(response) for response in batch.responses]
    assert len(trained) < 8 and -0.5 in scores and len(set(lengths)) > 2  # all of it occurs
    logprobs, kls, states = [], [], []
    for query, response in zip(batch.queries, batch.responses):
        p = plain_logprobs(policy, query, response, 1.0)
        q = plain_logprobs(reference, query, response, 1.0).detach()
        hidden = critic.base_model(input_ids=torch.tensor([query + response])).last_hidden_state[0]
        logprobs.append([p[t, token] for t, token in enumerate(response)])
        d = [p[t, token] - q[t, token] for t, token in enumerate(response)]
        full = [(p[t].exp() * (p[t] - q[t])).sum() for t in range(len(p))]
        kls.append({"k1": d, "k2": [x**2 / 2 for x in d], "abs": [x.abs() for x in d], "full": full}[how])
        states.append(hidden[len(query) - 1 : len(query) + len(response) - 1])  # that predict each token
    chosen = list(range(8))
    if "pf_ppo" in changes:
        numbers, odds = (
            utils.generator("filter", 1, 1),
            (odds_by_hand(scores[a : a + 4], "max_random", 1) for a in (0, 4)),
        )
        chosen = [4 * group + i for group, p in enumerate(odds) for i in numbers.choice(4, 4, p=p).tolist()]
        assert len(set(chosen)) < 8
    rewards = [[0.0 if in_loss else -0.1 * k.item() for k in kls[i]] for i in trained]
    for reward, i in zip(rewards, trained):
        reward[-1] += scores[i]
    if "whiten_rewards" in changes:
        rewards = whitened(rewards, keep_mean=True)
    read = [[critic.score(x)[0] for x in row] for row in states]
    old = [[v.item() for v in read[i]] for i in trained]
    gamma, lam = values.get("gamma", 1.0), values.get("gae_lambda", 0.95)
    if values["fit_value_model"]:
        to_go = [gae_by_hand(r, [0.0] * len(r), gamma, 1.0) for r in rewards]
        scale, offset = np.polyfit(sum(old, []), sum(to_go, []), 1)
        critic.score.weight.data *= scale
        read = [[critic.score(x)[0] + offset for x in row] for row in states]
        old = [[v.item() for v in read[i]] for i in trained]
    adapted = [max(0, 1 - 1 / (0.6 * len(r))) if "length_adaptive_lambda" in changes else lam for r in rewards]
    A = [gae_by_hand(r, v, gamma, own) for r, v, own in zip(rewards, old, adapted)]
    targets = [gae_by_hand(r, v, gamma, values.get("critic_gae_lambda", lam)) for r, v in zip(rewards, old)]
    returns = [[a + v for a, v in zip(*rows)] for rows in zip(targets, old)]
    if values.get("whiten_advantages", True):
        A = whitened(A, keep_mean=False)
    chosen = [i for i in chosen if i in trained]  # a response without a score has no share in any mean
    tokens = sum(lengths[i] for i in chosen)
    share = lambda i: chosen.count(i) / (len(chosen) * lengths[i] if in_loss else tokens)
    actor = sum(-a * (lp - lp.detach()).exp() * share(i) for i, As in zip(trained, A) for a, lp in zip(As, logprobs[i]))
    loss = actor + (0.1 * sum(sum(row) * share(i) for i, row in enumerate(kls)) if in_loss else 0)
    values_loss = sum(0.5 * (v - R) ** 2 * share(i) for i, Rs in zip(trained, returns) for v, R in zip(read[i], Rs))
    loss.backward(), values_loss.backward()
    norm = lambda model: math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters()))
    flat, flat_returns = sum(old, []), sum(returns, [])
    errors = [r - v for r, v in zip(flat_returns, flat)]
    expected = {
        "objective/scores": statistics.fmean(scores[i] for i in trained), "loss/policy_avg": actor.item(),
        "objective/kl": sum(k.item() for i in trained for k in kls[i]) / len(trained), "objective/loss": loss.item(),
        "loss/value_avg": values_loss.item(), "loss/grad_norm": norm(policy), "loss/critic_grad_norm": norm(critic),
        "val/values": statistics.fmean(flat), "val/returns": statistics.fmean(flat_returns),
        "val/explained_variance": 1 - statistics.variance(errors) / statistics.variance(flat_returns),
    }  # fmt: skip
    if "num_epochs" in changes:  # the mean of several norms
        del expected["loss/grad_norm"], expected["loss/critic_grad_norm"]
    assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-6, abs=1e-9)  # scores are float32


# ---- runs -------------------------------------------------------------------------------------------------------

VARIANTS = {
    "plain": {},
    "exact KL in the loss": dict(kl_in="loss", kl_estimator="full"),
    "ptx": dict(ptx_coef=0.5, ptx_batch_size=3, temperature=0.7),
    "pf_ppo": dict(pf_ppo="pow"),
    "whitened rewards": dict(whiten_rewards=True),
    "warm-up": dict(critic_warmup_steps=1),
    "critic's updates": dict(critic_num_epochs=3, critic_mini_batch_size=2, critic_gradient_checkpointing=True),
}


@pytest.fixture(scope="module")
def exact(base, tmp_path_factory) -> dict:
    """Flags of a run of two steps in float64, which has been made."""
    values = {**base, "precision": "float64", "total_episodes": 16, "save_every": 1, "micro_batch_tokens": 1000}
    values |= {"reward_normalization": True, "output_dir": str(tmp_path_factory.mktemp("exact"))}
    helpers.run(values, script="ppo")
    return values


@pytest.mark.parametrize("name", VARIANTS)
def test_ranks_and_micro_batches_change_nothing(base, exact, name, tmp_path):
    """All tokens in a micro-batch, and a token in each on two ranks: the same metrics and weights, with two epochs."""
    option = VARIANTS[name] | ({"ptx_dataset": beside(base, "ptx.jsonl")} if name == "ptx" else {})
    one, two = ({**exact, **option, "output_dir": str(tmp_path), "run_name": each} for each in ("one", "two"))
    started = helpers.start(one, script="ppo")
    run_ranks({**two, "micro_batch_tokens": 1}, 2, (0, 0), script="ppo")
    assert started.wait().code == 0, started.err[-2000:]
    for row, expected in zip(metrics_of(two), metrics_of(one), strict=True):
        assert [key for key, x in row.items() if x is None] == [key for key, x in expected.items() if x is None]
        row, expected = ({key: x for key, x in each.items() if x is not None} for each in (row, expected))
        assert row == pytest.approx(expected, rel=1e-9, abs=1e-11)
    for part in ("checkpoints/step_2", "checkpoints/step_2/critic"):
        ours, theirs = (weights_of(folder_of(each) / part) for each in (two, one))
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
    both = [metrics_of(each)[1] for each in (one, exact)]
    assert (both[0]["val/returns"] == both[1]["val/returns"]) == (name == "plain")  # the option does something
    assert len({len(line["response"]) for line in read_lines(folder_of(one) / "samples.jsonl")}) > 2


def test_critic_warm_up(base, tmp_path, monkeypatch):
    """In the first two steps the critic trains alone, from a head of zeros; the policy's schedule spans the rest."""
    values = {**base, "output_dir": str(tmp_path), "critic_warmup_steps": 2, "save_every": 1, "keep_checkpoints": 0}
    values |= dict(lr_schedule="linear", critic_lr_schedule="linear", ptx_coef=0.1, kl_coef=0.0, gae_lambda=1.0)
    imitated, original = [], ppo.ptx_loss
    monkeypatch.setattr(ppo, "ptx_loss", lambda *words: imitated.extend(words[1]) or original(*words))
    changes = {"ptx_dataset": beside(base, "ptx.jsonl"), "ptx_batch_size": 4, "ref_model": ""}
    run_here({**values, **changes}, "ppo")
    assert len(imitated) == 8 * 4 and len({str(row) for row in imitated[:13]}) == 13  # each row once a pass
    folders = [helpers.Path(base["model"]), *(folder_of(values) / "checkpoints" / f"step_{i}" for i in (1, 2, 3, 4))]
    assert [same_weights(*pair) for pair in zip(folders, folders[1:])] == [True, True, False, False]
    bodies = [weights_of(folders[0]), *(weights_of(folder / "critic") for folder in folders[1:])]
    for name in ("gpt_neox.embed_in.weight", "gpt_neox.final_layer_norm.bias"):
        assert all(not torch.equal(a[name], b[name]) for a, b in zip(bodies[1:], bodies[2:]))
    rows = metrics_of(values)
    assert rows[0]["val/values"] == 0 and all(row["val/values"] != 0 for row in rows[1:])
    assert [row["loss/grad_norm"] is None for row in rows] == ["loss/ptx" not in row for row in rows]
    assert [row["loss/grad_norm"] is None for row in rows] == [True, True, False, False]
    assert all(row["loss/critic_grad_norm"] > 0 for row in rows)
    assert [rows[-1][name] for name in ("lr", "critic_lr")] == [0, 0]  # linear, to the last update
    assert rows[2]["lr"] == pytest.approx(3e-3 * utils.lr_factor(3, 8, 0.03, "linear"))  # 4 updates a step


def test_critic_warm_up_ends_when_its_explained_variance_does_not_rise(base, tmp_path, monkeypatch, capsys):
    """In the second of at most three steps; the policy's schedule spans the rest. With updates of its own."""
    monkeypatch.setattr(
        plumbing.models.critic, "has_stopped_rising", lambda history, patience: len(history) >= patience
    )
    values = {**base, "output_dir": str(tmp_path), "critic_warmup_steps": 3, "critic_warmup_patience": 2}
    values |= dict(lr_schedule="linear", critic_num_epochs=3, critic_mini_batch_size=2)
    run_here(values, "ppo")
    rows = metrics_of(values)
    assert [row["loss/grad_norm"] is None for row in rows] == [True, True, False, False]
    assert rows[-1]["lr"] == 0 and rows[2]["lr"] == pytest.approx(3e-3 * utils.lr_factor(3, 8, 0.03, "linear"))
    explained = rows[1]["val/explained_variance"]
    assert f"critic warm-up: 2 steps, 16 responses, explained variance {explained:.3f}\n" in capsys.readouterr().out


def test_resume_bit_for_bit(base, tmp_path):
    """Four steps in one go, and two, a stop in the middle of the third, and the rest."""
    straight = {**base, "output_dir": str(tmp_path), "ptx_dataset": beside(base, "ptx.jsonl"), "ptx_coef": 0.2}
    straight |= dict(reward_normalization=True, kl_controller="adaptive", kl_horizon=20, kl_target=0.05, seed=3)
    straight |= dict(lr_schedule="linear", critic_lr_schedule="cosine", critic_learning_rate=1e-3, value_clip=0.01)
    straight |= dict(value_model=scalar_folder(base["model"], tmp_path / "judge"))  # its fit goes on, too
    run(straight, script="ppo")
    rows = metrics_of(straight)
    for name in ("objective/kl_coef", "loss/ptx", "val/values", "critic_lr", "objective/scores"):
        assert len({row[name] for row in rows}) == 4, name
    assert any(row["val/clipfrac_avg"] > 0 for row in rows)  # old values are those of the rollout in all updates
    stopped = {**straight, "run_name": "stopped"}
    run(stopped, code=75, script="ppo", place="ppo.generate:3:SIGTERM")
    assert helpers.steps_of(stopped) == ["step_2"]
    done = run({**stopped, "resume": True}, script="ppo")
    assert "goes on after step 2" in done.out and metrics_of(stopped) == rows
    assert read_lines(folder_of(stopped) / "samples.jsonl") == read_lines(folder_of(straight) / "samples.jsonl")
    for name in ("final", "checkpoints/step_4", "checkpoints/step_4/critic"):
        assert same_weights(folder_of(stopped) / name, folder_of(straight) / name)
    critic = folder_of(straight) / "checkpoints/step_4/critic"
    model, report = AutoModelForSequenceClassification.from_pretrained(critic, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and model.config.num_labels == 1
    assert model(torch.tensor([[40, 41, 42]])).logits.abs().item() > 0


@pytest.mark.parametrize("scale", ["raw", "centred", "standardized"])
def test_a_reward_model_beside_a_verifier(base, batches, tmp_path, scale):
    """Its scores are the model's own output for query and response, one at a time; the verifier is only measured."""
    folder = scalar_folder(base["model"], tmp_path / "rm", score_mean=0.75, score_std=2.5)
    values = {**base, "output_dir": str(tmp_path), "total_episodes": 8, "save_every": 0, "reward_model_scale": scale}
    values |= dict(reward=("exact", folder), reward_weights=(0.0, 2.0), micro_batch_tokens=30)
    run_here(values, "ppo")
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    model.config.pad_token_id = 257  # no token that occurs: the model finds the end by it
    ((row,), (batch,)) = metrics_of(values), batches
    sequences = [q + r for q, r in zip(batch.queries, batch.responses)]
    raw = [model(torch.tensor([ids])).logits.item() for ids in sequences]
    assert len(set(map(len, sequences))) > 2
    expected = {"raw": raw, "centred": [s - 0.75 for s in raw], "standardized": [(s - 0.75) / 2.5 for s in raw]}[scale]
    lines = read_lines(folder_of(values) / "samples.jsonl")
    close([line[folder] for line in lines], expected, 1e-5)
    assert {line["exact"] for line in lines} <= {0.0, 1.0} and len({round(x, 3) for x in raw}) > 4
    assert row["objective/scores"] == pytest.approx(2 * statistics.fmean(expected), rel=1e-5)
    assert row["objective/verifiable_correct_rate"] is not None


def test_a_source_that_is_only_measured_may_fail(base, tmp_path):
    """Weight 0 takes no part in the score, so its missing scores must not end the run."""
    (tmp_path / "none.py").write_text("def score(prompts, responses, **columns):\n    return [None] * len(prompts)\n")
    values = {**base, "output_dir": str(tmp_path), "total_episodes": 8, "save_every": 0}
    run_here({**values, "reward": (base["reward"], f"{tmp_path}/none.py:score"), "reward_weights": (1.0, 0.0)}, "ppo")
    assert metrics_of(values)[0]["val/missing_scores"] == 8


# ---- bad input --------------------------------------------------------------------------------------------------


def test_check_can_read(tmp_path, capsys):
    def refused() -> str:
        theirs.save_pretrained(tmp_path)
        with pytest.raises(SystemExit):
            models.check_can_read("--value_model", str(tmp_path), ours, str(tmp_path))
        return capsys.readouterr().err

    ours, theirs = helpers.make_tokenizer(), helpers.make_tokenizer()
    helpers.tiny_model(tmp_path)
    models.check_can_read("--value_model", str(tmp_path), ours, str(tmp_path))
    theirs.add_tokens(["<more>"])
    begin = f"error: --value_model {tmp_path}: cannot read what --model writes: its vocabulary"
    assert refused() == f"{begin} has {len(theirs)} tokens, that of --model {len(ours)}\n"
    ours.add_tokens(["<less>"])
    assert refused() == f"{begin} gives other ids to 1 of the {len(ours)} tokens, such as '<less>'\n"


REFUSED = {
    "value_model of another vocabulary": (dict(value_model="@longer"), "--value_model @longer", "vocabulary"),
    "value_model of two labels": (dict(value_model="@two"), "--value_model @two", "2 labels"),
    "reward of two labels": (dict(reward="@two"), "--reward @two", "2 labels"),
    "reward without a head": (dict(reward="@model"), "--reward @model", "no head"),
    "reward_model_scale": (dict(reward="@one", reward_model_scale="centred"), "--reward_model_scale", "score_mean"),
    "critic_warmup_steps": (dict(critic_warmup_steps=1), "--critic_warmup_steps 1", "no step"),
    "ptx_coef": (dict(ptx_coef=0.1), "--ptx_coef 0.1", "--ptx_dataset"),
    "reward_weights": (dict(reward="exact @one", reward_weights=(0.0, 0.0)), "--reward_weights", "all 0"),
    "reward twice": (dict(reward="exact exact"), "--reward exact exact", "twice"),
    "reward model twice": (dict(reward="@one @one"), "--reward @one @one", "twice"),
}


@pytest.fixture(scope="module")
def folders(base, tmp_path_factory) -> dict[str, str]:
    made, kinds = (
        tmp_path_factory.mktemp("folders"),
        {"@longer": dict(tokens=("<more>",)), "@two": dict(labels=2), "@one": {}},
    )
    return {"@model": base["model"]} | {k: scalar_folder(base["model"], made / k, **kinds[k]) for k in kinds}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_ends_with_one_line(base, folders, tmp_path, capsys, case):
    named = lambda words: " ".join(folders.get(word, word) for word in words.split())
    changes, start, reason = REFUSED[case]
    changes = {key: named(x) if isinstance(x, str) else x for key, x in changes.items()}
    changes = {key: tuple(x.split()) if key == "reward" else x for key, x in changes.items()}
    with pytest.raises(SystemExit) as end:
        run_here({**base, "output_dir": str(tmp_path), "total_episodes": 8, **changes}, "ppo")
    said = capsys.readouterr()
    lines = [line for line in said.err.splitlines() if line and not line.startswith("warning:")]
    assert end.value.code == 2 and len(lines) == 1, said.err
    assert lines[0].startswith(f"error: {named(start)}") and reason in lines[0]
    assert not list(tmp_path.glob("run"))
