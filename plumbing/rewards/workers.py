"""Verifiers and users' functions as sources of scores, computed in a pool of processes (pebble).

A call that takes too long, crashes or raises an exception gives no score (NaN), never 0. A process that hangs is
killed, and pebble starts another one. The processes import this module, so it imports no torch.
"""

import contextlib
import functools
import importlib
import logging
import math
import os
import signal
import sys
import traceback
import types
from concurrent.futures import wait
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Callable

from pebble import ProcessPool

from plumbing.rewards.functions import load_scorer, score_by
from plumbing.rewards.verifiers import verifier_of

SECONDS_TO_LOAD = 300.0  # for imports of users' files, which may be slow on a busy file system
LARGEST = 1e18  # score; the square of a larger one would not fit into float32, and its advantage become 0


def never() -> bool:
    """Return that the run is not interrupted."""
    return False


def finite_or_nan(score) -> float:
    """Return a score as a float; NaN for None, infinity and anything over LARGEST."""
    score = math.nan if score is None else float(score)
    return score if abs(score) <= LARGEST else math.nan


def columns_of(rows: list[dict]) -> dict[str, list]:
    """Return the columns that prompts had in their files and "answer", a value a prompt; None where a row lacks one."""
    tables = [{**row.get("columns", {}), "answer": row.get("answer")} for row in rows]
    names = sorted({name for table in tables for name in table})
    return {name: [table.get(name) for table in tables] for name in names}


# ---- in a worker process ---------------------------------------------------------------------------------------------


def prepare(packages: list[str]) -> None:
    """Set up a new process and import the packages of its verifiers, which can take longer than a call may."""
    os.setsid()  # signals to the trainer's process group are for the trainer
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # pebble's handler would wait for a call that hangs
    os.dup2(2, 1)  # output of functions goes to stderr
    logging.disable(logging.WARNING)  # math-verify warns at every call that its time limits are off
    for package in packages:
        with contextlib.suppress(Exception):  # the check that needs it reports it
            importlib.import_module(package)


def attempt(limit: float, call: Callable, arguments: list[tuple]) -> list[tuple]:
    """Return (result, "") of a call with each of the arguments, or (None, reason) where it raises an exception.

    Exceptions are returned as text: the trainer could not read an exception class of a user's file.
    """
    process, results = os.getpid(), []
    signal.setitimer(signal.ITIMER_REAL, limit + 5)  # ends this process for a trainer that has been killed
    for each in arguments:
        try:
            results.append((call(*each), ""))
        except BaseException as error:
            if call is call_function:
                traceback.print_exc()
            results.append((None, f"{type(error).__name__}: {error}"[:1000]))
    if os.getpid() != process:  # a child that a function has forked, and that came back from it
        os._exit(1)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return results


def call_function(name: str, *arguments) -> list[float | None]:
    """Return the scores of a user's function; without arguments, only import it."""
    function = load_scorer(name)
    return score_by(function, *arguments) if arguments else []


# ---- in the trainer --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def without_main():
    """Hide the script that runs here from a process that starts within, which would import it, and torch with it."""
    main, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class Context(SpawnContext):
    class Process(SpawnProcess):
        @staticmethod
        @without_main()
        def _Popen(process):
            return SpawnProcess._Popen(process)


class Workers:
    """Worker processes, which start with the first call."""

    def __init__(self, count: int, packages: list[str] = ()):
        self.settings = {"max_workers": count, "initializer": prepare, "initargs": (packages,), "context": Context()}
        self.pool = ProcessPool(**self.settings)

    def run(
        self, call: Callable, arguments: list[tuple], limit: float, interrupted: Callable = never, calls_a_job: int = 1
    ) -> list[tuple]:
        """Call a function with each of the arguments, spread over the workers, `limit` seconds at most a job.

        Return a list of (result, ""), or of (None, reason) where a call has failed.
        """
        if not self.pool.active:  # a worker without a call has died: pebble then gives up
            self.pool = ProcessPool(**self.settings)
        jobs = [arguments[i : i + calls_a_job] for i in range(0, len(arguments), calls_a_job)]
        futures = [self.pool.schedule(attempt, (limit, call, job), timeout=limit) for job in jobs]
        while wait(futures, timeout=0.1).not_done and self.pool.active and not interrupted():
            pass
        results = []
        for job, future in zip(jobs, futures):
            future.cancel()  # does nothing to those that are done
            try:
                results += future.result()
            except Exception as error:  # of pebble: TimeoutError, ProcessExpired, CancelledError if interrupted
                results += [(None, f"{type(error).__name__}: {error}")] * len(job)
        return results

    def close(self) -> None:
        """Kill the processes."""
        self.pool.stop()
        self.pool.join()


class VerifierSource:
    """A built-in verifier, which scores response by response."""

    verifies, failure = True, ""

    def __init__(self, name: str, workers: Workers, timeout: float):
        self.workers, self.verifier = workers, verifier_of(name)
        self.limit, self.check = min(timeout, self.verifier.limit), self.verifier.check
        if name.startswith("code"):
            # Less than the call may last: a program that is stuck scores 0, a call that is stuck has no score.
            self.check = functools.partial(self.check, seconds=0.8 * timeout)

    def score(self, rows: list[dict], texts: list[str], responses: list[list[int]], interrupted=never) -> list[float]:
        references = columns_of(rows).get(self.verifier.column, [None] * len(rows))
        # The answer of a conversation is the model's last turn, not that of a tool.
        texts = [row["turns"][-1]["content"] if row.get("turns") else text for row, text in zip(rows, texts)]
        calls = list(zip(texts, references))
        results = self.workers.run(self.check, calls, self.limit, interrupted, self.verifier.calls_a_job)
        if self.verifier.limit < math.inf:
            # Comparing a formula can last forever. Then the response is wrong, unless the reference is to blame.
            failed = [i for i, (_, failure) in enumerate(results) if failure]
            alone = self.workers.run(self.check, [("", references[i]) for i in failed], self.limit, interrupted)
            for i, (score, failure) in zip(failed, alone):
                results[i] = score, failure and f"the reference {references[i]!r:.60} alone: {failure}"
        self.failure = next((failure for _, failure in results if failure), self.failure)
        return [finite_or_nan(score) for score, _ in results]


class FunctionSource:
    """A function from a user's file, which scores all responses of a rank in one call, always in the same process."""

    verifies, failure = True, ""

    def __init__(self, name: str, workers: Workers, timeout: float):
        self.name, self.workers, self.timeout = name, workers, timeout

    def load(self) -> str:
        """Import the file in the worker process, once. Return why that failed, "" if it did not."""
        return self.workers.run(call_function, [(self.name,)], SECONDS_TO_LOAD)[0][1]

    def score(self, rows: list[dict], texts: list[str], responses: list[list[int]], interrupted=never) -> list[float]:
        if not rows:
            return []
        prompts, columns = [row["prompt"] for row in rows], columns_of(rows)
        if "turns" in rows[0]:
            columns["turns"] = [row["turns"] for row in rows]
        call = (self.name, prompts, texts, responses, columns)
        self.load()  # the process may be a new one, and the time of a call is not for imports
        ((scores, failure),) = self.workers.run(call_function, [call], self.timeout, interrupted)
        self.failure = failure or self.failure
        return [finite_or_nan(score) for score in scores or [None] * len(rows)]
