"""Long waits and signals of a rank: which ranks the others wait for, tracebacks of a phase that takes
too long, and the interruption of a run.
"""

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from types import FrameType
from typing import Callable

import torch.distributed as dist
from tqdm import tqdm

from utils import EXIT_INTERRUPTED, World

# Seconds in one phase after which each rank of several prints its traceback, again and again.
STUCK_AFTER = 600.0


@dataclass
class Status:
    """What this process does now, for messages of failures."""

    phase: str = "start"
    # Called after an exception: saves what it can, and returns what to say about it.
    rescue: Callable[[], str] = str
    late: str = ""  # which ranks the others wait for


status = Status()


def begin_phase(name: str, world: World) -> None:
    """Begin a phase of a run, and watch its time if ranks may wait for each other."""
    status.phase = name
    if world.size > 1:
        # Each rank waits a second more, so that tracebacks do not mix on the terminal.
        faulthandler.dump_traceback_later(STUCK_AFTER + world.rank, repeat=True, file=2)


def watch(world: World) -> None:
    """Warn of ranks that others wait for, in a thread of each rank; all ranks call this.

    Each rank writes the time, its phase, and how many collectives it has begun in each group, to the
    store of torch.distributed, and reads what all have written. A rank is late if it has written
    nothing for a tenth of --collective_timeout, or begun nothing though another rank has.
    """
    store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    keys = [f"watch {rank}" for rank in range(world.size)]
    tenth = world.timeout.total_seconds() / 10

    def write() -> None:
        begun = [
            sum(group._get_backend(x)._get_sequence_number_for_group() for x in group._device_types)  # type: ignore[attr-defined]
            for group in list(dist.distributed_c10d._world.pg_map)
        ]
        store.set(keys[world.rank], json.dumps([time.monotonic(), status.phase, begun]))

    def warn_of(late: str) -> None:
        status.late = late
        if os.environ.get("LOCAL_RANK", "0") == "0":
            line = f"warning: rank {world.rank} of {world.size}, in the phase {status.phase!r}: "
            line += f"{late}; the run ends after --collective_timeout {tenth / 6:g} minutes"
            tqdm.write(line, sys.stderr)

    def look() -> None:
        looks: deque[list] = deque(maxlen=5)  # of a tenth of the time
        while True:
            time.sleep(tenth / 4)
            # Where its machine cannot be reached, the store lets this thread wait.
            silence = threading.Timer(tenth, warn_of, ["rank 0's machine does not answer"])
            silence.daemon = True
            silence.start()
            try:
                write()
                looks.append([json.loads(text) for text in store.multi_get(keys)])
            except RuntimeError:  # rank 0 has ended
                return
            finally:
                silence.cancel()
            if len(looks) == looks.maxlen:
                most = max(begun for _, _, begun in looks[-1])
                late = {
                    rank: now[1]
                    for rank, (before, now) in enumerate(zip(looks[0], looks[-1]))
                    if now[0] == before[0] or now[2] == before[2] != most
                }
                status.late = ""
                if late:
                    phases = " or ".join(sorted({*late.values()}))
                    warn_of(f"ranks {[*late]} have not come, last seen in the phase {phases!r}")
                    looks.clear()  # the next line comes after another tenth

    write()
    world.barrier()
    threading.Thread(target=look, daemon=True).start()


class Interrupt:
    """SIGTERM and SIGINT ask the run to save and exit. A second SIGINT ends it at once, and so does
    any signal before `can_save`.

    `requested` is this process's flag, for places where ranks run independently (generation).
    `agreed` is a collective, for places where ranks meet, so that all of them leave at the same
    place.
    """

    def __init__(self, world: World, script: str):
        """`script`: the file whose `main` is the run."""
        self.world = world
        self.script = script
        self.requested = False
        # Set once the run looks at `requested`. Before, it may load, or wait for a server, for
        # minutes.
        self.can_save = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)
        # A process that a library forks may wait for a lock, where Python calls no handler.
        os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        while frame and frame.f_code.co_filename != self.script:
            frame = frame.f_back
        if signum == signal.SIGINT and not frame:  # in a notebook, after the run
            raise KeyboardInterrupt
        if self.requested and signum == signal.SIGINT:
            os._exit(128 + signum)
        saves = "the run exits as soon as it has saved a checkpoint; Ctrl-C ends it at once"
        line = saves if self.can_save else "the run exits before its first step; nothing is lost"
        if os.environ.get("LOCAL_RANK", "0") == "0":
            # The signal may have interrupted a print.
            os.write(2, f"\n{signal.Signals(signum).name}: {line}\n".encode())
        if not self.can_save:
            # An exception could be caught anywhere, or wait for threads.
            os._exit(EXIT_INTERRUPTED)
        self.requested = True

    def agreed(self) -> bool:
        return self.world.any(self.requested)
