"""--share_prompts: the responses to a prompt train behind one copy of it, as `generate` samples them.

The prompt's keys and values of each layer stand before those of each response. They keep their
gradient, so logits and gradients are those of whole rows, rounding aside.
"""

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

import utils
from plumbing.models.forward import body, last_hidden_states
from utils import UserError, as_user_error

if TYPE_CHECKING:
    from plumbing.rollout.batch import Batch

# Share of the tokens of a micro-batch. A micro-batch in which sharing saves less has whole rows.
LEAST_SAVED = 0.2


class PromptLayer(DynamicLayer):
    """A layer of a cache that keeps the keys and values of a prompt: (1, heads, P, size)."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any):
        self.keys, self.values = key_states, value_states
        self.is_initialized = True
        return key_states, value_states


class ResponseLayer(DynamicLayer):
    """A layer that puts the keys and values of a prompt before those of its responses. It does not keep
    the latter: a decoder block that is recomputed finds the layer as it was.
    """

    def __init__(self, prompt: PromptLayer):
        super().__init__()
        self.keys, self.values, self.is_initialized = prompt.keys, prompt.values, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any):
        pairs = (self.keys, key_states), (self.values, value_states)
        return [torch.cat([x.expand(len(y), -1, -1, -1), y], 2) for x, y in pairs]


def hidden_states_behind_prompt(model: PreTrainedModel, input_ids: Tensor, shared: int) -> Tensor:
    """Return the last hidden states of token ids whose rows all begin with the same `shared` tokens:
    (N, L) -> (N, L, H). These tokens are forwarded once.
    """
    decoder = body(model)
    layers = Cache(layer_class_to_replicate=PromptLayer)
    prompt = decoder(input_ids=input_ids[:1, :shared], past_key_values=layers, use_cache=True)
    layers = Cache(layers=[ResponseLayer(x) for x in layers.layers])
    rest = decoder(input_ids=input_ids[:, shared:], past_key_values=layers, use_cache=True)
    # The prompt's last hidden state predicts the first token of each response.
    of_prompt = prompt.last_hidden_state.expand(len(input_ids), -1, -1)
    return torch.cat([of_prompt, rest.last_hidden_state], 1)


@torch.no_grad()
def check_shared_prompts(model: PreTrainedModel) -> None:
    """Raise a UserError if the hidden states of a model are others behind a shared prompt."""
    if model.device.type == "meta":  # only rank 0 has the weights
        return
    ids = torch.arange(12, device=model.device).repeat(2, 2)  # (2, 24)
    ids[1, 12:] += 1
    with as_user_error("--share_prompts"):
        expected = last_hidden_states(model, ids)
        found = hidden_states_behind_prompt(model, ids, 12)
    if not torch.allclose(found, expected, rtol=1e-2, atol=1e-2 * expected.abs().max().item()):
        raise UserError(
            f"--share_prompts: {type(model).__name__} does not support it: its layers keep more of a "
            "prompt than keys and values"
        )


def cut_by_prompt(
    batch: "Batch", chosen: list[int], budget: int, world: utils.World
) -> list[tuple[list[int], tuple]]:
    """Cut responses into this rank's micro-batches, see `Batch.cut`: those whose prompt it saves
    tokens to share into micro-batches of one prompt, and the others as without --share_prompts.
    """
    whole: list[int] = []
    parts: list[list[int]] = []
    lengths: list[int] = []  # tokens of each part
    groups = defaultdict(list)
    for i in chosen:
        sample = batch.samples[i]
        # Of an agent's contexts only the first one begins with the prompt.
        groups[i if len(sample.starts) else tuple(sample.row["query"])].append(i)
    for responses in groups.values():
        responses.sort(key=lambda i: -len(batch.samples[i].response))
        while responses:
            prompt = prompt_length(batch, responses)
            longest = len(batch.samples[responses[0]].response)
            # A response without a token, as of an environment that has failed, has nothing to share.
            count = max(1, (budget - prompt) // longest) if longest else 1
            part, responses = responses[:count], responses[count:]
            if prompt * (len(part) - 1) < LEAST_SAVED * len(part) * (prompt + longest):
                whole += part
            else:
                parts.append(part)
                lengths.append(prompt + len(part) * longest)
    padded = batch.padded_lengths
    cuts = utils.micro_batches([padded[i] for i in whole], budget, world)
    micro_batches = [([whole[i] for i in cut], False) for cut in cuts]
    # With a budget of one token, each part is a micro-batch.
    cuts = utils.micro_batches(lengths, 1, world)
    micro_batches += [([i for part in cut for i in parts[part]], True) for cut in cuts]
    return [
        (
            rows,
            (*batch.collate(rows), prompt_length(batch, rows)) if shared else batch.collate(rows),
        )
        for rows, shared in micro_batches
    ]


def prompt_length(batch: "Batch", rows: list[int]) -> int:
    """Return the tokens of the prompt that responses have in common. A rank without responses has to
    make as many passes as the others: its row of padding begins with a prompt of one token.
    """
    return len(batch.samples[rows[0]].row["query"]) if rows else 1
