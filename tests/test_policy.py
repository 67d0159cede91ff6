"""Policy against a plain forward pass of the same model on each row alone, and its gradient in any
cut of the batch.
"""

from types import SimpleNamespace

import pytest
import torch
from tiny_models import CPU

import grpo
import utils
from grpo import Policy
from plumbing.rollout.batch import Batch, Sample, forward_tokens

FAMILIES = ["qwen2", "llama", "gemma", "gemma2", "gpt_neox", "gpt2"]
F64 = torch.float64
# In a float64 model the norms of Qwen2, Llama and Gemma still compute in float32, so a last bit of
# float64 can become one of float32. LayerNorm does not: what has to be exact is asked of GPT-NeoX
# and GPT-2.
EXACT = {"gpt_neox": 1e-10, "gpt2": 1e-10}
# (tokens of the query, tokens of the response): the shortest of all, long ones, a batch in which
# all differ
SHAPES = [(3, 5), (1, 1), (9, 2), (2, 8), (6, 6), (4, 1), (1, 7), (5, 3)]
ALL = list(range(len(SHAPES)))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(grpo, "CHUNK_TOKENS", 4)


def policy_of(
    model, temperature: float = 1.0, trains_entropy: bool = True, recomputes: bool = False
) -> Policy:
    """GPT-NeoX's configuration has a dropout of 0.2, which must not be applied."""
    args = dict(
        temperature=temperature,
        entropy_coef=float(trains_entropy),
        gradient_checkpointing=recomputes,
    )
    return Policy(model, SimpleNamespace(**args))


def batch_of(pairs: list[tuple[list[int], list[int]]]) -> Batch:
    """A batch of queries and responses."""
    samples = [
        Sample({"query": q}, r, {"rollout_logprobs": [0.0] * len(r)}, True, scores={})
        for q, r in pairs
    ]
    return Batch.from_samples(samples, CPU)


def random_batch(shapes=SHAPES, vocabulary: int = 32, seed: int = 0) -> Batch:
    """Random token ids, 0 (padding) and 1 (end of sequence) among them anywhere."""
    numbers = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(vocabulary, (n,), generator=numbers).tolist()
    return batch_of([(draw(q), draw(r)) for q, r in shapes])


def pairs_of(batch: Batch) -> list[tuple[list[int], list[int]]]:
    return [(sample.row["query"], sample.response) for sample in batch.samples]


def plain_logprobs(
    model, query: list[int], response: list[int], temperature: float
) -> torch.Tensor:
    """(response tokens, V): log-probabilities at the places of the response's tokens, by the whole
    model.
    """
    logits = model(input_ids=torch.tensor([[*query, *response]])).logits[0]
    # what stands before a token predicts it
    rows = [logits[len(query) + t - 1] for t in range(len(response))]
    return (torch.stack(rows) / temperature).log_softmax(-1)


def relative(result: torch.Tensor, expected: torch.Tensor) -> float:
    return ((result - expected).norm() / expected.norm()).item()


def gradient_of(policy) -> torch.Tensor:
    """All gradients as one vector, which is cleared."""
    parts = [
        (torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in policy.parameters()
    ]
    policy.zero_grad()
    return torch.cat(parts)


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("family", FAMILIES)
def test_statistics_by_a_plain_forward_of_each_row(load, family, temperature):
    """And their gradient in any cut, over more ranks than rows, too. (That of whole losses:
    tests/agreement.)
    """
    batch = random_batch()
    policy = policy_of(load(family, F64), temperature)
    outputs = policy(*batch.collate(ALL), entropy=True)
    assert list(outputs) == ["logprobs", "entropies"]
    plain = [
        (plain_logprobs(policy.model, *pair, temperature), pair[1]) for pair in pairs_of(batch)
    ]
    logprobs = torch.cat([p[range(len(response)), response] for p, response in plain])
    entropies = torch.cat([-(p.exp() * p).sum(1) for p, _ in plain])
    near = EXACT.get(family, 1e-6)
    torch.testing.assert_close(
        outputs, {"logprobs": logprobs, "entropies": entropies}, rtol=0, atol=near
    )

    weights = torch.linspace(-1, 1, len(logprobs), dtype=F64)
    (logprobs * weights + entropies * weights.square()).sum().backward()
    expected = gradient_of(policy)
    fixed = lambda: {"weights": weights}
    batch.tokens |= forward_tokens(fixed, (), batch.response_mask)
    for budget, ranks in ((1, 1), (20, 1), (1000, 3), (20, 12)):
        args = grpo.Args(micro_batch_tokens=budget)
        for rank in range(ranks):
            for inputs, t, _ in batch.micro_batches(ALL, args, utils.World(rank, ranks, CPU)):
                out = forward_tokens(policy, inputs, t["response_mask"], entropy=True)
                (
                    out["logprobs"] * t["weights"] + out["entropies"] * t["weights"].square()
                ).sum().backward()
        assert relative(gradient_of(policy), expected) < near


@pytest.mark.parametrize("recomputes", [False, True])
def test_chunks_bound_the_logits(load, monkeypatch, recomputes):
    """That chunks change no number is in the test above, and of recomputed ones in
    test_invariance.py.
    """
    batch = random_batch()
    policy = policy_of(load("gpt_neox", F64), recomputes=recomputes)
    tokens = int(batch.response_mask.sum())
    rows = []  # how many positions each call of the head computes
    policy.model.get_output_embeddings().register_forward_hook(
        lambda _, x, __: rows.append(x[0].shape[:-1].numel())
    )
    for chunk in (1, 3, tokens, 1000):
        monkeypatch.setattr(grpo, "CHUNK_TOKENS", chunk)
        rows.clear()
        out = policy(*batch.collate(ALL), entropy=True)
        # prompts' logits are never computed
        assert max(rows) == min(chunk, tokens) and sum(rows) == tokens
        sum(out.values()).sum().backward()
        # in the backward pass, too, which computes them anew if they are not kept for it
        assert max(rows) <= chunk
        assert sum(rows) == tokens * (2 if recomputes and chunk < tokens else 1)


@pytest.mark.parametrize("recomputes", [False, True])
def test_an_entropy_that_is_only_logged_cannot_enter_a_loss(load, recomputes):
    """Such a term would train nothing, so it raises; as a weight of another term it is detached."""
    batch = random_batch()
    model = load("gpt_neox", F64)
    inputs = batch.collate(ALL)
    mask = batch.response_mask
    logged, trained = (
        forward_tokens(policy_of(model, 1.0, trains, recomputes), inputs, mask, entropy=True)
        for trains in (False, True)
    )
    assert all(torch.equal(logged[name], trained[name]) for name in ("logprobs", "entropies"))
    (logged["logprobs"] * logged["entropies"].detach()).sum().backward(retain_graph=True)
    with pytest.raises(
        RuntimeError, match="entropies: a loss uses it, and it is computed without gradient"
    ):
        (logged["logprobs"] + logged["entropies"].clamp(max=1)).sum().backward()
