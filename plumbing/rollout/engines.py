"""Which rollout engine samples (--rollout_backend).

`extras.vllm.sampling.RolloutEngine` is the interface of an engine. vLLM's modules are imported if the flag
asks for them.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from plumbing.models.forward import check_decodes
from plumbing.models.loading import Precision
from utils import UserError, World

if TYPE_CHECKING:  # imported where a flag asks for them, or by the script
    from extras.vllm.sampling import RolloutEngine


def rollout_engine(
    args: Any,
    model: PreTrainedModel,
    world: World,
    precision: Precision,
    outputs: tuple[str, ...] = (),
):
    """Return the engine of --rollout_backend, or None if the model itself samples; print its name.

    Args:
        model: that trains. world: of the rollout. precision: of the trainer.
        outputs: names of what the script's `generate` stores of a token, log-probabilities first.
    """
    backend = backend_of("rollout_backend", args)
    engine: "RolloutEngine | None" = None
    if backend == "hf":
        for flag in ("agent",) if args.rollouts_from else ("async_steps", "agent"):
            if value := getattr(args, flag):
                raise UserError(f"--{flag} {value}: requires --rollout_backend vllm or server")
        check_decodes(f"--model {args.model}", model, "--rollout_backend vllm")
    elif outputs[1:]:
        raise UserError(
            f"--rollout_backend {backend}: vLLM does not return {', '.join(outputs[1:])} (ROLLOUT_OUTPUTS); use hf"
        )
    if backend == "vllm":
        from extras.vllm.engine import Engine

        engine = Engine(args, world, precision.compute_dtype, model)
    if backend == "server":
        from extras.vllm.servers import Servers

        engine = Servers(args, world, precision.compute_dtype)
    if world.main:
        print(f"rollout: {engine.about if engine else 'transformers'}", flush=True)
    return engine


def backend_of(flag: str, args: Any) -> str:
    """Return what a flag says that samples, and for auto what it is here; raise a UserError if vLLM
    cannot.
    """
    backend = getattr(args, flag)
    reason = obstacle(args)
    if backend == "auto":
        return "vllm" if torch.cuda.is_available() and not reason else "hf"
    if backend != "hf" and reason:
        raise UserError(f"--{flag} {backend}: {reason}")
    return backend


def obstacle(args: Any) -> str:
    """Return why vLLM cannot sample here or with these flags; "" if it can."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed (pip install vllm==0.32.0)"
    if args.precision == "float64":
        return "vLLM does not compute with --precision float64"
    if args.temperature > 2:
        return f"--temperature {args.temperature}: vLLM requires at most 2"
    return ""
