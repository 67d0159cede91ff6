"""What a rank says of itself where it fails or others wait for it: which rank it is, and in which phase of the run.

Imports utils only.
"""

import faulthandler
import functools
import os
import sys
import threading
import time
from typing import Callable

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import errors

from utils import World, fail

STUCK_AFTER = 600.0  # seconds in one phase after which a rank of several prints where it is, again and again


class Phase:
    """The phase of a run that this process is in; `Phase.now` is the last one that began."""

    now: "Phase"

    def __init__(self, name: str):
        rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
        self.place, self.ended = f"rank {rank} of {size}, in the phase {name!r}", threading.Event()

    def watch(self, seconds: float) -> None:
        """Print the tracebacks of this process's threads every so many seconds, until the phase ends.

        One may wait in a collective for another rank that is stuck elsewhere.
        """

        def wait() -> None:
            waited = seconds
            while not self.ended.wait(seconds):
                print(f"\n{self.place} for {waited:g} seconds, is here:", file=sys.stderr, flush=True)
                faulthandler.dump_traceback()
                waited += seconds

        threading.Thread(target=wait, daemon=True).start()

    def end(self) -> None:
        self.ended.set()


Phase.now = Phase("start")


def begin_phase(name: str, world: World) -> None:
    """Begin a phase of a run, which ends the one before."""
    Phase.now.end()
    Phase.now = Phase(name)
    if world.size > 1:
        # A second more for each rank, so that tracebacks do not mix on the terminal.
        Phase.now.watch(STUCK_AFTER + world.rank)


def record(main: Callable) -> Callable:
    """Return a script's `main`, whose exceptions say the rank and the phase, in torchrun's report, too.

    A connection to another rank that broke is one line: what went wrong is what that rank says.
    """

    @errors.record
    @functools.wraps(main)
    def recorded(args) -> None:
        try:
            main(args)
        except Exception as error:
            if is_lost_connection(error):
                try:
                    fail(f"{Phase.now.place}: another rank has ended, or does not answer; see what it said", local=True)
                finally:
                    time.sleep(2)  # torchrun takes the rank that ended first, in whole seconds, for the root cause
            error.add_note(f"({Phase.now.place})")
            raise
        finally:
            Phase.now.end()

    return recorded


def is_lost_connection(error: Exception) -> bool:
    """Return whether an error is that of a collective whose other ranks are gone or silent for too long."""
    return isinstance(error, dist.DistError) or isinstance(error, RuntimeError) and "gloo/transport" in str(error)
