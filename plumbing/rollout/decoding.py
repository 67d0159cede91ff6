"""What the decode loop of a script (`generate`) calls: the cache, with keys and values of a response's
tokens so far, how the next token attends to it, and how that token is drawn.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, Cache
from transformers.cache_utils import DynamicLayer
from transformers.generation import logits_process
from transformers.integrations.sdpa_attention import sdpa_attention_forward

# A layer that grows gets memory for these further tokens, and for an eighth of those that it holds:
# much room makes attention slower in a small cache, and little room copies a large one often.
ROOM = 16
BLOCK = 256  # tokens of the vocabulary that `invert_distribution` sums at once


class RoomyLayer(DynamicLayer):
    """A layer of transformers' cache whose memory has room for further tokens, in the format of the
    matrix products.

    Its base class copies all keys and values at every token. Under autocast it also keeps float32
    keys, which rotary embeddings make, and attention casts all of them at every token.
    """

    def __init__(self, layer: DynamicLayer):
        """Take over what a layer of the base class holds."""
        super().__init__()
        self.lazy_initialization(layer.keys, layer.values)
        self.memory = [matmul_format(layer.keys), matmul_format(layer.values)]
        self.keys, self.values = self.memory

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any):
        """Append the keys and values (n, heads, tokens, size) of further tokens; return all."""
        begin = self.get_seq_length()
        end = begin + key_states.shape[2]
        if end > self.memory[0].shape[2]:
            room = end - begin + ROOM + begin // 8
            self.memory = [pad(x, (0, 0, 0, room)) for x in (self.keys, self.values)]
        for memory, states in zip(self.memory, (key_states, value_states)):
            memory[:, :, begin:end] = states
        self.keys, self.values = (x[:, :, :end] for x in self.memory)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select rows; the next token makes room again."""
        super().reorder_cache(beam_idx)
        self.memory = [self.keys, self.values]


def matmul_format(x: Tensor) -> Tensor:
    """Return a tensor in the format to which autocast casts it for a matrix product."""
    device = x.device.type
    if x.dtype == torch.float32 and torch.is_autocast_enabled(device):
        return x.to(torch.get_autocast_dtype(device))
    return x


def expand_cache(cache: Cache, prompts: Tensor) -> None:
    """Make the cache of the prompts that of their responses, in place: row i becomes that of prompt
    prompts[i].

    Layers of full attention get room for the responses; those of other types (sliding windows,
    recurrent states) stay what they are.
    """
    cache.layers = [
        RoomyLayer(x) if type(x) is DynamicLayer and x.is_initialized else x for x in cache.layers
    ]
    cache.reorder_cache(prompts)


def attend_by_group(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return what transformers' attention "sdpa" does; where each row has one new token, without
    copies of the cache.

    With that token, the queries of the heads that share a key (grouped-query attention) are like
    those of several tokens that see the same ones, so the key is not copied for each of these heads.
    """
    n, heads, length, size = query.shape
    per_head = attention_mask is not None and attention_mask.shape[1] > 1
    if length > 1 or heads == key.shape[1] or per_head or options.get("position_bias") is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **options
        )
    groups = query.reshape(n, key.shape[1], -1, size)
    output = scaled_dot_product_attention(
        groups, key, value, attention_mask, dropout, scale=scaling
    )
    return output.reshape(n, 1, heads, -1), None


AttentionInterface.register("sdpa", attend_by_group)


def invert_distribution(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first token of each row up to which the weights sum to more than a share `uniforms`
    of all: (n, 1).

    Sums are float64, as a float32 sum over 150,000 tokens would distort the rare ones: first those
    of blocks of tokens, then those of the tokens of one block, for the sake of speed.

    Args:
        weights: (n, V), not negative; 0 for a token that is never drawn. uniforms: (n, 1) float64 in
            [0, 1).
    """
    blocks = pad(weights, (0, -weights.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    ends = blocks.sum(-1, dtype=torch.float64).cumsum(-1)  # (n, V / BLOCK)
    goal = uniforms * ends[:, -1:]
    # NaN weights would give an index past the end, here and below.
    block = torch.searchsorted(ends, goal, right=True).clamp_(max=ends.shape[1] - 1)
    begin = pad(ends, (1, 0)).gather(1, block)
    inside = blocks[torch.arange(len(blocks), device=blocks.device), block[:, 0]].cumsum(
        -1, dtype=torch.float64
    )
    # This sum of the block may differ from the one above by rounding.
    goal = torch.minimum(goal - begin, inside[:, -1:].nextafter(torch.zeros_like(goal)))
    token = block * BLOCK + torch.searchsorted(inside, goal, right=True)
    return token.clamp_(max=weights.shape[1] - 1)


def logits_processors(
    args: Any, width: int, stop_ids: list[int], sample: bool, device: torch.device
) -> list[Callable]:
    """Return transformers' functions (sequences, scores) -> scores that change the next token's
    logits, in order.
    """
    processors: list[Callable] = []
    if args.repetition_penalty != 1:
        processors.append(logits_process.RepetitionPenaltyLogitsProcessor(args.repetition_penalty))
    if args.min_response_length > 0:
        shortest = args.min_response_length
        processors.append(
            logits_process.MinNewTokensLengthLogitsProcessor(width, shortest, stop_ids, device)
        )
    if sample:
        processors.append(logits_process.TemperatureLogitsWarper(args.temperature))
        if args.top_p < 1:
            processors.append(logits_process.TopPLogitsWarper(args.top_p))
    return processors
