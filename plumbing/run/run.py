"""A run from its start, or its newest checkpoint, to its end: what happens between the steps of a
training loop.
"""

import math
import time
from typing import Any, Callable, Iterator, NoReturn

from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

import utils
from plumbing.data.cache import LISTS, numbers_of
from plumbing.models import loading, speed
from plumbing.rollout.batch import Batch
from plumbing.run import checkpoints, folder, ranks
from plumbing.run.command import check_rules, set_system_prompt
from plumbing.run.log import RunLog, as_logged, check_track
from plumbing.run.metrics import sample_rows, token_rows


class Run:
    """The life of a run.

    A checkpoint holds the row of metrics.jsonl of its step, and is saved before that row is
    written. So a kill at any instant leaves neither a row without its step nor a step without its
    row.

    Attributes:
        state: what the next step depends on besides weights and optimizers, and what a checkpoint
            saves with them: the step, and the entries that the script adds and reads by
            `state.get(name, default)`.
    """

    def __init__(self, args: Any, script: str, world: utils.World):
        """Check the rules between flags; find the run's folder and the checkpoint to continue from,
        without creating anything.

        Args:
            args: the flags of a script: those of plumbing.cli.RunArgs, and more.
            script: path of the script.
        """
        ranks.begin_phase("load", world)
        if world.size > 1:
            ranks.watch(world)
        check_rules(args)
        set_system_prompt(args)  # of a call from Python; `parse` has set that of a command line
        utils.say(f"Loopwise {utils.VERSION}: loading {args.model}")
        self.args = args
        self.script = script
        self.world = world
        self.interrupt = ranks.Interrupt(world, script)
        self.origin = world.on_main(folder.find_origin, args, script)
        self.folder = self.origin.folder
        self.checkpoint = self.origin.checkpoint
        # None for a script whose steps read pairs and sample nothing.
        self.prompts_per_step = getattr(args, "rollout_batch_size", None)
        if args.track:
            world.on_main(check_track, args.track)

    def start(
        self,
        total_steps: int,
        *,
        tokenizer: PreTrainedTokenizerBase,
        models: dict,
        optimizers: dict[str, utils.Optimizer],
        engine: Any = None,
        evaluate: Callable | None = None,
    ):
        """Load the checkpoint, if there is one, and open the logs.

        Args:
            models: what a checkpoint holds, by the name of its folder; "" is the model that the run
                trains.
            optimizers: those of the models of the same names.
            engine: a RolloutEngine, whose failure ends the run; None where the model samples.
            evaluate: returns metrics and sample rows; None where there is nothing to evaluate on.
        """
        self.evaluate = evaluate
        self.total_steps = total_steps
        self.tokenizer = tokenizer
        self.models = models
        self.optimizers = optimizers
        self.engine = engine
        # metrics: the step's. results, held_out: metrics and samples of the step's evaluation.
        # evaluated: whether that evaluation is done, or not due. `steps` adds whole: whether no
        # weight has changed since the step, and optimizers: their counters.
        self.state: dict[str, Any] = {
            "step": 0,
            "episode": 0,
            "seconds": 0.0,
            "metrics": {},
            "results": {},
            "held_out": [],
            "evaluated": False,
        }
        if self.checkpoint:
            self.state |= checkpoints.load_checkpoint(
                self.checkpoint, tokenizer, models, optimizers
            )
        step = self.state["step"]
        self.world.on_main(
            folder.open_folder, self.origin, self.args, self.script, self.world.size, step
        )
        self.log = RunLog(self.folder, self.origin.run_id, self.args, self.world, total_steps, step)
        dtype = loading.precision(self.args.precision, self.world.device).frozen_dtype
        self.product_flops = speed.product_flops(self.world.device, dtype)
        self.clock = utils.Clock(self.world, self.state["seconds"])
        for optimizer in optimizers.values():
            optimizer.adam.register_step_pre_hook(lambda *_: self.state.update(whole=False))
        ranks.status.rescue = self.rescue

    def check_rows(self, rows: Any, held_out: Any, supervised: Any = None) -> None:
        """Print how long the rows are and how often they are read; warn if they have changed since
        the run was interrupted.

        Args:
            rows: a data set, prompts or pairs, which steps read. supervised: further rows to train
                on.
        """
        named = {"rows to train on": rows, "held-out rows": held_out, "supervised rows": supervised}
        for name, part in named.items():
            lengths = numbers_of(part, *LISTS).tolist() if part else []
            self.log.lengths(self.state["step"], name, lengths)
        size = self.prompts_per_step or self.args.batch_size
        passes = f"{self.total_steps * size / len(rows):.3g} passes over {len(rows):,} rows"
        utils.say(f"{self.total_steps:,} steps of {size:,} rows: {passes}")
        if held_out and self.prompts_per_step:
            utils.say(
                f"evaluation: {len(held_out):,} prompts, greedily and {self.args.eval_samples} times sampled, "
                f"of up to {self.args.max_response_length:,} tokens"
            )
        if self.state["step"] > self.total_steps:
            utils.warn(
                f"--resume: nothing is left to train, as the run has {self.state['step']} steps already"
            )
        before = self.state.get("rows")
        self.state["rows"] = [part._fingerprint for part in (rows, supervised) if part]
        if before not in (None, self.state["rows"]):
            self.state.pop("pass_rates", None)  # by the places of the rows
            utils.warn(
                "--resume: the rows to train on have changed: they may come in another order, and no "
                "prompt has a pass rate"
            )

    def steps(self) -> Iterator[int]:
        """Yield the number of each step that is left; the first step of a run is 1.

        Between two steps: evaluate and save if they are due, log, and leave if a signal has come. An
        interrupted run continues here.
        """
        self.interrupt.can_save = True
        while True:
            step = self.state["step"]
            every = self.args.save_every
            # A checkpoint can be saved until an optimizer changes weights. It holds these counters.
            counters = {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}
            self.state.update(whole=True, optimizers=counters)
            if not self.state["evaluated"]:
                self._evaluate(step)
                if step and every and (self.ended or step % every == 0):
                    self.save()
            self._log_row(step)
            if self.interrupt.agreed():
                self.save_and_exit()
            if self.ended:
                if step < self.total_steps:
                    utils.say(f"--stop_at {self.args.stop_at}: reached after step {step}")
                break
            self.clock.peak_memory_gb = 0.0
            yield step + 1

    @property
    def ended(self) -> bool:
        """Whether no step is left, by --total_episodes or by --stop_at."""
        latest = self.state.get(self.args.keep_best, -math.inf)  # kept by `_evaluate`
        goal = math.inf if self.args.stop_at is None else self.args.stop_at
        return self.state["step"] >= self.total_steps or latest >= goal

    def finish(self) -> None:
        """Save the trained model in final/, and end the run."""
        checkpoints.save_final(
            self.folder, self.world, self.models[""], self.tokenizer, self.args.model
        )
        self.log.close(f"model: {self.folder}/final")

    def _evaluate(self, step: int) -> None:
        """Evaluate if it is due, put the results into `state`, and save the best model so far."""
        results = {}
        held_out = []
        every = self.args.eval_every
        best = self.args.keep_best
        due = every and (step % every == 0 or step >= self.total_steps)
        if self.evaluate and due:
            self.phase("evaluation")
            try:
                metrics, held_out = self.evaluate()
            except utils.Interrupted:
                self.save_and_exit()
            results = as_logged(metrics)
            self.log.table(step, held_out)
        self.state.update(
            results=results, held_out=held_out[: self.args.log_samples], evaluated=True
        )
        if due and best:
            if best not in results:
                self.fail(
                    f"--keep_best {best}: is none of the evaluation's metrics, {', '.join(results)}"
                )
            value = results[best]
            if step and value is not None:
                self.state[best] = value
                # The highest value stands in the folder: after a kill, the state is of an earlier step.
                if value > self.world.on_main(checkpoints.best_value, self.folder, best):
                    self.save(best=True)

    def _log_row(self, step: int) -> None:
        metrics = self.state["metrics"] | self.state["results"] | self.clock.times()
        if metrics:
            counts = {"step": step}
            if self.prompts_per_step:
                counts["episode"] = self.state["episode"]
            self.log.log(counts | metrics)
        self.log.samples(step, self.state["held_out"], "held_out.jsonl")
        if self.state["results"] and step < self.total_steps:  # `RunLog.close` draws at the end
            self.log.draw()

    def phase(self, name: str) -> None:
        """Begin a phase of a step: the progress bar shows it, and time/{name} is its duration.

        `finish_step` reads the time of "training", and `show_ended` the names "rollout" and
        "evaluation".
        """
        self.clock.begin_phase(name)
        self.log.phase(name)

    def show_ended(self, key: tuple, ended: int, total: int) -> None:
        """Show how many responses of a rollout have ended on this rank, if the run waits for this
        rollout, and if it is time to do so.

        Args:
            key: of the rollout, see `plumbing.rollout.sampler.Sampler.rollout`.
        """
        # A key is name, seed and, but for an evaluation, the step.
        steps = {"rollout": (self.state["step"] + 1,), "evaluation": ()}
        if steps.get(self.clock.phase) == key[2:3] and time.monotonic() > self.log.next_show:
            self.log.show(ended, total)

    def log_samples(self, batch: Batch) -> None:
        """Log the first --log_samples responses of a step, which has not ended, and their tokens."""
        step = self.state["step"] + 1
        count = self.args.log_samples
        self.log.samples(step, sample_rows(batch, count))
        if self.args.log_tokens:
            added = batch.gather_added(count, self.world)
            rows = token_rows(batch, count, self.tokenizer, added)
            self.log.samples(step, rows, "tokens.jsonl")

    def finish_step(self, metrics: dict, tokens: int, trained_tokens: int, **state: Any) -> None:
        """End a step.

        Args:
            metrics: of the step; the clock's and an evaluation's are logged with them.
            tokens: number of tokens of the step's sequences, over all ranks.
            trained_tokens: the same, of a sequence once for each update that reads it.
            state: entries of `self.state` for the next step.
        """
        metrics = metrics | self.clock.metrics(tokens)
        flops = 6 * self.models[""].num_parameters() * trained_tokens / self.world.size
        metrics["perf/mfu"] = flops / metrics["time/training"] / self.product_flops
        responses = (self.prompts_per_step or 0) * getattr(self.args, "group_size", 1)
        self.state["episode"] += responses  # a resume may have other flags
        self.state.update(
            step=self.state["step"] + 1, metrics=metrics, results={}, evaluated=False, **state
        )

    def save(self, best: bool = False) -> None:
        """Save a checkpoint of `state["step"]`, or only the model, in checkpoints/best/."""
        self.phase("save")
        self.state["seconds"] = self.clock.total()
        optimizers = {} if best else self.optimizers
        keep = self.args.keep_checkpoints
        checkpoints.save_checkpoint(
            self.folder, self.world, self.tokenizer, self.state, self.models, optimizers, keep
        )

    def rescue(self) -> str:
        """Save a checkpoint after an exception, if no weight has changed since `state["step"]`; return
        what to say about it.

        Rank 0 saves without the other ranks, which may wait in a collective or have ended. So
        shards cannot be saved.
        """
        step = self.state["step"]
        shards = isinstance(next(self.models[""].parameters()), DTensor)
        if not step or not self.world.main:
            return ""
        if not self.state.get("whole") or shards and self.world.size > 1:
            return "; nothing is saved, as the step had changed weights, or other ranks have shards"
        self.world = utils.World(0, 1, self.world.device)
        self.save()
        return f"; step {step} is saved, continue with --resume"

    def save_and_exit(self) -> NoReturn:
        """Save a checkpoint and raise Interrupted, or a UserError if the rollout engine has
        failed.
        """
        failure = getattr(self.engine, "failure", "")
        failures = self.world.all_gather([failure] if failure else [])
        if failures:
            self.fail(f"--rollout_backend {self.args.rollout_backend}: {failures[0]}")
        self.save()
        self.log.close(f"interrupted: step {self.state['step']} is saved, continue with --resume")
        raise utils.Interrupted

    def fail(self, message: str) -> NoReturn:
        """Save a checkpoint and raise a UserError."""
        self.save()
        self.log.close(f"step {self.state['step']} is saved, continue with --resume")
        raise utils.UserError(message)
