"""The trainer's end of the processes in which tools (--tools) and environments (--environment) run.

A rank has one server process, plumbing/turns/tool_worker.py. A conversation has a child of the server for its environment and
another one for its tools. A child that gives no answer within --tool_timeout is killed; the others go on.

Imports plumbing.turns.tool_worker (the processes) and plumbing.rewards.reward_worker (how Python is started).
"""

import asyncio
import contextlib
import itertools
import json
import math
import os
import resource
import signal
import socket
import subprocess
from collections.abc import Iterable

from plumbing.rewards.reward_worker import start_python
from plumbing.turns.tool_worker import KILL, MESSAGE, OPEN_ENVIRONMENT, OPEN_TOOLS, ToolError
from utils import fail

JSON_TYPES = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict,
    "null": type(None),
}  # fmt: skip


class EnvironmentFailure(Exception):
    """An environment raised an exception, hung, died, or returned what it should not."""


class NoAnswer(Exception):
    """A child hung or died."""


class ToolProcesses:
    """The tools and the environment of a run, and the server of their processes.

    `schemas` describes all tools to the chat template; `has_step` says whether the environment has a method `step`.
    """

    def __init__(self, tools: tuple[str, ...], environment: str, timeout: float):
        """Start the server; end the run if it cannot load or use what the flags name.

        Args:
            tools: of --tools. environment: of --environment, or "". timeout: seconds that a call may take.
        """
        for flag, name in [*(("--tools", name) for name in tools), ("--environment", environment)]:
            path, _, function = name.rpartition(":")
            if name and not (path and function.isidentifier()):
                fail(f"{flag} {name}: is not of the form path/to/file.py:{'Class' if name == environment else 'name'}")
            if name and not os.path.isfile(path):
                fail(f"{flag} {name}: there is no file {path}")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # a conversation takes two sockets
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 1 << 16)), hard))
        self.settings = {"tools": tools, "environment": environment, "timeout": timeout}
        self.timeout = timeout
        self.numbers = itertools.count()  # of children
        found = self._start()
        self.has_step: bool = found["has_step"]
        self.schemas: list[dict] = found["tools"] + found["environment"]
        self.parameters = {schema["function"]["name"]: schema["function"]["parameters"] for schema in self.schemas}
        self.own_names = {schema["function"]["name"] for schema in found["tools"]}  # of --tools

    def open(self, seed: int) -> "ToolProcess":
        """Return the processes of one conversation, which start when they are first called.

        Args:
            seed: of their `random` and `numpy.random`.
        """
        return ToolProcess(self, seed % 2**64)

    def close(self) -> None:
        """End the server and its children."""
        self.control.close()  # at which they end by themselves
        try:
            self.server.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self.server.pid, signal.SIGKILL)
            self.server.wait()

    def _start(self) -> dict:
        """Start the server and return its description of the tools and the environment."""
        self.control, theirs = socket.socketpair()
        with theirs:
            self.server = start_python("-m", "plumbing.turns.tool_worker", json.dumps(self.settings), stdin=theirs)
        self.control.settimeout(300.0)  # importing may take long on a busy file system
        try:
            line = self.control.makefile("rb").readline()
            found = json.loads(line or '{"error": "the process that loads them ended"}')
        except TimeoutError:
            found = {"error": "they were not loaded within 300 s"}
        if "error" in found:
            self.close()
            fail(f"{found.get('flag', '--tools, --environment')}: {found['error']}", local=True)
        return found

    def _send(self, kind: bytes, number: int, seed: int = 0, sockets: Iterable[socket.socket] = ()) -> None:
        """Send the server a message."""
        socket.send_fds(self.control, [MESSAGE.pack(kind, number, seed)], [own.fileno() for own in sockets])

    def open_child(self, kind: bytes, seed: int) -> "Child":
        """Start a child. A server that has ended is started anew."""
        number, (ours, theirs) = next(self.numbers), socket.socketpair()
        ours.setblocking(False)
        with theirs:
            try:
                self._send(kind, number, seed, [theirs])
            except OSError:
                self.close()
                self._start()
                self._send(kind, number, seed, [theirs])
        return Child(self, number, ours)

    def kill_child(self, number: int) -> None:
        with contextlib.suppress(OSError):  # the server has ended; its children end with their sockets
            self._send(KILL, number)


class Child:
    """A child of the server, which serves one conversation."""

    def __init__(self, processes: ToolProcesses, number: int, connection: socket.socket):
        self.processes, self.number, self.connection = processes, number, connection

    async def ask(self, *request) -> dict:
        """Return the answer to a request; raise NoAnswer, and be killed, if there is none within the time limit."""
        try:
            async with asyncio.timeout(self.processes.timeout):
                return await self._exchange(request)
        except TimeoutError:
            self.kill()
            raise NoAnswer(f"gave no answer within --tool_timeout {self.processes.timeout:g} s") from None
        except (OSError, ValueError):
            self.kill()
            raise NoAnswer("ended its process") from None

    async def _exchange(self, request: tuple) -> dict:
        loop, answer = asyncio.get_running_loop(), b""
        await loop.sock_sendall(self.connection, json.dumps(request, default=str).encode() + b"\n")
        while not answer.endswith(b"\n"):
            part = await loop.sock_recv(self.connection, 1 << 16)
            if not part:
                raise ConnectionError
            answer += part
        return json.loads(answer)

    def kill(self) -> None:
        if self.connection.fileno() != -1:
            self.connection.close()
            self.processes.kill_child(self.number)


class ToolProcess:
    """The processes of one conversation. It makes one call at a time, and has to be killed at its end."""

    def __init__(self, processes: ToolProcesses, seed: int):
        self.processes, self.seed = processes, seed
        self.children: dict[bytes, Child] = {}

    async def reset(self, row: dict) -> str | list[dict] | None:
        """Make the environment from the columns of a row; return what it adds to the prompt."""
        return await self._ask_environment("reset", row)

    async def step(self, text: str) -> tuple[str | None, float, bool]:
        """Return the environment's (observation, reward, done) for a turn of the model."""
        return tuple(await self._ask_environment("step", text))

    async def outcome(self) -> tuple[float, bool]:
        """Return the (reward, done) of an environment without `step`; the reward is NaN if it has none."""
        reward, done = await self._ask_environment("outcome")
        return (math.nan if reward is None else reward), done

    async def call(self, name: str, arguments: dict) -> str:
        """Return the text that a tool answers with; raise ToolError, with a text for the model, if it fails."""
        if name not in self.processes.parameters:
            raise ToolError(f"there is no tool {name!r}, there are {', '.join(self.processes.parameters)}")
        if problem := misfit(arguments, self.processes.parameters[name]):
            raise ToolError(f"{name}: {problem}")
        if name not in self.processes.own_names:
            return await self._ask_environment("call", name, arguments)
        try:
            answer = await self._child(OPEN_TOOLS).ask("call", name, arguments)
        except NoAnswer as error:
            del self.children[OPEN_TOOLS]
            raise ToolError(f"{name} {error}") from None
        return result_of(answer)

    def kill(self) -> None:
        for child in self.children.values():
            child.kill()
        self.children = {}

    def _child(self, kind: bytes) -> Child:
        if kind not in self.children:
            self.children[kind] = self.processes.open_child(kind, self.seed)
        return self.children[kind]

    async def _ask_environment(self, method: str, *arguments):
        """Return the result of a method of the environment; raise EnvironmentFailure if it fails."""
        try:
            answer = await self._child(OPEN_ENVIRONMENT).ask(method, *arguments)
        except NoAnswer as error:
            raise EnvironmentFailure(f"{arguments[0] if method == 'call' else method} {error}") from None
        return result_of(answer)


def result_of(answer: dict):
    """Return the result in a child's answer; raise ToolError or EnvironmentFailure if there is none."""
    if "tool_error" in answer:
        raise ToolError(answer["tool_error"])
    if "error" in answer:
        raise EnvironmentFailure(" ".join(answer["error"][:500].split()))
    return answer["result"]


def misfit(arguments: dict, parameters: dict) -> str:
    """Return why the arguments of a call do not fit a tool's parameters; "" if they do.

    Args:
        parameters: JSON schema of the object of arguments.
    """
    properties = parameters["properties"]
    names = ", ".join(properties) or "none"
    for name in parameters.get("required", ()):
        if name not in arguments:
            return f"the argument {name!r} is missing"
    for name, value in arguments.items():
        if name not in properties:
            return f"there is no argument {name!r}; the arguments are: {names}"
        wanted = properties[name]
        if value not in wanted.get("enum", [value]):
            return f"the argument {name!r} has to be one of {json.dumps(wanted['enum'])}"
        if not has_type(value, wanted):
            return f"the argument {name!r} has to be of type {wanted['type']}, not {json.dumps(value)[:40]}"
    return ""


def has_type(value, schema: dict) -> bool:
    """Return whether a JSON value is of the type that a schema names, if it names one; what it holds is not checked."""
    names = schema.get("type", [])
    names = [names] if isinstance(names, str) else names
    if not names or value is None and schema.get("nullable"):
        return True
    if isinstance(value, bool):  # which Python takes for an integer
        return "boolean" in names
    return any(isinstance(value, JSON_TYPES.get(name, object)) for name in names)
