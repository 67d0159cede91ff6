"""Ulysses sequence parallelism: neighbouring ranks share each sequence (DeepSpeed Ulysses, arXiv:2309.14509).

Each rank computes one slice of the positions. Attention exchanges slices for heads: there each rank computes some of
the heads at all positions. transformers has this only for its own Trainer and DeepSpeed. Imports
plumbing.models.experts (whether a model needs whole sequences).
"""

import math

import torch
from torch.distributed._functional_collectives import all_to_all_single
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from plumbing.models.experts import asks_for_balance
from utils import fail


def enable_sequence_parallel(model: torch.nn.Module, group) -> None:
    """Let the ranks of a process group share the sequences of a model; end the run if they cannot.

    The functions of models.py that take positions then go by `model.sequence_parallel`.
    """
    config, size = model.config.get_text_config(), group.size()
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type")  # two types depend on the full length
    supported = model._supports_attention_backend and model.supports_context_parallel
    if not supported or rope in ("dynamic", "longrope") or config._attn_implementation != "sdpa":
        fail(f"--sequence_parallel {size}: takes a model of full causal attention, unlike {type(model).__name__}")
    if config.num_attention_heads % size:
        fail(f"--sequence_parallel {size}: has to divide the {config.num_attention_heads} heads of attention")
    if asks_for_balance(config):
        fail(f"--sequence_parallel {size}: not with routers' balance loss (output_router_logits in the configuration)")
    model.sequence_parallel = SequenceParallel(group)
    model.set_attn_implementation("ulysses")


class SequenceParallel:
    """The slice of the positions that this rank computes of the sequences of its group."""

    def __init__(self, group):
        self.group = group

    def local_positions(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Return this rank's slice of the positions of tensors (N, L), padded to the same length on each rank."""
        length = math.ceil(tensors[0].shape[1] / self.group.size())
        padding, start = length * self.group.size() - tensors[0].shape[1], length * self.group.rank()
        return [torch.nn.functional.pad(x, (0, padding))[:, start : start + length] for x in tensors]

    def last_hidden_states(self, model: torch.nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states (N, l, H) at this rank's positions, from the tokens (N, l) there."""
        start = input_ids.shape[1] * self.group.rank()
        position_ids = torch.arange(start, start + input_ids.shape[1], device=input_ids.device)[None]
        # transformers hands what it does not know on to `ulysses_attention`.
        inputs = {"input_ids": input_ids, "position_ids": position_ids, "sequence_parallel_group": self.group}
        return model.base_model(**inputs, use_cache=False).last_hidden_state

    def gather_positions(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the values at all set positions of a mask (N, L), from those that each rank has at its own.

        Every rank of the group gets all of them, row by row. Their gradients are summed over the ranks.
        """
        (local_mask,) = self.local_positions(mask)
        grid = torch.zeros_like(local_mask, dtype=values.dtype).masked_scatter(local_mask, values)
        full_grid = all_to_all(grid.repeat(1, self.group.size()), 1, 1, self.group)  # the same chunk to every rank
        return full_grid[:, : mask.shape[1]][mask]


def all_to_all(x: torch.Tensor, split_dim: int, cat_dim: int, group) -> torch.Tensor:
    """Split a tensor along one dimension, a chunk for each rank, and concatenate what comes back along another."""
    chunks = torch.stack(x.chunk(group.size(), split_dim))
    return torch.cat(all_to_all_single(chunks, None, None, group).unbind(), cat_dim)


def ulysses_attention(module, query, key, value, attention_mask, sequence_parallel_group=None, **options):
    """Compute transformers' sdpa attention, (N, heads, L, D) to (N, L, heads, D).

    With a group, L are the positions of this rank. Generation passes none, and computes all positions.
    """
    group = sequence_parallel_group
    if group is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    query, key = query.to(value.dtype), key.to(value.dtype)  # in autocast, rotated ones are float32
    copies = group.size() // math.gcd(group.size(), key.shape[1])  # above 1 where there are fewer keys than ranks
    key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
    query, key, value = (all_to_all(x, 1, 2, group) for x in (query, key, value))  # (N, heads / size, L * size, D)
    grouped = query.shape[1] != key.shape[1]
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=options.get("scaling"), enable_gqa=grouped
    )
    return all_to_all(output, 2, 1, group).transpose(1, 2).contiguous(), None


AttentionInterface.register("ulysses", ulysses_attention)

AttentionMaskInterface.register("ulysses", sdpa_mask)
