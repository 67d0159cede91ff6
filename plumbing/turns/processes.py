"""The trainer's end of the processes in which tools (--tools) and environments (--environment) run.

A conversation has a process for its tools and another one for its environment, forked from multiprocessing's fork
server. One that gives no answer within --timeout is killed; the others go on.

Imports plumbing.turns.worker (what the processes do).
"""

import asyncio
import contextlib
import json
import multiprocessing
import os
import resource
import signal
import sys
import types

from plumbing.turns import worker
from plumbing.turns.worker import ToolError
from utils import fail

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LONGEST_ANSWER = 1 << 28  # bytes
SECONDS_TO_LOAD = 300.0  # importing may take long on a busy file system
forked = multiprocessing.get_context("forkserver")


class EnvironmentFailure(Exception):
    """An environment raised an exception, hung, died, or returned a value of the wrong type."""


class NoAnswer(Exception):
    """A process hung or died."""


class ToolProcesses:
    """The tools and the environment of a run.

    `schemas` describes all tools to the chat template; `has_step` says whether the environment has a method `step`.
    """

    def __init__(self, tools: tuple[str, ...], environment: str, timeout: float):
        """Load and describe tools and environment in a process; exit with code 2 if that fails.

        Args:
            tools: of --tools. environment: of --environment, or "". timeout: seconds that a call may take.
        """
        for flag, name in [*(("--tools", name) for name in tools), ("--environment", environment)]:
            path, _, function = name.rpartition(":")
            if name and not (path and function.isidentifier()):
                fail(f"{flag} {name}: is not of the form path/to/file.py:name")
            if name and not os.path.isfile(path):
                fail(f"{flag} {name}: there is no file {path}")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # a process takes three descriptors
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 1 << 16)), hard))
        self.tools, self.environment = list(map(os.path.abspath, tools)), environment and os.path.abspath(environment)
        self.timeout = timeout
        schemas, has_step = [], False
        with fork_server([*self.tools, *filter(None, [self.environment])]):
            if tools:
                schemas += self._describe(f"--tools {' '.join(tools)}", Process(self.tools, ""))["schemas"]
            if environment:
                description = self._describe(f"--environment {environment}", Process([], self.environment))
                schemas, has_step = schemas + description["schemas"], description["has_step"]
        names = [schema["function"]["name"] for schema in schemas]
        for name in {name for name in names if names.count(name) > 1}:
            fail(f"--tools, --environment: there are two tools {name}")
        self.schemas: list[dict] = schemas
        self.has_step: bool = has_step
        self.names, self.environment_names = names, names[len(tools) :]

    def _describe(self, flag: str, process: "Process") -> dict:
        try:
            return asyncio.run(process.ask(SECONDS_TO_LOAD, "describe"))
        except (NoAnswer, EnvironmentFailure) as error:
            fail(f"{flag}: {error}", local=True)
        finally:
            process.kill()

    def open(self, seed: int) -> "ToolProcess":
        """Return the processes of one conversation, which start when they are first called.

        Args:
            seed: of their `random` and `numpy.random`.
        """
        return ToolProcess(self, seed % 2**64)


class ToolProcess:
    """The processes of one conversation. It makes one call at a time, and has to be killed at its end."""

    def __init__(self, processes: ToolProcesses, seed: int):
        self.processes = processes
        self.tools = Process(processes.tools, "", seed)
        self.environment = Process([], processes.environment, seed)

    async def reset(self, row: dict) -> str | list[dict] | None:
        """Make the environment from the columns of a row; return what it adds to the prompt."""
        return await self._ask_environment("reset", row)

    async def step(self, text: str) -> tuple[str | None, float, bool]:
        """Return the environment's (observation, reward, done) for a turn of the model."""
        return tuple(await self._ask_environment("step", text))

    async def outcome(self) -> tuple[float | None, bool]:
        """Return the (reward, done) of an environment without `step` for a turn; None as long as it has no reward."""
        return tuple(await self._ask_environment("outcome"))

    async def call(self, name: str, arguments: dict) -> str:
        """Return the text that a tool answers with; raise ToolError, with a text for the model, if it fails."""
        if name not in self.processes.names:
            raise ToolError(f"there is no tool {name!r}, there are {', '.join(self.processes.names)}")
        if name in self.processes.environment_names:
            return await self._ask_environment("call", name, arguments)
        try:
            return await self.tools.ask(self.processes.timeout, "call", name, arguments)
        except NoAnswer as error:  # the next call starts a new process
            raise ToolError(f"{name} {error}") from None

    def kill(self) -> None:
        """Kill the processes, and all that they have started."""
        self.tools.kill()
        self.environment.kill()

    async def _ask_environment(self, method: str, *arguments):
        try:
            return await self.environment.ask(self.processes.timeout, method, *arguments)
        except NoAnswer as error:
            raise EnvironmentFailure(f"{method} {error}") from None


class Process:
    """A process of one conversation, for its tools or for its environment. A request starts it if there is none."""

    def __init__(self, tools: list[str], environment: str, seed: int = 0):
        """See `worker.serve`."""
        self.arguments = (tools, environment, seed)
        self.process = self.connection = None

    async def ask(self, timeout: float, *request):
        """Return the result of a request.

        Raises:
            NoAnswer: after `timeout` seconds, or if the process has died; it is killed.
            ToolError: a tool failed; the text is for the model.
            EnvironmentFailure: anything else failed.
        """
        try:
            if self.process is None:
                self._start()
                await asyncio.sleep(0)  # until others, which start at once, have started, too
            async with asyncio.timeout(timeout):
                answer = json.loads(await self._answer(json.dumps(request, default=str).encode()))
        except TimeoutError:
            self.kill()
            raise NoAnswer(f"gave no answer within --timeout {timeout:g} s") from None
        except (OSError, EOFError, ValueError):
            self.kill()
            raise NoAnswer("ended its process") from None
        if "tool_error" in answer:
            raise ToolError(answer["tool_error"])
        if "error" in answer:
            raise EnvironmentFailure(" ".join(f"{request[0]}: {answer['error'][:500]}".split()))
        return answer["result"]

    async def _answer(self, request: bytes) -> bytes:
        self.connection.send_bytes(request)
        loop, answered = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self.connection.fileno(), answered.set)
        try:
            await answered.wait()
        finally:
            loop.remove_reader(self.connection.fileno())
        return self.connection.recv_bytes(LONGEST_ANSWER)

    def _start(self) -> None:
        self.connection, connection = forked.Pipe()
        self.process = forked.Process(target=worker.serve, args=(connection, *self.arguments))
        main, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
        try:  # without its `__main__`, as a new process would import the script that runs here, and torch with it
            self.process.start()
        finally:
            sys.modules["__main__"] = main
            connection.close()

    def kill(self) -> None:
        """Kill the process, if there is one, and all that it has started."""
        if self.process is None:
            return
        if self.process.pid:  # it may not have started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
        self.connection.close()
        self.process = None


@contextlib.contextmanager
def fork_server(functions: list[str]):
    """Start multiprocessing's fork server, if it does not run, with the users' files that have these functions."""
    forked.set_forkserver_preload([worker.__name__])
    path = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
    changes = {"PYTHONPATH": path, worker.FILES: json.dumps(functions)}
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
