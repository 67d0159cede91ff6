"""Print what a run needs of each GPU's memory, before it starts, from its models' configurations.

    python scripts/memory.py --gpus 8 --model Qwen/Qwen2.5-7B
    python scripts/memory.py --algorithm ppo --gpus 16 --model Qwen/Qwen2.5-7B --shard fsdp --gradient_checkpointing

All other flags are those of the script that --algorithm names, here taken as on GPUs where vLLM is installed. How it is
estimated: plumbing/models/memory.py.
"""

import importlib
import os
import sys
from dataclasses import dataclass, replace

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from plumbing import command_line, flags
from plumbing.models import memory
from plumbing.models.sharding import Sharding
from utils import ROOT, fail


@dataclass
class Args:
    algorithm: str = "grpo"
    """Script of the run, or the path of a fork."""
    gpus: flags.PositiveInt = 1
    """GPUs that train."""
    gpu_gb: flags.PositiveFloat = 80.0
    """Memory of each, GB."""


def read_args(words: list[str] | None = None) -> tuple[Args, object, list[memory.Model]]:
    """Return the flags of this command, those of the script, and the models that it holds with them."""
    own, words = command_line.parse_ungrouped(Args, words, return_unknown_args=True, description=__doc__)
    folder, name = os.path.split(os.path.join(ROOT, own.algorithm.removesuffix(".py")))
    sys.path.append(folder)
    there = name.isidentifier() and os.path.isfile(os.path.join(folder, f"{name}.py"))
    script = importlib.import_module(name) if there else None
    if not hasattr(script, "held_models"):
        fail(f"--algorithm {own.algorithm}: there is no such script")
    args = command_line.parse(script.Args, words, beside=(Args,))
    for name in ("sequence_parallel", "shard_group_size"):
        size = getattr(args, name) or own.gpus
        if own.gpus % size:
            fail(f"--{name} {size}: has to divide --gpus {own.gpus}")
    flags.check_training_args(args)
    return own, args, memory.read_models(script.held_models(args), args.lora_rank)


def settle(own: Args, args, models: list[memory.Model]) -> tuple[object, memory.Devices]:
    """Return the script's flags with what a run makes of those that are "auto" or 0, and the GPUs."""
    if args.precision == "auto":
        args = replace(args, precision="bf16")
    if getattr(args, "rollout_backend", "") == "auto":
        args = replace(args, rollout_backend="vllm")
    if args.shard == "auto":
        states = sum(memory.state_bytes(models, memory.BYTES[args.precision][0]).values())
        needed = own.gpus > 1 and states > Sharding.AUTO_SHARE * own.gpu_gb * 1e9
        args = replace(args, shard="fsdp" if needed else "none")
    devices = memory.Devices(own.gpus, own.gpu_gb * 1e9, args.shard == "fsdp")
    return memory.choose_tokens(args, models, devices), devices


def main(words: list[str] | None = None) -> None:
    own, args, models = read_args(words)
    args, devices = settle(own, args, models)
    parts = memory.estimate(args, models, devices)
    tokens = memory.describe_tokens(args, parts)
    where = f"{own.algorithm} on {own.gpus} GPU{'s' * (own.gpus > 1)}, --shard {args.shard}, {tokens}"
    print(f"{args.model}: {models[0].parameters:,} parameters, {where}; GB on each:")
    for name, size in parts.items():
        if size:
            print(f"  {name:16}{size / 1e9:9.3g}")
    if args.cpu_offload:
        states = sum(memory.state_bytes(models, memory.BYTES[args.precision][0]).values())
        print(f"  and {states / 1e9:.3g} GB in the memory of all machines together")
    reserve = f"{own.gpu_gb:g} GB, of which {memory.RESERVE:.0%} are left for what is not counted"
    if devices.fits(parts):
        print(f"fits into {reserve}")
    else:
        print(f"does not fit into {reserve}\ntry {memory.ADVICE}")


if __name__ == "__main__":
    main()
