"""The reward sources of a run: built-in verifiers, functions from files, reward models and reward servers.

Each kind is a class with `score(rows, texts, responses, interrupted) -> [float] * N`, NaN for a response without a
score, and with `failure`, the last reason for that ("" for none). A source that raises an exception, takes longer than
--timeout, or returns None, NaN, infinity or over 1e18 gives no score: never a silent zero. `score` stops waiting once
the function `interrupted` returns True: a run that ends does not use the scores.

Where rows name their sources, as in open-instruct's mixtures, the others do not count for them: see
`plumbing.data.prompts.named_sources`.
"""

import functools
import importlib.util
import os
from multiprocessing.util import Finalize
from typing import Callable

import torch

from plumbing.data.prompts import is_filled
from plumbing.rewards.reward_models import ModelSource
from plumbing.rewards.verifiers import VERIFIERS, verifier_of
from plumbing.rewards.workers import LARGEST, FunctionSource, VerifierSource, Workers, columns_of, finite_or_nan, never
from utils import fail, first_line, loading, warn


def reward_weights(args) -> tuple[float, ...]:
    """Return the weight of each reward source."""
    return args.reward_weights or (1.0,) * len(args.reward)


def check_reference(where: str, row: dict, args) -> str:
    """Return why a source of --reward that trains cannot score a row, whatever the response; "" if all of them can.

    Exit with code 2 if the row has no answer, and a source needs one.

    Args:
        where: names the row in messages. row: as `plumbing.data.mixture.load_prompts` makes it.
    """
    if not is_filled(row["answer"]) and (source := needs_answer(args, row["sources"])):
        fail(f"{where}: has no answer, which {source} needs; --answer_column names one of {', '.join(row['columns'])}")
    for name, weight in zip(args.reward, reward_weights(args)):
        if weight and is_scored_by(row, name) and (verifier := verifier_of(name)):
            check_name(name)
            try:
                verifier.read(*columns_of([row]).get(verifier.column, [None]))
            except Exception as error:  # references of any form
                return f"--reward {name}: {first_line(error)}"
    return ""


def needs_answer(args, sources: list[str] | None = None) -> str:
    """Return "--reward NAME" of the first source that compares responses with the row's answer; "" if none does.

    Args:
        sources: those of --reward that score the row; None for all.
    """
    names = args.reward if sources is None else sources
    return next((f"--reward {name}" for name in names if getattr(verifier_of(name), "column", "") == "answer"), "")


def kind_of(name: str) -> str:
    """Return what a source of --reward is: "environment", "verifier", "server", "function" or "model"."""
    if name == "environment":
        return name
    if verifier_of(name):
        return "verifier"
    if name.startswith(("http://", "https://")):
        return "server"
    return "function" if name.rpartition(":")[0].endswith(".py") else "model"


@functools.cache
def check_name(name: str) -> None:
    """Exit with code 2 for a source that cannot be used. A model's folder or hub name is not opened."""
    if kind_of(name) == "model" and not os.path.isdir(name) and name.count("/") != 1:
        others = "path/to/file.py:function, a reward model's folder or hub name, or a server's http:// address"
        fail(f"--reward {name}: there is no such reward; use {', '.join(VERIFIERS)}, {others}")
    if kind_of(name) == "verifier" and importlib.util.find_spec(package := verifier_of(name).package) is None:
        fail(f"--reward {name}: requires the package {package} (pip install {package})")
    if name == "code":
        from plumbing.rewards import sandbox

        with loading("--reward code"):
            missing = sandbox.open_limits()
        if missing:
            warn(f"--reward code: {missing}")


def is_scored_by(row: dict, name: str) -> bool:
    """Return whether a source scores a row: all of them do, unless the row names its sources."""
    return row.get("sources") is None or name in row["sources"]


class Rewards:
    """The reward sources of a run, by the names given to --reward."""

    def __init__(self, args, tokenizer, rows: list[dict] = (), environment: bool = False):
        """Check all sources and start the worker processes; reward models are loaded by `load_models`.

        Args:
            args: --reward, and --timeout in seconds of a call. tokenizer: of the policy. rows: prompts of the run, of
                which each source gets two in a call that has to succeed; none for no such call.
            environment: whether responses are conversations.
        """
        # Verifiers share the responses of a rank out among processes; functions share one process and what it holds.
        cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        packages = [verifier_of(name).package for name in args.reward if kind_of(name) == "verifier"]
        verifiers, functions = Workers(max(1, min(4, cores)), packages), Workers(1)
        self.workers, self.sources, self.warned = [verifiers, functions], {}, set()
        Finalize(None, self.close, exitpriority=1)  # at the end of this process, a child of multiprocessing, too
        for name in args.reward:
            check_name(name)
            match kind_of(name):
                case "environment":
                    self.sources[name] = EnvironmentSource()
                case "verifier":
                    self.sources[name] = VerifierSource(name, verifiers, args.timeout)
                case "server":
                    from plumbing.rewards.client import ServerSource

                    self.sources[name] = ServerSource(name, args.timeout)
                case "function":
                    self.sources[name] = FunctionSource(name, functions, args.timeout)
                    if failure := self.sources[name].load():
                        fail(f"--reward {name}: {failure}", local=True)
                case "model":
                    self.sources[name] = ModelSource(name, tokenizer)
        self.models = {name: source for name, source in self.sources.items() if isinstance(source, ModelSource)}
        if rows:
            self._try_out(rows, tokenizer, environment)
        # Those that tell a right response, by 1 or more, from a wrong one, as reward models do not.
        self.verifiers = tuple(name for name, source in self.sources.items() if source.verifies)

    def _try_out(self, rows: list[dict], tokenizer, environment: bool) -> None:
        """Exit with code 2 if a source fails in a call with two prompts, answered by their references or "42"."""
        for name, source in self.sources.items():
            scored = [row for row in rows if is_scored_by(row, name)]
            two = scored[:1] + scored[-1:]
            texts = ["42" if row["answer"] is None else str(row["answer"]) for row in two]
            responses = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
            if environment:
                two = [{**row, "turns": [{"role": "assistant", "content": x}]} for row, x in zip(two, texts)]
            if name in self.models:
                source.read(two, texts, responses)  # its weights are not loaded yet
            elif kind_of(name) in ("function", "server"):
                source.score(two, texts, responses)
            if source.failure:
                fail(f"--reward {name}: a trial call with two responses failed: {source.failure}")

    def load_models(self, args, precision, sharding=None) -> None:
        """Load the reward models among the sources, see `ModelSource.load`."""
        for source in self.models.values():
            source.load(args, precision, sharding)

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
            scored = [i for i, row in enumerate(rows) if is_scored_by(row, name)]
            chosen = ([column[i] for i in scored] for column in (rows, texts, responses))
            for i, score in zip(scored, source.score(*chosen, interrupted)):
                scores[name][i] = score
            reason = self.why_missing({name: torch.tensor(scores[name])})
            if reason and name not in self.warned and not interrupted():
                self.warned.add(name)
                warn(f"--reward {reason}; such responses have no score (this is said once)")
        return scores

    def score_samples(self, samples: list, interrupted: Callable[[], bool]) -> None:
        """Set `scores`, {source: score}, of responses whose `text` is set: plumbing.rollout.batch.Samples."""
        rows = [x.row if x.conversation is None else x.conversation.scored_row() for x in samples]
        scores = self.score(rows, [x.text for x in samples], [x.response for x in samples], interrupted)
        for i, sample in enumerate(samples):
            sample.scores = {source: column[i] for source, column in scores.items()}

    def score_equal_responses_alike(self, samples: list) -> None:
        """Give equal responses to a prompt the reward model's score of the first of them.

        A model's score depends, by rounding, on the other rows of its micro-batch: a group of equal responses would get
        advantages that are nothing but this rounding.

        Args:
            samples: plumbing.rollout.batch.Samples of all ranks, whose `scores` change.
        """
        for name in self.models:
            first: dict[tuple, float] = {}
            for x in samples:
                sequence = (is_scored_by(x.row, name), *x.row["query"], *x.response)
                x.scores[name] = first.setdefault(sequence, x.scores[name])

    def why_missing(self, components: dict[str, torch.Tensor]) -> str:
        """Return the reasons for the scores that are missing in `components`, source by source."""
        missing = [name for name, scores in components.items() if scores.isnan().any()]
        no_score = f"it returned None, NaN, infinity or over {LARGEST:g}"
        return "; ".join(f"{name}: {self.sources[name].failure or no_score}" for name in missing)

    def close(self) -> None:
        """Kill the worker processes."""
        for workers in self.workers:
            workers.close()


class EnvironmentSource:
    """The sum of --environment's rewards, which the conversations bring along."""

    verifies, failure = True, ""

    def score(self, rows: list[dict], texts: list[str], responses: list[list[int]], interrupted=never) -> list[float]:
        return [finite_or_nan(row["environment"]) for row in rows]
