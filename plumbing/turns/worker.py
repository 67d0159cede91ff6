"""What a process of tools (--tools) or of an environment (--environment) does: it serves one conversation.

Requests and answers are JSON objects on a pipe:
    ["describe"] or ["reset", row] or ["step", text] or ["outcome"] or ["call", name, arguments]
    {"result": ...} or {"tool_error": text for the model} or {"error": why the environment failed}

The processes are forked from multiprocessing's fork server, which imports this module, and with it the users' files.
It imports no torch.
"""

import asyncio
import inspect
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

from plumbing.rewards.functions import accepted, load_function

FILES = "RLHF_TOOL_FILES"  # environment variable of the fork server: JSON list of the functions in users' files
LONGEST_TEXT = 100_000  # characters of a tool's or an environment's text; the rest is cut


class ToolError(Exception):
    """A call of a tool has failed; the text is for the model."""


class Tools:
    """The functions of --tools, for one conversation."""

    has_step = False

    def __init__(self, functions: list[Callable]):
        self.functions = functions
        self.runner = asyncio.Runner()  # one event loop for all calls, to which connections may be bound

    def describe(self) -> tuple[list[dict], bool]:
        """Return the schemas of the tools, and whether it is an environment with a method `step`."""
        from transformers.utils import chat_template_utils  # slow to import

        chat_template_utils.is_torch_available = lambda: False  # torch would be imported for a type that no tool has
        return [chat_template_utils.get_json_schema(function) for function in self.functions], self.has_step

    def call(self, name: str, arguments: dict) -> str:
        """Return the text that a tool answers with; raise ToolError if it fails, as for arguments that do not fit."""
        functions = {function.__name__: function for function in self.functions}
        try:
            return as_text(self.finish(functions[name](**arguments)))
        except BaseException as error:  # SystemExit, too
            raise ToolError(shortened(f"{type(error).__name__}: {error}")) from error

    def finish(self, result):
        """Return the result of a function, which may be asynchronous."""
        return self.runner.run(result) if inspect.iscoroutine(result) else result


class Environment(Tools):
    """An instance of --environment and its tools, for one conversation."""

    def __init__(self, make: Callable):
        self.instance, self.reward_so_far = make(), 0.0
        self.has_step = hasattr(self.instance, "step")
        super().__init__([])

    def describe(self) -> tuple[list[dict], bool]:
        self.functions = self.tools()
        if not hasattr(self.instance, "reset") or not (self.has_step or self.functions):
            raise TypeError("requires a method reset, and a method step or tools")
        return super().describe()

    def tools(self) -> list[Callable]:
        """Return the functions that the model may call.

        Those that the method `tools` returns; else, as in TRL's environment_factory, the public methods but `reset`, if
        there is no `step`.
        """
        if hasattr(self.instance, "tools"):
            return list(self.instance.tools())
        members = [] if self.has_step else inspect.getmembers(type(self.instance), inspect.isroutine)
        return [getattr(self.instance, name) for name, _ in members if not name.startswith("_") and name != "reset"]

    def reset(self, row: dict) -> str | list[dict] | None:
        """Return what the environment adds to the prompt. gymnasium's (observation, info) is read, too."""
        result = self.finish(self.instance.reset(**accepted(self.instance.reset, row)))
        self.functions = self.tools()
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
            result = result[0]
        if isinstance(result, list) and all(isinstance(message, dict) and "role" in message for message in result):
            return result
        if not isinstance(result, str | None):
            raise TypeError(f"{str(result)[:80]!r} is not a text, a list of messages or None")
        return result and shortened(result)

    def step(self, text: str) -> tuple[str | None, float, bool]:
        """Return the environment's answer to a turn of the model: (observation, reward, done).

        gymnasium's (observation, reward, terminated, truncated, info) is read, too.
        """
        result = self.finish(self.instance.step(text))
        if isinstance(result, tuple) and len(result) == 5:
            result = (*result[:2], result[2] or result[3])
        observation, reward, done = result
        if not isinstance(observation, str | None) or isinstance(done, float | str | dict | None):  # in another order
            raise TypeError(f"{str(result)[:80]!r} is not (text or None, number, bool)")
        return observation and shortened(observation), float(reward), bool(done)

    def outcome(self) -> tuple[float | None, bool]:
        """Return (reward, done) of an environment without `step`, by its attributes of these names.

        The reward is what came to the attribute since the last call; None as long as there is no such attribute.
        """
        reward, done = getattr(self.instance, "reward", None), bool(getattr(self.instance, "done", False))
        if reward is None:
            return None, done
        before, self.reward_so_far = self.reward_so_far, float(reward)
        return self.reward_so_far - before, done


def as_text(value) -> str:
    """Return a tool's result as text: "" for None, JSON for anything but text."""
    if value is None:
        return ""
    if not isinstance(value, str):
        plain = lambda x: x.tolist() if hasattr(x, "tolist") else str(x)  # arrays and other objects
        value = json.dumps(value, ensure_ascii=False, default=plain)
    return shortened(value)


def shortened(text: str) -> str:
    """Return a text of at most LONGEST_TEXT characters, and a note if that is not all of it."""
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}\n[cut, of {len(text)} characters]"


# ---- the process -----------------------------------------------------------------------------------------------------


def serve(connection: Connection, names: list[str], is_environment: bool, seed: int) -> None:
    """Answer the requests of one conversation.

    Args:
        names: functions that are tools, or a class that is an environment, each as path/to/file.py:name.
        seed: of `random` and, where a user's file imports it, `numpy.random`.
    """
    os.setpgid(0, 0)  # a group of processes, to be killed with all that a tool starts
    threading.Thread(target=end_with_trainer, daemon=True).start()
    os.dup2(2, 1)  # output of tools goes to stderr
    sys.stdout = sys.stderr
    try:
        functions = list(map(load_function, names))
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        served = Environment(*functions) if is_environment else Tools(functions)
    except BaseException as error:  # the answer to the first request
        connection.send_bytes(as_json({"error": reason(error)}))
        return
    while True:
        try:
            method, *arguments = json.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):  # the trainer is gone
            return
        try:
            answer = as_json({"result": getattr(served, method)(*arguments)})
        except ToolError as error:
            answer = as_json({"tool_error": str(error)})
        except BaseException as error:
            answer = as_json({"error": reason(error)})
        connection.send_bytes(answer)


def end_with_trainer() -> None:
    """Wait for the end of the trainer; then kill this process and all that it has started."""
    multiprocessing.parent_process().join()
    os.killpg(0, signal.SIGKILL)


def as_json(message: dict) -> bytes:
    """Return a message as JSON. A half of a surrogate pair, which no tokenizer reads, becomes "?"."""
    return json.dumps(message, ensure_ascii=False).encode(errors="replace")


def reason(error: BaseException) -> str:
    """Return an exception's type and text, and the last line of a user's file that its traceback passes through."""
    frames = traceback.extract_tb(error.__traceback__)
    # load_function puts users' files into sys.modules by their paths.
    places = [f" ({frame.filename}:{frame.lineno})" for frame in frames if frame.filename in sys.modules]
    return f"{type(error).__name__}{places[-1] if places else ''}: {error}"


for name in json.loads(os.environ.get(FILES, "[]")):  # in the fork server: once, not in each process
    try:
        load_function(name)
    except BaseException:  # the process that needs the file imports it again, and reports the error
        sys.modules.pop(name.rpartition(":")[0], None)
