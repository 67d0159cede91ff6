"""A teacher of distill.py on a vLLM server: what scripts/vllm_server.py starts, or vLLM as it is."""

import asyncio
import math
from typing import Any, Callable

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from extras.http import SERVER_PATIENCE, SERVER_START, ask_server
from plumbing.data.cache import numbers_of
from plumbing.models.config import load_config
from plumbing.processes import run_all, run_until_done
from plumbing.rollout.batch import Sample
from utils import Interrupted, UserError, World, first_line, say, warn

REQUESTS = 64  # under way, for each rank


def spread_rest(tokens: Tensor, top_logprobs: Tensor, logprobs: Tensor) -> Tensor:
    """Return log-probabilities (..., V) of a teacher of which K tokens are known. The others share
    what is left in the proportions of the student.

    The divergences of the result, and their gradients, are those over the K tokens and one entry for
    all others, whose probabilities are 1 minus the sums.

    Args:
        tokens, top_logprobs: (..., K), the known tokens, of which some may be the same, and their
            log-probabilities. logprobs: (..., V), of the student, without gradient.
    """
    unknown = torch.full_like(logprobs, -math.inf)
    known = unknown.scatter(-1, tokens, top_logprobs.to(logprobs.dtype))
    is_known = known > -math.inf
    # What the known probabilities leave of 1. A server sends float32, and less is its rounding.
    rest = (1 - known.exp().sum(-1, keepdim=True)).clamp(min=1e-7)
    of_student = logprobs.masked_fill(is_known, -math.inf).logsumexp(-1, keepdim=True)
    return torch.where(is_known, known, logprobs + rest.log() - of_student)


class ServedTeacher:
    """A frozen model that a server knows, and of which it tells the log-probabilities of the sampled
    tokens and of the most likely ones.

    A request, which --timeout limits, is sent again as those of a rollout are (`ask_server`). If that
    does not help, its response does not train.

    Attributes:
        failure: why the last response that was not answered has no log-probabilities.
    """

    failure = ""

    def __init__(self, args: Any, tokenizer: PreTrainedTokenizerBase, rows: Any):
        """Wait for the server; raise a UserError if it cannot be reached, has another vocabulary
        than --model, or cannot read the longest of the rows.

        Args:
            args: of distill.py. rows: to train on.
        """
        self.url = args.teacher.rstrip("/")
        self.timeout = args.timeout
        self.vocab_size = load_config("--model", args.model).get_text_config().vocab_size
        self.top_k = args.teacher_top_k if args.estimator == "exact" else 0
        say(f"waiting for the teacher at {self.url}, {SERVER_START:.0f} s at most")
        # A pad token may differ: padding is masked.
        ids = sorted({*tokenizer.get_vocab().values()} - {tokenizer.pad_token_id})

        async def ask() -> tuple[int, str]:
            models = await ask_server(self.url, "/v1/models", timeout=10.0, patience=SERVER_START)
            text = await ask_server(self.url, "/detokenize", {"tokens": ids})
            return models["data"][0]["max_model_len"], text["prompt"]

        try:
            max_length, text = run_until_done(ask())
        except (OSError, RuntimeError, LookupError, TypeError) as error:
            raise UserError(f"--teacher {first_line(error)}", local=True) from error
        if text != tokenizer.decode(ids):
            raise UserError(f"--teacher {self.url}: has another vocabulary than --model")
        queries = np.maximum(numbers_of(rows, "query"), numbers_of(rows, "teacher_query"))
        needed = queries.max() + args.max_response_length + 1  # it samples a token
        if needed > max_length:
            raise UserError(
                f"--teacher {self.url}: reads {max_length} tokens, and prompts with --max_response_length "
                f"need {needed}"
            )

    def ask(self, samples: list[Sample], world: World, interrupted: Callable[[], bool]) -> None:
        """Add to the outputs of all samples "teacher_tokens" and "teacher_logprobs" (T, K): of each
        response token itself and the most likely ones; NaN for a sample without an answer.

        The requests of a rank are under way side by side. Raise Interrupted if a rank was asked to
        save and exit.
        """
        answers: dict[int, Any] = {}  # by place in `samples`; a text says why there is none
        slots = asyncio.Semaphore(REQUESTS)

        async def ask(place: int) -> None:
            async with slots:
                try:
                    answers[place] = await self._known_tokens(samples[place])
                except (RuntimeError, LookupError, TypeError, ValueError, AttributeError) as error:
                    answers[place] = f"--teacher {first_line(error)}"

        run_until_done(run_all(map(ask, world.shard([*range(len(samples))])), interrupted))
        if world.any(interrupted()):
            raise Interrupted
        answers = dict(world.all_gather([*answers.items()]))
        for place, sample in enumerate(samples):
            answer = answers[place]
            if isinstance(answer, str):
                if not self.failure:
                    warn(f"{answer}; such responses do not train (this is said once)")
                self.failure = answer
                answer = np.full((2, len(sample.response), self.top_k + 1), np.nan)
            tokens, logprobs = answer
            sample.outputs |= {"teacher_tokens": tokens, "teacher_logprobs": logprobs}

    async def _known_tokens(self, sample: Sample) -> np.ndarray:
        """Return tokens and log-probabilities (2, T, K) of a response."""
        ((query, response, _),) = sample.contexts
        query = sample.row["teacher_query"] or query
        body = {
            "prompt": [*query, *response.tolist()],
            "max_tokens": 1,
            "prompt_logprobs": self.top_k,
        }
        answer = await ask_server(self.url, "/v1/completions", body, self.timeout, SERVER_PATIENCE)
        rows = []
        for known in answer["choices"][0]["prompt_logprobs"][len(query) :]:
            # The token itself comes first, and is one of the most likely or one more. A teacher may
            # have tokens that the student lacks, as padding.
            row = [(int(x), of["logprob"]) for x, of in known.items() if int(x) < self.vocab_size]
            rows.append(row + row[:1] * (self.top_k + 1 - len(row)))
        return np.array(rows).reshape(len(response), self.top_k + 1, 2).transpose(2, 0, 1)
