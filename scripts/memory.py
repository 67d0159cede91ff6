"""Print what a run needs of each GPU's memory, before it starts, from its models' configurations.

    python scripts/memory.py --model Qwen/Qwen2.5-7B --gpus 8
    python scripts/memory.py --algorithm ppo --model Qwen/Qwen2.5-7B --gpus 16 --shard fsdp --gradient_checkpointing

Flags that a run has, too, mean the same here. How it is estimated: plumbing/memory.py.
"""

import math
import os
import sys
from dataclasses import dataclass, replace
from typing import Literal

import tyro

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from plumbing import memory
from plumbing.models import ModelNames
from plumbing.sharding import Sharding
from utils import fail


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


def check_args(args: Args) -> None:
    """End with one line for a flag that is out of range."""
    above_zero = ("gpus", "gpu_gb", "max_prompt_length", "max_response_length", "sequence_parallel")
    above_zero += ("vllm_tensor_parallel", "generation_batch_size")
    for name in (*above_zero, "kv_cache_gb", "lora_rank", "micro_batch_tokens", "logits_chunk_tokens"):
        value = getattr(args, name)
        if not math.isfinite(value) or value < 0 or (name in above_zero and value == 0):
            fail(f"--{name} {value}: has to be {'above 0' if name in above_zero else '0 or more'}")
    for name in ("sequence_parallel", "shard_group_size"):
        size = getattr(args, name) or args.gpus
        if size < 1 or args.gpus % size:
            fail(f"--{name} {size}: has to divide --gpus {args.gpus}")
    if args.cpu_offload and args.shard != "fsdp":
        fail("--cpu_offload: takes --shard fsdp")


def models_of(args: Args) -> list[memory.Model]:
    """Return the models that the script of --algorithm holds with these flags."""
    model = ("--model", args.model)
    if args.algorithm == "reward_model":
        return memory.read_models(ModelNames([], [model], []), args.lora_rank)
    frozen = [model] if args.kl_coef and not args.lora_rank else []  # with LoRA, the model without its adapter
    frozen += [("--reward_model", args.reward_model)] if args.reward_model else []
    critic = [model] if args.algorithm == "ppo" else []
    return memory.read_models(ModelNames([model], critic, frozen), args.lora_rank)


def settle(args: Args, models: list[memory.Model]) -> tuple[Args, memory.Devices]:
    """Return the flags with what a run makes of those that are "auto" or 0, and the GPUs."""
    if args.rollout_backend == "auto":
        args = replace(args, rollout_backend="vllm")
    if args.algorithm == "reward_model":
        args = replace(args, rollout_backend="server")  # nothing samples here
    gpu = args.gpu_gb * 1e9
    if args.shard == "auto":
        states = sum(memory.state_bytes(models, memory.BYTES[args.precision][0]).values())
        args = replace(args, shard="fsdp" if args.gpus > 1 and states > Sharding.WHOLE_SHARE * gpu else "none")
    devices = memory.Devices(args.gpus, gpu, args.shard == "fsdp")
    return memory.choose_tokens(args, models, devices), devices


def main(args: Args) -> None:
    check_args(args)
    models = models_of(args)
    args, devices = settle(args, models)
    parts = memory.estimate(args, models, devices)
    where = f"{args.algorithm} on {args.gpus} GPU{'s' * (args.gpus > 1)}, --shard {args.shard}"
    where += f", {args.micro_batch_tokens:,} tokens and logits of {args.logits_chunk_tokens:,} at once"
    size = memory.parameter_count(memory.without_weights("--model", args.model))
    print(f"{args.model}: {size:,} parameters, {where}; GB on each:")
    for name, size in parts.items():
        if size:
            print(f"  {name:16}{size / 1e9:9.3g}")
    if args.cpu_offload:
        states = sum(memory.state_bytes(models, memory.BYTES[args.precision][0]).values())
        print(f"  and {states / 1e9:.3g} GB in the memory of all machines together")
    fits = devices.fits(parts)
    reserve = f"{args.gpu_gb:g} GB, of which {memory.RESERVE:.0%} are left for what is not counted"
    print(f"{'fits' if fits else 'does not fit'} into {reserve}")
    if not fits:
        print(f"try {memory.ADVICE}")


if __name__ == "__main__":
    main(tyro.cli(Args))
