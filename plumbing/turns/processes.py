"""The trainer's end of the processes in which tools (--tools) and environments (--environment) run.

A conversation has a process, forked from multiprocessing's fork server. A call that lasts longer than --timeout is
interrupted; a process that gives no answer then is killed, and the others continue.
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
SECONDS_TO_GIVE_UP = 1.0  # after --timeout, for what interrupts a call
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
        """Load and describe tools and environment in a process; exit with code 2 if that fails."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # a process has three descriptors
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 1 << 16)), hard))
        self.tools, self.environment = list(map(os.path.abspath, tools)), environment and os.path.abspath(environment)
        # The fork server, if it starts here, imports the worker, and with it the users' files.
        forked.set_forkserver_preload([worker.__name__])
        path = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
        files = self.tools + [self.environment] * bool(environment)
        os.environ |= {"PYTHONPATH": path, worker.FILES: json.dumps(files)}
        self.timeout = SECONDS_TO_LOAD
        flags = [f"--tools {' '.join(tools)}" if tools else "", f"--environment {environment}" if environment else ""]
        self.schemas, self.has_step = ask_once(" ".join(filter(None, flags)), ToolProcess(self, seed=0), "describe")
        self.timeout = timeout
        names = [schema["function"]["name"] for schema in self.schemas]
        if len(set(names)) < len(names):
            fail(f"--tools, --environment: two of the tools {', '.join(names)} have the same name")


class ToolProcess:
    """The process of one conversation. A request starts it if there is none, and it has to be killed at the end."""

    def __init__(self, processes: ToolProcesses, seed: int):
        self.processes, self.seed, self.timeout = processes, seed, processes.timeout
        self.process = self.connection = None

    async def ask(self, method: str, *arguments):
        """Return the result of a method of `worker.Tools`; if there is no answer, kill the process.

        Raises:
            ToolError: a tool failed.
            EnvironmentFailure: the environment failed, or its process is gone.
        """
        gone = EnvironmentFailure if self.processes.environment else ToolError
        name = arguments[0] if method == "call" else method
        try:
            if self.process is None:
                self._start()
                await asyncio.sleep(0)  # until others, which start at once, have started, too
            self.connection.send_bytes(json.dumps([self.timeout, method, *arguments], default=str).encode())
            async with asyncio.timeout(self.timeout + SECONDS_TO_GIVE_UP):
                await self._answered()
            answer = json.loads(self.connection.recv_bytes())
        except TimeoutError:
            self.kill()
            raise gone(f"{name} gave no answer within --timeout {self.timeout:g} s") from None
        except (OSError, EOFError):
            self.kill()
            raise gone(f"{name} ended its process") from None
        if "result" in answer:
            return answer["result"]
        if method == "call":
            raise ToolError(answer["error"])
        raise EnvironmentFailure(" ".join(f"{method}: {answer['error'][:500]}".split()))

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
        served = (of_process, self.processes.tools, self.processes.environment, self.seed)
        process = forked.Process(target=worker.serve, args=served)
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


def ask_once(flag: str, process: ToolProcess, method: str, *arguments):
    """Return what a process answers to one request; exit with code 2 if that fails."""
    try:
        return asyncio.run(process.ask(method, *arguments))
    except (ToolError, EnvironmentFailure) as error:
        fail(f"{flag}: {error}", local=True)
    finally:
        process.kill()
