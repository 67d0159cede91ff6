"""The rollouts of a run's steps, with --async_steps those of later steps while one trains."""

import atexit
import dataclasses
import math
import threading
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Callable, Sequence

import torch

from plumbing.data.rows import Row
from plumbing.rollout.sampler import Experience, Sampler
from utils import Interrupted

if TYPE_CHECKING:  # of a later folder
    from plumbing.run.run import Run


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
        args = sampler.args
        if args.save_rollouts or args.rollouts_from:
            from extras.saved_rollouts import FileSampler

            self.collect = lambda sampler, *given: collect(
                FileSampler(**vars(sampler), sampler=sampler, folder=run.folder), *given
            )
        self.async_steps = args.async_steps
        sampler.reward_sources.state = run.state
        self.step = run.state["step"]  # the last one that has begun to train
        self.ahead: dict[int, Future] = {}  # rollouts, by step
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
        if pass_rates := getattr(self.sampler.args, "pass_rates", None):
            self._add_pass_rates(experience, *pass_rates)
        self.step = step
        for later in range(step + 1, min(step + self.async_steps, self.run.total_steps) + 1):
            if later not in self.ahead:
                skipped = (later - step - 1) * self.sampler.args.rollout_batch_size
                state = {**experience.state, "position": experience.state["position"] + skipped}
                self.ahead[later] = self._begin(later, state)
        if self.sampler.engine is not None:
            self.sampler.engine.sleep()
        return experience

    def _add_pass_rates(self, experience: Experience, low: float, high: float) -> None:
        """Add the mean scores of a step's groups to the pass rates of the steps before.

        Steps come here in their order, whichever rollout ends first, so that the rates which a
        later step sees do not depend on time.
        """
        batch = experience.sampled
        size = self.sampler.args.group_size
        scores = batch.verifier_scores(self.sampler.reward_sources.verifiers)
        rates = dict(self.run.state.get("pass_rates", {}))
        for sample, rate in zip(batch.samples[::size], scores.view(-1, size).nanmean(1).tolist()):
            if not math.isnan(rate):
                rates[sample.row["place"]] = rate
        experience.state["pass_rates"] = rates
        below = sum(rate < low for rate in rates.values()) / len(self.prompts)
        above = sum(rate > high for rate in rates.values()) / len(self.prompts)
        seen = len(rates) / len(self.prompts)
        experience.metrics["pass_rates/below"] = below
        experience.metrics["pass_rates/inside"] = seen - below - above
        experience.metrics["pass_rates/above"] = above
        experience.metrics["pass_rates/unseen"] = 1 - seen

    def _begin(self, step: int, state: dict) -> Future:
        """Begin the rollout of a later step in a thread of its own."""
        sampler = self.samplers[step % self.async_steps]
        rollout: Future = Future()

        def work() -> None:
            if self.run.world.device.type == "cuda":
                torch.cuda.set_device(self.run.world.device)  # the current device is set per thread
            try:
                rollout.set_result(self.collect(sampler, self.prompts, step, state))
            except BaseException as error:  # `take` raises it
                rollout.set_exception(error)

        # A daemon: at exit, it may be in a collective with a rank that has ended.
        threading.Thread(target=work, daemon=True).start()
        return rollout

    def sync(self) -> None:
        """Give the engine the weights of the model, with --async_steps 1 once nothing samples any
        more; all ranks call it.
        """
        if self.async_steps == 1:
            wait(self.ahead.values())
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
            wait(self.ahead.values(), timeout=10)
