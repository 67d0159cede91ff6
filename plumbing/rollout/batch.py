"""The batch of a step: responses sampled and scored on all ranks, with per-token tensors that
travel with them.

A per-token tensor, such as the log-probabilities, is an entry of `Batch.tokens`: made by the sampler
or by the loop, and from then on padded and sliced with the rest, by name. To carry a further one,
add an entry.
"""

import contextlib
import copy
import functools
import math
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

import utils
from plumbing.cli import ModelArgs, RewardArgs
from plumbing.data.rows import Row
from plumbing.models.loading import Precision
from plumbing.models.sharding import model_device, unsharded
from plumbing.models.speed import Decoding
from plumbing.rewards.sources import RewardSources, Scoring, is_scored_by, reward_weights

if TYPE_CHECKING:  # imported where a flag asks for them
    from extras.episodes.conversations import Conversation, Conversations
    from extras.vllm.sampling import VllmSampling

# Further rollouts of a step with --filter_groups refill; then it trains on the groups that it has.
MAX_REFILLS = 9


@dataclass
class Sample:
    """One response to a prompt, and its scores."""

    row: Row
    # (T,) int32, up to and including the stop token; observations of a conversation, too
    response: np.ndarray | list[int]
    outputs: Mapping[str, np.ndarray | list]  # (T,) by name; a list becomes float32
    stopped: bool  # whether it ended before --max_response_length cut it off
    conversation: "Conversation | None" = None  # with --tools or --environment
    text: str = ""
    # By reward source; NaN where it gave none.
    scores: dict[str, float] = field(default_factory=dict)
    # Where in `response` another context begins, which does not see what is before: of an agent.
    starts: Sequence[int] = ()

    def __post_init__(self):
        """Turn lists into arrays: those of all ranks travel between them, and a list has 30 bytes a
        token.
        """
        self.response = np.asarray(self.response, np.int32)
        self.outputs = {
            name: np.asarray(x, getattr(x, "dtype", np.float32)) for name, x in self.outputs.items()
        }

    @property
    def contexts(self) -> list[tuple]:
        """Return what the model reads: (query, tokens, mask of those that it has sampled) of each
        context.
        """
        mask = self.outputs.get("response_mask", np.ones(len(self.response)))
        parts = zip(np.split(self.response, self.starts), np.split(mask, self.starts))
        queries = [self.row["query"], *[()] * len(self.starts)]
        return [(query, *part) for query, part in zip(queries, parts)]


@dataclass(frozen=True)
class Sampler:
    """What samples and scores responses, the same for the whole run."""

    generate: Callable  # the script's decode loop
    model: torch.nn.Module  # the causal language model that trains
    engine: "VllmSampling | None"  # samples in place of the model
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

    def rollout(self, rows: list[Row], samples: int, key: tuple) -> "Batch":
        """Sample and score responses to some prompts, spread over the ranks.

        Args:
            rows: prompts of all ranks.
            samples: responses per prompt; 0 for a single greedy one.
            key: names the random numbers, see `utils.generator`.
        Returns:
            The Batch, the same on every rank.
        Raises:
            Interrupted: on all ranks, if one of them was asked to save and exit.
        """
        rows = [row for row in rows for _ in range(samples or 1)]
        size = samples or 1 if self.reward_sources.whole else 1
        groups = [range(i, i + size) for i in range(0, len(rows), size)]
        local = list(chain(*self.world.shard(groups)))  # the responses of this rank
        draws, tool_seeds = self.random_numbers(len(rows), key)

        scoring = Scoring(self.reward_sources, self.interrupted)

        def end(place: int, sample: Sample) -> None:
            sample.text = self.tokenizer.decode(sample.response, skip_special_tokens=True)
            scoring.add(place, sample)
            self.show_ended(key, len(scoring.samples), len(local))

        self.show_ended(key, 0, len(local))
        self.sample(
            [rows[i] for i in local],
            draws[local] if samples else None,
            tool_seeds[local].tolist(),
            end,
        )
        if self.world.any(self.interrupted() or len(scoring.samples) < len(local)):
            raise utils.Interrupted
        responses = scoring.finish()
        if self.world.any(self.interrupted()):  # then some scores may be missing
            raise utils.Interrupted
        for sample in responses:
            sample.row = {}  # all ranks have it
        gathered = dict(self.world.all_gather([*zip(local, responses)]))
        responses = [gathered[i] for i in range(len(rows))]
        for row, sample in zip(rows, responses):
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

    def random_numbers(self, responses: int, key: tuple) -> tuple[np.ndarray, np.ndarray]:
        """Return a row of random numbers for each response of all ranks, whichever rank samples it.

        Returns:
            (N, T) uniform numbers for the tokens of the decode loop, or (N, 1) seeds for an
            engine; and (N,) seeds for the random numbers of tools.
        """
        rng = utils.generator(*key)
        tool_seeds = np.zeros(responses, dtype=int)
        if self.conversations:
            tool_seeds = rng.integers(2**62, size=responses)
        if self.engine is None:
            return rng.random((responses, self.args.max_response_length)), tool_seeds
        return rng.integers(2**62, size=(responses, 1)), tool_seeds

    def sample(
        self, rows: list[Row], draws: np.ndarray | None, tool_seeds: list[int], end: Callable
    ) -> None:
        """Sample a response to each row, by the engine or by the script's decode loop; if
        interrupted, not to all.

        Args:
            rows: prompts of this rank, one for each response.
            draws, tool_seeds: see `random_numbers`, a row for each response; no draws for greedy
                decoding.
            end: called with the place of a row and its Sample, once the response has ended.
        """

        def end_response(place: int, response: list[int], outputs: dict[str, list]) -> None:
            stopped = response[-1] in self.stop_ids
            end(place, Sample(rows[place], response, outputs, stopped))

        def end_conversation(place: int, x: Any) -> None:
            stopped = x.stop_reason != "length"
            sample = Sample(x.row, x.response, x.outputs, stopped, x, starts=x.starts)
            x.response = sample.response
            x.outputs = sample.outputs
            end(place, sample)

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
                    end_conversation,
                    self.engine,
                    self.in_batches,
                )
            elif self.engine is None:
                uniforms = None if draws is None else torch.from_numpy(draws)
                for response in self.in_batches(queries, uniforms):
                    end_response(*response)
            else:
                seeds = None if draws is None else draws[:, 0].tolist()
                self.engine.generate(
                    queries, seeds, self.stop_ids, self.args, self.interrupted, end_response
                )

    def in_batches(
        self,
        queries: list[list[int]],
        uniforms: Tensor | None,
        lengths: list[int] | None = None,
        stop_strings: Callable | None = None,
    ) -> Iterator[tuple[int, list[int], dict[str, list[float]]]]:
        """Call the script's decode loop with --generation_batch_size queries at a time; if
        interrupted, not with all.

        See `generate` of a script for the arguments and what it yields.
        """
        size = self.args.generation_batch_size
        for start in range(0, len(queries), size):
            if self.interrupted():
                return
            part = slice(start, start + size)
            numbers = None if uniforms is None else uniforms[part]
            limits = lengths and lengths[part]
            interrupted = self.decoding.timed(self.interrupted)
            sampled = self.generate(
                self.model,
                queries[part],
                numbers,
                self.stop_ids,
                self.args,
                interrupted,
                limits,
                stop_strings,
            )
            for place, response, outputs in sampled:
                self.decoding.ended(queries[start + place], response)
                yield start + place, response, outputs
            interrupted()  # the end of the last pass


@dataclass
class Batch:
    """N responses of all ranks, the G responses to a prompt next to each other.

    Every rank holds all of them, so that advantages, mini-batches and counts are those of the whole
    batch.
    """

    samples: list[Sample]
    stopped: Tensor  # (N,) bool
    # Of each reward source, then of each further number: (N,) float64, NaN where it gave none.
    reward_components: dict[str, Tensor]
    # (N, T) each, 0 after a response's end; "response_mask" (bool): what was sampled
    tokens: dict[str, Tensor]
    scores: Tensor  # (N,), what a response is trained with; NaN for one that is left out
    # Of distill.py, if the teacher reads another prompt: (query, tokens, mask) of each response.
    teacher_contexts: list[tuple] = field(default_factory=list)
    trained_tokens: int = 0  # of the updates, prompts included, over all ranks
    # Of the responses whose latest update ran on this rank: {response: (its place in a
    # micro-batch, what the loop added to the slices of it)}.
    updated: dict[int, tuple[int, dict[str, Tensor]]] = field(default_factory=dict)

    @staticmethod
    def from_samples(samples: list[Sample], device: torch.device) -> "Batch":
        """Return a batch of some responses; their per-token outputs are padded to the longest.

        Its scores are NaN until the script makes them.
        """
        lengths = torch.tensor([len(x.response) for x in samples], device=device)
        tokens = {
            "response_mask": torch.arange(int(lengths.max()), device=device) < lengths[:, None]
        }
        for name in {name: None for x in samples for name in x.outputs}:
            rows = [torch.as_tensor(x.outputs.get(name, ())) for x in samples]
            tokens[name] = pad_sequence(rows, batch_first=True).to(device)
        tokens["response_mask"] = tokens["response_mask"].bool()
        components = {
            name: torch.tensor(
                [x.scores.get(name, math.nan) for x in samples], dtype=torch.float64, device=device
            )
            for name in {name: None for x in samples for name in x.scores}
        }
        stopped = torch.tensor([x.stopped for x in samples], device=device)
        scores = torch.full(stopped.shape, math.nan, dtype=torch.float64, device=device)
        return Batch(samples, stopped, components, tokens, scores)

    @property
    def response_mask(self) -> Tensor:
        return self.tokens["response_mask"]

    @property
    def response_lengths(self) -> Tensor:
        """Return (N,): the tokens of each response, observations of a conversation included."""
        return torch.tensor([len(x.response) for x in self.samples], device=self.stopped.device)

    @property
    def lengths(self) -> list[int]:
        """Tokens of query and response together."""
        return [len(x.row["query"]) + len(x.response) for x in self.samples]

    @property
    def padded_lengths(self) -> list[int]:
        """At most the tokens of each response in a micro-batch: several contexts, each as long as
        the longest response, or its own; or its `teacher_contexts`, if they are longer.
        """
        longest = max(self.lengths)
        starts = [len(x.starts) for x in self.samples]
        lengths = [(n + 1) * longest if n else own for n, own in zip(starts, self.lengths)]
        of_teacher = [len(query) + len(tokens) for query, tokens, _ in self.teacher_contexts]
        return list(map(max, lengths, of_teacher or lengths))

    def scored_by(self, name: str) -> Tensor:
        """Return (N,) bool: the responses that a source scores, which are all unless rows name
        other sources.
        """
        scored = [is_scored_by(x.row, name) for x in self.samples]
        return torch.tensor(scored, device=self.stopped.device)

    def verifier_scores(self, verifiers: Sequence[str]) -> Tensor:
        """Return (N,): the score of the first source among `verifiers` that scores the row; NaN
        where it gave none, or there is no such source.
        """
        first = torch.full_like(self.stopped, math.nan, dtype=torch.float64)
        for name in reversed(verifiers):
            first = torch.where(self.scored_by(name), self.reward_components[name], first)
        return first

    def collate(self, chosen: list[int]) -> tuple[Tensor, Tensor]:
        """Return some of the responses behind their queries, as `collate` lays them out;
        observations are not set.
        """
        rows = [context for i in chosen for context in self.samples[i].contexts]
        return collate(rows, self.response_mask.device)

    def cut(
        self, chosen: list[int], args: Any, world: utils.World
    ) -> list[tuple[list[int], tuple]]:
        """Cut some of the responses into this rank's micro-batches of --micro_batch_tokens, as many on
        every rank.

        Returns:
            For each micro-batch its responses, and the inputs of a model: input_ids and response_mask
            (n, L), with --share_prompts perhaps also the tokens of a shared prompt.
        """
        if args.share_prompts:
            from extras.shared_prompts import cut_by_prompt

            return cut_by_prompt(self, chosen, args.micro_batch_tokens, world)
        lengths = self.padded_lengths
        cuts = utils.micro_batches([lengths[i] for i in chosen], args.micro_batch_tokens, world)
        by_micro_batch = [[chosen[i] for i in cut] for cut in cuts]
        return [(rows, self.collate(rows)) for rows in by_micro_batch]

    def micro_batches(
        self, chosen: list[int], args: Any, world: utils.World
    ) -> Iterator[tuple[tuple, dict[str, Tensor], bool]]:
        """Go through this rank's micro-batches of some of the responses.

        Yields:
            the inputs of a model, see `cut`, followed by those of a teacher if there are
            `teacher_contexts`; the slices (n, T) of `tokens`, where T is the longest response of the
            micro-batch; and whether it is the last one.
            What the loop adds to the slices, (n, T) by name, goes to `updated`.
        """
        for i in chosen:  # another rank may have the latest update of a response this time
            self.updated.pop(i, None)
        own = self.lengths
        self.trained_tokens += sum(own[i] for i in chosen)
        cuts = self.cut(chosen, args, world)
        for number, (rows, inputs) in enumerate(cuts, 1):
            longest = max([len(self.samples[i].response) for i in rows], default=0)
            tokens = {name: x[rows, :longest] for name, x in self.tokens.items()}
            if self.teacher_contexts:
                of_teacher = [self.teacher_contexts[i] for i in rows]
                inputs += collate(of_teacher, self.response_mask.device)
            yield inputs, tokens, number == len(cuts)
            added = {name: x.detach() for name, x in tokens.items() if name not in self.tokens}
            self.updated |= {i: (place, added) for place, i in enumerate(rows)}

    def gather_updated(self, count: int, world: utils.World) -> dict[int, dict[str, Tensor]]:
        """Return what the loop added for the first `count` responses, of all ranks: {response:
        {name: (T,)}}.
        """
        mine = [
            (i, {name: x[place].cpu() for name, x in added.items()})
            for i, (place, added) in self.updated.items()
            if i < count
        ]
        return dict(world.all_gather(mine))


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
    if args.filter_groups != "refill" or groups >= wanted:
        return 0
    if unscored(latest, sampler.reward_sources, args):
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
    for (name, scores), weight in zip(batch.reward_components.items(), reward_weights(args)):
        scored = scores[batch.scored_by(name)]
        if weight and len(scored) and scored.isnan().all():
            return reward_sources.why_missing(name)
    return ""


def collate(rows: list[tuple], device: torch.device) -> tuple[Tensor, Tensor]:
    """Pad queries and responses on the right: input_ids (n, L) and a mask (n, L) bool of response
    tokens.

    No rows make one row of padding, with which a rank that has nothing to do joins a collective
    forward pass.

    Args:
        rows: (query, response), token ids, or (query, response, mask of the response's tokens, or
            True for all).
    """
    ids = [np.concatenate(row[:2]).astype(np.int64) for row in rows] or [np.zeros(2, np.int64)]
    input_ids = pad_sequence(list(map(torch.from_numpy, ids)), batch_first=True)
    mask = torch.zeros_like(input_ids, dtype=torch.bool)
    for row, (query, response, *sampled) in zip(mask, rows):
        row[len(query) : len(query) + len(response)] = torch.as_tensor(
            sampled[0] if sampled else True
        )
    return input_ids.to(device), mask.to(device)  # at the end: a GPU would wait for each row


def pad_rows(flat: Tensor, mask: Tensor) -> Tensor:
    """Lay values of response tokens, row after row, out as (N, T) along a mask (N, T); 0 elsewhere.
    Differentiable.
    """
    return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat)


def forbid_gradient(name: str, x: Tensor) -> Tensor:
    """Return a tensor without gradient that raises where a loss uses it, since that term would
    train nothing.
    """

    def refuse(_: Any) -> None:
        raise RuntimeError(
            f"{name}: a loss uses it, and it is computed without gradient, for the log"
        )

    x = x.detach().requires_grad_()
    x.register_hook(refuse)
    return x


def forward_tokens(
    module: torch.nn.Module, inputs: tuple, mask: Tensor, **options: Any
) -> dict[str, Tensor]:
    """Return `module(*inputs, **options)`, outputs (tokens,) by name, as (n, T) along the response
    mask (n, T).
    """
    return {name: pad_rows(x, mask) for name, x in module(*inputs, **options).items()}


@torch.no_grad()
def forward_batch(
    module: torch.nn.Module,
    batch: Batch,
    name: str,
    args: ModelArgs,
    world: utils.World,
    **options: Any,
) -> Tensor:
    """Return what a module gives for every response token, without gradient, the work spread over
    the ranks.

    Args:
        module: called with (input_ids, response_mask, **options), returns outputs (tokens,) by name.
        name: of the output that is returned.
    Returns:
        (N, T), 0 after a response's end.
    """
    mask = batch.response_mask
    cuts = batch.cut([*range(len(batch.samples))], args, world)
    outputs = [
        (rows, forward_tokens(module, inputs, mask[rows], **options)[name]) for rows, inputs in cuts
    ]
    result = outputs[0][1].new_zeros(mask.shape)
    for rows, x in outputs:
        result[rows] = x
    return world.sum(result)  # a row is 0 on all ranks but one
