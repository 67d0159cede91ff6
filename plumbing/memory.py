"""What a run needs of each GPU's memory, before it starts, and which flags make it fit.

    python scripts/memory.py --model Qwen/Qwen2.5-7B --gpus 8
    python scripts/memory.py --algorithm ppo --model Qwen/Qwen2.5-7B --gpus 16 --shard fsdp --gradient_checkpointing

Of the model it reads the configuration alone. `estimate` is arithmetic on it; what its parts hold was read from the
code of this repository, transformers and torch, and tests/test_memory.py compares it with tensors counted on a CPU. No
GPU has confirmed it: the CUDA context, NCCL and fragmentation are only allowed for, by RESERVE. GB are 1e9 bytes.
"""

import itertools
import math
import os
from dataclasses import dataclass, replace
from typing import Literal

import torch
from transformers import AutoModelForCausalLM

from plumbing.engines import rollout_backend
from plumbing.models import load_config
from plumbing.rewards import is_reward_model, reward_names
from plumbing.sharding import Sharding
from utils import World, fail, first_line, parameter_count, warn

RESERVE = 0.1  # of a GPU's memory, for what is not counted
STATES = ("weights", "gradients", "optimizer", "critic", "frozen")  # what a run holds all the time
CHUNKS = 512, 4096  # least and most response tokens whose logits exist at once, if they are not given
TOKENS, ROOM = 16_384, 0.8  # of a micro-batch, if they are not given, and what share of a GPU training may then take
BYTES = {  # of a weight, and of a number in a matrix product
    "float32": (4, 4), "float64": (8, 8), "bf16": (4, 2), "fp16": (4, 2), "pure_bf16": (2, 2),
}  # fmt: skip


@dataclass
class Args:
    model: str = "Qwen/Qwen2.5-0.5B-Instruct"
    """Model to train: folder or hub name, of which only the configuration is read."""
    algorithm: Literal["grpo", "rloo", "ppo", "reward_model"] = "grpo"
    """Script of the run: ppo has a critic as large as the model, reward_model neither rollouts nor reference."""
    reward_model: str = ""
    """Reward model that the run loads (folder or hub name)."""
    gpus: int = 1
    """GPUs that train."""
    gpu_gb: float = 80.0
    """Memory of each, GB."""
    shard: Literal["auto", "none", "fsdp"] = "auto"
    """none: each GPU holds everything (DDP); fsdp: weights, gradients and Adam are spread over the GPUs; auto: fsdp if
    they would take over 60 % of one of several GPUs."""
    shard_group_size: int = 0
    """GPUs that share one sharded copy; 0 for all."""
    cpu_offload: bool = False
    """With --shard fsdp: weights, gradients and Adam live in the machine's own memory."""
    precision: Literal["float32", "float64", "bf16", "fp16", "pure_bf16"] = "bf16"
    """bf16 and fp16 keep float32 weights (autocast); pure_bf16 has no float32 copy."""
    lora_rank: int = 0
    """Train adapters of this rank on all linear layers; 0: all weights."""
    kl_coef: float = 0.001
    """Weight of the KL; 0: no reference model."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    sequence_parallel: int = 1
    """Neighbouring GPUs that share each sequence in training."""
    micro_batch_tokens: int = 0
    """Tokens, padding included, of a forward pass on one device; 0: 16,384, or fewer where that takes over 80 % of a
    GPU."""
    logits_chunk_tokens: int = 0
    """Response tokens whose logits exist at once; 0: 512, or up to 4,096 where that still fits into 80 % of a GPU."""
    max_prompt_length: int = 512
    """Most tokens of a prompt."""
    max_response_length: int = 1024
    """Most tokens of a response."""
    rollout_backend: Literal["auto", "hf", "vllm", "server"] = "auto"
    """What samples; auto is vllm."""
    kv_cache_gb: float = 0.0
    """GB of vLLM's cache; 0: a quarter of the GPU."""
    vllm_tensor_parallel: int = 1
    """Neighbouring GPUs that share one vLLM engine."""
    async_steps: Literal[0, 1] = 0
    """1: vLLM samples while the model trains, so it cannot give its memory back."""
    generation_batch_size: int = 512
    """Responses that one device generates at once with hf."""


def shape(config) -> tuple[int, int, int, int, int, int, int]:
    """hidden, layers, heads * head_dim, kv_heads * head_dim, intermediate (of a token's experts), vocabulary, heads."""
    config = config.get_text_config()
    heads, hidden = config.num_attention_heads, config.hidden_size
    size = getattr(config, "head_dim", None) or hidden // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden
    inner = max(inner) if isinstance(inner, (list, tuple)) else inner  # Gemma 3n has one for each layer
    inner = getattr(config, "moe_intermediate_size", inner) * (getattr(config, "num_experts_per_tok", None) or 1)
    return hidden, config.num_hidden_layers, heads * size, kv_heads * size, inner, config.vocab_size, heads


def block_activations(config, precision: str) -> int:
    """Bytes that one block keeps of a token for the backward pass (transformers' Llama and Qwen2 blocks, SDPA).

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


def estimate(
    config, parameters: int, *, trained: int | None = None, critic: int = 0, critic_trained: int | None = None,
    frozen: int = 0, ranks: int = 1, shard: str = "none", cpu_offload: bool = False, precision: str = "bf16",
    gradient_checkpointing: bool = False,
    micro_batch_tokens: int = 16_384, logits_chunk_tokens: int = 512, max_prompt_length: int = 512,
    max_response_length: int = 1024, backend: str = "none", generation_batch_size: int = 512, kv_cache: float = 0.0,
    tensor_parallel: int = 1, overlap: bool = False, gpu_memory: float = 0.0, sequence_parallel: int = 1,
) -> dict[str, float]:  # fmt: skip
    """Bytes of each part on one GPU, and the most at one time while sampling, while training, and in all ("peak").

    Args:
        config: of the model, as transformers has it. parameters: of the model, tied ones once.
        trained: how many of them train, adapters included; default: all. critic, critic_trained: the same of PPO's
            critic. frozen: parameters of the reference and reward models together.
        logits_chunk_tokens: 0 for a model without logits (a reward model).
        backend: "hf", "vllm" (in this process), or "none" for sampling elsewhere. kv_cache: bytes of vLLM's.
        overlap: the engine keeps its memory while the model trains. gpu_memory: bytes of the GPU.

    The parts, with w the bytes of a weight (4, pure_bf16 2) and c those in a matrix product (bf16 2):
        weights: w a parameter. gradients: w a trained one (DDP's buckets are the gradients). optimizer: 2w a trained
        one, Adam's two means in the weights' type. critic: w a parameter, w + 2w a trained one. frozen: w a parameter.
        All of them over the number of ranks with fsdp (gradients that collect whole: Sharding); on the CPU with
        cpu_offload.
        copies: autocast makes one of each matrix for c bytes and keeps it to the end of the forward pass, and without
        checkpointing the graph keeps it to the backward pass; with fsdp, what is gathered at once: embeddings and head
        in w, with autocast's copy of the head, and two blocks in c (one computes, the next one arrives).
        activations: tokens * (layers * `block_activations` + the last norm); with checkpointing tokens * layers *
        hidden * w and one block's, which are there only when the copies have gone.
        logits: of a chunk 4 times in float32 (logits, softmax or its gradient, two of the products between) and once in
        c; the gradient of the head; the last hidden states of all tokens once more.
        temporaries: gradients inside of a block's MLP, or that of the largest matrix in c and w, whichever is more.
        sampler (hf): keys (float32 in autocast, after the rotation) and values of all rows at full length, the prompts'
        way through one MLP, and 28 bytes a row and vocabulary entry: logits, log-probabilities, float64 distribution.
        engine (vllm): c a parameter, over tensor_parallel, and the cache.
    """
    hidden, layers, q, kv, inner, vocabulary, _ = shape(config)
    weight, compute = BYTES[precision]
    trained = parameters if trained is None else trained
    share = 0.0 if cpu_offload else 1 / ranks if shard == "fsdp" else 1.0
    longest = math.ceil((max_prompt_length + max_response_length) / sequence_parallel)
    tokens, length = max(micro_batch_tokens, longest), max_prompt_length
    tied = getattr(config, "tie_word_embeddings", False)
    embeddings = vocabulary * hidden * (1 if tied else 2)
    block = (parameters - embeddings) / layers
    each = block_activations(config, precision)
    parts = {
        "weights": weight * parameters * share,
        "gradients": weight * trained * share,
        "optimizer": 2 * weight * trained * share,
        "critic": weight * (critic + 3 * (critic if critic_trained is None else critic_trained)) * share,
        "frozen": weight * frozen * share,
    }
    if shard == "fsdp":
        head = vocabulary * hidden * compute if compute < weight else 0  # autocast's copy of it
        copies = embeddings * weight + 2 * block * compute + head
        backward_copies = copies + embeddings * weight  # and their whole gradient
        if trained * max(4, weight) <= Sharding.GRADIENT_SHARE * gpu_memory:
            parts["gradients"] = trained * max(4, weight)
    elif compute < weight:
        copies = (parameters - (0 if tied else vocabulary * hidden)) * compute
        backward_copies = (block + vocabulary * hidden) * compute if gradient_checkpointing else copies
    else:
        copies = backward_copies = 0
    resident = sum(parts.values())
    last = tokens * (hidden * (max(4, weight) + weight) + 4)  # the last norm
    kept = tokens * layers * (hidden * weight if gradient_checkpointing else each)
    recomputed = tokens * each if gradient_checkpointing else 0
    chunk = min(tokens, logits_chunk_tokens) * vocabulary
    logits = chunk * (4 * max(4, weight) + (compute if compute < 4 else 0))
    logits += (tokens * hidden * weight + vocabulary * hidden * compute) if chunk else 0
    largest = max(vocabulary * hidden, inner * hidden) * (compute + weight if compute < weight else weight)
    temporaries = max(largest, tokens * (2 * inner + hidden) * compute)
    forward = copies + kept + last + logits
    backward = backward_copies + kept + max(last + logits, recomputed + temporaries)
    sampler = engine = 0.0
    if backend == "hf":
        rows, keys = generation_batch_size, max(4, compute) if compute < weight else weight
        cache = rows * (length + max_response_length) * layers * kv * (keys + compute)
        sampler = cache + max(rows * vocabulary * 28, rows * length * (3 * inner * compute + 3 * hidden * weight))
    elif backend == "vllm":
        engine = parameters * compute / tensor_parallel + kv_cache
    sampling = resident + sampler + engine
    training = resident + max(forward, backward) + (engine if overlap else 0)
    return {
        **parts,
        "copies": copies,
        "activations": kept + max(last, recomputed),
        "logits": logits,
        "temporaries": temporaries,
        "sampler": sampler,
        "engine": engine,
        "while sampling": sampling,
        "while training": training,
        "peak": max(sampling, training),
    }


def lora_parameters(model: torch.nn.Module, rank: int) -> int:
    """Parameters of adapters of a rank on all linear layers but the head: rank * (inputs + outputs) each."""
    head = model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    return sum(rank * (m.in_features + m.out_features) for m in linear)


def on_meta(flag: str, name: str) -> torch.nn.Module:
    """The model without its weights; ends with one line where there is no configuration."""
    config = load_config(flag, name)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (ValueError, AttributeError, KeyError) as error:
        fail(f"{flag} {name}: not a causal language model ({first_line(error)})")


def plan(args: Args, model: torch.nn.Module, reward: int = 0) -> dict[str, float]:
    """`estimate` of a run with these flags; `reward`: parameters of its reward model."""
    count, config = parameter_count(model), model.config
    scalar = count - (0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size)  # a head of 1 output
    samples = args.algorithm != "reward_model"
    adapters = lora_parameters(model, args.lora_rank) if args.lora_rank else 0
    reference = count if samples and args.kl_coef and not args.lora_rank else 0  # else the model without its adapters
    size = (count if samples else scalar) + adapters
    critic = scalar + adapters if args.algorithm == "ppo" else 0
    backend = {"auto": "vllm", "server": "none"}.get(args.rollout_backend, args.rollout_backend)
    return estimate(
        config, size, trained=adapters or size, critic=critic, critic_trained=adapters if args.lora_rank else critic,
        frozen=reference + (reward if samples else 0), ranks=args.shard_group_size or args.gpus,
        shard=args.shard, cpu_offload=args.cpu_offload,
        precision=args.precision, gradient_checkpointing=args.gradient_checkpointing,
        micro_batch_tokens=args.micro_batch_tokens, logits_chunk_tokens=args.logits_chunk_tokens if samples else 0,
        max_prompt_length=args.max_prompt_length, max_response_length=args.max_response_length,
        backend=backend if samples else "none", generation_batch_size=args.generation_batch_size,
        kv_cache=(args.kv_cache_gb or args.gpu_gb / 4) * 1e9, tensor_parallel=args.vllm_tensor_parallel,
        overlap=args.async_steps > 0, gpu_memory=args.gpu_gb * 1e9, sequence_parallel=args.sequence_parallel,
    )  # fmt: skip


def settle(args: Args, model: torch.nn.Module, reward: int = 0) -> Args:
    """The flags with what a run makes of --shard auto, --micro_batch_tokens 0 and --logits_chunk_tokens 0.

    The tokens are 16,384, halved while training takes over ROOM of a GPU's memory and a GPU's part of the longest
    sequence is shorter; the chunk is doubled while training takes less.
    """
    gpu = args.gpu_gb * 1e9
    training = lambda args: plan(args, model, reward)["while training"]
    chunk, args = args.logits_chunk_tokens, replace(args, logits_chunk_tokens=args.logits_chunk_tokens or CHUNKS[0])
    if args.shard == "auto":
        whole = plan(replace(args, shard="none"), model, reward)
        states = sum(whole[name] for name in STATES)
        args = replace(args, shard="fsdp" if args.gpus > 1 and states > Sharding.WHOLE_SHARE * gpu else "none")
    if not args.micro_batch_tokens:
        args = replace(args, micro_batch_tokens=TOKENS)
        longest = (args.max_prompt_length + args.max_response_length) / args.sequence_parallel
        while args.micro_batch_tokens // 2 >= longest and training(args) > ROOM * gpu:
            args = replace(args, micro_batch_tokens=args.micro_batch_tokens // 2)
    while not chunk and args.logits_chunk_tokens < CHUNKS[1]:
        larger = replace(args, logits_chunk_tokens=2 * args.logits_chunk_tokens)
        if training(larger) > ROOM * gpu:
            break
        args = larger
    return args


def fits(parts: dict[str, float], args: Args) -> bool:
    return parts["peak"] <= (1 - RESERVE) * args.gpu_gb * 1e9


def suggestions(args: Args, model: torch.nn.Module, reward: int = 0) -> list[tuple[dict, float]]:
    """Flags that make a run fit, [(changes, peak)], what costs the least first; none contains another.

    The price of each is a rough order: what costs time before what changes the result.
    """
    longest = (args.max_prompt_length + args.max_response_length) / args.sequence_parallel
    halves = [args.micro_batch_tokens // 2**i for i in range(1, 20)]
    choices = {  # flag: [(value, price)]
        "micro_batch_tokens": [(n, 0.2 * i) for i, n in enumerate(halves, 1) if n >= longest],
        "gradient_checkpointing": [(True, 1)] if not args.gradient_checkpointing else [],
        "shard": [("fsdp", 1)] if args.shard == "none" and args.gpus > 1 else [],
        "kv_cache_gb": [(args.gpu_gb // 20, 0.5)] if (args.kv_cache_gb or args.gpu_gb) > args.gpu_gb // 20 else [],
        "generation_batch_size": [(n, 0.5 * i) for i, n in enumerate((128, 32), 1) if n < args.generation_batch_size],
        "cpu_offload": [(True, 4)] if not args.cpu_offload else [],
        "lora_rank": [(32, 6)] if not args.lora_rank else [],
        "precision": [("pure_bf16", 8)] if args.precision != "pure_bf16" else [],
    }
    if args.rollout_backend == "hf":
        choices["kv_cache_gb"] = []
    else:
        choices["generation_batch_size"] = []
    found = []
    options = [[(name, None, 0.0), *((name, *choice) for choice in values)] for name, values in choices.items()]
    for picked in sorted(itertools.product(*options), key=lambda picked: sum(price for _, _, price in picked)):
        changes = {name: value for name, value, _ in picked if value is not None}
        changed = replace(args, **changes)
        if changed.cpu_offload and changed.shard != "fsdp" or any(set(known) <= set(changes) for known, _ in found):
            continue
        parts = plan(changed, model, reward)
        if fits(parts, args):
            found.append((changes, parts["peak"]))
    return found


def as_flags(changes: dict) -> str:
    """The changes as words of a command line."""
    text = lambda x: f"{x:g}" if isinstance(x, float) else str(x)
    return " ".join(f"--{name}" if value is True else f"--{name} {text(value)}" for name, value in changes.items())


def plan_memory(args, script: str, world: World, sharding: Sharding) -> None:
    """Set --micro_batch_tokens and --logits_chunk_tokens, where they are 0, by what scripts/memory.py expects the run
    to need of each device, from the configurations of its models, and say what that is."""
    gpu = world.device.type == "cuda"
    values = {name: x for name, x in vars(args).items() if name in Args.__annotations__}
    values |= {"algorithm": os.path.basename(script).removesuffix(".py"), "gpus": world.size, "reward_model": ""}
    values |= {"shard": "fsdp" if sharding.on else "none", "gpu_gb": sharding.memory / 1e9 if gpu else 4.0}
    if args.precision == "auto":
        values["precision"] = "bf16" if gpu else "float32"
    if hasattr(args, "max_length"):  # both sides of a pair are in one micro-batch
        values |= {"max_prompt_length": args.max_length, "max_response_length": args.max_length}
    if hasattr(args, "rollout_backend"):
        values["rollout_backend"] = rollout_backend(args)
    about, model = Args(**values), on_meta("--model", args.model)
    sources = reward_names(args) if hasattr(args, "reward") else ()
    reward = sum(parameter_count(on_meta("--reward", name)) for name in filter(is_reward_model, sources))
    about = settle(about, model, reward) if gpu else about
    for name, on_cpu in {"micro_batch_tokens": TOKENS, "logits_chunk_tokens": CHUNKS[0]}.items():
        if getattr(args, name, None) == 0:
            chosen = min(world.all_gather([getattr(about, name) if gpu else on_cpu]))
            setattr(args, name, chosen)
            setattr(about, name, chosen)
    if not world.main:
        return
    parts = plan(about, model, reward)
    named = [f"{name} {size / 1e9:.3g}" for name, size in parts.items() if size and " " not in name and name != "peak"]
    tokens = f"{about.micro_batch_tokens:,} tokens at once"
    tokens += f" and logits of {about.logits_chunk_tokens:,}" if parts["logits"] else ""
    print(
        f"memory of each device with {tokens}, estimated: {parts['peak'] / 1e9:.3g} GB ({', '.join(named)})", flush=True
    )
    if gpu and not fits(parts, about):
        better = [as_flags(changes) for changes, _ in suggestions(about, model, reward)[:2]]
        warn(f"the GPU has {about.gpu_gb:.3g} GB: the run may not fit; try {' or '.join(better) or 'more GPUs'}")


def needed_memory(args, stored: torch.dtype) -> int:
    """Bytes of whole models: weight, gradient and two numbers of Adam's for each parameter that trains, the weight of
    the others."""
    adapter = getattr(args, "lora_rank", 0) > 0  # so small that it does not count
    trained = [("--model", args.model)]
    trained += [("--value_model", args.value_model or args.model)] if hasattr(args, "value_model") else []
    trained, kept = ([], trained) if adapter else (trained, [])
    if getattr(args, "kl_coef", 0) and (args.ref_model or not adapter):
        kept.append(("--ref_model", args.ref_model or args.model))
    sources = reward_names(args) if hasattr(args, "reward") else ()
    kept += [("--reward", name) for name in sources if is_reward_model(name)]

    def count(flag: str, name: str) -> int:
        with torch.device("meta"):
            return parameter_count(AutoModelForCausalLM.from_config(load_config(flag, name)))

    return stored.itemsize * (4 * sum(count(*each) for each in trained) + sum(count(*each) for each in kept))


def main(args: Args) -> None:
    positive = ("gpus", "gpu_gb", "micro_batch_tokens", "logits_chunk_tokens", "max_prompt_length", "kv_cache_gb")
    positive += ("sequence_parallel",)
    for name in (*positive, "max_response_length", "vllm_tensor_parallel", "generation_batch_size", "lora_rank"):
        least = name not in ("kv_cache_gb", "lora_rank", "micro_batch_tokens", "logits_chunk_tokens")
        if not math.isfinite(getattr(args, name)) or getattr(args, name) < least * 1e-9:
            fail(f"--{name} {getattr(args, name)}: has to be {'above 0' if least else '0 or more'}")
    for name in ("sequence_parallel", "shard_group_size"):
        size = getattr(args, name) or args.gpus
        if size < 1 or args.gpus % size:
            fail(f"--{name} {size}: has to divide --gpus {args.gpus}")
    if args.cpu_offload and args.shard != "fsdp":
        fail("--cpu_offload: takes --shard fsdp")
    model = on_meta("--model", args.model)
    reward = parameter_count(on_meta("--reward_model", args.reward_model)) if args.reward_model else 0
    args = settle(args, model, reward)
    parts = plan(args, model, reward)
    where = f"{args.algorithm} on {args.gpus} GPU{'s' * (args.gpus > 1)}, --shard {args.shard}"
    where += f", {args.micro_batch_tokens:,} tokens and logits of {args.logits_chunk_tokens:,} at once"
    print(f"{args.model}: {parameter_count(model):,} parameters, {where}; GB on each:")
    for name, size in parts.items():
        if size:
            print(f"  {name:16}{size / 1e9:9.3g}")
    if args.cpu_offload:
        held = plan(replace(args, cpu_offload=False, gpus=1), model, reward)
        states = sum(held[name] for name in STATES)
        print(f"  and {states / 1e9:.3g} GB in the memory of all machines together")
    room = f"{args.gpu_gb:g} GB, of which {RESERVE:.0%} are left for what is not counted"
    if fits(parts, args):
        print(f"fits into {room}")
        return
    print(f"does not fit into {room}")
    found = suggestions(args, model, reward)
    for changes, peak in found[:4]:
        print(f"  {peak / 1e9:6.1f} GB with {as_flags(changes)}")
    if not found:
        print("  and no flags known here make it fit: it takes more GPUs, a smaller model or shorter sequences")
