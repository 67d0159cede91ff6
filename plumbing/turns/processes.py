"""The trainer's end of the processes in which tools (--tools) and environments (--environment) run.

A conversation has a process for its tools and another one for its environment, forked from multiprocessing's fork
server. One that gives no answer within --timeout is killed; the others continue.
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
SECONDS_TO_LOAD = 300.0  # imports may be slow on a busy file system
forked = multiprocessing.get_context("forkserver")


class EnvironmentFailure(Exception):
    """An environment raised an exception, hung, died, or returned a value of the wrong type."""


class ToolProcesses:
    """The tools and the environment of a run.

    `schemas` describes all tools to the chat template; `has_step` says whether the environment has a method `step`.
    """

    def __init__(self, tools: tuple[str, ...], environment: str, timeout: float):
        """Load and describe tools and environment in a process; exit with code 2 if that fails.

        Args:
            tools: of --tools. environment: of --environment, or "". timeout: seconds that a call may last.
        """
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # a process has three descriptors
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 1 << 16)), hard))
        self.timeout = timeout
        self.tools, self.environment = [[os.path.abspath(x) for x in names if x] for names in (tools, (environment,))]
        with fork_server(self.tools + self.environment):
            schemas, _ = self._describe("--tools", Process(self.tools, False, SECONDS_TO_LOAD))
            schemas_of_environment, self.has_step = self._describe(
                "--environment", Process(self.environment, True, SECONDS_TO_LOAD)
            )
        self.schemas: list[dict] = schemas + schemas_of_environment
        self.names = [schema["function"]["name"] for schema in self.schemas]
        self.environment_names = self.names[len(schemas) :]
        for name in {name for name in self.names if self.names.count(name) > 1}:
            fail(f"--tools, --environment: there are two tools {name}")

    def _describe(self, flag: str, process: "Process") -> tuple[list[dict], bool]:
        if not process.names:
            return [], False
        try:
            return tuple(asyncio.run(process.ask("describe")))
        except (ToolError, EnvironmentFailure) as error:
            fail(f"{flag} {' '.join(process.names)}: {error}", local=True)
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
        self.tools = Process(processes.tools, False, processes.timeout, seed)
        self.environment = Process(processes.environment, True, processes.timeout, seed)

    async def ask(self, method: str, *arguments):
        """Return the result of a method of the environment, see `worker.Environment`; raise EnvironmentFailure."""
        return await self.environment.ask(method, *arguments)

    async def call(self, name: str, arguments: dict) -> str:
        """Return the text that a tool answers with; raise ToolError, with a text for the model, if it fails."""
        if name not in self.processes.names:
            raise ToolError(f"there is no tool {name!r}, there are {', '.join(self.processes.names)}")
        process = self.environment if name in self.processes.environment_names else self.tools
        return await process.ask("call", name, arguments)

    def kill(self) -> None:
        """Kill the processes, and all that they have started."""
        self.tools.kill()
        self.environment.kill()


class Process:
    """A process of one conversation, for its tools or for its environment. A request starts it if there is none."""

    def __init__(self, names: list[str], is_environment: bool, timeout: float, seed: int = 0):
        """See `worker.serve`; `timeout`: seconds that a request may last."""
        self.names, self.is_environment, self.timeout, self.seed = names, is_environment, timeout, seed
        self.process = self.connection = None

    async def ask(self, method: str, *arguments):
        """Return the result of a request; without an answer the process is killed.

        Raises:
            ToolError: a tool failed; the text is for the model.
            EnvironmentFailure: anything else of an environment failed.
        """
        failure = EnvironmentFailure if self.is_environment else ToolError
        name = arguments[0] if method == "call" else method
        try:
            if self.process is None:
                self._start()
                await asyncio.sleep(0)  # until others, which start at once, have started, too
            async with asyncio.timeout(self.timeout):
                answer = json.loads(await self._answer(json.dumps([method, *arguments], default=str).encode()))
        except TimeoutError:
            self.kill()
            raise failure(f"{name} gave no answer within --timeout {self.timeout:g} s") from None
        except (OSError, EOFError, ValueError):
            self.kill()
            raise failure(f"{name} ended its process") from None
        if "tool_error" in answer:
            raise ToolError(answer["tool_error"])
        if "error" in answer:
            raise failure(" ".join(f"{method}: {answer['error'][:500]}".split()))
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
        arguments = (connection, self.names, self.is_environment, self.seed)
        self.process = forked.Process(target=worker.serve, args=arguments)
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
    """Let multiprocessing's fork server, if it starts within, import the users' files that have these functions."""
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
