"""How a causal language model computes: its hidden states, what follows its head, recomputation and
torch.compile; and whether it can train and sample in this way.

Below that, what the decode loop of a script (`generate`) calls: the cache, with keys and values of a
response's tokens so far, how the next token attends to it, and how that token is drawn.
"""

import functools
import math
from typing import Any, Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, Cache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.generation import logits_process
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_layers import GradientCheckpointingLayer

from utils import UserError, as_user_error

# The decode loop needs a cache that left-padded rows share, and that can drop finished rows. These
# families have no such cache.
NO_DECODE_LOOP = ("mamba", "minimax", "recurrent_gemma", "openai-gpt")
# Entries of configurations that scale the logits: the power of the factor.
LOGIT_FACTORS = {
    "logit_scale": 1,  # Cohere
    "lm_head_multiplier": 1,  # Falcon-H1
    "logits_scaling": -1,  # Granite, MiniCPM
    "logits_mup_width_multiplier": -1,  # Inkling
}
# A layer of the decode loop's cache that grows gets memory for these further tokens, and for an eighth
# of those that it holds: much room makes attention slower in a small cache, and little room copies a
# large one often.
ROOM = 16
BLOCK = 256  # tokens of the vocabulary that `invert_distribution` sums at once


def last_hidden_states(model: PreTrainedModel, input_ids: Tensor, shared: int = 0) -> Tensor:
    """Return the last hidden states of token ids: (N, L) -> (N, L, H).

    `shared`: of --share_prompts, the number of tokens with which all rows begin; 0 for whole rows.
    """
    if shared:
        from extras.shared_prompts import hidden_states_behind_prompt

        return hidden_states_behind_prompt(model, input_ids, shared)
    return body(model)(input_ids=input_ids, use_cache=False).last_hidden_state


def body(model: PreTrainedModel) -> nn.Module:
    """Return a language model without its head. (Llama 4's decoder includes the head.)"""
    decoder = model.get_decoder()
    return getattr(decoder, "model", decoder)


def head_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Return the logits (..., V) of last hidden states (..., H), in float32 or better.

    They are the output of the model's head, scaled or capped (Gemma) as its configuration says.
    """
    logits = model.get_output_embeddings()(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    config = model.config.get_text_config()
    for name, power in LOGIT_FACTORS.items():
        factor = getattr(config, name, 1.0)
        if factor not in (None, 1.0):
            logits = logits * factor**power
    softcap = getattr(config, "final_logit_softcapping", None)
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def recomputed(forward: Callable, *args: Any, **options: Any) -> Any:
    """Return `forward(*args, **options)`. Only its inputs are kept for the backward pass, which
    computes it again.
    """
    if not torch.is_grad_enabled():
        return forward(*args, **options)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the decoder blocks of a model. transformers marks them by a class of their own."""
    return [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]


def checkpoint_blocks(model: nn.Module) -> None:
    """Recompute the decoder blocks of a model in the backward pass (--gradient_checkpointing); raise
    a UserError if the model has no such blocks.

    transformers recomputes in training mode only. No model here is ever in that mode, as some
    families then compute something else: phi-3.5-moe draws its experts at random.
    """
    blocks = blocks_of(model)
    if not blocks:
        raise UserError(
            f"--gradient_checkpointing: {type(model).__name__} does not support it; use --no-gradient_checkpointing"
        )
    for block in blocks:
        block.forward = functools.partial(recomputed, block.forward)


def compile_parts(module: nn.Module) -> None:
    """Compile, in place, a module's decoder blocks and a policy's `statistics` (--compile).

    A block's `forward` is compiled, not the block: FSDP's and DDP's hooks stay outside of the
    graph, gradient checkpointing is inside, and parameters keep their names. All blocks share their
    graphs: one with and one without gradient, each again for a batch of one row.
    """
    # DDP's optimizer of graphs would split a block's graph, and refuses recomputation in it.
    torch._dynamo.config.optimize_ddp = False
    # The blocks of all models share the limit.
    compiled = functools.partial(torch.compile, dynamic=True, recompile_limit=64)
    for block in blocks_of(module):
        block.forward = compiled(block.forward)
    if hasattr(module, "statistics"):
        module.statistics = compiled(module.statistics)  # type: ignore[assignment]


def caps_scores(config: PretrainedConfig) -> bool:
    """Return whether a model caps the scores of its attention, as Gemma 2 does. transformers' sdpa
    leaves the cap out.
    """
    return bool(getattr(config.get_text_config(), "attn_logit_softcapping", None))


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Set the kernel of a model's attention to --attention `name`; raise a UserError if the model
    does not support it.
    """
    # transformers would log this and go on.
    if not model._can_set_attn_implementation() or name == "sdpa" and caps_scores(model.config):
        raise UserError(f"--attention {name}: {type(model).__name__} does not support it")
    with as_user_error(f"--attention {name}"):
        model.set_attn_implementation(name)


@torch.no_grad()
def check_head(flag: str, model: PreTrainedModel) -> None:
    """Raise a UserError if `head_logits`, which train, are not the logits that the model samples
    from.

    Args:
        flag: the flag that names the model, with its value.
    """
    if model.device.type == "meta":  # only rank 0 has the weights
        return
    count = min(32, model.config.get_text_config().vocab_size)
    ids = torch.arange(count, device=model.device)[None]
    with torch.enable_grad():  # as it trains; below it computes as it samples
        trained = head_logits(model, last_hidden_states(model, ids))
    sampled = model(input_ids=ids, use_cache=False).logits.to(trained.dtype)
    # A logit of -inf masks a token. NaN stays in, as it is not equal to -inf.
    largest = sampled[sampled != -math.inf].abs().max().item()
    if not math.isfinite(largest):
        raise UserError(
            f"{flag}: its logits are not finite, so its weights or --precision are to blame"
        )
    if not torch.allclose(trained, sampled, rtol=1e-3, atol=1e-3 * largest):
        raise UserError(
            f"{flag}: {type(model).__name__} trains by other logits: what changes them is not in `head_logits`"
        )


def check_decodes(flag: str, model: PreTrainedModel, instead: str) -> None:
    """Raise a UserError for a model of a family of NO_DECODE_LOOP.

    Args:
        flag: the flag that names the model, with its value. instead: a flag that samples otherwise.
    """
    if model.config.model_type in NO_DECODE_LOOP:
        raise UserError(
            f"{flag}: {type(model).__name__} cannot sample by the decode loop; use {instead}"
        )


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


# In place of transformers' own, for each model of this process.
AttentionInterface.register("sdpa", attend_by_group)


def invert_distribution(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first token of each row up to which the weights sum to more than a share `uniforms`
    of all, or the token of the largest weight for -1: (n, 1).

    Sums are float64, as a float32 sum over 150,000 tokens would distort the rare ones: first those
    of blocks of tokens, then those of the tokens of one block, for the sake of speed.

    Args:
        weights: (n, V), not negative; 0 for a token that is never drawn. uniforms: (n, 1) float64 in
            [0, 1), or -1.
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
    token = token.clamp_(max=weights.shape[1] - 1)
    if (uniforms < 0).any():  # most rollouts spare this pass over the weights
        token = token.where(uniforms >= 0, weights.argmax(-1, keepdim=True))
    return token


def logits_processors(
    args: Any, width: int, stop_ids: list[int], device: torch.device
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
    if args.temperature:  # 0, of scripts/evaluate.py: all responses are greedy
        processors.append(logits_process.TemperatureLogitsWarper(args.temperature))
        if args.top_p < 1:
            processors.append(logits_process.TopPLogitsWarper(args.top_p))
    return processors
