"""What a training script sets up before its loop: processes, rows, rewards, models, what samples."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import utils
from plumbing.data.formats import Learn
from plumbing.data.mixture import mix
from plumbing.data.prompts import load_prompts, load_train_and_eval
from plumbing.models import loading
from plumbing.models.sharding import Sharding
from plumbing.models.tokenizer import check_can_read, check_same_tokens, load_tokenizer_and_stop_ids
from plumbing.rewards.sources import RewardSources, why_unscorable
from plumbing.rollout import engines
from plumbing.rollout.rollouts import Rollouts
from plumbing.rollout.sampler import Sampler
from plumbing.run import evaluation
from plumbing.run.run import Run


@dataclass
class Setup:
    """What a training loop uses."""

    world: utils.World
    run: Run
    precision: loading.Precision
    sharding: Sharding
    prompts: Any  # rows of --dataset, a Sequence
    eval_prompts: Any
    ptx_rows: Any  # of --ptx_dataset, with responses to learn
    policy: Any  # the script's Policy
    wrapped: torch.nn.Module  # the policy as it trains, in DDP on several ranks without --shard
    # Of the KL penalty, frozen: None without one, with LoRA the policy without its adapter.
    reference: Any
    sampler: Sampler  # samples, by the script's `generate` or an engine, and scores
    models: dict[str, torch.nn.Module]  # that a checkpoint holds, by folder; "" is the policy's

    def start(
        self,
        collect: Callable,
        total_steps: int,
        optimizers: dict[str, utils.Optimizer],
    ) -> Rollouts:
        """Load the checkpoint, if there is one, open the logs, and give the engine its weights.

        Args:
            collect: makes the rollout of a step, see `Rollouts`. optimizers: of `models`,
                by the same names.
        """
        evaluate = functools.partial(evaluation.evaluate, self.sampler, self.eval_prompts)
        self.run.start(
            total_steps,
            tokenizer=self.sampler.tokenizer,
            models=self.models,
            optimizers=optimizers,
            engine=self.sampler.engine,
            evaluate=evaluate if self.eval_prompts else None,
        )
        self.run.check_rows(self.prompts, self.eval_prompts, self.ptx_rows)
        return Rollouts(self.run, self.sampler, self.prompts, collect)


def set_up(
    args: Any,
    script: str,
    make_policy: Callable,
    generate: Callable,
    outputs: tuple[str, ...],
    learn: Learn = "",
) -> Setup:
    """Set up a run, up to its optimizers.

    Args:
        script: its file. make_policy: wraps a causal language model in the script's Policy.
        generate: the script's decode loop. outputs: what it stores of a token, by name.
        learn: what of a row is learned.
    """
    world = utils.setup_processes(args.collective_timeout)
    run = Run(args, script, world)
    tokenizer, stop_ids = load_tokenizer_and_stop_ids(args)
    conversations = load_conversations(args, tokenizer, stop_ids)
    prompts, eval_prompts = load_train_and_eval(
        args, tokenizer, why_unscorable, conversations, learn, stop_ids
    )
    ptx_rows = load_supervised(args, tokenizer, stop_ids) if getattr(args, "ptx_coef", 0) else ()
    if getattr(args, "value_model", ""):
        check_can_read("--value_model", args.value_model, tokenizer)
    if teacher := getattr(args, "loaded_teacher", ""):
        check_same_tokens("--teacher", teacher, args.model)
    scored = eval_prompts if learn else prompts
    reward_sources = RewardSources(args, tokenizer, scored, conversations is not None)

    if getattr(args, "pass_rates", None) and not reward_sources.verifiers:
        raise utils.UserError("--pass_rates: no source of --reward tells right from wrong")

    precision = loading.precision(args.precision, world.device)
    sharding = Sharding(args, world, precision)
    policy, wrapped = loading.load_policy(args, make_policy, run.checkpoint, precision, sharding)
    models = {"": policy.model}
    reference = None
    if getattr(args, "kl_coef", 0):
        reference, is_saved = loading.load_reference(
            args, make_policy, policy, run.checkpoint, precision, sharding
        )
        if is_saved:
            models["reference"] = reference.model
    reward_sources.load_models(args, precision, sharding)

    # A supervised run without evaluations samples nothing.
    samples = bool(eval_prompts) or getattr(args, "on_policy_share", 1) > 0
    engine = None
    sampling_world = world.rollout_world(args.vllm_tensor_parallel)
    if samples:
        engine = engines.rollout_engine(args, policy.model, sampling_world, precision, outputs)
    sampler = Sampler(
        generate=generate,
        model=policy.model,
        engine=engine,
        tokenizer=tokenizer,
        stop_ids=stop_ids,
        reward_sources=reward_sources,
        conversations=conversations,
        args=args,
        interrupted=lambda: run.interrupt.requested,
        world=sampling_world,
        precision=precision,
        show_ended=run.show_ended,
    )
    return Setup(
        world=world,
        run=run,
        precision=precision,
        sharding=sharding,
        prompts=prompts,
        eval_prompts=eval_prompts,
        ptx_rows=ptx_rows,
        policy=policy,
        wrapped=wrapped,
        reference=reference,
        sampler=sampler,
        models=models,
    )


def load_supervised(args: Any, tokenizer: Any, stop_ids: list[int]) -> Any:
    """Return the rows of --ptx_dataset with responses, see `load_prompts`."""
    # --prompt_column and --answer_column name columns of --dataset, not of these rows.
    given = dataclasses.replace(args, prompt_column="", answer_column="")
    parts = load_prompts(
        "--ptx_dataset",
        args.ptx_dataset,
        "train",
        tokenizer,
        given,
        why_unscorable=lambda *_: "",  # no source scores these rows
        learn="conversations",
        stop_ids=stop_ids,
    )
    return mix(parts, args.seed)


def load_conversations(args: Any, tokenizer: Any, stop_ids: list[int]) -> Any:
    """Return the Conversations of --tools and --environment or of an --agent, or None without
    them.
    """
    if args.agent:
        from extras.episodes.agents import Agents

        return Agents(args, tokenizer, stop_ids)
    if args.tools or args.environment:
        from extras.episodes.conversations import Conversations

        return Conversations(args, tokenizer, stop_ids)
    return None
