"""Which rollout engine samples (--rollout_backend), and the rollouts of later steps while one
trains.

`extras.vllm.sampling.VllmSampling` is the interface of an engine. vLLM's modules are imported if the flag
asks for them.
"""

import atexit
import concurrent.futures
import dataclasses
import importlib.util
from typing import TYPE_CHECKING, Any, Callable, Sequence

import pebble
import torch

from plumbing.data.rows import Row
from plumbing.models.forward import check_decodes
from plumbing.models.loading import Precision
from plumbing.rollout.batch import Experience, Sampler
from utils import Interrupted, UserError, World

if TYPE_CHECKING:  # imported where a flag asks for them, or by the script
    from extras.vllm.sampling import VllmSampling
    from plumbing.run.run import Run


def rollout_engine(
    args: Any,
    model: torch.nn.Module,
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
    engine: "VllmSampling | None" = None
    if backend == "hf":
        for flag in ("async_steps", "agent"):
            if value := getattr(args, flag):
                raise UserError(f"--{flag} {value}: requires --rollout_backend vllm or server")
        check_decodes(f"--model {args.model}", model, "--rollout_backend vllm")
    elif outputs[1:]:
        raise UserError(
            f"--rollout_backend {backend}: vLLM does not return {', '.join(outputs[1:])} (ROLLOUT_OUTPUTS); use hf"
        )
    if backend == "vllm":
        from extras.vllm.engine import Engine

        engine = Engine(args, world, precision.compute_dtype)
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


class Rollouts:
    """The scored rollouts of a run's steps. With --async_steps K the rollout of step s + K begins
    when step s trains, in a thread of its own.

    The prompts of a step are fixed before its rollout: all ranks agree on them, nothing is dropped,
    no response is preferred for being short, and no token is sampled by a policy that has trained
    more than K steps less than the one that learns from it. With K = 1 weights wait for the
    rollout: steps 1 and 2 train on data of policy 1 and step k on data of policy k - 1, as with the
    two queues of size one of open-instruct, after Cleanba (arXiv:2310.00036). From 2 on a rollout
    goes on with the new weights, as in PipelineRL (arXiv:2509.19128).
    """

    def __init__(self, run: "Run", sampler: Sampler, prompts: Sequence[Row], collect: Callable):
        """Give the engine the weights of the model.

        Args:
            run: which has started.
            collect: makes the rollout of a step, an Experience, from a sampler, the prompts, the
                number of the step and what the rollout before has left (`Experience.state`); raises
                Interrupted once `run.interrupt.requested` is set.
        """
        self.run = run
        self.sampler = sampler
        self.prompts = prompts
        self.collect = collect
        self.async_steps = sampler.args.async_steps
        sampler.reward_sources.state = run.state
        self.step = run.state["step"]  # the last one that has begun to train
        self.ahead: dict[int, concurrent.futures.Future] = {}  # rollouts, by step
        # Those under way at once meet the other ranks in groups of their own.
        self.samplers = [
            dataclasses.replace(sampler, world=run.world.rollout_world(1))
            for _ in range(self.async_steps)
        ]
        atexit.register(self._leave)
        self.sync()

    def take(self, step: int) -> Experience:
        """Return the rollout of a step. If it was interrupted, or a reward source gave no score,
        save and exit.
        """
        try:
            if step in self.ahead:
                experience = self.ahead[step].result()
                del self.ahead[step]
            else:
                experience = self.collect(self.sampler, self.prompts, step, self.run.state)
        except Interrupted:
            self.run.save_and_exit()
        if experience.unscored:
            self.run.fail(
                f"--reward: no response of step {step} got a score from {experience.unscored}"
            )
        self.step = step
        for later in range(step + 1, min(step + self.async_steps, self.run.total_steps) + 1):
            if later not in self.ahead:
                skipped = (later - step - 1) * self.sampler.args.rollout_batch_size
                state = {**experience.state, "position": experience.state["position"] + skipped}
                self.ahead[later] = self._collect_ahead(later, state)
        if self.sampler.engine is not None:
            self.sampler.engine.sleep()
        return experience

    # A daemon: at exit, it may be in a collective with a rank that has ended.
    @pebble.concurrent.thread
    def _collect_ahead(self, step: int, state: dict) -> Experience:
        if self.run.world.device.type == "cuda":
            torch.cuda.set_device(self.run.world.device)  # the current device is set per thread
        return self.collect(self.samplers[step % self.async_steps], self.prompts, step, state)

    def sync(self) -> None:
        """Give the engine the weights of the model, with --async_steps 1 once nothing samples any
        more; all ranks call it.
        """
        if self.async_steps == 1:
            concurrent.futures.wait(self.ahead.values())
        if self.sampler.engine is not None:
            on_gpu = self.run.world.device.type == "cuda"
            if on_gpu:  # the engine reads the weights in another stream than the optimizer's
                torch.cuda.synchronize()
            self.sampler.engine.sync(self.sampler.model, self.step)
            if on_gpu:  # before the optimizer writes the next ones
                torch.cuda.synchronize()

    def _leave(self) -> None:
        """Let the engine return before the interpreter ends around it, which may crash; wait for 10
        seconds at most.
        """
        if self.ahead:
            self.run.interrupt.requested = True
            concurrent.futures.wait(self.ahead.values(), timeout=10)
