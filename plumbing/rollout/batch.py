"""The batch of a step: responses sampled and scored on all ranks, with per-token tensors that
travel with them.

A per-token value, such as the log-probabilities, is an entry of `Batch.tokens`: made by the sampler
or by the loop, and from then on padded and sliced with the rest, by name. To carry a further one,
add an entry.
"""

import contextlib
import math
from dataclasses import dataclass
from typing import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.generation import logits_process

import utils
from plumbing.models.sharding import model_device, unsharded
from plumbing.rewards.sources import RewardSources, Scoring


@dataclass
class Sample:
    """One response to a prompt, and its scores."""

    row: dict  # of the data: "prompt", the text, "query", its token ids, "answer", "columns"
    # (t,) int32, up to and including the stop token; observations of a conversation, too
    response: np.ndarray
    values: dict[str, np.ndarray]  # (t,) float32, by name
    stopped: bool  # whether it ended before --max_response_length cut it off
    # plumbing.turns.conversations.Conversation, with --tools or --environment
    conversation: object = None
    text: str = ""
    scores: dict[str, float] | None = None  # by reward source; NaN where it gave none

    def __post_init__(self):
        """Turn lists into arrays: those of all ranks travel between them, and a list has 30 bytes a
        token.
        """
        self.response = np.asarray(self.response, np.int32)
        self.values = {name: np.asarray(x, np.float32) for name, x in self.values.items()}


@dataclass(frozen=True)
class Sampler:
    """What samples and scores responses, the same for the whole run."""

    generate: Callable  # the script's decode loop
    model: torch.nn.Module  # the causal language model that trains
    engine: object  # samples in place of the model, see plumbing/rollout/engines.py; None for none
    tokenizer: object
    stop_ids: list[int]  # token ids that end a response
    reward_sources: RewardSources
    # plumbing.turns.conversations.Conversations; None for responses of a single turn
    conversations: object
    args: object
    interrupt: object  # plumbing.run.ranks.Interrupt
    world: utils.World  # of the rollout, see `utils.World.rollout_world`
    autocast: Callable  # returns the context to compute in

    def interrupted(self) -> bool:
        """Return whether this rank was asked to save and exit."""
        return self.interrupt.requested

    def sync(self) -> None:
        """Give the engine the weights of the trained model; all ranks call it, and nothing samples
        meanwhile.
        """
        if self.engine is not None:
            self.engine.sync(self.model)

    def sleep(self) -> None:
        """Free the engine's memory until the next `sync`, where it can."""
        if self.engine is not None:
            self.engine.sleep()

    def metrics(self) -> dict[str, float]:
        """Return what the engine logs of a step, and the seconds that it waited for scores once all
        was sampled.
        """
        waited = self.reward_sources.waited
        self.reward_sources.waited = 0.0
        return {"time/reward": waited, **(self.engine.metrics() if self.engine else {})}

    def rollout(self, rows: list[dict], samples: int, key: tuple) -> "Batch | None":
        """Sample and score responses to some prompts, spread over the ranks.

        Args:
            rows: prompts of all ranks.
            samples: responses per prompt; 0 for a single greedy one.
            key: names the random numbers, see `utils.generator`.
        Returns:
            The Batch, the same on every rank; None if the run is interrupted.
        """
        rows = [row for row in rows for _ in range(samples or 1)]
        local = self.world.shard(list(range(len(rows))))  # the responses of this rank
        draws, tool_seeds = self.random_numbers(len(rows), key)
        scoring = Scoring(self.reward_sources, self.interrupted)
        given = (
            [rows[i] for i in local],
            draws[local] if samples else None,
            tool_seeds[local].tolist(),
        )
        self.sample(*given, scoring.add)
        if self.world.any(self.interrupted() or len(scoring.samples) < len(local)):
            return None
        responses = scoring.finish()
        if self.world.any(self.interrupted()):  # then some scores may be missing
            return None
        for sample in responses:
            sample.row = None  # all ranks have it
        responses = self.world.unshard(responses, len(rows))
        for row, sample in zip(rows, responses):
            sample.row = sample.conversation.row if sample.conversation else row
        self.reward_sources.score_equal_responses_alike(responses)
        if self.conversations:
            self.conversations.leave_out_failed(responses)
        batch = Batch.from_samples(responses, model_device(self.model))
        if not batch.tokens["rollout_logprobs"].isfinite().all():
            utils.fail(
                "--model or --learning_rate: log-probabilities are not finite; bad weights, or too large an update"
            )
        return batch

    def random_numbers(self, responses: int, key: tuple) -> tuple[np.ndarray, np.ndarray]:
        """Return a row of random numbers for each response of all ranks, whichever rank samples it.

        Returns:
            (N, T) uniform numbers for the tokens of the decode loop, or (N, turns) seeds for an
            engine; and (N,) seeds for the random numbers of tools.
        """
        rng = utils.generator(*key)
        tool_seeds = np.zeros(responses, dtype=int)
        if self.conversations:
            tool_seeds = rng.integers(2**62, size=responses)
        if self.engine is None:
            return rng.random((responses, self.args.max_response_length)), tool_seeds
        turns = self.args.max_turns if self.conversations else 1
        return rng.integers(2**62, size=(responses, turns)), tool_seeds

    def sample(
        self, rows: list[dict], draws: np.ndarray | None, tool_seeds: list[int], end: Callable
    ) -> None:
        """Sample a response to each row, by the engine or by the script's decode loop; if
        interrupted, not to all.

        Args:
            rows: prompts of this rank, one for each response.
            draws, tool_seeds: see `random_numbers`, a row for each response; no draws for greedy
                decoding.
            end: called with the place of a row and its Sample, once the response has ended.
        """

        def end_response(
            place: int, response: list[int], values: dict[str, list], conversation=None
        ) -> None:
            row = rows[place]
            if conversation:
                row = conversation.row
                stopped = conversation.stop_reason != "length"
            else:
                stopped = response[-1] in self.stop_ids
            text = self.tokenizer.decode(response, skip_special_tokens=True)
            sample = Sample(row, response, values, stopped, conversation, text)
            if conversation:
                conversation.response = sample.response
                conversation.values = sample.values
            end(place, sample)

        with contextlib.ExitStack() as stack:
            if self.engine is None:
                stack.enter_context(unsharded(self.model))
                # shapes change at every token
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(self.autocast())
            queries = [row["query"] for row in rows]
            if self.conversations:
                end_conversation = lambda place, x: end_response(place, x.response, x.values, x)
                given = (
                    rows,
                    tool_seeds,
                    draws,
                    self.interrupted,
                    end_conversation,
                    self.engine,
                    self.in_batches,
                )
                self.conversations.sample(*given)
            elif self.engine is None:
                for response in self.in_batches(
                    queries, None if draws is None else torch.from_numpy(draws)
                ):
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
            sampled = self.generate(
                self.model,
                queries[part],
                numbers,
                self.stop_ids,
                self.args,
                self.interrupted,
                limits,
                stop_strings,
            )
            for place, *response in sampled:
                yield start + place, *response


@dataclass
class Batch:
    """N responses of all ranks, the G responses to a prompt next to each other.

    Every rank holds all of them, so that advantages, mini-batches and counts are those of the whole
    batch.
    """

    samples: list[Sample]
    stopped: Tensor  # (N,) bool
    # of each reward source, then of each further number: (N,) float64, NaN where it gave none
    reward_components: dict[str, Tensor]
    # (N, T) each, 0 after a response's end; "response_mask" (bool): what was sampled
    tokens: dict[str, Tensor]
    # (N,), what a response is trained with; NaN for one that is left out
    scores: Tensor | None = None

    @staticmethod
    def from_samples(
        samples: list[Sample], device: torch.device, scores: Tensor | None = None
    ) -> "Batch":
        """Return a batch of some responses; their per-token values are padded to the longest."""
        padded = lambda rows: pad_sequence(list(map(torch.as_tensor, rows)), batch_first=True).to(
            device
        )
        lengths = torch.tensor([len(x.response) for x in samples], device=device)
        tokens = {"response_mask": torch.arange(lengths.max(), device=device) < lengths[:, None]}
        for name in {name: None for x in samples for name in x.values}:
            tokens[name] = padded([x.values.get(name, ()) for x in samples])
        tokens["response_mask"] = tokens["response_mask"].bool()
        components = {
            name: torch.tensor(
                [x.scores.get(name, math.nan) for x in samples], dtype=torch.float64, device=device
            )
            for name in {name: None for x in samples for name in x.scores}
        }
        stopped = torch.tensor([x.stopped for x in samples], device=device)
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

    def collate(self, chosen: list[int]) -> tuple[Tensor, Tensor]:
        """Return some of the responses behind their queries, as `collate` lays them out;
        observations are not set.
        """
        samples = [self.samples[i] for i in chosen]
        rows = [(x.row["query"], x.response, x.values.get("response_mask", True)) for x in samples]
        return collate(rows, self.response_mask.device)

    def micro_batches(
        self, chosen: list[int], token_budget: int, world: utils.World
    ) -> Iterator[tuple[tuple[Tensor, Tensor], dict[str, Tensor], bool]]:
        """Cut some of the responses into this rank's micro-batches.

        Yields:
            the inputs of a model (input_ids, response_mask: (n, L)), the slices (n, T) of `tokens`,
            where T is the longest response of the micro-batch, and whether it is the last one.
        """
        lengths = self.lengths
        cuts = utils.micro_batches([lengths[i] for i in chosen], token_budget, world)
        for number, cut in enumerate(cuts, 1):
            rows = [chosen[i] for i in cut]
            longest = max([len(self.samples[i].response) for i in rows], default=0)
            tokens = {name: x[rows, :longest] for name, x in self.tokens.items()}
            yield self.collate(rows), tokens, number == len(cuts)


@dataclass
class Experience:
    """A scored batch to train on, and where the next step continues."""

    batch: Batch
    metrics: dict[str, float]  # of all responses that were sampled, the dropped ones included
    sampled_tokens: int  # of theirs, prompts included
    position: int  # of the next step's first prompt in the stream of prompts
    policy_step: int  # steps that the policy which sampled had trained
    unscored: str  # the first reward source that gave no response a score, and why; "" for none
    # (N,), scores of the greedy responses to the same prompts (rloo.py)
    baselines: Tensor | None = None
    # running count, mean and sum of squared deviations of scores (ppo.py)
    score_statistics: list[float] | None = None


def collate(rows: list[tuple], device) -> tuple[Tensor, Tensor]:
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


def only_logged(name: str, x: Tensor) -> Tensor:
    """Return a tensor without gradient that raises where a loss uses it, since that term would
    train nothing.
    """

    def refuse(_) -> None:
        raise RuntimeError(
            f"{name}: a loss uses it, and it is computed without gradient, for the log"
        )

    x = x.detach().requires_grad_()
    x.register_hook(refuse)
    return x


def forward_tokens(
    module, inputs: tuple[Tensor, Tensor], mask: Tensor, **options
) -> dict[str, Tensor]:
    """Return `module(*inputs, **options)`, values (tokens,) by name, as (n, T) along the response
    mask (n, T).
    """
    return {name: pad_rows(x, mask) for name, x in module(*inputs, **options).items()}


@torch.no_grad()
def forward_batch(
    module, batch: Batch, args, world: utils.World, autocast: Callable, **options
) -> dict[str, Tensor]:
    """Return what a module gives for every response token, without gradient, the work spread over
    the ranks.

    Args:
        module: called with (input_ids, response_mask, **options), returns values (tokens,) by name.
    Returns:
        (N, T) by name, 0 after a response's end.
    """
    mask = batch.response_mask
    values = {}
    for rows in utils.micro_batches(batch.lengths, args.micro_batch_tokens, world):
        with autocast():
            outputs = forward_tokens(module, batch.collate(rows), mask[rows], **options)
        for name, x in outputs.items():
            if name not in values:
                values[name] = x.new_zeros(mask.shape)
            values[name][rows] = x
    return {name: world.sum(x) for name, x in values.items()}  # a row is 0 on all ranks but one


def logits_processors(
    args, width: int, stop_ids: list[int], sample: bool, device
) -> list[Callable]:
    """Return transformers' functions (sequences, scores) -> scores that change the next token's
    logits, in order.
    """
    processors = []
    if args.repetition_penalty != 1:
        processors.append(logits_process.RepetitionPenaltyLogitsProcessor(args.repetition_penalty))
    if args.min_response_length > 0:
        shortest = args.min_response_length
        processors.append(
            logits_process.MinNewTokensLengthLogitsProcessor(width, shortest, stop_ids, device)
        )
    if sample:
        processors.append(logits_process.TemperatureLogitsWarper(args.temperature))
        if args.top_p < 1:
            processors.append(logits_process.TopPLogitsWarper(args.top_p))
    return processors
