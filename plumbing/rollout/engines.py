"""Which rollout engine samples (--rollout_backend), and the rollout of the next step while this one
trains.

`vllm_engine.VllmSampling` is the interface of an engine. vLLM's modules are imported if the flag
asks for them.
"""

import atexit
import concurrent.futures
import importlib.util
from typing import Callable

import pebble
import torch

from plumbing.models.loading import Precision, check_decodes
from plumbing.models.sharding import unsharded
from utils import World, fail


def rollout_engine(
    args, model: torch.nn.Module, world: World, precision: Precision, outputs: tuple[str, ...] = ()
):
    """Return the engine of --rollout_backend, or None if the model itself samples; print its name.

    Args:
        model: that trains. world: of the rollout. precision: of the trainer.
        outputs: names of what the script's `generate` stores of a token, log-probabilities first.
    """
    backend = backend_of("rollout_backend", args)
    engine = None
    if backend == "hf":
        if args.async_steps:
            fail(f"--async_steps {args.async_steps}: requires --rollout_backend vllm or server")
        with unsharded(model):
            check_decodes(f"--model {args.model}", model, precision, "--rollout_backend vllm")
    elif outputs[1:]:
        fail(
            f"--rollout_backend {backend}: vLLM does not return {', '.join(outputs[1:])} (ROLLOUT_OUTPUTS); use hf"
        )
    if backend == "vllm":
        from plumbing.rollout.vllm_engine import Engine

        engine = Engine(args, world, precision.compute_dtype)
    if backend == "server":
        from plumbing.rollout.vllm_servers import Servers

        engine = Servers(args, world, precision.compute_dtype)
    if world.main:
        print(f"rollout: {engine.about if engine else 'transformers'}", flush=True)
    return engine


def backend_of(flag: str, args) -> str:
    """Return what a flag says that samples, and for auto what it is here; exit with code 2 if vLLM
    cannot.
    """
    backend = getattr(args, flag)
    reason = obstacle(args)
    if backend == "auto":
        return "vllm" if torch.cuda.is_available() and not reason else "hf"
    if backend != "hf" and reason:
        fail(f"--{flag} {backend}: {reason}")
    return backend


def obstacle(args) -> str:
    """Return why vLLM cannot sample here or with these flags; "" if it can."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed (pip install vllm==0.32.0)"
    if args.precision == "float64":
        return "vLLM does not compute with --precision float64"
    if args.temperature > 2:
        return f"--temperature {args.temperature}: vLLM requires at most 2"
    return ""


def load_conversations(args, tokenizer, stop_ids: list[int]):
    """Return the Conversations of --tools and --environment, or None without them."""
    if not (args.tools or args.environment):
        return None
    from plumbing.turns.conversations import Conversations

    return Conversations(args, tokenizer, stop_ids)


class Prefetch:
    """Makes the next step's rollout in another thread while this step trains.

    So steps 1 and 2 train on data of policy 1 and step k on data of policy k - 1, as with the two
    queues of size one of open-instruct, after Cleanba (arXiv:2310.00036).
    """

    def __init__(self, make: Callable, interrupt):
        """`make` makes a rollout and returns early, with any result, once `interrupt.requested` is
        set.
        """
        self.make = make
        self.interrupt = interrupt
        self.future: concurrent.futures.Future | None = None
        atexit.register(self._leave)

    def start(self, *job) -> None:
        """Begin make(*job) in a thread."""
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        # a daemon: at exit, it may be in a collective with a rank that has ended
        @pebble.concurrent.thread
        def work():
            if device is not None:
                torch.cuda.set_device(device)  # the current device is set per thread
            return self.make(*job)

        self.future = work()

    def wait(self) -> None:
        """Wait for the rollout that was started, if one was."""
        if self.future is not None:
            self.future.exception()

    def take(self, *job):
        """Return the rollout that was started, or else make(*job) now; raise what it raises."""
        if self.future is None:
            return self.make(*job)
        result = self.future.result()
        self.future = None
        return result

    def _leave(self) -> None:
        """Let the engine return before the interpreter ends around it, which may crash; wait for 10
        seconds at most.
        """
        if self.future is not None:
            self.interrupt.requested = True
            concurrent.futures.wait([self.future], timeout=10)
