"""The processes that run verifiers and users' files (--reward, --tools, --environment, --agent), and
the event loop in which the trainer asks them.

trainer -> fork server, which imports what the processes need, once -> a Process for each object

A process makes an object, and calls its methods for the trainer. A request is a pickle, [method,
seconds after which the call is interrupted, or 0, arguments...]; its answer is a line of JSON,
{"result": ...} or {"error": type, place and text of what was raised}. The trainer reads no pickles:
a program of the model may have written them.

Imports nothing of this project, and no torch: the processes start in a fraction of a second.
"""

import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import json
import math
import operator
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

SECONDS_TO_LOAD = 300.0  # for imports of users' files, which may be slow on a busy file system
SECONDS_TO_GIVE_UP = 1.0  # for a call that is interrupted
LONGEST_ANSWER = 1 << 26  # bytes
LONGEST_ERROR = 100_000  # characters; the rest is cut
modules: dict[str, types.ModuleType] = {}  # users' files, by their paths


class Failed(Exception):
    """A call raised an exception."""

    def __init__(self, kind: str, place: str, text: str):
        """`kind`: its class. `place`: the last line of a user's file on its way, " (FILE:LINE)", or
        "".
        """
        super().__init__(f"{kind}{place}: {text}")
        self.without_place = f"{kind}: {text}"


class Late(Exception):
    """A call gave no answer in time, and its process was killed."""


class Stuck(Exception):
    """A call has computed for longer than it may, and its process was killed."""


class Ended(Exception):
    """A process ended in a call, or wrote something else into its connection, and was killed; or
    none was started.
    """


# ---- users' files --------------------------------------------------------------------------------


def load_function(name: str) -> Callable:
    """Return the function or class of "path/to/file.py:function", or the method of
    ":judge.score".
    """
    path, _, function = name.rpartition(":")
    file = os.path.abspath(path)
    if file not in modules:
        folder, base = os.path.split(file)
        sys.path.insert(0, folder)  # for what it imports
        # The processes of a pool that a function makes import the file by this name.
        name = base.removesuffix(".py")
        if "." in name or name in sys.modules:  # that of another file
            name = re.sub(r"\W", "_", file)
        spec: Any = importlib.util.spec_from_file_location(name, file)
        # Where pickle and dataclasses look for its names.
        modules[file] = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(modules[file])
    return operator.attrgetter(function)(modules[file])


def accepted(function: Callable, named: dict) -> dict:
    """Return those of the named arguments that a function has parameters for."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values()):
        return named
    return {name: value for name, value in named.items() if name in parameters}


# ---- the fork server and its processes -----------------------------------------------------------


def fork_processes(control: int, imports: list[str]) -> None:
    """Import modules, by their names, and users' files, by those of functions. Then fork a process
    for each connection that arrives at a socket. Once the trainer is gone, kill all that is left.
    """
    sys.stdout = sys.stderr
    signal.alarm(int(SECONDS_TO_LOAD))  # ends a server that hangs in an import
    for name in imports:
        try:
            load_function(name) if ":" in name else importlib.import_module(name)
        except BaseException:  # the process that needs it imports it again, and reports this
            modules.pop(os.path.abspath(name.rpartition(":")[0]), None)
    signal.alarm(0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing is left of those that have ended
    with socket.socket(fileno=control) as trainer:
        while descriptors := socket.recv_fds(trainer, 1, 1)[1]:
            with socket.socket(fileno=descriptors[0]) as connection:
                if os.fork() == 0:
                    trainer.close()
                    serve(connection)
    for process in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(ProcessLookupError):
            if process != os.getpid() and os.getsid(process) == os.getpid():
                os.kill(process, signal.SIGKILL)


def serve(connection: socket.socket) -> None:
    """Send the number of this process, and answer requests until the connection is closed; then
    end all that the calls have started.
    """
    os.setpgid(0, 0)  # a group of processes, to be killed with all that a call starts
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, give_up)
    process = os.getpid()
    # A child that a call forks must not keep it open: the trainer waits for its end.
    os.register_at_fork(after_in_child=lambda: os.close(connection.detach()))
    with contextlib.suppress(OSError, EOFError):  # the trainer is gone
        connection.sendall(b"%d\n" % process)
        requests = connection.makefile("rb")
        make, *given = pickle.load(requests)
        made = None
        while True:
            method, limit, *arguments = pickle.load(requests)
            try:
                signal.setitimer(signal.ITIMER_REAL, limit)
                made = make(*given) if made is None else made
                answer = as_json({"result": getattr(made, method)(*arguments)})
            except BaseException as error:  # SystemExit, too
                answer = as_json({"error": what_was_raised(error)})
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            if os.getpid() != process:  # a call has forked, and both have returned
                os._exit(0)
            # Half of a surrogate pair, which no tokenizer reads, becomes "?".
            connection.sendall(answer.encode(errors="replace") + b"\n")
    os.killpg(0, signal.SIGKILL)


as_json = json.JSONEncoder(ensure_ascii=False).encode


def give_up(signum: int, frame: Any) -> None:
    raise TimeoutError("no answer in time")


def what_was_raised(error: BaseException) -> tuple[str, str, str]:
    """Return the arguments of a Failed."""
    raised = traceback.TracebackException.from_exception(error)
    places = [
        f" ({frame.filename}:{frame.lineno})" for frame in raised.stack if frame.filename in modules
    ]
    # `raised` has a text even where str(error) raises an exception.
    return type(error).__name__, "".join(places[-1:]), str(raised)[:LONGEST_ERROR]


# ---- in the trainer ------------------------------------------------------------------------------


class ForkServer:
    """The process from which others are forked; it starts with the first of them, and ends, with
    all of them, when this object or the trainer is gone.
    """

    def __init__(self, imports: Sequence[str]):
        """`imports`: see `fork_processes`."""
        self.imports = list(imports)
        self.process: subprocess.Popen | None = None

    def fork(self, connection: socket.socket) -> None:
        """Fork a process that serves a connection."""
        if self.process is None or self.process.poll() is not None:
            self.control, of_server = socket.socketpair()
            # They import what the trainer does.
            code = f"import sys; sys.path[:] = {[*sys.path, os.getcwd()]}; from plumbing import processes; "
            code += f"processes.fork_processes({of_server.fileno()}, {self.imports})"
            with of_server:
                self.process = subprocess.Popen(
                    [sys.executable, "-c", code],
                    pass_fds=[of_server.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # output of functions goes to stderr
                    start_new_session=True,  # signals to its process group are for the trainer
                )
        socket.send_fds(self.control, [b"1"], [connection.fileno()])


class Process:
    """A process that makes an object and calls its methods. The first request starts it, and the
    next one after its end another one; it has to be killed at the end.
    """

    def __init__(self, server: ForkServer, make: Callable, *arguments: Any):
        """`make`: makes the object of the arguments."""
        self.server = server
        self.made_by = make, *arguments
        self.writer: Any = None  # an asyncio.StreamWriter
        self.pid: Any = None  # an int

    async def ask(
        self,
        seconds: float,
        method: str,
        *arguments: Any,
        interrupt: bool = False,
        cpu_seconds: float = math.inf,
    ) -> Any:
        """Return the result of a method of the object.

        Args:
            seconds: after which the process is killed, counted from when it has started.
            interrupt: whether the call is interrupted then, by a TimeoutError, and the process
                killed only SECONDS_TO_GIVE_UP later.
            cpu_seconds: of computing, after which the process is killed.

        Raise Failed, Late, Stuck or Ended; the process goes on after a Failed only.
        """
        request = pickle.dumps((method, seconds if interrupt else 0, *arguments))
        try:
            if self.writer is None:
                await self._start()
            async with asyncio.timeout(seconds + SECONDS_TO_GIVE_UP * interrupt):
                self.writer.write(request)
                await self.writer.drain()
                answer = json.loads(await self._answer(cpu_seconds))
            if not isinstance(answer, dict):
                raise ValueError(f"{answer!r:.60} is no answer")
        except BaseException as error:  # also where the caller is cancelled
            reason = (
                "the process of the call has ended, or wrote into its connection"
                if self.pid
                else "the fork server, which starts processes, has ended"
            )
            self.kill()
            if isinstance(error, TimeoutError):
                raise Late(f"no answer within {seconds:g} s") from None
            if isinstance(error, (OSError, ValueError)):
                raise Ended(reason) from error
            raise
        if "error" in answer:
            raise Failed(*answer["error"])
        return answer["result"]

    async def _start(self) -> None:
        connection, of_process = socket.socketpair()
        with of_process:
            self.reader, self.writer = await asyncio.open_connection(
                sock=connection, limit=LONGEST_ANSWER
            )
            self.server.fork(of_process)
        self.writer.write(pickle.dumps(self.made_by))
        async with asyncio.timeout(SECONDS_TO_LOAD):
            self.pid = int(await self.reader.readline())

    async def _answer(self, cpu_seconds: float) -> bytes:
        """Return the line that the process writes; raise Stuck once it has computed for so long, on
        a busy machine later than by the clock on the wall.
        """
        # CLOCK_PROCESS_CPUTIME_ID of the other process, which macOS does not have.
        of_process = lambda: time.clock_gettime(~self.pid << 3 | 2)
        computed = time.monotonic if sys.platform == "darwin" else of_process
        end = computed() + cpu_seconds
        while (left := end - computed()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    return await self.reader.readline()
        raise Stuck(f"over {cpu_seconds:g} s of CPU time")

    def kill(self) -> None:
        """Kill the process, if there is one, and all that it has started."""
        if self.writer is not None:
            self.writer.close()  # ends it, too, which may have begun only now
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self.writer = self.pid = None


class Processes:
    """Processes that make equal objects, for calls side by side."""

    def __init__(self, server: ForkServer, make: Callable, count: int):
        self.at_once = asyncio.Semaphore(count)  # which callers of `ask` hold
        self.idle = [Process(server, make) for _ in range(count)]

    async def ask(self, seconds: float, method: str, *arguments: Any, **limits: Any) -> Any:
        """Return the result of a method in one of them, see `Process.ask`. A call whose process ends
        is made once more, in a new one: that it ends may have nothing to do with the call.
        """
        process = self.idle.pop()
        try:
            with contextlib.suppress(Ended):
                return await process.ask(seconds, method, *arguments, **limits)
            return await process.ask(seconds, method, *arguments, **limits)
        finally:
            self.idle.append(process)


# ---- coroutines side by side ---------------------------------------------------------------------


async def run_all(calls: Iterable[Coroutine], ended: Callable[[], bool]) -> None:
    """Run coroutines side by side; once one of them raises, or `ended` returns true, cancel those
    that are left.
    """
    tasks = list(map(asyncio.ensure_future, calls))
    results = asyncio.gather(*tasks)
    try:
        while not results.done() and not ended():
            await asyncio.wait([results], timeout=0.1)
        if results.done():
            results.result()  # raises what one of them has raised
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(results, *tasks, return_exceptions=True)


def run_until_done(work: Coroutine) -> Any:
    """Return what a coroutine returns, as asyncio.run does; also where this thread runs an event
    loop, as that of a notebook does.

    In this thread, as the decode loop requires: autocast is set for a thread, and signals arrive in
    the main one.
    """
    outer = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        return asyncio.run(work)
    finally:
        asyncio._set_running_loop(outer)


class EventLoop:
    """An event loop in a thread of its own. All threads may use it."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def start(self, work: Coroutine) -> Future:
        """Begin a coroutine."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine) -> Any:
        """Return what a coroutine returns."""
        return self.start(work).result()
