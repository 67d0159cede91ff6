"""The choice of the rollout engine, and rollouts that are made ahead."""

import atexit
import contextlib
import importlib.util
import queue
import threading
from typing import Callable

import torch

from utils import Interrupt, World, fail, set_num_threads, warn


def rollout_backend(args) -> str:
    """What --rollout_backend stands for: "hf", "vllm" or "server"."""
    if args.rollout_backend != "auto":
        return args.rollout_backend
    useful = torch.cuda.is_available() and args.precision != "float64" and args.temperature <= 2
    return "vllm" if useful and importlib.util.find_spec("vllm") else "hf"


def rollout_engine(args, world: World, half: torch.dtype | None):
    """The engine of --rollout_backend, None for transformers' generate; says which it is.

    Args:
        world: that of the rollout. half: what the trainer's matrix products are computed in, None: float32.
    """
    backend = rollout_backend(args)
    if backend == "vllm" and importlib.util.find_spec("vllm") is None:
        fail("--rollout_backend vllm: vLLM is not installed (pip install vllm==0.32.0; on a CPU see scripts/setup.sh)")
    if backend == "hf" and args.async_steps:
        fail(f"--async_steps {args.async_steps}: takes --rollout_backend vllm or server")
    engine = None
    if backend != "hf":
        from plumbing import vllm_engine

        engine = {"vllm": vllm_engine.Engine, "server": vllm_engine.Servers}[backend](args, world, half)
    if world.main:
        why = " (vLLM, on a GPU, is not installed or not for these flags)" if args.rollout_backend == "auto" else ""
        print(f"rollout: {engine.about if engine is not None else f'transformers{why}'}", flush=True)
    return engine


class Ahead:
    """Makes the next step's rollout in a thread, with queues of size one, as open-instruct does (arXiv:2410.18252)."""

    def __init__(self, make: Callable, interrupt: Interrupt):
        self.make, self.interrupt = make, interrupt
        self.jobs, self.results = queue.Queue(1), queue.Queue(1)
        self.device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self.threads = torch.get_num_threads()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()
        atexit.register(self._close)

    def _work(self) -> None:
        set_num_threads(self.threads)  # both belong to a thread: a new one has the default, and GPU 0
        if self.device is not None:
            torch.cuda.set_device(self.device)
        while (job := self.jobs.get()) is not None:
            try:
                self.results.put(self.make(*job))
            except BaseException as error:  # for whoever waits for the result
                self.results.put(error)

    def start(self, *job) -> None:
        self.jobs.put(job)

    def result(self):
        """What `make` returned for the oldest job; raises what it raised."""
        result = self.results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def _close(self) -> None:
        """Where the run ends in an error: leave the engine before the interpreter is taken down around it."""
        self.interrupt.requested = True
        with contextlib.suppress(queue.Full):
            self.jobs.put_nowait(None)
        self.thread.join(timeout=10)


AGREEMENT = 0.01  # mean difference of probabilities from which on the rollout is not that of the trained policy


def watch_agreement(metrics: dict[str, float]) -> None:
    """Warn if what sampled and the trainer disagree about the probabilities of the tokens, given the same weights."""
    difference = metrics["rollout/prob_diff_mean"]
    if difference > AGREEMENT and metrics["rollout/staleness"] == 0:
        warn(
            f"step {metrics['step']}: rollout and trainer differ by {difference:.3f} in a token's mean probability; "
            "try --precision float32, --rollout_backend hf to see whose fault it is, or --rollout_correction truncate"
        )


Prefetch = Ahead
