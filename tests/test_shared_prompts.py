"""--share_prompts: log-probabilities and gradients are those of whole rows."""

from itertools import chain

import numpy as np
import pytest
import torch
from test_policy import EXACT, gradient_of, relative
from tiny_models import CPU, SMALL, WORLD, random_model
from transformers import AutoConfig, AutoModelForCausalLM

import grpo
import utils
from extras import shared_prompts
from plumbing.models.forward import body, checkpoint_blocks
from plumbing.models.loading import precision
from plumbing.models.sharding import Sharding
from plumbing.rollout.batch import Batch, Sample, forward_batch, forward_tokens

# Two prompts that are worth sharing, one that is not, and one whose responses have no token.
QUERIES = [[*range(3, 17)], [*range(9, 18)], [5], [*range(3, 15)]]
SIZE = 4  # responses per prompt


def make_batch() -> Batch:
    rng = np.random.default_rng(0)
    samples = [
        Sample({"query": query}, rng.integers(1, 30, rng.integers(1, 7)), {}, True)
        for query in QUERIES
        for _ in range(SIZE)
    ]
    for sample in samples[3 * SIZE :]:
        sample.response = sample.response[:0]
    return Batch.from_samples(samples, CPU)


def gradient(policy: grpo.Policy, batch: Batch, args: grpo.Args) -> torch.Tensor:
    for inputs, micro, _ in batch.micro_batches([*range(len(batch.samples))], args, WORLD):
        out = forward_tokens(policy, inputs, micro["response_mask"], entropy=True)
        (out["logprobs"] * micro["weights"] + out["entropies"]).sum().backward()
    return gradient_of(policy)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gpt_neox", "gpt2"])
def test_equal_to_whole_rows(family, recomputes):
    """gemma2 has sliding windows, shorter than these prompts."""
    model = random_model(family).double()
    if recomputes:
        checkpoint_blocks(model)
    args = grpo.Args(gradient_checkpointing=recomputes, entropy_coef=0.1, micro_batch_tokens=30)
    policy = grpo.Policy(model, args)
    batch = make_batch()
    torch.manual_seed(0)
    batch.tokens["weights"] = torch.randn(batch.response_mask.shape).double()
    expected = forward_batch(policy, batch, "logprobs", args, WORLD)
    expected_gradient = gradient(policy, batch, args)
    args.share_prompts = True
    passes = []
    body(model).register_forward_pre_hook(
        lambda _, __, options: passes.append(options["input_ids"].shape), with_kwargs=True
    )
    near = EXACT.get(family, 1e-6)
    found = forward_batch(policy, batch, "logprobs", args, WORLD)
    torch.testing.assert_close(found, expected, rtol=0, atol=near)
    assert {(1, 14), (1, 9)} <= set(passes) and sum(map(np.prod, passes)) < sum(batch.lengths)
    assert relative(gradient(policy, batch, args), expected_gradient) < near


@pytest.mark.parametrize("ranks", [1, 3, 7])
def test_cuts(ranks):
    """Each response once, within the budget, and the same passes on every rank."""
    batch = make_batch()
    args = grpo.Args(micro_batch_tokens=30, share_prompts=True)
    cuts = [batch.cut([*range(12)], args, utils.World(rank, ranks, CPU)) for rank in range(ranks)]
    assert sorted(i for cut in cuts for rows, _ in cut for i in rows) == [*range(12)]
    assert len({tuple(len(inputs) for _, inputs in cut) for cut in cuts}) == 1
    count = 0
    for rows, (ids, _, *shared) in chain(*cuts):
        if shared and not rows:  # padding, which has a prompt and a response, too
            assert shared == [1] and ids.shape == (1, 2)
        if shared and rows:
            count += 1
            assert ids.numel() - (len(ids) - 1) * shared[0] <= 30 and len(rows) > 1
            assert {len(batch.samples[i].row["query"]) for i in rows} == set(shared)
    assert count > 2


def test_responses_of_several_contexts_are_alone():
    """Only the first context of an agent begins with the prompt."""
    batch = make_batch()
    for sample in batch.samples[:3]:
        sample.starts = [0]
    args = grpo.Args(micro_batch_tokens=1000, share_prompts=True)
    shared = {
        i for rows, inputs in batch.cut([*range(12)], args, WORLD) for i in rows if inputs[2:]
    }
    assert shared == {4, 5, 6, 7}


def refuse(model) -> str:
    """Prepare a model for training; return why it is refused."""
    args = grpo.Args(share_prompts=True)
    with pytest.raises(utils.UserError, match="^--share_prompts: ") as error:
        Sharding(args, WORLD, precision("float32", CPU)).shard(grpo.Policy(model, args))
    return str(error.value)


def test_models_whose_hidden_states_would_be_others(monkeypatch):
    right = shared_prompts.hidden_states_behind_prompt
    shared_prompts.check_shared_prompts(random_model("qwen2"))
    monkeypatch.setattr(
        shared_prompts, "hidden_states_behind_prompt", lambda *x: right(*x).roll(1, 1)
    )
    assert "keep more of a prompt" in refuse(random_model("qwen2"))


def test_models_that_keep_more_than_keys_and_values():
    """Convolutions see the tokens before."""
    layers = ["conv", "full_attention"]
    config = AutoConfig.for_model(
        "lfm2", **SMALL | {"layer_types": layers, "num_key_value_heads": 1}
    )
    refuse(AutoModelForCausalLM.from_config(config).eval())
