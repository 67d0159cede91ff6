"""What a run needs of each GPU's memory, estimated before its models are loaded. scripts/memory.py is the command.

`estimate` is arithmetic on the models' configurations. What its parts hold was read from the code of this repository,
transformers and torch, and tests/test_memory.py compares it with tensors counted on a CPU. No GPU has confirmed it:
the CUDA context, NCCL and fragmentation are only allowed for, by RESERVE. GB are 1e9 bytes.

From other modules it takes how models are loaded (models), the limits of sharding (sharding), and the rollout engine's
name (engines).
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig

from plumbing.models.loading import ModelNames, load_config, scalar_config
from plumbing.models.sharding import Sharding
from plumbing.rollout.engines import rollout_backend
from utils import World, fail, first_line, parameter_count, warn

RESERVE = 0.1  # share of a GPU's memory that is left for what is not counted
TRAINING_SHARE = 0.8  # share of a GPU's memory that training may take where the two flags of tokens are 0
MICRO_BATCH_TOKENS = 16_384  # what --micro_batch_tokens 0 becomes, if that fits
LOGITS_CHUNK_TOKENS = 512, 4096  # the least and the most that --logits_chunk_tokens 0 becomes
BYTES = {  # of a weight, and of a number in a matrix product
    "float32": (4, 4), "float64": (8, 8), "bf16": (4, 2), "fp16": (4, 2), "pure_bf16": (2, 2),
}  # fmt: skip
ADVICE = (
    "--gradient_checkpointing, --shard fsdp, a lower --micro_batch_tokens, --kv_cache_gb or --generation_batch_size, "
    "--cpu_offload, --lora_rank 32, shorter sequences, or more GPUs"
)


@dataclass(frozen=True)
class Model:
    """What the estimate needs of one model."""

    config: PretrainedConfig
    parameters: int  # with adapters; tied ones once
    trained: int  # how many of them train; 0: the model is frozen
    logits: bool  # False: a head of one output, as critics and reward models have


@dataclass(frozen=True)
class Devices:
    """What a run has: GPUs, their memory in bytes (infinite on a CPU), and whether --shard fsdp is on."""

    count: int
    memory: float
    sharded: bool

    def fits(self, parts: dict[str, float]) -> bool:
        return parts["peak"] <= (1 - RESERVE) * self.memory


# ---- models: sizes without weights -----------------------------------------------------------------------------------


@functools.cache
def without_weights(flag: str, name: str, scalar: bool = False) -> torch.nn.Module:
    """Return the model on the meta device, with `scalar` under a head of one output. Ends the run where there is no
    configuration of one."""
    config = scalar_config(flag, name)[0] if scalar else load_config(flag, name)
    try:
        with torch.device("meta"):
            return (AutoModelForSequenceClassification if scalar else AutoModelForCausalLM).from_config(config)
    except Exception as error:  # a configuration of any content
        fail(f"{flag} {name}: not a causal language model ({first_line(error)})")


def adapter_parameters(model: torch.nn.Module, rank: int) -> int:
    """Return how many parameters LoRA adapters have, on all linear layers but the head: rank * (inputs + outputs)."""
    heads = model.get_output_embeddings(), getattr(model, "score", None)
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m not in heads]
    return sum(rank * (m.in_features + m.out_features) for m in linear)


def read_models(names: ModelNames, lora_rank: int) -> list[Model]:
    """Return the sizes of all models of a run, those that train first."""
    models = []
    for flag, name, scalar in [*((*pair, False) for pair in names.trained), *((*pair, True) for pair in names.scalar)]:
        model = without_weights(flag, name, scalar)
        size = trained = parameter_count(model)
        if lora_rank:
            adapters = adapter_parameters(model, lora_rank)
            size, trained = size + adapters, adapters + (model.config.hidden_size if scalar else 0)
        models.append(Model(model.config, size, trained, logits=not scalar))
    for flag, name in names.frozen:
        model = without_weights(flag, name, scalar=scalar_config(flag, name)[1])
        models.append(Model(model.config, parameter_count(model), 0, logits=False))
    return models


class Shape(NamedTuple):
    hidden: int
    layers: int
    queries: int  # heads * head_dim
    keys: int  # kv_heads * head_dim
    inner: int  # intermediate size, of a token's experts together
    vocabulary: int
    heads: int


def shape(config: PretrainedConfig) -> Shape:
    """Return the sizes of a language model, under the names that each architecture has for them."""
    config = config.get_text_config()
    heads, hidden = config.num_attention_heads, config.hidden_size
    size = getattr(config, "head_dim", None) or hidden // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden
    inner = max(inner) if isinstance(inner, (list, tuple)) else inner  # Gemma 3n has one for each layer
    inner = getattr(config, "moe_intermediate_size", inner) * (getattr(config, "num_experts_per_tok", None) or 1)
    return Shape(hidden, config.num_hidden_layers, heads * size, kv_heads * size, inner, config.vocab_size, heads)


# ---- the estimate ----------------------------------------------------------------------------------------------------


def state_bytes(models: list[Model], weight: int) -> dict[str, float]:
    """Return the bytes that a run holds all the time if each GPU holds everything; `weight`: bytes of a weight.

    Adam's two means have the weights' type. DDP's buckets are the gradients.
    """
    training = [model for model in models if model.trained]
    trained = sum(model.trained for model in training)
    return {
        "weights": weight * sum(model.parameters for model in training),
        "gradients": weight * trained,
        "optimizer": 2 * weight * trained,
        "frozen": weight * sum(model.parameters for model in models if not model.trained),
    }


def sharded_state_bytes(models: list[Model], args, devices: Devices) -> dict[str, float]:
    """Return `state_bytes` of one GPU with --shard fsdp. A gradient of at most Sharding.GRADIENT_SHARE of the GPU is
    collected whole, in float32 or better."""
    weight = BYTES[args.precision][0]
    share = 0.0 if args.cpu_offload else 1 / (args.shard_group_size or devices.count)
    parts = {name: size * share for name, size in state_bytes(models, weight).items()}
    for model in models:
        if model.parameters * max(4, weight) <= Sharding.GRADIENT_SHARE * devices.memory:
            parts["gradients"] += model.trained * (max(4, weight) - weight * share)
    return parts


def block_activations(config: PretrainedConfig, precision: str) -> int:
    """Return the bytes that one block keeps of a token for the backward pass (transformers' Llama and Qwen2, SDPA).

    Each of the two norms keeps its input and its normalised input. What it returns is kept by the linear layers behind
    it: once, or in autocast a bfloat16 copy for each (q, k, v; gate, up), as autocast caches copies of weights only.
    SDPA keeps q, k, v, its output (also the input of o_proj), and a float32 a head: never (L, L). The MLP keeps gate,
    silu(gate), up, and their product. Norms compute in float32; pure_bf16 keeps that copy of their input, too.
    Qwen3 has norms of q and k as well.
    """
    hidden, _, q, kv, inner, _, heads = shape(config)
    weight, compute = BYTES[precision]
    if compute == weight:
        norms = 2 * hidden * (max(4, weight) + 2 * weight)
    else:
        norms = 2 * hidden * 2 * weight + 5 * hidden * compute
    if config.model_type.startswith("qwen3"):
        norms += (q + kv) * (max(4, compute) + compute)
    return norms + (2 * q + 2 * kv + 4 * inner) * compute + 4 * (heads + 2)


def longest_sequence(args) -> int:
    """Return the most tokens of one row: prompt and response, or both sides of a pair."""
    return 2 * args.max_length if hasattr(args, "max_length") else args.max_prompt_length + args.max_response_length


def embedding_parameters(model: Model) -> tuple[int, int]:
    """Return the parameters of embeddings and of a head over the vocabulary, and those that are only looked up."""
    matrix = shape(model.config).vocabulary * shape(model.config).hidden
    if not model.logits:
        return matrix, matrix
    return (matrix, 0) if getattr(model.config, "tie_word_embeddings", False) else (2 * matrix, matrix)


def training_bytes(args, model: Model, sharded: bool) -> dict[str, float]:
    """Return the bytes that training one model on one micro-batch takes beside the states, by parts and at most.

    With w the bytes of a weight (4, pure_bf16 2) and c those in a matrix product (bf16 2):

    - copies: autocast makes one of each matrix for c bytes and keeps it to the end of the forward pass, and without
      checkpointing the graph keeps it to the backward pass. With fsdp, what is gathered at once: embeddings and head
      in w, with autocast's copy of the head, and two blocks in c (one computes, the next one arrives).
    - activations: tokens * (layers * `block_activations` + the last norm); with checkpointing tokens * layers *
      hidden * w and one block's, which are there only when the copies have gone.
    - logits: the log-probs over the vocabulary that the backward pass needs, of all tokens, or of a chunk if they are
      recomputed, and two products more of a trained entropy and of an exact KL; of a chunk 3 times in float32
      (gradients of log-probs and logits, a product between) and once in c; the gradient of the head; the last hidden
      states of all tokens once more.
    - temporaries: gradients inside of a block's MLP, or that of the largest matrix in c and w, whichever is more.
    """
    hidden, layers, _, _, inner, vocabulary, _ = shape(model.config)
    weight, compute = BYTES[args.precision]
    autocast = compute < weight
    tokens = max(args.micro_batch_tokens, math.ceil(longest_sequence(args) / args.sequence_parallel))
    of_critic = not model.logits and getattr(args, "critic_gradient_checkpointing", False)
    recomputes = args.gradient_checkpointing or of_critic
    embeddings, looked_up = embedding_parameters(model)
    matrix, head = vocabulary * hidden, vocabulary * hidden if model.logits else 0
    block = (model.parameters - embeddings) / layers
    activations = block_activations(model.config, args.precision)

    if sharded:
        copies = embeddings * weight + 2 * block * compute + (head * compute if autocast else 0)
        backward_copies = copies + embeddings * weight  # and their gradient, unsharded
    elif autocast:
        copies = (model.parameters - looked_up) * compute
        backward_copies = (block + head) * compute if recomputes else copies
    else:
        copies = backward_copies = 0
    last_norm = tokens * (hidden * (max(4, weight) + weight) + 4)
    kept = tokens * layers * (hidden * weight if recomputes else activations)
    recomputed = tokens * activations if recomputes else 0
    logits = 0
    if model.logits:
        chunk = min(tokens, args.logits_chunk_tokens)
        times = 1 + 2 * (args.entropy_coef > 0) + 2 * (args.kl_estimator == "full")
        saved = times * (chunk if args.recompute_logits == "yes" else tokens)
        logits = vocabulary * ((saved + 3 * chunk) * max(4, weight) + chunk * (compute if compute < 4 else 0))
        logits += tokens * hidden * weight + head * compute
    largest = max(matrix, inner * hidden) * (compute + weight if autocast else weight)
    temporaries = max(largest, tokens * (2 * inner + hidden) * compute)
    forward = copies + kept + last_norm + logits
    backward = backward_copies + kept + max(last_norm + logits, recomputed + temporaries)
    return {
        "copies": copies,
        "activations": kept + max(last_norm, recomputed),
        "logits": logits,
        "temporaries": temporaries,
        "most": max(forward, backward),
    }


def sampling_bytes(args, policy: Model, devices: Devices) -> dict[str, float]:
    """Return the bytes of what samples on this GPU, beside the states.

    - sampler (hf): autocast's copies of the matrices, or with fsdp all weights, unsharded; keys (float32 in autocast,
      after the rotation) and values of all rows; the most of: 40 bytes a row and vocabulary entry (logits as they are
      and divided, log-probabilities, probabilities; in float64 a copy, the sums, and those of the token before), keys
      and values of one layer once for each head, and, while there are only the prompts, their way through one MLP.
    - engine (vllm): c a parameter, over --vllm_tensor_parallel, and the cache, by default a quarter of the GPU's memory
      (1 GB on a CPU).
    """
    hidden, layers, queries, keys, inner, vocabulary, _ = shape(policy.config)
    weight, compute = BYTES[args.precision]
    parts = {"sampler": 0.0, "engine": 0.0}
    backend = getattr(args, "rollout_backend", "none")
    if backend == "hf":
        rows, pair = args.generation_batch_size, compute + (max(4, compute) if compute < weight else weight)
        length, prompt = longest_sequence(args), args.max_prompt_length
        end = length * layers * keys * pair + max(vocabulary * 40, length * queries * pair)
        begin = prompt * ((layers * keys + queries) * pair + 3 * inner * compute + 3 * hidden * weight)
        embeddings, looked_up = embedding_parameters(policy)
        weights = (policy.parameters - looked_up) * compute if compute < weight else 0
        if devices.sharded:
            weights = (policy.parameters - embeddings) * compute + embeddings * weight
        parts["sampler"] = weights + rows * max(begin, end)
    elif backend == "vllm":
        cache = args.kv_cache_gb * 1e9 or (devices.memory / 4 if math.isfinite(devices.memory) else 1e9)
        parts["engine"] = policy.parameters * compute / args.vllm_tensor_parallel + cache
    return parts


def estimate(args, models: list[Model], devices: Devices) -> dict[str, float]:
    """Return the bytes of each part on one GPU, and the most at one time while sampling, while training, and in all
    ("peak").

    Args:
        args: flags of a run, with nothing left to choose by itself: no "auto", and tokens above 0.
        models: the first is the one that samples. Of those that train, the one whose pass takes most counts.
    """
    if devices.sharded:
        states = sharded_state_bytes(models, args, devices)
    else:
        states = state_bytes(models, BYTES[args.precision][0])
    passes = [training_bytes(args, model, devices.sharded) for model in models if model.trained]
    training = max(passes, key=lambda parts: parts["most"])
    most = training.pop("most")
    sampling = sampling_bytes(args, models[0], devices)
    resident = sum(states.values())
    while_sampling = resident + sum(sampling.values())
    # An engine that samples at the same time cannot give its memory back.
    while_training = resident + most + (sampling["engine"] if getattr(args, "async_steps", 0) else 0)
    totals = {"while sampling": while_sampling, "while training": while_training}
    return {**states, **training, **sampling, **totals, "peak": max(totals.values())}


def describe_tokens(args, parts: dict[str, float]) -> str:
    """Return words for how many tokens and logits are computed at once; parts: an estimate."""
    words = f"{args.micro_batch_tokens:,} tokens at once"
    if parts["logits"]:
        words += f" and logits of {args.logits_chunk_tokens:,}, "
        words += "recomputed" if args.recompute_logits == "yes" else "kept"
    return words


# ---- what a run asks -------------------------------------------------------------------------------------------------


def unsharded_bytes(args, names: ModelNames, stored: torch.dtype) -> float:
    """Return the bytes of all weights, gradients and Adam's state together, for --shard auto; `stored`: the weights'
    type."""
    return sum(state_bytes(read_models(names, args.lora_rank), stored.itemsize).values())


def choose_tokens(args, models: list[Model], devices: Devices):
    """Return the flags with what --micro_batch_tokens 0, --recompute_logits auto and --logits_chunk_tokens 0 become.

    A micro-batch is halved while training takes over TRAINING_SHARE of a GPU and a GPU's part of the longest sequence
    is shorter. Then logits are kept if training still takes less, and the chunk is doubled while it does. On a CPU
    tokens keep the numbers that they start at.
    """
    limit = TRAINING_SHARE * devices.memory
    training = lambda args: estimate(args, models, devices)["while training"]
    free_chunk = hasattr(args, "logits_chunk_tokens") and not args.logits_chunk_tokens
    free_logits = getattr(args, "recompute_logits", None) == "auto"
    if free_chunk:
        args = replace(args, logits_chunk_tokens=LOGITS_CHUNK_TOKENS[0])
    if free_logits:
        args = replace(args, recompute_logits="yes")
    if not args.micro_batch_tokens:
        args = replace(args, micro_batch_tokens=MICRO_BATCH_TOKENS)
        longest = longest_sequence(args) / args.sequence_parallel
        while args.micro_batch_tokens // 2 >= longest and training(args) > limit:
            args = replace(args, micro_batch_tokens=args.micro_batch_tokens // 2)
    if free_logits and not args.gradient_checkpointing:
        kept = replace(args, recompute_logits="no")
        args = kept if training(kept) <= limit else args
    while free_chunk and math.isfinite(limit) and args.logits_chunk_tokens < LOGITS_CHUNK_TOKENS[1]:
        larger = replace(args, logits_chunk_tokens=2 * args.logits_chunk_tokens)
        if training(larger) > limit:
            break
        args = larger
    return args


def plan_run(args, names: ModelNames, world: World, sharding: Sharding) -> None:
    """Set --micro_batch_tokens, --logits_chunk_tokens and --recompute_logits, where they are left open, by what the run
    is expected to need of each device, print that, and warn if it does not fit.

    All ranks take the fewest tokens that they choose, and recompute if one of them does.
    """
    gpu = world.device.type == "cuda"
    models, devices = read_models(names, args.lora_rank), Devices(world.size, sharding.memory, sharding.on)
    precision = ("bf16" if gpu else "float32") if args.precision == "auto" else args.precision
    about = replace(args, precision=precision)
    if hasattr(args, "rollout_backend"):
        about = replace(about, rollout_backend=rollout_backend(args))
    about = choose_tokens(about, models, devices)
    # Of "yes" and "no", "yes" is the larger one.
    for name, choose in (("micro_batch_tokens", min), ("logits_chunk_tokens", min), ("recompute_logits", max)):
        if getattr(args, name, None) in (0, "auto"):
            chosen = choose(world.all_gather([getattr(about, name)]))
            setattr(args, name, chosen)
            setattr(about, name, chosen)
    if not world.main:
        return
    parts = estimate(about, models, devices)
    named = [f"{name} {size / 1e9:.3g}" for name, size in parts.items() if size and " " not in name and name != "peak"]
    peak = f"{parts['peak'] / 1e9:.3g} GB ({', '.join(named)})"
    print(f"memory of each device with {describe_tokens(about, parts)}, estimated: {peak}", flush=True)
    if not devices.fits(parts):
        warn(f"the GPU has {devices.memory / 1e9:.3g} GB: the run may not fit; try {ADVICE}")
