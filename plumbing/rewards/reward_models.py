"""Reward models as sources of scores.

A model of the policy's vocabulary reads the sampled token ids themselves. Another one reads prompt and response as
text, through its tokenizer and chat template, as verl's reward workers do.
"""

import math

import torch

from plumbing.data.prompts import encode_text, guarded
from plumbing.models import loading
from plumbing.rewards.workers import never
from utils import World, fail, first_line, micro_batches, warn


class ModelSource:
    """A reward model, from a folder or the hub, that scores responses in this process."""

    verifies = False

    def __init__(self, name: str, tokenizer):
        """Exit with code 2 if `name` is not a reward model, or cannot read what the policy of `tokenizer` writes."""
        self.name, self.failure, self.tokenizer = name, "", loading.read_tokenizer("--reward", name)
        config, trained = loading.scalar_config("--reward", name)
        if not trained:
            fail(f"--reward {name}: is not a reward model, as it has no head for a score (see reward_model.py)")
        self.positions = getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf
        self.difference = loading.vocabulary_difference(tokenizer, self.tokenizer)
        # Of the same vocabulary, the policy's pad token, if it alone has one.
        self.unknown = set(tokenizer.get_vocab().values()) - set(self.tokenizer.get_vocab().values())
        if self.difference:
            self.unknown, self.stop_id = set(), loading.stop_token_ids(self.tokenizer, name, "eos")[0]
            # A model of reward_model.py is read at its end token, another one behind all that its template writes.
            is_ours = hasattr(config, "score_token")
            self.ending = (loading.end_of_turn(self.tokenizer), [self.stop_id]) if is_ours else ("", [])
            if tokenizer.chat_template and not self.tokenizer.chat_template:
                fail(f"--reward {name}: its vocabulary {self.difference}, and it has no chat template to read text by")
            warn(f"--reward {name}: reads text, as its vocabulary {self.difference}")

    def load(self, args, precision, sharding=None) -> None:
        """Load the model.

        Args:
            args: --micro_batch_tokens. precision: a plumbing.models.loading.Precision.
            sharding: a plumbing.models.sharding.Sharding; None for a model in one piece on this process's device.
        """
        self.autocast, self.token_budget = precision.autocast, args.micro_batch_tokens
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.world = World(0, 1, self.device)  # the ranks that make forward passes together
        load_device = self.device
        if sharding is not None and sharding.shards_reward_models:
            self.world, load_device = sharding.world, sharding.load_device
        self.model, _ = loading.load_scalar_model("--reward", self.name, precision.param_dtype, load_device)
        self.model.requires_grad_(False)
        if sharding is not None:
            sharding.shard(self.model, reward_model=True)

    @torch.no_grad()
    def score(self, rows: list[dict], texts: list[str], responses: list[list[int]], interrupted=never) -> list[float]:
        self.failure, scores = "", [math.nan] * len(rows)
        sequences = self.read(rows, texts, responses)
        readable = [i for i, sequence in enumerate(sequences) if sequence]
        batches = micro_batches([len(sequences[i]) for i in readable], self.token_budget, World(0, 1, self.device))
        # Each rank has cut its sequences; a rank with fewer batches joins the passes of the others.
        most = self.world.max(torch.tensor(len(batches), device=self.device)).item()
        for batch in batches + [[]] * (most - len(batches)):
            chosen = [readable[place] for place in batch]
            for i, score in zip(chosen, self._forward([sequences[i] for i in chosen] or [[0, 0]])):
                scores[i] = score if math.isfinite(score) else math.nan
        if not self.failure and any(map(math.isnan, scores)):
            self.failure = "its score is not finite"
        return scores

    def read(self, rows: list[dict], texts: list[str], responses: list[list[int]]) -> list[list[int]]:
        """Return prompts and responses as token ids of the reward model, [] and `failure` where it cannot read them."""
        sequences = []
        for row, text, response in zip(rows, texts, responses):
            try:
                ids = self._read_text(row, text) if self.difference else row["query"] + response
                ids = [token for token in ids if token not in self.unknown]
                if len(ids) > self.positions:
                    raise ValueError(f"it has {len(ids)} tokens, and the model {self.positions} positions")
            except Exception as error:  # templates raise exceptions of any type
                self.failure = f"cannot read a response with its prompt: {first_line(error)}"
                ids = []
            sequences.append(ids)
        return sequences

    def _read_text(self, row: dict, text: str) -> list[int]:
        """Return prompt and response as token ids by the reward model's template, or as they are without one."""
        if self.tokenizer.chat_template is None:
            text = row["prompt"] + guarded(text, self.tokenizer, own=True)
            return [*encode_text("the prompt", text, self.tokenizer), self.stop_id]
        if row["messages"] is None:
            raise ValueError("its text may hold a chat template already, as with --chat_template none")
        messages = guarded([*row["messages"], {"role": "assistant", "content": text}], self.tokenizer)
        written, end = self.ending
        conversation = self.tokenizer.apply_chat_template(messages, tokenize=False).removesuffix(written)
        return encode_text("the prompt", conversation, self.tokenizer, special=False) + end

    def _forward(self, sequences: list[list[int]]) -> list[float]:
        """Return the model's output at the last token of each sequence."""
        rows = [torch.tensor(sequence, device=self.device) for sequence in sequences]
        input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # (n, L)
        last = torch.tensor([len(sequence) - 1 for sequence in sequences], device=self.device)
        with self.autocast():
            return self.model(input_ids, torch.arange(input_ids.shape[1], device=self.device) == last[:, None]).tolist()
