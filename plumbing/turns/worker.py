"""What a process of tools (--tools) and of an environment (--environment) does: it serves one
conversation.

Requests and answers are lines of JSON on a socket, each request with the seconds after which the
user's code is interrupted:
    [seconds, method, arguments...], where the methods are `describe`, `reset`, `step` and `call`
    {"result": ...} or {"error": type and text of what was raised}

The processes are forked from multiprocessing's fork server, which imports this module, and with it
the users' files. It imports no torch.
"""

import asyncio
import contextlib
import inspect
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker

from plumbing.user_code import accepted, load_function

# Environment variable of the fork server: JSON list of the functions in users' files.
FILES = "RLHF_TOOL_FILES"
LONGEST_TEXT = 100_000  # characters of a tool's or an environment's text; the rest is cut


class ToolError(Exception):
    """A call of a tool has failed; the text is for the model."""


class EnvironmentFailure(Exception):
    """An environment raised an exception, hung, died, or returned a value of the wrong type."""


class Tools:
    """The functions of --tools and an instance of --environment, if there is one, for one
    conversation.
    """

    def __init__(self, tools: list[str], environment: str, seed: int):
        self.functions = list(map(load_function, tools))
        make = load_function(environment) if environment else lambda: None
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        # One event loop for all calls, to which connections may be bound.
        self.runner = asyncio.Runner()
        self.instance = make()
        if environment and not (hasattr(self.instance, "reset") and hasattr(self.instance, "step")):
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
        """Return what the environment adds to the prompt. gymnasium's (observation, info) is read,
        too.
        """
        result = self.finish(self.instance.reset(**accepted(self.instance.reset, row)))
        return as_text(result[0] if isinstance(result, tuple) else result)

    def step(self, text: str) -> tuple[str, float, bool]:
        """Return the environment's answer to a turn of the model: (observation, reward, done).

        gymnasium's (observation, reward, terminated, truncated, info) is read, too.
        """
        result = self.finish(self.instance.step(text))
        if isinstance(result, tuple) and len(result) == 5:
            result = (*result[:2], result[2] or result[3])
        observation, reward, done = result
        if isinstance(done, float | str | dict | None):  # in another order
            raise TypeError(f"{str(result)[:80]!r} is not (text or None, number, bool)")
        return as_text(observation), float(reward), bool(done)


def as_text(value) -> str:
    """Return a value as text of at most LONGEST_TEXT characters: "" for None, JSON for anything but
    text.
    """
    if not isinstance(value, str | None):
        plain = lambda x: x.tolist() if hasattr(x, "tolist") else str(x)  # arrays and other objects
        value = json.dumps(value, ensure_ascii=False, default=plain)
    text = value or ""
    return (
        text
        if len(text) <= LONGEST_TEXT
        else f"{text[:LONGEST_TEXT]}\n[cut, of {len(text)} characters]"
    )


# ---- the process ---------------------------------------------------------------------------------


def serve(connection: socket.socket, tools: list[str], environment: str, seed: int) -> None:
    """Answer the requests of one conversation; once the trainer is gone, end all that the tools
    have started.
    """
    os.setpgid(0, 0)  # a group of processes, to be killed with all that a tool starts
    # What a tool writes to descriptors that are not its own would end the fork server or its
    # tracker.
    os.close(forkserver._forkserver._forkserver_alive_fd)
    os.close(resource_tracker._resource_tracker._fd)
    resource_tracker._resource_tracker._fd = None  # a tool that needs one starts its own
    threading.Thread(target=end_with_trainer, daemon=True).start()
    os.dup2(2, 1)  # output of tools goes to stderr
    sys.stdout = sys.stderr
    signal.signal(signal.SIGALRM, give_up)
    served = None
    process = os.getpid()
    with contextlib.suppress(OSError):  # the trainer is gone, or a tool has closed the connection
        for request in connection.makefile("rb"):
            try:
                limit, method, *arguments = json.loads(request)
                signal.setitimer(signal.ITIMER_REAL, limit)
                served = served or Tools(tools, environment, seed)
                answer = {"result": getattr(served, method)(*arguments)}
            except BaseException as error:  # SystemExit, too
                # Has a text even where str(error) raises.
                raised = traceback.TracebackException.from_exception(error)
                # load_function puts users' files into sys.modules by their paths. What a tool
                # raises is for the model, which does not need the place.
                places = [
                    f" ({frame.filename}:{frame.lineno})"
                    for frame in raised.stack
                    if frame.filename in sys.modules and method != "call"
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
    raise TimeoutError("no answer within --timeout")


def end_with_trainer() -> None:
    """Wait for the end of the trainer; then kill this process and all that it has started."""
    multiprocessing.parent_process().join()
    os.killpg(0, signal.SIGKILL)


# In the fork server: once, not in each process.
for name in json.loads(os.environ.get(FILES, "[]")):
    try:
        load_function(name)
    except BaseException:  # the process that needs the file imports it again, and reports the error
        sys.modules.pop(name.rpartition(":")[0], None)
