"""The pool of processes (pebble) in which verifiers and users' functions are called.

A process that hangs is killed, and pebble starts another one. The processes import this module, so it imports little.
"""

import contextlib
import importlib
import logging
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

SECONDS_TO_LOAD = 300.0  # for imports of users' files, which may be slow on a busy file system


def never() -> bool:
    """Return that the run is not interrupted."""
    return False


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
