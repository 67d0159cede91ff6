"""ppo.py: its equations, its critic, one step against plain loops, runs (in any cut:
test_invariance.py).
"""

import math
import statistics
from types import SimpleNamespace

import helpers
import pytest
import torch
from helpers import (
    folder_of,
    metrics_of,
    recorded,
    run_here,
    same_weights,
    scalar_folder,
    variant,
    weights_of,
)
from test_equations import close, double
from test_policy import ALL, gradient_of, pairs_of, plain_logprobs, random_batch, relative
from test_rloo import whiten_by_hand
from tiny_models import CPU
from transformers import AutoModelForCausalLM, GenerationConfig

import ppo
import utils
from plumbing.models import loading
from plumbing.rollout.sampler import Sampler
from ppo import (
    explained_variance,
    filter_weights,
    update_statistics,
)

NAN = math.nan
INF = math.inf
F64 = torch.float64
STEPS, GROUPS = helpers.table("ppo_steps.yaml").values()


# ---- rewards, advantages, values -----------------------------------------------------------------


def gae_by_hand(rewards: list, values: list, gamma: float, lam: float) -> list[float]:
    """The sum of eq. 16 itself, forwards from each token of a row without holes."""
    after = [*values[1:], 0.0]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, after, values)]
    return [
        sum((gamma * lam) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))
    ]


@pytest.mark.parametrize("clip", [0.0, 0.2, 0.5])
def test_where_clipping_raises_the_value_loss(clip):
    """tests/agreement has the loss and its gradient, and those of GAE."""
    cases = [
        (v, old, r)
        for v in (-1.0, -0.1, 0.15, 0.4, 2.0)
        for old in (0.0, 0.3)
        for r in (-3.0, 0.05, 0.25, 3.0)
    ]
    losses, raised = ppo.value_loss(*double(*zip(*cases)), clip)
    plain, _ = ppo.value_loss(*double(*zip(*cases)), 0.0)
    clipped = [(min(max(v, old - clip), old + clip) - r) ** 2 > (v - r) ** 2 for v, old, r in cases]
    assert raised.tolist() == (losses > plain).tolist() == [clip > 0 and flag for flag in clipped]
    assert raised.any() == (clip > 0)


def test_explained_variance():
    """Other numbers are in test_a_step_by_plain_loops."""
    values = double([1, 2, NAN], [0, 4, 9])
    returns = double([2, 2, 5], [1, 7, NAN])
    mask = torch.tensor([[True, True, False]] * 2)
    assert (
        explained_variance(returns, returns, mask) == 1
        and explained_variance(mask + 2.0, returns, mask) == 0
    )
    assert math.isnan(explained_variance(values, mask + 0.0, mask))  # all returns agree


def test_update_statistics_in_pieces_and_at_once():
    """Near 1e6, where sums of squares would lose the variance; what is not finite does not
    count.
    """
    scores = [1e6 + x for x in (0.25, 0.5, -1.0, 3.0, 0.125, 2.0, -7.0)]
    pieces = [scores[:1], [NAN, INF], scores[1:4], [], [scores[4], -INF, scores[5]], scores[6:]]
    running = [0.0, 0.0, 0.0]
    for piece in pieces:
        running = update_statistics(running, double(*piece) if piece else torch.zeros(0))
    for count, mean, squares in (
        running,
        update_statistics([0.0, 0.0, 0.0], double(*sum(pieces, []))),
    ):
        assert count == 7 and mean == pytest.approx(statistics.fmean(scores), rel=1e-15)
        assert squares == pytest.approx(6 * statistics.variance(scores), rel=1e-9)


def odds_by_hand(scores: list[float], kind: str) -> list[float]:
    scored = [i for i, s in enumerate(scores) if math.isfinite(s)]
    best = [i for i in scored if scores[i] == max(scores[j] for j in scored)]
    worst = [i for i in scored if scores[i] == min(scores[j] for j in scored)]
    odds = [0.0] * len(scores)
    if kind == "pow":
        for i in scored:
            odds[i] = abs(scores[i])
    else:
        for half in (best, worst if kind == "max_min" else [i for i in scored if i not in best]):
            for i in half:
                odds[i] += 1 / len(half)
    if sum(odds) == 0:
        odds = [float(i in scored or not scored) for i in range(len(scores))]
    return [x / sum(odds) for x in odds]


@pytest.mark.parametrize("kind", ["pow", "max_min", "max_random"])
def test_filter_weights_by_loops(kind):
    close(filter_weights(double(*GROUPS), kind), [odds_by_hand(group, kind) for group in GROUPS])
    # numpy wants sums of 1 within 1e-8
    assert filter_weights(torch.tensor(GROUPS), kind).dtype == F64


# ---- PTX -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "budget, ranks", [(1, 1), (14, 1), (1000, 1), (1, 2), (1000, 2), (1000, 12)]
)
def test_ptx_losses_add_the_gradient_of_the_cross_entropy(load, monkeypatch, budget, ranks):
    """At temperature 1 under a policy of 0.6, on top of what is there, in any cut and on more ranks
    than rows.
    """
    monkeypatch.setattr(ppo, "CHUNK_TOKENS", 3)
    args = ppo.Args(ptx_batch_size=len(ALL), micro_batch_tokens=budget, seed=1)
    of_policy = SimpleNamespace(temperature=0.6, entropy_coef=0.0, gradient_checkpointing=False)
    policy = ppo.Policy(load("gpt_neox", F64), of_policy)
    pairs = pairs_of(random_batch())
    masks = [[int(i % 3 != 1) for i in range(len(r))] for _, r in pairs]  # turns of the user are 0
    losses = [
        -(torch.tensor(m) * plain_logprobs(policy.model, q, r, 1.0)[range(len(r)), r]).sum()
        for (q, r), m in zip(pairs, masks)
    ]
    expected = sum(losses) / sum(map(sum, masks))
    expected.backward()
    gradient = gradient_of(policy)
    total = 0.0
    policy.model.get_output_embeddings().weight.grad = before = torch.ones(32, 16, dtype=F64)
    rows = [{"query": q, "response": r, "mask": m} for (q, r), m in zip(pairs, masks)]
    for rank in range(ranks):
        for loss in ppo.ptx_losses(policy, rows, args, 0, utils.World(rank, ranks, CPU)):
            (loss * ranks).backward()
            total += loss.item()
    before -= 1
    assert relative(gradient_of(policy) / ranks, gradient) < 1e-10
    assert total == pytest.approx(expected.item(), rel=1e-12)


# ---- one whole step ------------------------------------------------------------------------------

SOME = """
def score(prompts, responses, **columns):
    sums = [sum(map(ord, p + r)) for p, r in zip(prompts, responses)]
    return [None if s % 4 == 1 else s % 7 / 7 for s in sums]
"""
GROUP = """
def score(prompts, responses, **columns):
    firsts = [int(prompt.split("+")[0]) for prompt in prompts]
    return [None if a % 2 else sum(map(ord, r)) % 7 / 7 for a, r in zip(firsts, responses)]
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict:
    """The small run with a model that is exact in float64, and so many end tokens that responses
    differ in length.
    """
    folder = tmp_path_factory.mktemp("ppo")
    values = helpers.workspace(folder)
    (folder / "some.py").write_text(SOME)
    (folder / "group.py").write_text(GROUP)
    models = {name: helpers.tiny_model(folder / name, "gpt_neox") for name in ("neox", "reference")}
    reference = AutoModelForCausalLM.from_pretrained(models["reference"])
    for parameter in reference.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    reference.save_pretrained(models["reference"])
    GenerationConfig(eos_token_id=list(range(1, 25)), pad_token_id=0).save_pretrained(
        models["neox"]
    )
    return {
        **values,
        "model": models["neox"],
        "ref_model": models["reference"],
        "eval_every": 0,
        "run_name": "run",
    }


@pytest.mark.parametrize("changes", STEPS.values(), ids=STEPS)
def test_a_step_by_plain_loops(base, tmp_path, monkeypatch, changes):
    """Scores missing, penalties, KL, GAE, whitening, PF-PPO and both losses, to the norms of both
    gradients.
    """
    values = {
        **base,
        "output_dir": str(tmp_path),
        "precision": "float64",
        "total_episodes": 8,
        "save_every": 0,
        "mini_batch_size": 8,
        "num_epochs": 1,
        "non_stop_penalty": True,
        "penalty_reward_value": -0.5,
        "value_model": scalar_folder(base["model"], tmp_path / "critic"),
        **changes,
        "reward": base["reward"].replace("reward.py", changes.get("reward", "some.py")),
    }
    rollouts = recorded(monkeypatch, Sampler, "rollout")
    run_here(values, "ppo")
    (row,) = metrics_of(values)
    ((_, batch),) = rollouts
    policy, reference = (
        loading.load_model("", base[name], F64, CPU) for name in ("model", "ref_model")
    )
    critic = loading.load_scalar_model("", values["value_model"], F64, CPU)[0].model
    parts = batch.reward_components[values["reward"]].tolist()
    in_loss = "kl_in" in changes
    scores = [
        s if stop or math.isnan(s) else -0.5 for s, stop in zip(parts, batch.stopped.tolist())
    ]
    trained = [i for i, s in enumerate(scores) if not math.isnan(s)]
    lengths = [len(sample.response) for sample in batch.samples]
    assert len(trained) < 8 and -0.5 in scores and len(set(lengths)) > 2  # all of it occurs
    estimate = {
        "k1": lambda d: d,
        "k2": lambda d: d**2 / 2,
        "abs": torch.abs,
        "k3": lambda d: torch.exp(-d) + d - 1,
    }
    logprobs = []
    kls = []
    read = []
    for query, response in pairs_of(batch):
        p = plain_logprobs(policy, query, response, 1.0)[range(len(response)), response]
        q = plain_logprobs(reference, query, response, 1.0)[range(len(response)), response].detach()
        hidden = critic.base_model(input_ids=torch.tensor([[*query, *response]])).last_hidden_state[
            0
        ]
        logprobs.append(list(p))
        kls.append(list(estimate[changes["kl_estimator"]](p - q)))
        # that predict each token
        read.append([critic.score(x)[0] for x in hidden[len(query) - 1 : -1]])
    drawn = list(range(8))
    if "pf_ppo" in changes:
        numbers = utils.generator("filter", 1, 1)
        size = 8 if values["group_size"] == 1 else 4
        odds = (odds_by_hand(scores[a : a + size], changes["pf_ppo"]) for a in range(0, 8, size))
        drawn = [
            size * group + i
            for group, p in enumerate(odds)
            for i in numbers.choice(size, size, p=p).tolist()
        ]
        assert len(set(drawn)) < 8
        assert ("reward" in changes) == any(
            set(trained).isdisjoint(range(a, a + 4)) for a in (0, 4)
        )
    rewards = [[0.0 if in_loss else -0.1 * k.item() for k in kls[i]] for i in trained]
    for reward, i in zip(rewards, trained):
        reward[-1] += scores[i]
    old_values = [[v.item() for v in read[i]] for i in trained]
    gamma = values.get("gamma", 1.0)
    lam = values.get("gae_lambda", 0.95)
    A = [gae_by_hand(r, v, gamma, lam) for r, v in zip(rewards, old_values)]
    targets = [
        gae_by_hand(r, v, gamma, values.get("critic_gae_lambda", lam))
        for r, v in zip(rewards, old_values)
    ]
    returns = [[a + v for a, v in zip(*rows)] for rows in zip(targets, old_values)]
    if values.get("whiten_advantages", True):
        white = iter(whiten_by_hand(sum(A, [])))
        A = [[next(white) for _ in row] for row in A]
    # a response without a score has no share in any mean
    drawn = [i for i in drawn if i in trained]
    tokens = sum(lengths[i] for i in drawn)
    share = lambda i: drawn.count(i) / (len(drawn) * lengths[i] if in_loss else tokens)
    actor = sum(
        -a * (lp - lp.detach()).exp() * share(i)
        for i, As in zip(trained, A)
        for a, lp in zip(As, logprobs[i])
    )
    loss = actor + (0.1 * sum(sum(row) * share(i) for i, row in enumerate(kls)) if in_loss else 0)
    values_loss = sum(
        0.5 * (v - R) ** 2 * share(i)
        for i, Rs in zip(trained, returns)
        for v, R in zip(read[i], Rs)
    )
    loss.backward(), values_loss.backward()
    norm = lambda model: math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters()))
    flat = sum(old_values, [])
    flat_returns = sum(returns, [])
    errors = [r - v for r, v in zip(flat_returns, flat)]
    expected = {
        "objective/scores": statistics.fmean(scores[i] for i in trained),
        "loss/policy_avg": actor.item(),
        "objective/kl": sum(k.item() for i in trained for k in kls[i]) / len(trained),
        "objective/loss": loss.item(),
        "loss/value_avg": values_loss.item(),
        "loss/grad_norm": norm(policy),
        "loss/critic_grad_norm": norm(critic),
        "val/values": statistics.fmean(flat),
        "val/returns": statistics.fmean(flat_returns),
        "val/explained_variance": 1
        - statistics.variance(errors) / statistics.variance(flat_returns),
    }
    if "num_epochs" in changes:  # the mean of several norms
        del expected["loss/grad_norm"], expected["loss/critic_grad_norm"]
    assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-9, abs=1e-9)


# ---- runs ----------------------------------------------------------------------------------------


def test_critic_warm_up(base, tmp_path, monkeypatch):
    """In the first two steps the critic trains alone, from a head of zeros; the policy's schedule
    spans the rest.
    """
    values = variant(base, tmp_path, critic_warmup_steps=2, save_every=1, keep_checkpoints=0)
    values |= dict(
        lr_schedule="linear", critic_lr_schedule="linear", ptx_coef=0.1, kl_coef=0.0, gae_lambda=1.0
    )
    values |= {"critic_num_epochs": 1, "critic_mini_batch_size": 3}
    taken = recorded(monkeypatch, ppo, "take_prompts")
    changes = {"ptx_dataset": base["dataset"], "ptx_batch_size": 4, "ref_model": ""}
    run_here({**values, **changes}, "ppo")
    imitated = [row for _, rows in taken for row in rows if row["response"]]
    # each row once a pass
    assert len(imitated) == 8 * 4 and len({str(row) for row in imitated[:13]}) == 13
    folders = [
        helpers.Path(base["model"]),
        *(folder_of(values) / "checkpoints" / f"step_{i}" for i in (1, 2, 3, 4)),
    ]
    assert [same_weights(*pair) for pair in zip(folders, folders[1:])] == [True, True, False, False]
    critics = [weights_of(folder / "critic") for folder in folders[1:]]
    for name in ("gpt_neox.embed_in.weight", "gpt_neox.final_layer_norm.bias", "score.weight"):
        assert all(not torch.equal(a[name], b[name]) for a, b in zip(critics, critics[1:]))
    rows = metrics_of(values)
    assert rows[0]["val/values"] == 0 and all(row["val/values"] != 0 for row in rows[1:])
    assert [row["loss/grad_norm"] is None for row in rows] == [
        "loss/ptx" not in row for row in rows
    ]
    assert [row["loss/grad_norm"] is None for row in rows] == [True, True, False, False]
    assert all(row["loss/critic_grad_norm"] > 0 for row in rows)
    assert [rows[-1][name] for name in ("lr", "critic_lr")] == [0, 0]  # linear, to the last update
    # 4 updates a step
    assert rows[2]["lr"] == pytest.approx(3e-3 * utils.lr_factor(3, 8, 0.03, "linear"))
    assert rows[1]["critic_lr"] == pytest.approx(1e-5 * utils.lr_factor(5, 12, 0.03, "linear"))
    for row in rows[2:]:
        loss = row["loss/policy_avg"] + 0.1 * row["loss/ptx"]
        assert row["objective/loss"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("pf_ppo", ["none", "pow"])
def test_the_weight_of_the_kl_waits_for_the_policy(base, tmp_path, pf_ppo):
    """--kl_target has nothing to adapt to while the critic trains alone."""
    values = variant(base, tmp_path, pf_ppo=pf_ppo, critic_warmup_steps=2, save_every=0)
    run_here({**values, "kl_target": 9.0, "kl_horizon": 10}, "ppo")
    rows = metrics_of(values)
    # far below the target
    expected = [0.1, 0.1, 0.1, 0.1 * (1 - 0.2 * 8 / 10)]
    assert [row["objective/kl_coef"] for row in rows] == pytest.approx(expected)
