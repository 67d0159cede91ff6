"""Reward models as sources of --reward."""

import functools
import math
from itertools import chain
from typing import Any

import torch
from torch.nn.functional import one_hot
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from plumbing.data.encoding import Text, encode_texts
from plumbing.data.rendering import Rendering, apply_template, shown
from plumbing.data.rows import is_scored_by
from plumbing.models import loading
from plumbing.models.config import positions_of, scalar_config
from plumbing.models.loading import Precision
from plumbing.models.sharding import Sharding
from plumbing.models.tokenizer import (
    end_of_turn,
    read_tokenizer,
    stop_token_ids,
    vocabulary_difference,
)
from utils import UserError, World, as_user_error, first_line, micro_batches, warn


class ModelSource:
    """A reward model, from a folder or the hub, that scores responses in this process. It has the
    attributes of a plumbing.rewards.sources.Source.

    A model with the policy's vocabulary reads the sampled token ids themselves. Any other model, and
    the model of a reward server, reads prompt and response as text, through its own tokenizer and
    chat template, as verl's reward workers do.
    """

    verifies = False
    whole = False
    failure = ""
    warned = False

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase | None):
        """
        Args:
            tokenizer: of the policy; None for a server, which does not know the policy.
        Raises:
            UserError: if `name` is not a reward model, or cannot read what the policy writes.
        """
        self.name = name
        self.tokenizer = read_tokenizer("--reward", name)
        config, trained = scalar_config("--reward", name)
        if not trained:
            raise UserError(
                f"--reward {name}: is not a reward model, as it has no head for a score (see reward_model.py)"
            )
        self.positions = positions_of(name)
        self.stop_ids = stop_token_ids(self.tokenizer, name, "eos")
        # A model of reward_model.py scores at its stop token, other models behind all that their
        # template writes.
        self.ends_with_stop = hasattr(config, "score_token")
        self.policy = tokenizer
        self.unknown: set[int] = set()
        self.reads_text = True
        if tokenizer is None:
            return
        difference = vocabulary_difference(tokenizer, self.tokenizer)
        if not difference:
            self.reads_text = False
            # The policy's pad token, if the reward model has none.
            ours, theirs = (set(x.get_vocab().values()) for x in (tokenizer, self.tokenizer))
            self.unknown = ours - theirs
            return
        if tokenizer.chat_template and not self.tokenizer.chat_template:
            raise UserError(
                f"--reward {name}: its vocabulary {difference}, and it has no chat template to read text by"
            )
        warn(f"--reward {name}: reads text, as its vocabulary {difference}")

    def load(self, args: Any, precision: Precision, sharding: Sharding | None = None) -> None:
        """Load the model: as `sharding` says, or else in one piece on this process's device.

        Args:
            args: flags with micro_batch_tokens.
        """
        self.autocast = precision.autocast
        self.token_budget = args.micro_batch_tokens
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.world = World(0, 1, self.device)  # ranks that make their forward passes together
        load_device = self.device
        if sharding is not None and sharding.shards_reward_models:
            self.world = sharding.world
            load_device = sharding.load_device
        self.model, _ = loading.load_scalar_model(
            "--reward", self.name, precision.frozen_dtype, load_device
        )
        self.model.requires_grad_(False)
        if sharding is not None:
            sharding.shard(self.model, reward_model=True)

    @torch.no_grad()
    def score(self, samples: list) -> list[float]:
        """Return the score of each response, NaN for a response that the model cannot read.

        Only one thread may call this: see `Scoring.finish`.
        """
        sequences = self.read(samples)
        batches = micro_batches(
            list(map(len, sequences)), self.token_budget, World(0, 1, self.device)
        )
        # Each rank has its own batches. A rank with fewer batches joins the passes of the others.
        most = int(self.world.max(torch.tensor(len(batches), device=self.device)))
        batches += [[]] * (most - len(batches))
        scores = [math.nan] * len(samples)
        for batch in batches:
            # Two tokens, whose score is dropped, stand for a sequence that is missing.
            rows = [torch.tensor(sequences[i] or [0, 0]) for i in batch] or [torch.tensor([0, 0])]
            input_ids = pad_sequence(rows, batch_first=True).to(self.device)  # (n, L)
            last = torch.tensor([len(row) - 1 for row in rows], device=self.device)
            with self.autocast():
                outputs = self.model(input_ids, one_hot(last, input_ids.shape[1]).bool())
            for i, score in zip(batch, outputs.tolist()):
                scores[i] = score if sequences[i] else math.nan
        return scores

    def score_equal_responses_alike(self, samples: list) -> None:
        """Give equal responses to a prompt, of the samples of all ranks, the score of the first of
        them.

        It depends, by rounding, on the rows of its micro-batch: advantages of equal responses would
        be nothing else.
        """
        first: dict[tuple, float] = {}
        for x in samples:
            sequence = (is_scored_by(x.row, self.name), tuple(x.row["query"]), x.response.tobytes())
            x.scores[self.name] = first.setdefault(sequence, x.scores[self.name])

    def read(self, samples: list) -> list[list[int]]:
        """Return prompts and responses as token ids of the reward model. Where it cannot read them
        this returns [] and sets `failure`.
        """
        sequences = []
        for sample in samples:
            try:
                if self.reads_text:
                    ids = self._read_text(sample.row, sample.text)
                else:
                    ids = [*sample.row["query"], *sample.response]
                ids = [token for token in ids if token not in self.unknown]
                if len(ids) > self.positions:
                    raise ValueError(
                        f"it has {len(ids)} tokens, and the model {self.positions} positions"
                    )
            except Exception as error:  # templates raise exceptions of any type
                self.failure = f"cannot read a response with its prompt: {first_line(error)}"
                ids = []
            sequences.append(ids)
        return sequences

    def _read_text(self, row: dict, text: str) -> list[int]:
        """Return prompt and response as token ids, by the reward model's template. Without a
        template, or without messages on a server, the texts stay as they are.
        """
        has_template = self.tokenizer.chat_template is not None
        messages = row["messages"]
        if has_template and messages:
            messages = [*messages, {"role": "assistant", "content": text}]
            with as_user_error("its chat template"):
                whole = shown(functools.partial(apply_template, self.tokenizer), messages)
            if self.ends_with_stop:
                whole = whole.removesuffix(end_of_turn(self.tokenizer))
            texts = [Text("the prompt", whole, is_learned=self.ends_with_stop)]
        elif has_template and self.policy:
            raise ValueError(
                "its text may hold a chat template already, as with --chat_template none"
            )
        else:
            texts = [
                Text("the prompt", row["prompt"], special=not has_template),
                Rendering(self.tokenizer, self.stop_ids).response(
                    "the response", text, row["prompt"]
                ),
            ]
        return list(chain(*encode_texts(texts, self.tokenizer, self.stop_ids)))
