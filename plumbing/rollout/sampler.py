"""The rollout of a step: responses sampled and scored on all ranks, and which of them train."""

import contextlib
import copy
import functools
import math
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

import utils
from plumbing.cli import RewardArgs
from plumbing.data.rows import Row
from plumbing.models.loading import Precision
from plumbing.models.sharding import model_device, unsharded
from plumbing.models.speed import Decoding
from plumbing.rewards.sources import RewardSources, Scoring, reward_weights
from plumbing.rollout.batch import Batch, Sample

if TYPE_CHECKING:  # imported where a flag asks for them
    from extras.episodes.conversations import Conversations
    from extras.vllm.sampling import RolloutEngine

# Further rollouts of a step with --filter_groups refill; then it trains on the groups that it has.
MAX_REFILLS = 9


@dataclass(frozen=True)
class Sampler:
    """What samples and scores responses, the same for the whole run."""

    generate: Callable  # the script's decode loop
    model: torch.nn.Module  # the causal language model that trains
    engine: "RolloutEngine | None"  # samples in place of the model
    tokenizer: PreTrainedTokenizerBase
    stop_ids: list[int]  # token ids that end a response
    reward_sources: RewardSources
    conversations: "Conversations | None"  # None for responses of a single turn
    args: Any  # of the script
    interrupted: Callable[[], bool]  # whether this rank was asked to save and exit
    world: utils.World  # of the rollout, see `utils.World.rollout_world`
    precision: Precision
    # Called with the key of a rollout, how many of this rank's responses have ended, and how many
    # there are.
    show_ended: Callable = lambda *_: None

    @functools.cached_property
    def decoding(self) -> Decoding:
        """Measures `generate`."""
        return Decoding(self.model, self.precision)

    @property
    def correction(self) -> str:
        """--rollout_correction. By default it is "truncate" for synchronous rollouts of vLLM, whose
        log-probs differ from the trainer's by the rounding of other kernels, more so in bfloat16.
        """
        default = "none" if self.engine is None or self.args.async_steps else "truncate"
        return self.args.rollout_correction or default

    @property
    def correction_cap(self) -> float:
        """--rollout_correction_cap. By default it is 2, which a geometric mean would hardly reach."""
        default = 1.1 if self.correction == "geometric" else 2.0
        return self.args.rollout_correction_cap or default

    def with_args(self, **changes: Any) -> "Sampler":
        """Return a sampler that differs in some flags."""
        args = replace(self.args, **changes)
        conversations = copy.copy(self.conversations)
        if conversations:
            conversations.args = args
        return replace(self, args=args, conversations=conversations)

    def metrics(self) -> dict[str, float]:
        """Return what the engine logs of a step, and the seconds that it waited for scores once all
        was sampled.
        """
        waited = self.reward_sources.waited
        self.reward_sources.waited = 0.0
        return {"time/reward": waited, **(self.engine or self.decoding).metrics()}

    def rollout(self, rows: list[Row], per_prompt: int, key: tuple, greedy: bool = False) -> Batch:
        """Sample and score responses to some prompts, spread over the ranks.

        Args:
            rows: prompts of all ranks.
            per_prompt: responses whose tokens are drawn.
            key: names the random numbers, see `utils.generator`.
            greedy: whether each prompt also gets a greedy response, the last of its group.
        Returns:
            The Batch, the same on every rank.
        Raises:
            Interrupted: on all ranks, if one of them was asked to save and exit.
        """
        size = per_prompt + greedy  # of a group, the responses to a prompt
        draws, tool_seeds = self.random_numbers(len(rows), per_prompt, key, greedy)
        # a row for each response
        asked = [row | {"rollout_group": i} for i, row in enumerate(rows) for _ in range(size)]
        at_once = size if self.reward_sources.whole else 1  # responses that one rank has to have
        parts = [range(i, i + at_once) for i in range(0, len(asked), at_once)]
        local = list(chain(*self.world.shard(parts)))  # this rank's responses; "place": index in it
        scoring = Scoring(self.reward_sources, self.interrupted)

        def end(place: int, response: np.ndarray, outputs: dict, conversation: Any = None) -> None:
            """Have a response scored that has ended, while others are sampled."""
            i = local[place]
            if conversation:
                stopped = conversation.stop_reason != "length"
                sample = Sample(conversation.row, response, outputs, stopped, conversation)
                sample.starts = conversation.starts
            else:
                sample = Sample(asked[i], response, outputs, response[-1] in self.stop_ids)
            sample.greedy = i % size == per_prompt
            sample.text = self.tokenizer.decode(sample.response, skip_special_tokens=True)
            scoring.add(place, sample)
            self.show_ended(key, len(scoring.samples), len(local))

        self.show_ended(key, 0, len(local))
        self.sample([asked[i] for i in local], draws[local], tool_seeds[local].tolist(), end)
        if self.world.any(self.interrupted() or len(scoring.samples) < len(local)):
            raise utils.Interrupted
        responses = scoring.finish()
        if self.world.any(self.interrupted()):  # then some scores may be missing
            raise utils.Interrupted
        for sample in responses:
            sample.row = {}  # all ranks have it
        gathered = dict(self.world.all_gather([*zip(local, responses)]))
        responses = [gathered[i] for i in range(len(asked))]
        for row, sample in zip(asked, responses):
            sample.row = sample.conversation.row if sample.conversation else row
        for model in self.reward_sources.models.values():
            model.score_equal_responses_alike(responses)
        if self.conversations:
            self.conversations.leave_out_failed(responses)
        batch = Batch.from_samples(responses, model_device(self.model))
        if not batch.tokens["rollout_logprobs"].isfinite().all():
            raise utils.UserError(
                "--model or --learning_rate: log-probabilities are not finite; bad weights, or too large an update"
            )
        return batch

    def random_numbers(
        self, prompts: int, per_prompt: int, key: tuple, greedy: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return a row of random numbers for each response of all ranks, whichever rank samples it.

        Returns:
            (N, T) uniform numbers for the tokens of the decode loop, or (N, 1) seeds for an
            engine, -1 for a greedy response; and (N,) seeds for the random numbers of tools.
        """
        rng = utils.generator(*key)
        count = prompts * per_prompt
        tool_seeds = np.zeros(count, dtype=int)
        if self.conversations:
            tool_seeds = rng.integers(2**62, size=count)
        draws: np.ndarray
        if self.engine is None:
            draws = rng.random((count, self.args.max_response_length))
        else:
            draws = rng.integers(2**62, size=(count, 1))
        if greedy:
            behind = per_prompt * np.arange(1, prompts + 1)  # each group
            draws = np.insert(draws, behind, -1, axis=0)
            # Drawn last: the other responses have the same numbers without a greedy one.
            tool_seeds = np.insert(tool_seeds, behind, rng.integers(2**62, size=prompts))
        return draws, tool_seeds

    def sample(
        self, rows: list[Row], draws: np.ndarray, tool_seeds: list[int], end: Callable
    ) -> None:
        """Sample a response to each row, by the engine or by the script's decode loop; if
        interrupted, not to all.

        Args:
            rows: prompts of this rank, one for each response.
            draws, tool_seeds: see `random_numbers`, a row for each response.
            end: called once a response has ended with the place of its row, the response, its outputs
                and, if it is one, its Conversation.
        """
        with contextlib.ExitStack() as stack:
            if self.engine is None:
                stack.enter_context(unsharded(self.model))
                # Shapes change at every token.
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(self.precision.autocast())
            queries = [row["query"] for row in rows]
            if self.conversations:
                self.conversations.sample(
                    rows,
                    tool_seeds,
                    draws,
                    self.interrupted,
                    lambda place, x: end(place, x.response, x.outputs, x),
                    self.engine,
                    self.in_batches,
                )
            elif self.engine is None:
                lengths = [self.args.max_response_length] * len(rows)
                for response in self.in_batches(queries, torch.from_numpy(draws), lengths):
                    end(*response)
            else:
                seeds = [None if seed < 0 else seed for seed in draws[:, 0].tolist()]
                self.engine.generate(
                    queries, seeds, self.stop_ids, self.args, self.interrupted, end
                )

    def in_batches(
        self,
        queries: list[list[int]],
        uniforms: Tensor,
        lengths: list[int],
        stop_strings: Callable | None = None,
    ) -> Iterator[tuple[int, np.ndarray, dict[str, np.ndarray]]]:
        """Call the script's decode loop with --generation_batch_size queries at a time; if
        interrupted, not with all.

        See `generate` of a script for the arguments and what it yields; here these are arrays, the
        response int32.
        """
        size = self.args.generation_batch_size
        for start in range(0, len(queries), size):
            if self.interrupted():
                return
            part = slice(start, start + size)
            interrupted = self.decoding.timed(self.interrupted)  # it takes the time of each pass
            sampled = self.generate(
                self.model,
                queries[part],
                uniforms[part],
                self.stop_ids,
                self.args,
                interrupted,
                lengths[part],
                stop_strings,
            )
            for place, response, outputs in sampled:
                self.decoding.count_cached(len(queries[start + place]), len(response))
                # Copies: a view on a CPU would hold what the decode loop has of all rows.
                arrays = {name: x.cpu().numpy().copy() for name, x in outputs.items()}
                yield start + place, response.int().cpu().numpy(), arrays
            interrupted()  # takes the time of the last pass


@dataclass
class Experience:
    """A scored batch to train on, and where the next step continues."""

    batch: Batch
    sampled: Batch  # all that were sampled, those that do not train included
    metrics: dict[str, float]
    sampled_tokens: int  # of prompts, too
    # What the next rollout depends on: the "position" of its first prompt, see `take_prompts`, and
    # with --pass_rates the "pass_rates", {place of a row: mean score of its last group}.
    state: dict
    unscored: str  # see the function of this name
    baselines: Tensor | None = None  # (N,), scores of the greedy responses (rloo.py)


def prompts_to_add(has_signal: Tensor, latest: Batch, sampler: Sampler) -> int:
    """Return how many further prompts --filter_groups refill samples in place of groups without two
    different scores; 0 where it does not, where there are enough, or nothing scores them.

    Args:
        has_signal: (prompts,) bool, of all prompts so far. latest: responses to the newest ones.
    """
    args = sampler.args
    wanted = args.rollout_batch_size
    groups = int(has_signal.sum())
    if (
        args.filter_groups != "refill"
        or groups >= wanted
        or unscored(latest, sampler.reward_sources, args)
    ):
        return 0
    # As many as are needed if the next prompts are like those so far.
    return min(wanted, math.ceil((wanted - groups) * len(has_signal) / max(1, groups)))


def select_groups(
    sampled: Batch, has_signal: Tensor, sampler: Sampler, step: int, position: int
) -> Experience:
    """Return the scored responses of a step as an Experience, without the groups that
    --filter_groups drops.

    Args:
        has_signal: (prompts,) bool, the groups with two different scores. position: see
            `Experience.state`.
    """
    args = sampler.args
    size = args.group_size
    groups = int(has_signal.sum())
    metrics = {
        "val/zero_std_fraction": 1 - groups / len(has_signal) if size > 1 else math.nan,
        "val/sampled_prompts": len(has_signal),
    }
    batch = sampled
    if args.filter_groups != "none":
        scores = sampled.scores
        if not groups:  # nothing to learn from in this step
            scores = torch.full_like(scores, math.nan)
            has_signal = torch.ones_like(has_signal)
        most = args.rollout_batch_size * size
        chosen = has_signal.repeat_interleave(size).nonzero()[:most, 0].tolist()
        batch = Batch.from_samples([sampled.samples[i] for i in chosen], scores.device)
        batch.scores = scores[chosen]
    trained = int(batch.scores.isfinite().sum())
    if 4 * trained < len(batch.samples):
        utils.warn(
            f"step {step} trains on {trained} of {len(batch.samples)} responses: each of the others "
            "lacks a score, or was masked or filtered out"
        )
    missing = unscored(sampled, sampler.reward_sources, args)
    tokens = sum(sampled.lengths)
    return Experience(batch, sampled, metrics, tokens, {"position": position}, missing)


def unscored(batch: Batch, reward_sources: RewardSources, args: RewardArgs) -> str:
    """Return the first reward source that has a weight and gave no response a score, and why; "" if
    there is none.
    """
    # The sources come first, in the order of --reward and its weights.
    for (name, scores), weight in zip(batch.reward_components.items(), reward_weights(args)):
        scored = scores[batch.scored_by(name)]
        if weight and len(scored) and scored.isnan().all():
            return reward_sources.why_missing(name)
    return ""
