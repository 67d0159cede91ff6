"""The processes in which verifiers and users' functions are called.

One that hangs is killed. They import this module, so it imports little.
"""

import contextlib
import importlib
import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from multiprocessing.context import SpawnContext, SpawnProcess

from pebble import ProcessPool, ThreadPool

from plumbing.rewards.functions import attributes, load_reward_function, score_by
from plumbing.user_code import SECONDS_TO_LOAD, without_main

# ---- in a worker process -------------------------------------------------------------------------


def prepare(packages: list[str]) -> None:
    """Set up a new process and import the packages of its verifiers, which can take longer than a
    call may.
    """
    os.setsid()  # signals to the trainer's process group are for the trainer
    # pebble's handler would wait for a call that hangs.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(2, 1)  # output of functions goes to stderr
    logging.disable(logging.WARNING)  # math-verify warns at every call that its time limits are off
    for package in packages:
        with contextlib.suppress(Exception):  # the check that needs it reports it
            importlib.import_module(package)


def attempt(limit: float, call: Callable, arguments: list[tuple]) -> list[tuple]:
    """Return (result, "") of a call with each of the arguments, or (None, reason) where it raises
    an exception.

    Exceptions are returned as text: the trainer could not read an exception class of a user's file.
    """
    process = os.getpid()
    results = []
    # Ends this process for a trainer that has been killed.
    signal.setitimer(signal.ITIMER_REAL, limit + 5)
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


def call_function(name: str, *arguments) -> list[dict[str, float]] | tuple[bool, bool]:
    """Return what `score_by` does for a user's function; without arguments, its `attributes`."""
    function = load_reward_function(name)
    return score_by(function, *arguments) if arguments else attributes(function)


# ---- in the trainer ------------------------------------------------------------------------------


class Context(SpawnContext):
    class Process(SpawnProcess):
        @staticmethod
        @without_main()
        def _Popen(process):
            return SpawnProcess._Popen(process)


class Workers:
    """Worker processes, each for a thread that waits for it; they start when there is something to
    do.

    Each is a pool of pebble's of its own: in a pool of several, a process that dies can take along
    what another one does, or the lock by which they get their jobs.
    """

    def __init__(self, count: int, packages: Sequence[str] = ()):
        """`count`: of `threads`, which callers share. `packages`: see `prepare`."""
        self.packages = packages
        self.lock = threading.Lock()
        self.threads = ThreadPool(count)
        self.pools: list[ProcessPool] = []  # without a job

    def run(self, call: Callable, arguments: list[tuple], limit: float) -> list[tuple]:
        """Call a function with each of the arguments in one process, `limit` seconds at most for
        all of them.

        Return a list of (result, ""), or of (None, reason) where a call has failed. What is under
        way in a process that dies is done once more: that says nothing of it. Several threads may
        call this.
        """
        for is_second in (False, True):
            with self.lock:
                if is_second or not self.pools:
                    pool = ProcessPool(1, 0, prepare, [self.packages], Context())
                else:
                    pool = self.pools.pop()
            # pebble's limit begins with the call: none holds for a process that never starts.
            deadline = time.monotonic() + SECONDS_TO_LOAD + limit
            try:
                future = pool.schedule(attempt, (limit, call, arguments), timeout=limit)
                while wait([future], timeout=0.1).not_done and pool.active:
                    if time.monotonic() > deadline:
                        break
                future.cancel()  # does nothing if it is done
                results = future.result()
                self.pools.append(pool)
                return results
            except Exception as error:  # of pebble, which has several for a process that has died
                failure = f"{type(error).__name__}: {error}"
                end(pool)
                if isinstance(error, TimeoutError):
                    break
        return [(None, failure)] * len(arguments)


def end(pool: ProcessPool) -> None:
    """Kill the process of a pool, and close its descriptors."""
    pool.stop()
    pool.join()
