"""The reward sources of a run: built-in verifiers, functions from files, reward models and reward servers.

Each kind is a class with `score(rows, texts, responses, interrupted) -> [float] * N`, NaN for a response without a
score, and with `failure`, the last reason for that ("" for none). A source that raises, takes over --reward_timeout, or
returns None, NaN, infinity or over 1e18 gives no score: never a silent zero. Nobody waits for an answer any more once
the function `interrupted` returns True: a run that ends does not use the scores.

Where rows name their sources, as in open-instruct's mixtures, the others do not count for them: see `named_sources`.

Rooms: plumbing/rewards/reward_processes.py, plumbing/rewards/reward_models.py, and plumbing/rewards/client.py where a reward server is
named (the sources); plumbing/rewards/reward_worker.py (what a score is), plumbing/rewards/verifiers.py (names of the built-in sources),
plumbing/data/prompts.py (whether a column is filled).
"""

import atexit
import os
from typing import Callable

import torch

from plumbing.data.prompts import is_filled
from plumbing.rewards.reward_models import ModelSource
from plumbing.rewards.reward_processes import Workers, WorkerSource
from plumbing.rewards.reward_worker import LARGEST, finite_or_nan, never
from plumbing.rewards.verifiers import ANSWER_REWARDS, VERIFIERS
from utils import fail, warn


def reward_weights(args) -> tuple[float, ...]:
    """Return the weight of each reward source."""
    return args.reward_weights or (1.0,) * len(args.reward)


def needs_answer(args, sources: list[str] | None = None) -> str:
    """Return "--reward NAME" of the first source that compares responses with the row's answer; "" if none does.

    Args:
        sources: those of --reward that score the row; None for all.
    """
    names = args.reward if sources is None else sources
    return next((f"--reward {name}" for name in names if name in ANSWER_REWARDS), "")


def is_server(name: str) -> bool:
    """Return whether a reward source is the address of a reward server."""
    return name.startswith(("http://", "https://"))


def is_function(name: str) -> bool:
    """Return whether a reward source is "path/to/file.py:function"."""
    return name.rpartition(":")[0].endswith(".py")


def is_reward_model(name: str) -> bool:
    """Return whether a reward source is a model, not something that checks the text."""
    return not (name in VERIFIERS or name == "environment" or is_server(name) or is_function(name))


def check_name(name: str) -> None:
    """End the run for a name that fits no kind of source. A model's folder or hub name is not opened."""
    if is_reward_model(name) and (name.endswith(".py") or not os.path.isdir(name) and name.count("/") != 1):
        others = "path/to/file.py:function, a reward model's folder or hub name, or a server's http:// address"
        fail(f"--reward {name}: no such reward; take {', '.join(VERIFIERS)}, {others}")


def named_sources(where: str, row: dict, args) -> list[str] | None:
    """Return the sources of --reward that a row of a data set names; None if all of them score it.

    Args:
        args: --reward and --verifier_column. Names are compared without case: open-instruct writes MATH.
    """
    column = args.verifier_column
    if not column:
        is_choice = "ground_truth" in row and len(args.reward) > 1
        column = "verifier" if "verifier" in row else "dataset" if is_choice else None
    value = row.get(column)
    if column == "none" or not is_filled(value):
        return None
    known = {name.lower(): name for name in args.reward}
    names = [str(name).lower() for name in (value if isinstance(value, list) else [value])]
    for name in names:
        if name not in known:
            without = "--verifier_column none has every source score every row"
            fail(f"{where}: {column} is {value!r}, which is not in --reward {' '.join(args.reward)}; {without}")
    return [known[name] for name in names]


def is_scored_by(row: dict, name: str) -> bool:
    """Return whether a source scores a row: all of them do, unless the row names its own."""
    return row.get("sources") is None or name in row["sources"]


def one_score(sequences: list[list[int]], scores: list[float]) -> list[float]:
    """Give equal sequences the score of the first of them.

    A model's score depends, by rounding, on the other rows of its forward pass. A group of equal responses would get
    advantages that are nothing but this rounding.
    """
    first: dict[tuple, float] = {}
    return [first.setdefault(tuple(sequence), score) for sequence, score in zip(sequences, scores)]


class Rewards:
    """The reward sources of a run, by the names given to --reward."""

    def __init__(
        self, names: tuple[str, ...], timeout: float, tokenizer, rows: list[dict] = (), several_turns: bool = False
    ):
        """Check all names and start the worker processes; reward models are loaded by `load_models`.

        Args:
            timeout: seconds that a call of a source may take. tokenizer: of the policy. rows: prompts of the run, of
                which each source gets two in a call that has to succeed; none for no such call.
            several_turns: whether responses are conversations.
        """
        self.workers = Workers([name for name in names if name in VERIFIERS or is_function(name)], timeout)
        self.names = names
        self.sources = {}
        for name in names:
            if is_server(name):
                from plumbing.rewards.client import ServerSource

                self.sources[name] = ServerSource(name, timeout)
            elif name == "environment":
                self.sources[name] = EnvironmentSource()
            elif is_reward_model(name):
                check_name(name)
                self.sources[name] = ModelSource(name, tokenizer)
            else:
                self.sources[name] = WorkerSource(name, self.workers)
        self.models = {name: source for name, source in self.sources.items() if isinstance(source, ModelSource)}
        atexit.register(self.close)
        self.workers.start(spare=bool(rows) and any(map(is_function, names)))
        if rows:
            self._try_out(rows, tokenizer, several_turns)
        # Those that tell a right response, by 1 or more, from a wrong one, as reward models do not.
        self.verifiers = tuple(name for name, source in self.sources.items() if source.verifies)

    def _try_out(self, rows: list[dict], tokenizer, several_turns: bool) -> None:
        """End the run if a source fails in a call with two prompts, answered by their reference answers or "42"."""
        for name, source in self.sources.items():
            own = [row for row in rows if is_scored_by(row, name)]
            if not own:
                warn(f"--reward {name}: scores no row, as all of them name other sources; see --verifier_column")
                continue
            two = [own[0], own[-1]]
            texts = ["42" if row["answer"] is None else str(row["answer"]) for row in two]
            responses = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
            if several_turns:
                two = [{**row, "turns": [{"role": "assistant", "content": x}]} for row, x in zip(two, texts)]
            if failure := source.try_out(two, texts, responses):
                fail(f"--reward {name}: a trial call with two responses failed: {failure}")
        self.workers.end_spare()

    def load_models(
        self, scale: str, dtype: torch.dtype, device: torch.device, autocast, token_budget: int, sharding=None
    ) -> None:
        """Load the reward models among the sources, see `ModelSource.load`."""
        for source in self.models.values():
            source.load(scale, dtype, device, autocast, token_budget, sharding)

    def score(
        self, rows: list[dict], texts: list[str], responses: list[list[int]], interrupted: Callable[[], bool] = never
    ) -> dict[str, list[float]]:
        """Return each source's scores of the responses, NaN where there is none: {name: [float] * N}.

        A source that does not count for a row has 0 there, which adds nothing to the weighted sum.

        Args:
            rows: as `plumbing.data.mixture.load_prompts` makes them. texts: the responses as text. responses:
                the same as token ids. interrupted: see above.
        """
        scores = {name: [0.0] * len(rows) for name in self.sources}
        for name, source in self.sources.items():
            own = [i for i, row in enumerate(rows) if is_scored_by(row, name)]
            found = source.score(*([column[i] for i in own] for column in (rows, texts, responses)), interrupted)
            for i, score in zip(own, found):
                scores[name][i] = score
        return scores

    def why_missing(self, components: dict[str, torch.Tensor]) -> str:
        """Return what is known of the scores that are missing in `components`, source by source."""
        missing = [name for name, scores in components.items() if scores.isnan().any()]
        no_score = f"it returned None, NaN, infinity or over {LARGEST:g}"
        why = {name: self.sources[name].failure or no_score for name in missing}
        return "; ".join(f"{name}: {reason}" for name, reason in why.items())

    def close(self) -> None:
        self.workers.close()


class EnvironmentSource:
    """The sum of --environment's rewards, which the conversations bring along."""

    verifies, failure = True, ""

    def try_out(self, rows: list[dict], texts: list[str], responses: list[list[int]]) -> str:
        """Do nothing: there is no conversation yet."""
        return ""

    def score(self, rows: list[dict], texts: list[str], responses: list[list[int]], interrupted=never) -> list[float]:
        return [finite_or_nan(row["environment"]) for row in rows]
