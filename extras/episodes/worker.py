"""What a process of tools (--tools), an environment (--environment) or an agent (--agent) does: it
serves one conversation.

Requests and answers are lines of JSON on a socket, each request with the seconds after which the
user's code is interrupted:
    [seconds, method, arguments...], where the methods are `describe`, `reset`, `step`, `call` and `play`
    {"result": ...} or {"error": type and text of what was raised}

The processes are forked from one that has imported the users' files, and no torch.
"""

import asyncio
import contextlib
import inspect
import json
import os
import random
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable

from plumbing.processes import accepted, load_function, modules

LONGEST_TEXT = 100_000  # characters of a tool's or an environment's text; the rest is cut


class ToolError(Exception):
    """A call of a tool has failed; the text is for the model."""


class EnvironmentFailure(Exception):
    """An environment raised an exception, hung, died, or returned a value of the wrong type."""


class Tools:
    """The functions of --tools and an instance of --environment, if there is one, for one
    conversation; or in its place the --agent.
    """

    def __init__(self, tools: list[str], environment: str, seed: int):
        self.functions = list(map(load_function, tools))
        made = load_function(environment) if environment else None
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        # One event loop for all calls, to which connections may be bound.
        self.runner = asyncio.Runner()
        self.instance = made() if inspect.isclass(made) else made  # an agent is a function
        if inspect.isclass(made) and not (hasattr(made, "reset") and hasattr(made, "step")):
            raise TypeError("requires methods reset and step")

    def tools(self) -> list[Callable]:
        """Return the functions that the model may call: those of --tools, then those that a method
        `tools` of the environment returns.
        """
        of_environment = self.instance.tools() if hasattr(self.instance, "tools") else []
        return [*self.functions, *of_environment]

    def describe(self) -> list[dict]:
        """Return the schemas of the tools."""
        from transformers.utils import chat_template_utils  # slow to import

        # torch would be imported for a type that no tool has.
        chat_template_utils.is_torch_available = lambda: False
        return list(map(chat_template_utils.get_json_schema, self.tools()))

    def call(self, name: str, arguments: dict) -> str:
        """Return the text that a tool answers with."""
        functions = {function.__name__: function for function in self.tools()}
        if name not in functions:
            raise LookupError(f"there is no tool {name!r}, there are {', '.join(functions)}")
        return as_text(self.finish(functions[name](**arguments)))

    def finish(self, result):
        """Return the result of a function, which may be asynchronous."""
        return self.runner.run(result) if inspect.iscoroutine(result) else result

    def reset(self, row: dict) -> str:
        """Return what the environment adds to the prompt."""
        return as_text(self.finish(self.instance.reset(**accepted(self.instance.reset, row))))

    def step(self, text: str) -> tuple[str, float, bool]:
        """Return the environment's answer to a turn of the model: (observation, reward, done)."""
        result = self.finish(self.instance.step(text))
        observation, reward, done = result
        if isinstance(done, float | str | dict | None):  # in another order
            raise TypeError(f"{str(result)[:80]!r} is not (text or None, number, bool)")
        return as_text(observation), float(reward), bool(done)

    def play(self, base_url: str, row: dict) -> float | None:
        """Return the reward of the agent, which asks the policy at an address."""
        reward = self.finish(self.instance(base_url, **accepted(self.instance, row)))
        return None if reward is None else float(reward)


def as_text(value) -> str:
    """Return the first LONGEST_TEXT characters of a value as text: "" for None, JSON for anything
    but text.
    """
    if not isinstance(value, str | None):
        plain = lambda x: x.tolist() if hasattr(x, "tolist") else str(x)  # arrays and other objects
        value = json.dumps(value, ensure_ascii=False, default=plain)
    return (value or "")[:LONGEST_TEXT]


# ---- the process ---------------------------------------------------------------------------------


def fork_processes(control: int, tools: list[str], environment: str) -> None:
    """Import the users' files; then fork a process for each seed and connection that arrive at a
    socket, until the trainer is gone.
    """
    sys.stdout = sys.stderr
    for name in filter(None, [*tools, environment]):
        try:
            load_function(name)
        except BaseException:  # the process that needs the file imports it again, and reports this
            modules.pop(name.rpartition(":")[0], None)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing is left of those that have ended
    with socket.socket(fileno=control) as trainer:
        while True:
            seed, descriptors, *_ = socket.recv_fds(trainer, 100, 1)
            if not seed:
                return
            with socket.socket(fileno=descriptors[0]) as connection:
                if os.fork() == 0:
                    trainer.close()
                    serve(connection, tools, environment, int(seed))


def serve(connection: socket.socket, tools: list[str], environment: str, seed: int) -> None:
    """Send the number of this process, and answer the requests of one conversation; once the
    trainer is gone, end all that the tools have started.
    """
    os.setpgid(0, 0)  # a group of processes, to be killed with all that a tool starts
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    threading.Thread(target=end_with_trainer, args=[connection], daemon=True).start()
    signal.signal(signal.SIGALRM, give_up)
    served = None
    process = os.getpid()
    with contextlib.suppress(OSError):  # the trainer is gone, or a tool has closed the connection
        connection.sendall(b"%d\n" % process)
        for request in connection.makefile("rb"):
            try:
                limit, method, *arguments = json.loads(request)
                signal.setitimer(signal.ITIMER_REAL, limit)
                served = served or Tools(tools, environment, seed)
                answer = {"result": getattr(served, method)(*arguments)}
            except BaseException as error:  # SystemExit, too
                # Has a text even where str(error) raises.
                raised = traceback.TracebackException.from_exception(error)
                # What a tool raises is for the model, which does not need the place.
                places = [
                    f" ({frame.filename}:{frame.lineno})"
                    for frame in raised.stack
                    if frame.filename in modules and method != "call"
                ]
                text = f"{type(error).__name__}{''.join(places[-1:])}: {raised}"
                answer = {"error": as_text(text)}
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            if os.getpid() != process:  # a tool has forked, and both have returned
                os._exit(0)
            # Half of a surrogate pair, which no tokenizer reads, becomes "?".
            connection.sendall(
                json.dumps(answer, ensure_ascii=False).encode(errors="replace") + b"\n"
            )
    os.killpg(0, signal.SIGKILL)


def give_up(*_) -> None:
    raise TimeoutError("no answer in time")


def end_with_trainer(connection: socket.socket) -> None:
    """Wait for the end of the trainer; then kill this process and all that it has started."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    poll.poll()
    os.killpg(0, signal.SIGKILL)
