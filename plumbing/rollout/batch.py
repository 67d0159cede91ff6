"""The batch of a step: responses sampled and scored on all ranks, with per-token tensors that travel with them.

A per-token value, such as the log-probabilities, is an entry of `Batch.tokens`: made by the sampler or by the loop, and
from then on joined, padded, sliced and saved with the rest, by name. To carry a further one, add an entry.
Imports utils, plumbing.rewards.sources (equal scores), plumbing.models.sharding (whole weights for the decode loop) and
plumbing.turns.conversations (responses of several turns).
"""

import contextlib
import functools
from dataclasses import dataclass
from typing import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.generation import logits_process

import utils
from plumbing.models.sharding import model_device, unsharded
from plumbing.rewards.sources import Rewards
from plumbing.turns.conversations import Conversation, Conversations


@dataclass
class Batch:
    """N responses of all ranks, the G responses to a prompt next to each other.

    Every rank holds all of them, so that advantages, mini-batches and counts are those of the whole batch.
    """

    rows: list[dict]  # of the data, for each response: "prompt", the text, "query", its token ids, "answer", "columns"
    responses: list[list[int]]  # token ids up to and including the stop token; observations of a conversation, too
    texts: list[str]
    stopped: Tensor  # (N,) bool, whether a stop token was sampled, or a conversation ended by itself
    reward_components: dict[str, Tensor]  # reward source: (N,) scores, NaN where it gave none
    tokens: dict[str, Tensor]  # (N, T) each, 0 after a response's end; "response_mask" (bool): what was sampled
    scores: Tensor | None = None  # (N,), what a response is trained with; NaN for one that is left out
    verifiers: tuple[str, ...] = ()  # the reward sources that tell right from wrong
    conversations: list[Conversation] | None = None  # with --tools or --environment, what the responses are made of

    @property
    def response_mask(self) -> Tensor:
        return self.tokens["response_mask"]

    @property
    def ended(self) -> Tensor:
        """Return (N,) bool, whether no limit cut a response off: it stopped, or its environment failed."""
        failed = [x.stop_reason == "error" for x in self.conversations or []] or [False]  # of one turn: none failed
        return self.stopped | torch.tensor(failed, device=self.stopped.device)

    @property
    def queries(self) -> list[list[int]]:
        return [row["query"] for row in self.rows]

    @property
    def lengths(self) -> list[int]:
        """Tokens of query and response together."""
        return [len(query) + len(response) for query, response in zip(self.queries, self.responses)]

    def select(self, chosen: list[int]) -> "Batch":
        """Return some of the responses, which have their scores."""
        pick = lambda items: [items[i] for i in chosen]
        return Batch(
            pick(self.rows), pick(self.responses), pick(self.texts), self.stopped[chosen],
            {name: x[chosen] for name, x in self.reward_components.items()},
            {name: x[chosen] for name, x in self.tokens.items()},
            self.scores[chosen], self.verifiers, self.conversations and pick(self.conversations),
        )  # fmt: skip

    def collate(self, chosen: list[int]) -> tuple[Tensor, Tensor]:
        """Return some of the responses behind their queries, as `collate` lays them out."""
        rows = [(self.rows[i]["query"], self.responses[i]) for i in chosen]
        input_ids, mask = collate(rows, self.response_mask.device)
        for row, i in zip(mask, chosen):
            row[row.clone()] = self.response_mask[i, : len(self.responses[i])]
        return input_ids, mask

    def micro_batches(
        self, chosen: list[int], token_budget: int, world: utils.World
    ) -> Iterator[tuple[tuple[Tensor, Tensor], dict[str, Tensor], bool]]:
        """Cut some of the responses into this rank's micro-batches.

        Yields:
            what a model takes (input_ids, response_mask: (n, L)), the slices (n, T) of `tokens` with "rows" (n,), where
            they are in the batch, and whether it is the last micro-batch.
        """
        lengths = self.lengths
        cuts = utils.micro_batches([lengths[i] for i in chosen], token_budget, world)
        for number, cut in enumerate(cuts, 1):
            rows = [chosen[i] for i in cut]
            slices = {name: x[rows] for name, x in self.tokens.items()}
            yield self.collate(rows), {**slices, "rows": torch.tensor(rows)}, number == len(cuts)


def join(batches: list[Batch]) -> Batch:
    """Return several batches, which have no scores yet, as one; per-token tensors are padded to the longest."""
    joined = lambda name: [x for batch in batches for x in getattr(batch, name)]
    rows = lambda name: [row for batch in batches for row in batch.tokens[name]]
    return Batch(
        *map(joined, ("rows", "responses", "texts")),
        torch.cat([batch.stopped for batch in batches]),
        {name: torch.cat([x.reward_components[name] for x in batches]) for name in batches[0].reward_components},
        {name: pad_sequence(rows(name), batch_first=True) for name in batches[0].tokens},
        verifiers=batches[0].verifiers,
        conversations=batches[0].conversations and joined("conversations"),
    )  # fmt: skip


def collate(rows: list[tuple[list[int], list[int]]], device) -> tuple[Tensor, Tensor]:
    """Pad queries and responses on the right: input_ids (n, L) and a mask (n, L) bool of response tokens.

    No rows make one row of padding, with which a rank that has nothing to do takes part in a collective forward pass.
    """
    ids = [torch.tensor(query + response) for query, response in rows] or [torch.zeros(2, dtype=torch.long)]
    input_ids = pad_sequence(ids, batch_first=True)
    mask = torch.zeros_like(input_ids, dtype=torch.bool)
    for row, (query, response) in zip(mask, rows):
        row[len(query) : len(query) + len(response)] = True
    return input_ids.to(device), mask.to(device)


def pad_rows(flat: Tensor, mask: Tensor) -> Tensor:
    """Lay values of response tokens, row after row, out as (N, T) along a mask (N, T); 0 elsewhere. Differentiable."""
    return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat)


def forward_tokens(module, inputs: tuple[Tensor, Tensor], mask: Tensor, **options) -> dict[str, Tensor]:
    """Return `module(*inputs, **options)`, values (tokens,) by name, as (n, T) along the response mask (n, T)."""
    return {name: pad_rows(x, mask) for name, x in module(*inputs, **options).items()}


@torch.no_grad()
def forward_batch(
    module, batch: Batch, *, token_budget: int, world: utils.World, autocast: Callable, **options
) -> dict[str, Tensor]:
    """Return what a module gives for every response token, without gradient, the work spread over the ranks.

    Args:
        module: called with (input_ids, response_mask, **options), returns values (tokens,) by name.
    Returns:
        (N, T) by name, 0 after a response's end.
    """
    share, mask = [], batch.response_mask
    sampled = mask.sum(1).tolist()  # tokens
    for rows in utils.micro_batches(batch.lengths, token_budget, world):
        with autocast():
            outputs = module(*batch.collate(rows), **options)
        names = list(outputs)
        values = torch.stack([outputs[name] for name in names]).cpu()  # (names, tokens)
        parts = values.split([sampled[i] for i in rows], dim=1)
        share += zip(rows, [part.clone() for part in parts])  # a view would send the whole tensor to the other ranks
    in_order = [value for _, value in sorted(world.all_gather(share), key=lambda pair: pair[0])]
    return {name: pad_rows(x, mask) for name, x in zip(names, torch.cat(in_order, 1).to(mask.device))}


def logits_processors(args, width: int, stop_ids: list[int], sample: bool, device) -> list[Callable]:
    """Return transformers' functions (sequences, scores) -> scores that change the next token's logits, in order."""
    found = []
    if args.repetition_penalty != 1:
        found.append(logits_process.RepetitionPenaltyLogitsProcessor(args.repetition_penalty))
    if args.min_response_length > 0:
        shortest = args.min_response_length
        found.append(logits_process.MinNewTokensLengthLogitsProcessor(width, shortest, stop_ids, device))
    if sample:
        found.append(logits_process.TemperatureLogitsWarper(args.temperature))
        found += [logits_process.TopKLogitsWarper(args.top_k)] if args.top_k > 0 else []
        found += [logits_process.TopPLogitsWarper(args.top_p)] if args.top_p < 1 else []
    return found


def in_batches(
    generate: Callable, queries: list[list[int]], uniforms: Tensor | None, lengths: list[int] | None = None,
    stop_strings: Callable | None = None, *, model, stop_ids: list[int], args, interrupted: Callable,
) -> tuple[list[list[int]], list[dict[str, list[float]]]]:  # fmt: skip
    """Call the decode loop `generate` with --generation_batch_size queries at a time; if interrupted, not with all."""
    responses, values = [], []
    for start in range(0, len(queries), args.generation_batch_size):
        if interrupted():
            break
        part = slice(start, start + args.generation_batch_size)
        numbers, limits = None if uniforms is None else uniforms[part], lengths and lengths[part]
        sampled = generate(model, queries[part], numbers, stop_ids, args, interrupted, limits, stop_strings)
        responses, values = responses + sampled[0], values + sampled[1]
    return responses, values


def rollout(
    rows: list[dict], samples: int, key: tuple, *, generate: Callable, model, engine, tokenizer, stop_ids: list[int],
    rewards: Rewards, args, interrupt: utils.Interrupt, world: utils.World, autocast: Callable,
    conversations: Conversations | None = None,
) -> Batch | None:  # fmt: skip
    """Sample and score `samples` responses for each row, spread over the ranks.

    Args:
        rows: prompts of all ranks. samples: responses a prompt; 0 for a single greedy one.
        key: names the random numbers, see `utils.generator`.
        generate: the script's decode loop over `model`. engine: what samples instead of it; None for none.
        conversations: makes responses of several turns; None for single turns.
    Returns:
        The Batch, the same on every rank; None if the run is interrupted.
    """
    rows = [row for row in rows for _ in range(samples or 1)]
    mine, interrupted = world.shard(list(range(len(rows)))), lambda: interrupt.requested
    own_rows, rng, device = [rows[i] for i in mine], utils.generator(*key), model_device(model)
    tool_seeds = rng.integers(2**62, size=len(rows))[mine].tolist() if conversations else []
    turns = args.max_turns if conversations else 1
    # A line of numbers for each response of all ranks, whichever rank makes it: of its tokens, or seeds of its turns.
    size = (len(rows), args.max_response_length if engine is None else turns)
    draws = rng.random(size) if engine is None else rng.integers(2**62, size=size)
    draws = draws[mine] if samples else None
    decode = functools.partial(in_batches, generate, model=model, stop_ids=stop_ids, args=args, interrupted=interrupted)
    talks = [None] * len(mine)
    with contextlib.ExitStack() as stack:
        if engine is None:
            stack.enter_context(unsharded(model))
            stack.enter_context(autocast())
        if conversations:
            talks = conversations.sample(own_rows, tool_seeds, draws, interrupted, engine, decode)
            sampled = talks and [(talk.response, talk.values) for talk in talks]
        elif engine is not None:
            seeds = None if draws is None else draws[:, 0].tolist()
            sampled = engine.generate([row["query"] for row in own_rows], seeds, stop_ids, args, interrupted)
            sampled = sampled and [(ids, {"rollout_logprobs": logprobs}) for ids, logprobs in zip(*sampled)]
        else:
            uniforms = None if draws is None else torch.from_numpy(draws)
            sampled = list(zip(*decode([row["query"] for row in own_rows], uniforms)))
    if world.any(interrupted() or sampled is None):
        return None
    responses, values = [ids for ids, _ in sampled], [columns for _, columns in sampled]
    texts = [tokenizer.decode(response, skip_special_tokens=True) for response in responses]
    scored = [talk.scored_row() for talk in talks] if conversations else own_rows
    scores = rewards.score(scored, texts, responses, interrupted)
    if world.any(interrupted()):  # then some may be missing
        return None
    gathered = world.unshard(list(zip(responses, texts, values, talks, *scores.values())), len(rows))
    responses, texts, values, talks, *columns = map(list, zip(*gathered))
    rows, scores = [talk.row for talk in talks] if conversations else rows, dict(zip(scores, columns))
    if conversations:
        scores = dict(zip(scores, conversations.leave_out_failed(talks, list(scores.values()))))
    padded = lambda rows: pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(device)
    tokens = {"response_mask": padded([[1] * len(response) for response in responses])}
    tokens |= {name: padded([value[name] for value in values]) for name in values[0]}
    tokens["response_mask"] = tokens["response_mask"].bool()
    if not tokens["rollout_logprobs"].isfinite().all():
        why = "so its weights, --precision or --temperature are to blame"
        utils.fail(f"--model: its log-probabilities are not finite, {why}")
    stopped = [talk.stopped if talk else response[-1] in stop_ids for talk, response in zip(talks, responses)]
    components = {name: torch.tensor(column, device=device) for name, column in scores.items()}
    return Batch(
        rows, responses, texts, torch.tensor(stopped, device=device), components, tokens, verifiers=rewards.verifiers,
        conversations=talks if conversations else None,
    )  # fmt: skip


@dataclass
class Experience:
    """What a step trains on, and where the next one goes on."""

    batch: Batch
    metrics: dict[str, float]  # of all responses that were sampled, the dropped ones included
    sampled_tokens: int  # of theirs, prompts included
    position: int  # in the stream of prompts, of the next step's first
    score_statistics: list[float]  # running count, mean and sum of squared deviations of the scores
    policy_step: int  # steps that the policy which sampled had trained
    group_size: int
    unscored: str  # the first reward source that gave no response a score, and why; "" for none

    def state(self) -> dict:
        """Return it in plain types and tensors, for a checkpoint; of the rows only what is still needed."""
        needed = lambda row: {name: row.get(name) for name in ("prompt", "query", "sources")}
        talks = self.batch.conversations and [{**vars(x), "row": needed(x.row)} for x in self.batch.conversations]
        batch = {**vars(self.batch), "rows": list(map(needed, self.batch.rows)), "conversations": talks}
        return {**vars(self), "batch": batch}

    @staticmethod
    def from_state(state: dict | None, args, device) -> "Experience | None":
        """Return what `state` made, its tensors on the device; None if there is none, or if it is not for this run."""
        if state is None or not args.async_steps or state["group_size"] != args.group_size:  # groups would not fit
            return None

        def to_device(x):
            if isinstance(x, dict):
                return {name: to_device(y) for name, y in x.items()}
            return x.to(device) if isinstance(x, Tensor) else x

        batch = Batch(**to_device(state["batch"]))
        batch.conversations = batch.conversations and [Conversation(**x) for x in batch.conversations]
        return Experience(**{**state, "batch": batch})
