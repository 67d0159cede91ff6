"""Policy against a plain forward pass of the same model on each row alone, and its gradient in any cut of the batch."""

import contextlib
import functools
import json
import os
import types

import pytest
import torch
from tiny_models import CPU, random_model
from transformers import GenerationConfig

import utils
from grpo import Policy, aggregate, group_advantages, policy_loss
from plumbing.models import loading as models
from plumbing.models import lora
from plumbing.rollout.batch import Batch, forward_batch, forward_tokens, pad_rows

HERE = ["qwen2", "llama", "gemma", "gemma2", "gpt_neox", "gpt2"]
F32, F64 = torch.float32, torch.float64
# In a float64 model the norms of Qwen2, Llama and Gemma still compute in float32, so a last bit of float64 can become
# one of float32. LayerNorm does not: what has to be exact is asked of GPT-NeoX and GPT-2.
EXACT = {"gpt_neox": 1e-10, "gpt2": 1e-10}
# (tokens of the query, tokens of the response): the shortest of all, long ones, a batch in which all differ
SHAPES = [(3, 5), (1, 1), (9, 2), (2, 8), (6, 6), (4, 1), (1, 7), (5, 3)]


def random_batch(shapes=SHAPES, vocabulary: int = 32, seed: int = 0) -> Batch:
    """Random token ids, 0 (padding) and 1 (end of sequence) among them anywhere."""
    numbers = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(vocabulary, (n,), generator=numbers).tolist()  # noqa: E731
    queries, responses = [draw(q) for q, _ in shapes], [draw(r) for _, r in shapes]
    lengths = torch.tensor([r for _, r in shapes])
    mask = torch.arange(lengths.max()) < lengths[:, None]
    return Batch(
        [{"query": query} for query in queries], responses, [""] * len(shapes),
        torch.ones(len(shapes), dtype=torch.bool), {},
        {"response_mask": mask, "rollout_logprobs": torch.zeros(mask.shape)},
    )  # fmt: skip


def plain_logprobs(model, query: list[int], response: list[int], temperature: float) -> torch.Tensor:
    """(response tokens, V): log-probabilities at the places of the response's tokens, by the whole model."""
    logits = model(input_ids=torch.tensor([query + response])).logits[0]
    rows = [logits[len(query) + t - 1] for t in range(len(response))]  # what stands before a token predicts it
    return (torch.stack(rows) / temperature).log_softmax(-1)


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got - expected).norm() / expected.norm()).item()


def gradient_of(policy) -> torch.Tensor:
    """All gradients as one vector, which is cleared."""
    parts = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in policy.parameters()]
    policy.zero_grad()
    return torch.cat(parts)


# ---- values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("family", HERE)
def test_statistics_by_a_plain_forward_of_each_row(load, family, temperature):
    model, ref_model = load(family, F64), load(family, F64, seed=1)
    batch = random_batch()
    policy, reference = (Policy(m, temperature, 4, train_entropy=True) for m in (model, ref_model))
    outputs = policy(*batch.collate(list(range(8))), reference)
    assert list(outputs) == ["logprobs", "kl", "entropies"]
    logprobs, kl, entropies = outputs.values()
    place, near = 0, EXACT.get(family, 1e-6)
    with torch.no_grad():
        for query, response in zip(batch.queries, batch.responses):
            plain = plain_logprobs(model, query, response, temperature)
            ref = plain_logprobs(ref_model, query, response, temperature)
            for t, token in enumerate(response):
                p = plain[t].exp()
                assert abs(logprobs[place] - plain[t, token]) < near
                assert abs(entropies[place] + (p * plain[t]).sum()) < near
                assert abs(kl[place] - sum(a * (b - c) for a, b, c in zip(p, plain[t], ref[t]))) < near
                place += 1
    assert place == len(logprobs) == len(entropies) == len(kl) == batch.response_mask.sum()


@pytest.mark.parametrize("family", HERE)
def test_padding_that_neighbours_force_changes_nothing(load, family):
    policy, batch = Policy(load(family, F64), 1.0, 100), random_batch()
    together = forward_tokens(policy, batch.collate(list(range(8))), batch.response_mask)["logprobs"]
    for i, response in enumerate(batch.responses):
        alone = policy(*batch.collate([i]))["logprobs"]
        torch.testing.assert_close(together[i, : len(response)], alone, rtol=0, atol=EXACT.get(family, 1e-6))
        assert together[i, len(response) :].eq(0).all()
    # nor what stands in the padding
    input_ids, mask = batch.collate(list(range(8)))
    for i, length in enumerate(batch.lengths):
        input_ids[i, length:] = 17
    assert torch.equal(policy(input_ids, mask)["logprobs"], policy(*batch.collate(list(range(8))))["logprobs"])


def test_collate_and_pad_rows():
    queries, mask = [[5, 1], [7], [1, 1, 1]], [[True, True, False], [True, True, True], [True, False, False]]
    batch = Batch(
        [{"query": query} for query in queries], [[1, 0], [9, 8, 1], [2]], [""] * 3, torch.ones(3, dtype=torch.bool),
        {}, {"response_mask": torch.tensor(mask)},
    )  # fmt: skip
    assert batch.lengths == [4, 4, 4] and batch.queries == queries
    ids, mask = batch.collate([2, 0])
    assert ids.tolist() == [[1, 1, 1, 2], [5, 1, 1, 0]]
    assert mask.int().tolist() == [[0, 0, 0, 1], [0, 0, 1, 1]]
    ids, mask = batch.collate([])
    assert ids.shape == mask.shape == (1, 2) and not mask.any()
    flat = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], requires_grad=True)
    rows = pad_rows(flat, batch.response_mask)
    assert rows.tolist() == [[1, 2, 0], [3, 4, 5], [6, 0, 0]]
    (gradient,) = torch.autograd.grad((rows * torch.arange(9.0).view(3, 3)).sum(), flat)
    assert gradient.tolist() == [0, 1, 3, 4, 5, 6]


def test_log_probs_of_a_batch_in_any_cut(load):
    """With exact KL and without, with entropies and without, at another temperature; also on more ranks than there are
    rows, where some have nothing to do."""
    policy, reference = (Policy(load("gpt_neox", F64, seed), 0.6, 3) for seed in (0, 1))
    batch = random_batch()
    inputs, mask = batch.collate(list(range(8))), batch.response_mask
    with torch.no_grad():
        expected = forward_tokens(policy, inputs, mask, reference=reference)
        warmer = forward_tokens(policy, inputs, mask, temperature=1.0, entropy=False)
    assert list(expected) == ["logprobs", "kl", "detached_entropies"] and list(warmer) == ["logprobs"]
    assert not torch.allclose(warmer["logprobs"], expected["logprobs"], atol=0.01)

    class Ranks(utils.World):
        """Gathers what the ranks before it had; the last one sees all."""

        shares = []

        def all_gather(self, items):
            self.shares.append(items)
            return [item for share in self.shares for item in share]

    options = {"autocast": contextlib.nullcontext}

    for size, budget in ((1, 10_000), (1, 1), (1, 30), (2, 30), (10, 30)):
        Ranks.shares = []
        for rank in range(size):
            ranks = Ranks(rank, size, CPU)
            try:
                got = forward_batch(policy, batch, token_budget=budget, world=ranks, reference=reference, **options)
            except RuntimeError:  # a rank before the last lacks the rows of the others here
                assert rank < size - 1
        assert got.keys() == expected.keys()
        assert all(x.shape == (8, 8) and not x.requires_grad and x[~mask].eq(0).all() for x in got.values())
        for name, x in expected.items():
            torch.testing.assert_close(got[name], x, rtol=0, atol=1e-12)
    options |= {"token_budget": 30, "world": utils.World(0, 1, CPU)}
    without = forward_batch(policy, batch, **options)
    assert list(without) == ["logprobs", "detached_entropies"]
    torch.testing.assert_close(without["logprobs"], expected["logprobs"], rtol=0, atol=1e-12)
    without = forward_batch(policy, batch, **options, temperature=1.0, entropy=False)
    assert list(without) == ["logprobs"]
    torch.testing.assert_close(without["logprobs"], warmer["logprobs"], rtol=0, atol=1e-12)


# ---- chunks of logits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gpt_neox"])
def test_chunks_change_neither_values_nor_gradients_and_bound_the_logits(load, family, exact, recompute):
    model, batch = load(family, F64), random_batch()
    reference = Policy(load(family, F64, seed=1), 0.6, 100) if exact else None
    rows = []  # how many positions each call of the head computes
    head = model.get_output_embeddings()
    hook = head.register_forward_hook(lambda _, inputs, __: rows.append(inputs[0].shape[:-1].numel()))
    tokens, results = int(batch.response_mask.sum()), {}
    for chunk in (1, 3, tokens, 1000):
        policy = Policy(model, 0.6, chunk, train_entropy=True, recompute_logits=recompute)
        rows.clear()
        out = policy(*batch.collate(list(range(8))), reference)
        assert list(out) == (["logprobs", "kl", "entropies"] if exact else ["logprobs", "entropies"])
        assert max(rows) == min(chunk, tokens) and sum(rows) == tokens  # prompts' logits are never computed
        weights = torch.linspace(-1, 1, tokens, dtype=F64)
        loss = (out["logprobs"] * weights).sum() + (out["entropies"] * weights.square()).sum()
        (loss + (out["kl"] * weights).sum() if exact else loss).backward()
        assert max(rows) <= chunk  # in the backward pass, too, which computes them anew if they are not kept for it
        assert sum(rows) == tokens * (2 if recompute and chunk < tokens else 1)
        results[chunk] = torch.cat(list(out.values())).detach(), gradient_of(policy)
    hook.remove()
    for chunk in (1, 3, 1000):
        assert relative(results[chunk][0], results[tokens][0]) < 1e-10  # the head comes after all norms
        assert relative(results[chunk][1], results[tokens][1]) < EXACT.get(family, 1e-6)


@pytest.mark.parametrize("chunk", [2, 1000])
def test_an_entropy_that_is_only_logged_cannot_enter_a_loss(load, chunk):
    """Its name says so, and there is no other: a loss term of "entropies" without `train_entropy` is a KeyError."""
    batch, model = random_batch(), load("gpt_neox", F64)
    logged = Policy(model, 1.0, chunk)(*batch.collate([0, 1]))
    assert list(logged) == ["logprobs", "detached_entropies"]
    with pytest.raises(KeyError):
        logged["entropies"]
    assert not logged["detached_entropies"].requires_grad and logged["logprobs"].requires_grad
    trained = Policy(model, 1.0, chunk, train_entropy=True)(*batch.collate([0, 1]))
    assert list(trained) == ["logprobs", "entropies"] and trained["entropies"].requires_grad
    assert torch.equal(trained["entropies"].detach(), logged["detached_entropies"])


@pytest.mark.parametrize("chunk", [2, 1000])
def test_the_gradient_of_the_entropy_is_that_of_plain_logits(load, chunk):
    policy, batch = Policy(load("gpt_neox", F64), 0.6, chunk, train_entropy=True), random_batch()
    policy(*batch.collate(list(range(8))))["entropies"].sum().backward()
    got = gradient_of(policy)
    for query, response in zip(batch.queries, batch.responses):
        plain = plain_logprobs(policy.model, query, response, 0.6)
        (-(plain.exp() * plain).sum()).backward()
    expected = gradient_of(policy)
    assert expected.norm() > 1e-2 and relative(got, expected) < EXACT["gpt_neox"]


def test_the_reference_may_be_the_policy_without_its_adapter(load):
    """The exact KL to the model that it started from: its gradient is that with the model as a reference of its own."""
    batch, both = random_batch(), []
    for alone in (True, False):
        model = load("gpt_neox", F64)
        lora.add_lora(model, types.SimpleNamespace(lora_rank=2, lora_alpha=8.0, seed=1))
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:  # 0 in a new adapter, which changes nothing
                torch.nn.init.normal_(parameter)
        policy = Policy(model, 0.6, 4, train_entropy=True)
        reference = policy if alone else Policy(load("gpt_neox", F64), 0.6, 4)
        out = policy(*batch.collate(list(range(8))), reference=reference)
        (out["kl"].sum() + out["entropies"].sum()).backward()
        both.append((*(x.detach() for x in out.values()), gradient_of(policy)))
    assert all(relative(ours, theirs) < 1e-10 and theirs.norm() > 1e-3 for ours, theirs in zip(*both))
    with torch.no_grad():  # and the adapter is there again
        assert torch.equal(policy(*batch.collate(list(range(8))))["logprobs"], both[1][0])


# ---- gradients --------------------------------------------------------------------------------------------------

HOWS = ["token", "step_token", "sequence", "sequence_sum", "constant"]
MAX_LENGTH, KL_COEF, ENTROPY_COEF = 10, 0.3, 0.1


def old_and_advantages(dtype):
    numbers = torch.Generator().manual_seed(3)
    batch = random_batch()
    shift = 0.3 * torch.randn(batch.response_mask.shape, generator=numbers, dtype=F64)
    return shift.to(dtype), group_advantages(torch.rand(8, generator=numbers), 4, "group").to(dtype)


def update_gradient(policy, batch, reference, how, budget, ranks, token_loss="ppo"):
    """The gradient of one optimizer update, taken the way `main` takes it; DDP's mean over ranks is done by hand."""
    dtype = next(policy.parameters()).dtype
    shift, advantages = old_and_advantages(dtype)
    mask = batch.response_mask
    batch.tokens |= {"shift": shift, "advantages": torch.where(mask, advantages[:, None], 0.0)}
    tokens = mask.sum().item() * (1.5 if how == "step_token" else 1)
    mean = functools.partial(aggregate, how=how, tokens=tokens, sequences=8, max_length=MAX_LENGTH)
    for rank in range(ranks):
        for inputs, t, _ in batch.micro_batches(list(range(8)), budget, utils.World(rank, ranks, CPU)):
            m = t["response_mask"]
            out = forward_tokens(policy, inputs, m, reference=reference)
            old = out["logprobs"].detach() + t["shift"]
            losses, _ = policy_loss(out["logprobs"], old, t["advantages"], m, token_loss, 0.2, 0.28)
            loss = mean(losses, m) - ENTROPY_COEF * mean(out["entropies"], m) + KL_COEF * mean(out["kl"], m)
            (loss * ranks).backward()
    return gradient_of(policy) / ranks


def plain_gradient(policy, batch, reference, how):
    """The same of the plain models, row by row and token by token, no masks, all in one graph."""
    dtype = next(policy.parameters()).dtype
    shift, advantages = old_and_advantages(dtype)
    rows = []
    for i, (query, response) in enumerate(zip(batch.queries, batch.responses)):
        plain = plain_logprobs(policy.model, query, response, policy.temperature)
        with torch.no_grad():
            ref = plain_logprobs(reference.model, query, response, policy.temperature)
        terms = []
        for t, token in enumerate(response):
            ratio = torch.exp(plain[t, token] - plain[t, token].detach() - shift[i, t])
            loss = torch.max(-advantages[i] * ratio, -advantages[i] * ratio.clamp(0.8, 1.28))
            p = plain[t].exp()
            terms.append(loss + ENTROPY_COEF * (p * plain[t]).sum() + KL_COEF * (p * (plain[t] - ref[t])).sum())
        rows.append(terms)
    tokens = sum(map(len, rows))
    {
        "token": lambda: sum(map(sum, rows)) / tokens,
        "step_token": lambda: sum(map(sum, rows)) / (1.5 * tokens),
        "sequence": lambda: sum(sum(row) / len(row) for row in rows) / 8,
        "sequence_sum": lambda: sum(map(sum, rows)) / 8,
        "constant": lambda: sum(map(sum, rows)) / (8 * MAX_LENGTH),
    }[how]().backward()
    return gradient_of(policy)


@pytest.mark.parametrize("family, dtype, near", [("gpt_neox", F64, 1e-10), ("gpt2", F64, 1e-10), ("qwen2", F32, 1e-5)])
@pytest.mark.parametrize("how", HOWS)
def test_gradient_is_the_same_in_any_cut(load, how, family, dtype, near):
    """1, 2, 3 and 12 ranks (more than rows), from a row a pass to all in one, against the plain gradient."""
    policy, reference = (Policy(load(family, dtype, seed), 0.6, 4, train_entropy=True) for seed in (0, 1))
    batch = random_batch()
    expected = plain_gradient(policy, batch, reference, how)
    assert expected.norm() > 1e-3
    for budget, ranks in ((1, 1), (20, 1), (33, 1), (1000, 1), (20, 2), (1000, 3), (20, 12)):
        assert relative(update_gradient(policy, batch, reference, how, budget, ranks), expected) < near


@pytest.mark.parametrize("token_loss", ["gspo", "cispo", "sapo", "reinforce"])
def test_gradient_of_each_loss_is_the_same_in_any_cut(load, token_loss):
    policy, reference = (Policy(load("gpt_neox", F64, seed), 1.0, 1000, train_entropy=True) for seed in (0, 1))
    gradients = [
        update_gradient(policy, random_batch(), reference, "sequence", budget, ranks, token_loss)
        for budget, ranks in ((1000, 1), (1, 1), (20, 2))
    ]
    assert relative(gradients[1], gradients[0]) < 1e-10 and relative(gradients[2], gradients[0]) < 1e-10


@pytest.mark.parametrize("family", HERE)
def test_gradient_checkpointing_gives_the_same_gradient(load, family):
    batch, gradients = random_batch(), []
    for checkpointing in (False, True):
        model = load(family, F64)
        calls = []
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        layer = model.base_model.layers[0] if family != "gpt2" else model.base_model.h[0]
        layer.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        model.train()
        policy, reference = Policy(model, 0.6, 3, train_entropy=True), Policy(load(family, F64, seed=1), 0.6, 3)
        gradients.append(update_gradient(policy, batch, reference, "token", 1000, 1))
        assert len(calls) == (2 if checkpointing else 1)  # it does recompute
    assert relative(gradients[1], gradients[0]) < EXACT.get(family, 1e-6)


@pytest.mark.parametrize("family", HERE)
def test_an_empty_micro_batch_has_zero_gradients(load, family):
    model = load(family).train()
    policy, reference = (Policy(m, 0.6, 4, train_entropy=True) for m in (model, load(family, seed=1)))
    batch = random_batch()
    results = policy(*batch.collate([]), reference)
    assert [x.shape for x in results.values()] == [(0,)] * 3
    m = batch.response_mask[[]]
    logprobs, kl, entropies = (pad_rows(x, m) for x in results.values())
    losses, clipped = policy_loss(logprobs, logprobs.detach(), torch.zeros(0, 1), m, "gspo", 0.2, 0.2)
    assert clipped.shape == (0, 8)
    for how in HOWS:
        mean = functools.partial(aggregate, mask=m, how=how, tokens=9, sequences=8, max_length=MAX_LENGTH)
        (mean(losses) + mean(entropies) + mean(kl)).backward(retain_graph=True)
    assert all(p.grad is not None and p.grad.eq(0).all() for p in model.parameters())  # DDP waits for each of them


def test_the_stop_token_is_trained_where_padding_is_the_same_token(load):
    """Masks come from lengths: id 1 is the padding, the end, and stands in prompts as well as in responses."""
    model = load("llama", F64)
    batch = random_batch([(3, 3), (2, 5)])
    batch.rows, batch.responses = [{"query": [1, 7, 1]}, {"query": [1, 1]}], [[4, 1, 1], [5, 1, 6, 7, 1]]
    policy = Policy(model, 1.0, 100)
    logprobs = policy(*batch.collate([0, 1]))["logprobs"]
    for i, (places, stops) in enumerate((((0, 3), (1, 2)), ((3, 8), (1, 4)))):
        plain = plain_logprobs(model, batch.queries[i], batch.responses[i], 1.0)
        for t in stops:
            torch.testing.assert_close(logprobs[slice(*places)][t], plain[t, 1], rtol=0, atol=1e-6)
    # A step up the gradient of the last token alone, the end of the second response, makes it likelier.
    logprobs[-1].backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1e-3 * parameter.grad
        assert policy(*batch.collate([0, 1]))["logprobs"][-1] > logprobs[-1]


# ---- dropout, heads, loading ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_a_model_with_dropout_in_its_config_trains_without(load, model_folder, family):
    with open(os.path.join(model_folder(family), "config.json")) as file:
        assert sum(value == 0.2 for key, value in json.load(file).items() if "drop" in key) >= 2
    batch = random_batch()
    policy = Policy(load(family).train(), 1.0, 4)
    first, second = (policy(*batch.collate(list(range(8))))["logprobs"] for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(first, Policy(load(family).eval(), 1.0, 4)(*batch.collate(list(range(8))))["logprobs"])
    with_dropout = Policy(random_model(family).train(), 1.0, 4)  # the same weights, not by load_model
    assert not torch.equal(first, with_dropout(*batch.collate(list(range(8))))["logprobs"])


@pytest.mark.parametrize("family", HERE)
def test_check_head_accepts_what_policy_computes(load, family):
    model = load(family)
    models.check_head("--model here", model, Policy(model, 1.0, 4).logits)


@pytest.mark.parametrize("family", ["granite", "cohere"])
def test_check_head_ends_the_run_where_logits_are_scaled(load, family, capsys):
    model = load(family)
    with pytest.raises(SystemExit) as end:
        models.check_head("--model there", model, Policy(model, 1.0, 4).logits)
    assert end.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith("error: --model there: ") and line.count("\n") == 1


def fails(capsys, flag_and_name: str, call, *arguments):
    """The call ends the run with exit code 2 and one line that begins with the flag."""
    with pytest.raises(SystemExit) as end:
        call(*arguments)
    assert end.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith(f"error: {flag_and_name}") and line.count("\n") == 1, line


def broken(tmp_path, kind: str) -> str:
    folder = str(tmp_path / kind)
    random_model("qwen2").save_pretrained(folder)
    config, weights = (os.path.join(folder, name) for name in ("config.json", "model.safetensors"))
    if kind == "no folder":
        return os.path.join(folder, "nothing")
    if kind == "no config":
        os.remove(config)
    elif kind == "no weights":
        os.remove(weights)
    elif kind == "config is no json":
        with open(config, "w") as file:
            file.write("{")
    elif kind == "unknown type":
        with open(config, "w") as file:
            json.dump({"model_type": "no_such_model"}, file)
    elif kind == "cut weights":
        with open(weights, "r+b") as file:
            file.truncate(os.path.getsize(weights) // 2)
    elif kind == "other shapes":
        with open(config) as file:
            changed = {**json.load(file), "intermediate_size": 48}
        with open(config, "w") as file:
            json.dump(changed, file)
    elif kind == "missing weights":
        with open(config) as file:
            changed = {**json.load(file), "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
        with open(config, "w") as file:
            json.dump(changed, file)
    return folder


@pytest.mark.parametrize(
    "kind",
    [
        "no folder", "no config", "no weights", "config is no json", "unknown type", "cut weights", "other shapes",
        "missing weights",
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_loaded_ends_the_run_with_one_line(tmp_path, capsys, kind):
    """Weights that are missing in the file must not be filled in at random, either."""
    folder = broken(tmp_path, kind)
    capsys.readouterr()
    fails(capsys, f"--ref_model {folder}: ", models.load_model, "--ref_model", folder, F32, CPU)


def test_a_tokenizer_that_cannot_be_used_ends_the_run_with_one_line(tmp_path, tiny_folder, tokenizer, capsys):
    empty = str(tmp_path / "empty")
    os.makedirs(empty)
    fails(capsys, f"--model {empty}: ", models.load_tokenizer, empty)
    fails(capsys, "--model a/b: ", models.load_tokenizer, "a/b")
    loaded = models.load_tokenizer(tiny_folder)
    assert loaded.pad_token_id == tokenizer.pad_token_id and loaded.padding_side == "left"
    fails(capsys, "--stop_token 'ab': ", models.stop_token_ids, tokenizer, tiny_folder, "ab")
    assert models.stop_token_ids(tokenizer, tiny_folder, "a") == tokenizer.encode("a")
    assert models.stop_token_ids(tokenizer, tiny_folder, "eos") == [1]
    GenerationConfig(eos_token_id=[0, 1, 7]).save_pretrained(tmp_path)
    assert models.stop_token_ids(tokenizer, str(tmp_path), "eos") == [1, 0, 7]  # a text ends with the tokenizer's own
