"""The reward sources of a run: built-in verifiers and functions from files; reward models and reward
servers are in extras/.

Each kind is a class, a Source. One that raises an exception, takes longer than --timeout, or
returns None, NaN, infinity or over 1e18 gives no score: never a silent zero.
"""

import asyncio
import functools
import importlib.util
import itertools
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from types import SimpleNamespace
from typing import Any

from plumbing.data.formats import is_filled
from plumbing.data.rows import Row, is_scored_by
from plumbing.processes import (
    SECONDS_TO_LOAD,
    Ended,
    EventLoop,
    Failed,
    ForkServer,
    Late,
    Processes,
    Stuck,
)
from plumbing.rewards import verifiers
from plumbing.rewards.functions import Functions
from utils import UserError, as_user_error, first_line, warn

# Score; the square of a larger one would not fit into float32, and its advantage become 0.
LARGEST = 1e18


def finite_or_nan(score) -> float:
    """Return a score as a float; NaN for None, infinity and anything over LARGEST."""
    score = math.nan if score is None else float(score)
    return score if abs(score) <= LARGEST else math.nan


def values_of(row: Row) -> dict:
    """Return the columns that a prompt had in its file; "answer", the reference if it has one; and
    "rollout_group", unless it is one of the columns.
    """
    columns = row.get("columns", {})
    return {
        "rollout_group": row.get("rollout_group"),
        **columns,
        "answer": columns.get("answer") if row["answer"] is None else row["answer"],
    }


def columns_of(rows: list[Row]) -> dict[str, list]:
    """Return the `values_of` some rows by column, None where a row lacks one."""
    tables = list(map(values_of, rows))
    names = sorted({name for table in tables for name in table})
    return {name: [table.get(name) for table in tables] for name in names}


def turns_of(rows: list[Row]) -> list:
    """Return the messages of each conversation; [] if responses are none."""
    return [row["turns"] for row in rows if "turns" in row]


def final_turn(sample) -> str:
    """Return the text that verifiers read: of a conversation the model's last turn, behind the
    thought that the chat template opened in its prompt.
    """
    turns = sample.row.get("turns")
    opened = "<think>" if sample.row["prompt"].rstrip().endswith("<think>") else ""
    return opened + (turns[-1]["content"] if turns else sample.text)


# ---- what --reward names -------------------------------------------------------------------------


def reward_weights(args) -> tuple[float, ...]:
    """Return the weight of each reward source."""
    return args.reward_weights or (1.0,) * len(args.reward)


def kind_of(name: str) -> str:
    """Return what a source of --reward is: "episode", "verifier", "server", "function" or
    "model".
    """
    if name == "episode":
        return name
    if name in verifiers.NAMES:
        return "verifier"
    if name.startswith(("http://", "https://")):
        return "server"
    return "function" if name.rpartition(":")[0].endswith(".py") else "model"


@functools.cache
def check_name(name: str) -> None:
    """Raise a UserError for a source that cannot be used. A model's folder or hub name is not
    opened.
    """
    if kind_of(name) == "model" and not os.path.isdir(name) and name.count("/") != 1:
        raise UserError(
            f"--reward {name}: there is no such reward; use {', '.join(verifiers.NAMES)}, "
            "path/to/file.py:function, a reward model's folder or hub name, or a server's http:// address"
        )
    if kind_of(name) == "verifier":
        package = verifiers.verifier(name).package
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"--reward {name}: requires the package {package} (pip install {package})"
            )
    if name == "code":
        from extras.verifiers import sandbox

        with as_user_error("--reward code"):
            if missing := sandbox.open_limits():
                warn(f"--reward code: {missing}")


def why_unscorable(where: str, row: Row, args) -> str:
    """Return why a source of --reward that trains cannot score a row, whatever the response; "" if
    all of them can.

    Raise a UserError if the row has no answer, and a source needs one.
    """
    for name, weight in zip(args.reward, reward_weights(args)):
        if kind_of(name) != "verifier" or not is_scored_by(row, name):
            continue
        verifier = verifiers.verifier(name)
        if verifier.column == "answer" and not is_filled(row["answer"]):
            raise UserError(
                f"{where}: has no answer, which --reward {name} needs; --answer_column names one of "
                f"{', '.join(row['columns'])}"
            )
        if weight:
            check_name(name)
            try:
                verifier.read(values_of(row).get(verifier.column))
            except Exception as error:  # references of any form
                return f"--reward {name}: {first_line(error)}"
    return ""


# ---- the sources of a run ------------------------------------------------------------------------


class RewardSources:
    """The reward sources of a run, by the names given to --reward."""

    waited = 0.0  # seconds for scores of a step, once all responses had ended
    whole = False  # whether a source is; then one rank has all responses of a group

    def __init__(self, args, tokenizer=None, rows: Sequence[Row] = (), environment: bool = False):
        """Check all sources, and load functions; reward models are loaded by `load_models`.

        Args:
            args: --reward, and --timeout in seconds of a call. tokenizer: of the policy; None on a
                server. rows: prompts of the run, of which each source gets two in a call that has
                to succeed; none for no such call.
            environment: whether responses are conversations.
        """
        # Its "step" is that of the run once there is one, see Rollouts; a server knows none.
        self.state: dict = {"step": 0} if tokenizer else {}
        self.lock = threading.Lock()  # of what rollouts share that end at the same time
        self.loop = EventLoop()  # all sources but reward models are asked there
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        count = args.reward_workers or max(1, (os.cpu_count() or 1) // ranks)
        used = [verifiers.verifier(name) for name in args.reward if kind_of(name) == "verifier"]
        self.server = ForkServer([name for x in used for name in (x.check.__module__, x.package)])
        # One for all functions of a folder and what they hold: files of several folders may import
        # modules of one name. Of a kind that asks none it never starts.
        processes = defaultdict(
            lambda: Processes(self.server, Functions, 1),
            verifier=Processes(self.server, verifiers.Checks, count),
        )
        self.sources: dict[str, Any] = {}  # a Source or a ModelSource each
        self.models: dict[str, Any] = {}  # the ModelSources
        for name in args.reward:
            check_name(name)
            kind = kind_of(name)
            if kind == "model":
                from extras.reward_models import ModelSource

                self.models[name] = self.sources[name] = ModelSource(name, tokenizer)
                continue
            if kind == "server":
                from extras.reward_servers import ServerSource
            make = ServerSource if kind == "server" else SOURCES[kind]
            shared = os.path.dirname(os.path.abspath(name)) if kind == "function" else kind
            source = make(name, args.timeout, processes[shared])
            self.loop.run(source.load())
            self.sources[name] = source
        self._try_out(rows, tokenizer, environment, getattr(args, "group_size", 1))
        self.whole = any(source.whole for source in self.sources.values())
        # Not only built-in ones: all that tell a right response, by 1 or more, from a wrong one.
        self.verifiers = tuple(name for name, source in self.sources.items() if source.verifies)

    def _try_out(self, rows: Sequence[Row], tokenizer, environment: bool, group: int) -> None:
        """Raise a UserError if a source fails in a call with two prompts, answered by their
        references or "42"; one that compares responses gets a `group` of each.
        """
        rows = list(itertools.islice(rows, 1000))
        for name, source in self.sources.items():
            chosen = [row for row in rows if is_scored_by(row, name)]
            samples = []
            for i, row in enumerate(chosen[:1] + chosen[-1:]):
                text = str(row["answer"] or 42)
                row = row | {"rollout_group": i}
                if environment:
                    row["turns"] = [{"role": "assistant", "content": text}]
                ids = tokenizer.encode(text, add_special_tokens=False)
                samples.append(SimpleNamespace(row=row, text=text, response=ids, step=0))
            if name in self.models:
                self.models[name].read(samples)  # its weights are not loaded yet
            elif samples and kind_of(name) in ("function", "server"):
                copies = group if source.whole else 1
                for _ in range(2):  # what a function holds may work only once
                    if not source.failure:
                        self.loop.run(source.score([x for x in samples for _ in range(copies)]))
            if source.failure:
                raise UserError(f"--reward {name}: a trial call failed: {source.failure}")

    def load_models(self, args, precision, sharding=None) -> None:
        """Load the reward models among the sources, see `ModelSource.load`."""
        for source in self.models.values():
            source.load(args, precision, sharding)

    def why_missing(self, name: str) -> str:
        """Return a source and why scores of it are missing."""
        return f"{name}: {self.sources[name].failure or f'it returned None, NaN, infinity or over {LARGEST:g}'}"


class Scoring:
    """Scores of a rank's responses: each response goes to its sources when it has ended, while
    others are sampled.

    A call of a source scores all responses that wait, up to its `most`. Which ones wait depends on
    when they end, so a score must not depend on the others of its call. A source that is `whole`,
    and a reward model, scores all responses at the end, in order.
    """

    def __init__(self, reward_sources: RewardSources, interrupted: Callable[[], bool]):
        self.reward_sources = reward_sources
        self.interrupted = interrupted
        self.samples: dict[int, Any] = {}  # by their places
        self.lock = threading.Lock()  # of what two threads change
        self.waiting: dict[str, list] = defaultdict(list)
        self.jobs: list[Future] = []

    def add(self, place: int, sample) -> None:
        """Have a response scored: a plumbing.rollout.batch.Sample, or what has its `row`, `text`
        and `response`.
        """
        self.samples[place] = sample
        sample.step = self.reward_sources.state.get("step")
        sources = self.reward_sources.sources
        scored_by = [name for name in sources if is_scored_by(sample.row, name)]
        sample.scores = dict.fromkeys(sources, 0.0) | dict.fromkeys(scored_by, math.nan)
        for name in scored_by:
            if not sources[name].whole and name not in self.reward_sources.models:
                self._start(name, [sample])

    def _start(self, name: str, samples: list) -> None:
        """Have a source score a sample, or all of a source that is `whole`."""
        with self.lock:
            # Else a call that has begun takes it, too: a further one would wake the event loop.
            if len(self.waiting[name]) % self.reward_sources.sources[name].most == 0:
                self.jobs.append(self.reward_sources.loop.start(self._score(name)))
            self.waiting[name] += samples

    async def _score(self, name: str) -> None:
        """Have a source score the samples that wait for it, once it is free."""
        source = self.reward_sources.sources[name]
        await asyncio.sleep(0.002)  # what ends at the same time is scored together
        async with source.at_once:
            with self.lock:
                taken = self.waiting[name][: source.most]
                del self.waiting[name][: source.most]
            keep(name, taken, await source.score(taken))

    def finish(self) -> list:
        """Wait for all scores, and return the samples in order; if interrupted, scores may be
        missing.

        Each sample has got its `scores`, {source: score}: NaN for no score, and 0, which adds
        nothing to the weighted sum, where a source does not count for a row. Behind the sources
        come the further numbers of functions, named "SOURCE/NUMBER".
        """
        begin = time.monotonic()
        samples = [self.samples[place] for place in sorted(self.samples)]
        # Ranks that share reward models make their passes together: everywhere one rollout after
        # the other, with all models of a rollout.
        with self.reward_sources.lock:
            for name, source in self.reward_sources.sources.items():
                is_model = name in self.reward_sources.models
                if is_model or source.whole:
                    scored = [sample for sample in samples if is_scored_by(sample.row, name)]
                    if is_model:
                        keep(name, scored, source.score(scored))
                    elif scored:
                        self._start(name, scored)
        while (jobs := wait(self.jobs, timeout=0.1)).not_done and not self.interrupted():
            pass
        for job in jobs.not_done:
            job.cancel()
        for job in jobs.done:
            job.result()  # raises what it has raised
        with self.reward_sources.lock:
            self.reward_sources.waited += time.monotonic() - begin
            for name, source in self.reward_sources.sources.items():
                missing = any(math.isnan(sample.scores[name]) for sample in samples)
                if missing and not source.warned and not self.interrupted():
                    source.warned = True
                    reason = self.reward_sources.why_missing(name)
                    warn(f"--reward {reason}; such responses have no score (this is said once)")
        return samples


def keep(name: str, samples: list, results: list) -> None:
    """Add what a source has returned to the scores of samples."""
    for sample, result in zip(samples, results):
        numbers = result if isinstance(result, dict) else {"score": result}
        for key, number in numbers.items():
            sample.scores[f"{name}/{key}".removesuffix("/score")] = finite_or_nan(number)


# ---- kinds of sources, but for those in extras/ --------------------------------------------------


class Source:
    """What scores responses."""

    verifies = True  # whether a score of 1 or more is that of a right response
    whole = False  # whether `score` gets all responses of a rollout on this rank in one call
    most = 1 << 30  # responses in a call of `score`
    failure = ""  # the last reason for a score that is missing
    warned = False  # whether a missing score was reported

    def __init__(self, name: str, timeout: float, processes: Processes):
        """`processes`: those that `ask` asks."""
        self.name = name
        self.timeout = timeout
        self.processes = processes
        self.at_once = processes.at_once  # of calls of `score` at the same time

    async def load(self) -> None:
        """Set `verifies`, `whole` and so on before anything is scored."""

    async def score(self, samples: list) -> list:
        """Return a number for each response, None or NaN for no score, or an object that has it as
        "score", and further numbers.

        Args:
            samples: see `Scoring.add`; their rows are as `plumbing.data.prompts.load_prompts` makes
                them.
        """
        raise NotImplementedError

    async def ask(
        self, seconds: float, method: str, *arguments: Any, **limits: Any
    ) -> tuple[Any, str]:
        """Return (what a process answers, ""), or (None, the reason) if the call fails."""
        try:
            return await self.processes.ask(seconds, method, *arguments, **limits), ""
        except Late:
            flag = "--timeout " if seconds == self.timeout else ""
            return None, f"TimeoutError: no result within {flag}{seconds:g} s"
        except (Failed, Ended, Stuck) as error:
            return None, str(error)[:1000]


class VerifierSource(Source):
    """A built-in verifier, which scores response by response."""

    def __init__(self, name: str, timeout: float, processes: Processes):
        super().__init__(name, timeout, processes)
        self.verifier = verifiers.verifier(name)
        self.check = self.verifier.check
        self.most = self.verifier.most
        if name == "code":
            # Less than the call may last: a program that is stuck scores 0, a call that is stuck
            # has no score.
            self.check = functools.partial(self.check, seconds=0.8 * timeout)

    async def score(self, samples):
        calls = [(final_turn(x), values_of(x.row).get(self.verifier.column)) for x in samples]
        ask = functools.partial(
            self.ask, self.timeout, "score", self.check, cpu_seconds=self.verifier.limit
        )
        checked, failure = await ask(calls)
        if failure.endswith("CPU time"):
            # Comparing a formula can last forever. Then the response, the only one of the call, gets
            # the score of an empty one, 0. If that takes too long, too, the reference is to blame.
            ((_, reference),) = calls
            checked, failure = await ask([("", reference)])
            failure = f"the reference {reference!r:.60} alone: {failure}"
        scores, reason = checked or ([None] * len(calls), failure)
        self.failure = reason or self.failure
        return scores


class FunctionSource(Source):
    """A function from a user's file, called with lists of responses, always in the same process."""

    async def load(self):
        """Import the file in the process, unless it is there."""
        attributes, failure = await self.ask(SECONDS_TO_LOAD, "attributes", self.name)
        if failure:
            raise UserError(f"--reward {self.name}: {failure}", local=True)
        self.verifies, self.whole = attributes

    async def score(self, samples):
        """Return {"score": a number, NAME: a further number} for each response."""
        rows = [sample.row for sample in samples]
        # The process may be a new one, and the time of a call is not for imports.
        await self.ask(SECONDS_TO_LOAD, "attributes", self.name)
        results, failure = await self.ask(
            self.timeout,
            "score",
            self.name,
            [row["prompt"] for row in rows],
            [sample.text for sample in samples],
            [list(map(int, sample.response)) for sample in samples],
            columns_of(rows),
            samples[0].step,
            turns_of(rows),
        )
        results = results or [None] * len(samples)
        if failure or any(math.isnan(result["score"]) for result in results):
            self.failure = failure
        return results


class EpisodeSource(Source):
    """What --environment or --agent gives an episode, which the conversations bring along."""

    async def score(self, samples):
        return [sample.row["episode"] for sample in samples]


SOURCES: dict[str, type[Source]] = {
    "episode": EpisodeSource,
    "verifier": VerifierSource,
    "function": FunctionSource,
}
