"""Verifiers and users' functions as sources of scores, computed in a pool of processes (pebble).

A call that takes too long, crashes or raises an exception gives no score (NaN), never 0. A process that hangs is
killed, and pebble starts another one. The processes import this module, so it imports no torch.
"""

import contextlib
import functools
import importlib
import importlib.util
import logging
import math
import os
import signal
import sys
import traceback
import types
from concurrent.futures import CancelledError, wait
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Callable, NamedTuple

from pebble import ProcessExpired, ProcessPool

from plumbing.rewards.functions import load_function, score_by
from plumbing.rewards.verifiers import verifier_of

POLL = 0.1  # seconds between two checks whether the run is interrupted
STARTING = 300.0  # seconds to import a source; a busy file system may be slow
FAST = ("gsm8k", "exact", "format", "knights")  # verifiers that check many responses in one call, ...
CHUNK = 64  # so many; if it fails, they are checked one by one
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


def prepare(names: list[str]) -> None:
    """Set up a new process and import the packages of its verifiers, which can take longer than a call may."""
    os.setsid()  # signals to the trainer's process group are for the trainer
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # pebble's handler would wait for a call that hangs
    os.dup2(2, 1)  # output of functions goes to stderr
    logging.disable(logging.WARNING)  # math-verify warns at every call that its time limits are off
    for name in filter(verifier_of, names):
        with contextlib.suppress(Exception):  # `load` reports it
            load(name)


@functools.cache
def load(name: str) -> str:
    """Import a source. Return what the user should be warned of, "" for nothing."""
    verifier = verifier_of(name)
    if verifier is None:
        load_function(name)
    elif package := verifier.package:
        module = package.replace("-", "_")
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"requires the package {package} (pip install {package})")
        importlib.import_module(module)
    elif name == "code":
        from plumbing.rewards import sandbox

        return sandbox.open_limits()
    return ""


def verify(name: str, texts: list[str], references: list, options: dict) -> list[tuple]:
    """Return the result of `attempt` for each response."""
    check = functools.partial(verifier_of(name).check, **options)
    return [attempt(check, text, reference) for text, reference in zip(texts, references)]


def score_all(name: str, *arguments) -> list[float | None]:
    return score_by(load_function(name), *arguments)


def attempt(call: Callable, *arguments) -> tuple:
    """Return the result of a call and "", or None and the reason why there is none.

    Exceptions are returned as text: the trainer could not read an exception class of a user's file.
    """
    process = os.getpid()
    try:
        return call(*arguments), ""
    except BaseException as error:
        traceback.print_exc()
        return None, f"{type(error).__name__}: {error}"[:1000]
    finally:
        if os.getpid() != process:  # a child that a function has forked, and that came back from it
            os._exit(1)


def attempt_within(limit: float, call: Callable, arguments: tuple) -> tuple:
    """Return the result of `attempt`; end this process after the limit, for a trainer that has been killed."""
    signal.setitimer(signal.ITIMER_REAL, limit + 5)
    result = attempt(call, *arguments)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return result


# ---- in the trainer --------------------------------------------------------------------------------------------------


class WorkerProcess(SpawnProcess):
    """A new process that does not import the script which runs here, and torch with it, as multiprocessing's would."""

    @staticmethod
    def _Popen(process):
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            return SpawnProcess._Popen(process)
        finally:
            sys.modules["__main__"] = main


class Context(SpawnContext):
    Process = WorkerProcess


class Outcome(NamedTuple):
    """The end of a call in a worker."""

    result: object  # None if it failed
    failure: str = ""
    died: bool = False  # whether it took its process with it


class Workers:
    """Worker processes that import the same sources."""

    def __init__(self, names: list[str], count: int):
        self.names, self.count = names, count
        self.pool = self._new_pool()

    def _new_pool(self) -> ProcessPool:
        return ProcessPool(self.count, initializer=prepare, initargs=(self.names,), context=Context())

    def load(self) -> dict[str, Outcome]:
        """Import each source in a worker."""
        return {name: self.run(load, [(name,)], STARTING)[0] for name in self.names}

    def run(
        self, call: Callable, arguments: list[tuple], limit: float, interrupted: Callable[[], bool] = never
    ) -> list[Outcome]:
        """Call a function with each of the arguments, spread over the workers, `limit` seconds at most each."""
        if not self.pool.active:  # a worker without a call has died: pebble then gives up
            self.pool = self._new_pool()
        futures = [self.pool.schedule(attempt_within, (limit, call, each), timeout=limit) for each in arguments]
        while wait(futures, timeout=POLL).not_done and self.pool.active and not interrupted():
            pass
        for future in futures:
            future.cancel()  # does nothing to those that are done
        return [self._outcome(future, limit) for future in futures]

    def _outcome(self, future, limit: float) -> Outcome:
        try:
            return Outcome(*future.result())
        except CancelledError:
            return Outcome(None, "the run is interrupted, or the pool of workers has failed")
        except TimeoutError:
            return Outcome(None, f"gave no answer within --timeout {limit:g} s", died=True)
        except ProcessExpired as error:
            return Outcome(None, f"its process ended with exit code {error.exitcode}", died=True)
        except Exception as error:  # of pebble, or of an exception that cannot be printed
            return Outcome(None, f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Kill the processes."""
        self.pool.stop()
        self.pool.join()


class VerifierSource:
    """A built-in verifier, which scores response by response."""

    verifies, failure = True, ""

    def __init__(self, name: str, workers: Workers, timeout: float):
        self.name, self.workers = name, workers
        self.verifier = verifier_of(name)
        self.limit = min(timeout, self.verifier.limit)
        # Less than the call may last: a program that is stuck scores 0, a call that is stuck has no score.
        self.options = {"seconds": 0.8 * timeout} if name.startswith("code") else {}

    def score(self, rows: list[dict], texts: list[str], responses: list[list[int]], interrupted=never) -> list[float]:
        references = columns_of(rows).get(self.verifier.column, [None] * len(rows))
        texts = [last_turn(row, text) for row, text in zip(rows, texts)]
        outcomes = self._verify(texts, references, CHUNK if self.name in FAST else 1, interrupted)
        died = [i for i, outcome in enumerate(outcomes) if outcome.died]
        if self.name in FAST:
            alone = self._verify([texts[i] for i in died], [references[i] for i in died], 1, interrupted)
            for i, outcome in zip(died, alone):
                outcomes[i] = outcome
        elif self.verifier.limit < math.inf:
            # Comparing a formula can last forever. Then the response is wrong, unless the reference is to blame.
            alone = self._verify([""] * len(died), [references[i] for i in died], 1, interrupted)
            for i, outcome in zip(died, alone):
                reason = f"the reference {references[i]!r:.60} alone takes over {self.limit:g} s, or a crash"
                outcomes[i] = Outcome(None, reason) if outcome.died else outcome
        failures = [outcome.failure for outcome in outcomes if outcome.failure]
        self.failure = failures[-1] if failures else self.failure
        return [finite_or_nan(outcome.result) for outcome in outcomes]

    def _verify(self, texts: list[str], references: list, size: int, interrupted: Callable) -> list[Outcome]:
        """Return the end of each response's check, `size` of them a call."""
        parts = [slice(start, start + size) for start in range(0, len(texts), size)]
        calls = [(self.name, texts[part], references[part], self.options) for part in parts]
        outcomes = []
        for call, outcome in zip(calls, self.workers.run(verify, calls, self.limit, interrupted)):
            checked = [Outcome(*result) for result in outcome.result or []]
            outcomes += checked or [outcome] * len(call[1])
        return outcomes


def last_turn(row: dict, text: str) -> str:
    """Return the last turn of a response: the answer of a conversation is the model's, not that of a tool."""
    if "turns" not in row:
        return text
    return row["turns"][-1]["content"] if row["turns"] else ""


class FunctionSource:
    """A function from a user's file, which scores all responses of a rank in one call, always in the same process."""

    verifies, failure = True, ""

    def __init__(self, name: str, workers: Workers, timeout: float):
        self.name, self.workers, self.timeout = name, workers, timeout

    def try_out(self, rows: list[dict], texts: list[str], responses: list[list[int]]) -> str:
        """Return why the function fails in a trial call; "" if it does not."""
        return self._call(rows, texts, responses).failure

    def score(self, rows: list[dict], texts: list[str], responses: list[list[int]], interrupted=never) -> list[float]:
        if not rows:
            return []
        outcome = self._call(rows, texts, responses, interrupted)
        self.failure = outcome.failure or self.failure
        return [finite_or_nan(score) for score in outcome.result or [None] * len(rows)]

    def _call(self, rows: list[dict], texts: list[str], responses: list[list[int]], interrupted=never) -> Outcome:
        prompts, columns = [row["prompt"] for row in rows], columns_of(rows)
        if "turns" in rows[0]:
            columns["turns"] = [row["turns"] for row in rows]
        call = (self.name, prompts, texts, responses, columns)
        (outcome,) = self.workers.run(score_all, [call], self.timeout, interrupted)
        if outcome.died:
            self.workers.load()  # the time of the next call is not for imports
        return outcome
