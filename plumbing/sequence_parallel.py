"""Ulysses: sequences that several ranks share (DeepSpeed Ulysses, arXiv:2309.14509)."""

import math

import torch
from torch.distributed._functional_collectives import all_to_all_single
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from utils import fail


def share_sequences(model: torch.nn.Module, team) -> None:
    """Let the ranks of a team share the sequences of a model in all that follows, or end the run if they cannot."""
    config, size = model.config.get_text_config(), team.size()
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type")  # two kinds depend on the whole length
    known = model._supports_attention_backend and model.supports_context_parallel
    if not known or rope in ("dynamic", "longrope") or config._attn_implementation != "sdpa":
        fail(f"--sequence_parallel {size}: takes a model of full causal attention, unlike {type(model).__name__}")
    if config.num_attention_heads % size:
        fail(f"--sequence_parallel {size}: has to divide the {config.num_attention_heads} heads of attention")
    model.team = team
    model.set_attn_implementation("shared_sdpa")


def own_positions(model: torch.nn.Module, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """This rank's slice of the positions of tensors (N, L), each of the same length; all of them without a team."""
    team = getattr(model, "team", None)
    if team is None:
        return list(tensors)
    length = math.ceil(tensors[0].shape[1] / team.size())
    padding, start = length * team.size() - tensors[0].shape[1], length * team.rank()
    return [torch.nn.functional.pad(x, (0, padding))[:, start : start + length] for x in tensors]


def last_hidden_states(model: torch.nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    """A language model's last hidden states (N, L, H) at this rank's positions, of which it gets the tokens (N, L)."""
    shared, team = {}, getattr(model, "team", None)
    if team is not None:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device) + input_ids.shape[1] * team.rank()
        shared = {"position_ids": positions[None], "team": team}  # transformers hands `team` on to `attention`
    return model.base_model(input_ids=input_ids, use_cache=False, **shared).last_hidden_state


def from_team(model: torch.nn.Module, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Values of the set entries of a mask (N, L), row by row, from those that each rank has for its own positions.

    Every rank of a team gets them all. The gradient of each is the sum of what the ranks have for it.
    """
    team = getattr(model, "team", None)
    if team is None:
        return values
    (here,) = own_positions(model, mask)
    grid = torch.zeros(here.shape, dtype=values.dtype, device=values.device).masked_scatter(here, values)
    whole_grid = exchange(grid.repeat(1, team.size()), 1, 1, team)  # the same to each
    return whole_grid[:, : mask.shape[1]][mask]


def exchange(x: torch.Tensor, apart: int, together: int, team) -> torch.Tensor:
    """Cut a tensor along one dimension, a part for each rank of a team, and join those that come along another."""
    parts = torch.stack(x.chunk(team.size(), apart))
    return torch.cat(all_to_all_single(parts, None, None, team).unbind(), together)


def attention(module, query, key, value, attention_mask, team=None, **options) -> tuple[torch.Tensor, None]:
    """transformers' sdpa attention, (N, heads, L, D) to (N, L, heads, D); with a team, as not in generation, each rank
    has its own L."""
    if team is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    query, key = query.to(value.dtype), key.to(value.dtype)  # in autocast, rotated ones are float32
    copies = team.size() // math.gcd(team.size(), key.shape[1])  # fewer keys than ranks
    key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
    query, key, value = (exchange(x, 1, 2, team) for x in (query, key, value))  # (N, heads / size, L * size, D)
    grouped = query.shape[1] != key.shape[1]
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=options.get("scaling"), enable_gqa=grouped
    )
    return exchange(output, 2, 1, team).transpose(1, 2).contiguous(), None


AttentionInterface.register("shared_sdpa", attention)

AttentionMaskInterface.register("shared_sdpa", sdpa_mask)
