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

from plumbing.rewards.workers import without_main
from plumbing.turns import worker
from utils import ROOT, fail

SECONDS_TO_LOAD = 300.0  # imports may be slow on a busy file system
forked = multiprocessing.get_context("forkserver")


class ToolError(Exception):
    """A call of a tool has failed; the text is for the model."""


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
        # The fork server, if it starts here, imports the worker, and with it the users' files.
        forked.set_forkserver_preload([worker.__name__])
        path = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
        os.environ |= {"PYTHONPATH": path, worker.FILES: json.dumps(self.tools + self.environment)}
        schemas, schemas_of_environment, self.has_step = [], [], False
        if tools:
            process = Process(self.tools, False, SECONDS_TO_LOAD)
            schemas, _ = ask_once(f"--tools {' '.join(tools)}", process, "describe")
        if environment:
            process = Process(self.environment, True, SECONDS_TO_LOAD)
            schemas_of_environment, self.has_step = ask_once(f"--environment {environment}", process, "describe")
        self.schemas: list[dict] = schemas + schemas_of_environment
        self.names = [schema["function"]["name"] for schema in self.schemas]
        self.environment_names = self.names[len(schemas) :]
        if len(set(self.names)) < len(self.names):
            fail(f"--tools, --environment: two of the tools {', '.join(self.names)} have the same name")


class ToolProcess:
    """The processes of one conversation, which start when they are first called, and have to be killed at its end.

    Args:
        seed: of their `random` and `numpy.random`.
    """

    def __init__(self, processes: ToolProcesses, seed: int):
        self.processes = processes
        self.tools = Process(processes.tools, False, processes.timeout, seed)
        self.environment = Process(processes.environment, True, processes.timeout, seed)

    async def call(self, name: str, arguments: dict) -> str:
        """Return the text that a tool answers with; raise ToolError if it fails."""
        if name not in self.processes.names:
            raise ToolError(f"there is no tool {name!r}, there are {', '.join(self.processes.names)}")
        process = self.environment if name in self.processes.environment_names else self.tools
        return await process.ask("call", name, arguments)

    def kill(self) -> None:
        self.tools.kill()
        self.environment.kill()


class Process:
    """A process of one conversation, for its tools or for its environment. A request starts it if there is none."""

    def __init__(self, names: list[str], is_environment: bool, timeout: float, seed: int = 0):
        """See `worker.serve`; `timeout`: seconds that a request may last."""
        self.names, self.is_environment, self.timeout, self.seed = names, is_environment, timeout, seed
        self.process = self.connection = None

    async def ask(self, method: str, *arguments):
        """Return the result of a method of `worker.Tools` or `worker.Environment`; without an answer, kill the process.

        Raises:
            ToolError: a tool failed.
            EnvironmentFailure: anything else of an environment failed.
        """
        failure = EnvironmentFailure if self.is_environment else ToolError
        name = arguments[0] if method == "call" else method
        try:
            if self.process is None:
                self._start()
                await asyncio.sleep(0)  # until others, which start at once, have started, too
            self.connection.send_bytes(json.dumps([method, *arguments], default=str).encode())
            async with asyncio.timeout(self.timeout):
                await self._answered()
            answer = json.loads(self.connection.recv_bytes())
        except TimeoutError:
            self.kill()
            raise failure(f"{name} gave no answer within --timeout {self.timeout:g} s") from None
        except (OSError, EOFError):
            self.kill()
            raise failure(f"{name} ended its process") from None
        if "result" in answer:
            return answer["result"]
        if method == "call":
            raise ToolError(answer["error"])
        raise failure(" ".join(f"{method}: {answer['error'][:500]}".split()))

    async def _answered(self) -> None:
        """Wait until there is something to read."""
        loop, readable, descriptor = asyncio.get_running_loop(), asyncio.Event(), self.connection.fileno()
        loop.add_reader(descriptor, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(descriptor)

    def _start(self) -> None:
        connection, of_process = forked.Pipe()
        process = forked.Process(target=worker.serve, args=(of_process, self.names, self.is_environment, self.seed))
        with of_process, without_main():
            process.start()
        self.process, self.connection = process, connection

    def kill(self) -> None:
        """Kill the process, if there is one, and all that it has started."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()  # it may not lead its group yet
            self.connection.close()
            self.process = None


def ask_once(flag: str, process: Process, method: str, *arguments):
    """Return what a process answers to one request; exit with code 2 if that fails."""
    try:
        return asyncio.run(process.ask(method, *arguments))
    except (ToolError, EnvironmentFailure) as error:
        fail(f"{flag}: {error}", local=True)
    finally:
        process.kill()
