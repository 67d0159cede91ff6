"""The batch of a step: responses of all ranks, with per-token tensors that travel with them, and how
a model goes through them.

A per-token tensor, such as the log-probabilities, is an entry of `Batch.tokens`: made by the sampler
or by the loop, and from then on padded and sliced with the rest, by name. To carry a further one,
add an entry.
"""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import utils
from plumbing.cli import ModelArgs
from plumbing.data.rows import Row, is_scored_by

if TYPE_CHECKING:  # imported where a flag asks for it
    from extras.episodes.conversations import Conversation


@dataclass
class Sample:
    """One response to a prompt, and its scores."""

    row: Row
    # (T,) int32, up to and including the stop token; observations of a conversation, too
    response: np.ndarray
    outputs: dict[str, np.ndarray]  # (T,) by name; "response_mask" if it has observations
    stopped: bool  # whether it ended before --max_response_length cut it off
    conversation: "Conversation | None" = None  # with --tools or --environment
    text: str = ""
    greedy: bool = False  # whether each token is the most likely one, none is drawn
    # By reward source; NaN where it gave none, 0 where it does not score the row.
    scores: dict[str, float] = field(default_factory=dict)
    # Where in `response` another context begins, which does not see what is before: of an agent.
    starts: Sequence[int] = ()
    step: int | None = None  # steps that the run had made when it was scored

    @staticmethod
    def of_row(row: Row) -> "Sample":
        """Return the response that a row of a data set has, with the mask of what is to be learned."""
        mask = np.array(row["mask"], np.float32)
        response = np.array(row["response"], np.int32)
        return Sample(row, response, {"response_mask": mask}, stopped=True)

    def output(self, name: str) -> np.ndarray:
        """Return one of `outputs`; if it is missing, 0 for each token, or 1 in "response_mask"."""
        if name in self.outputs:
            return self.outputs[name]
        return np.full(len(self.response), name == "response_mask", np.float32)

    @property
    def contexts(self) -> list[tuple]:
        """Return what the model reads: (query, tokens, mask of those that it has sampled) of each
        context.
        """
        mask = self.output("response_mask")
        parts = zip(np.split(self.response, self.starts), np.split(mask, self.starts))
        queries = [self.row["query"], *[()] * len(self.starts)]
        return [(query, *part) for query, part in zip(queries, parts)]


@dataclass
class Batch:
    """N responses of all ranks, the G responses to a prompt next to each other.

    Every rank holds all of them, so that advantages, mini-batches and counts are those of the whole
    batch.
    """

    samples: list[Sample]
    stopped: Tensor  # (N,) bool
    # Of each reward source, then of each further number: (N,) float64, NaN where it gave none, 0 where
    # it does not score the row.
    reward_components: dict[str, Tensor]
    # (N, T) each, 0 after a response's end; "response_mask" (bool): what was sampled
    tokens: dict[str, Tensor]
    scores: Tensor  # (N,), what a response is trained with; NaN for one that is left out
    # Of distill.py, if the teacher reads another prompt: (query, tokens, mask) of each response.
    teacher_contexts: list[tuple] = field(default_factory=list)
    trained_tokens: int = 0  # of the updates, prompts included, over all ranks
    # Of the responses whose latest update ran on this rank: {response: (its place in a
    # micro-batch, what the loop added to the slices of it)}.
    added: dict[int, tuple[int, dict[str, Tensor]]] = field(default_factory=dict)

    @staticmethod
    def from_samples(samples: list[Sample], device: torch.device) -> "Batch":
        """Return a batch of some responses; their per-token outputs are padded to the longest.

        Its scores are NaN until the script makes them.
        """
        tokens = {}
        for name in {name: None for x in samples for name in ("response_mask", *x.outputs)}:
            rows = [torch.as_tensor(x.output(name)) for x in samples]
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
        """Return an upper bound of each response's tokens in a micro-batch: its own length; of one with
        several contexts, their number times the longest length; or that of its teacher's context, if
        it is longer.
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
        # The penalty is of no source, and each response has one.
        scored = [name == "length_penalty" or is_scored_by(x.row, name) for x in self.samples]
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
        """Return some of the responses behind their queries, as the function `collate` lays them
        out; the mask is not set on observations.
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
            (n, L), with --share_prompts perhaps also the number of tokens of a shared prompt.
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
            What the loop adds to the slices, (n, T) by name, goes to `added`.
        """
        for i in chosen:  # another rank may have the latest update of a response this time
            self.added.pop(i, None)
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
            self.added |= {i: (place, added) for place, i in enumerate(rows)}

    def gather_added(self, count: int, world: utils.World) -> dict[int, dict[str, Tensor]]:
        """Return what the loop added for the first `count` responses, of all ranks: {response:
        {name: (T,)}}.
        """
        mine = [
            (i, {name: x[place].cpu() for name, x in added.items()})
            for i, (place, added) in self.added.items()
            if i < count
        ]
        return dict(world.all_gather(mine))


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
    mask (n, T); 0 elsewhere.
    """
    return {
        name: x.new_zeros(mask.shape).masked_scatter(mask, x)
        for name, x in module(*inputs, **options).items()
    }


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
