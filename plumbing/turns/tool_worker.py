"""The processes in which tools and environments run: a server, and a child of it for those of each conversation.

    trainer (plumbing/turns/tool_processes.py) -> server -> child: the functions of --tools for one conversation
                                                   -> child: the environment of one conversation

The server imports the files of --tools and --environment once, and checks them. Its children are forks, so that there
can be hundreds of them, and what hangs or crashes in one harms no other conversation. The server is started with a
socket as stdin and its settings, a JSON object, as argument. It answers with a line, {"tools": [schemas],
"environment": [schemas], "has_step": ...} or {"flag": name, "error": why}. From then on the trainer sends it MESSAGEs.
One that opens a child brings along the child's socket, on which go lines of JSON, a request and its answer:
    ["reset", row] or ["step", text] or ["call", name, arguments] or ["outcome"]
    {"result": ...} or {"tool_error": text for the model} or {"error": why the environment failed}

Imports plumbing/rewards/functions.py (functions of users' files). Starts in a tenth of a second, and without torch.
"""

import asyncio
import contextlib
import functools
import gc
import importlib
import inspect
import json
import os
import random
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable

from plumbing.rewards.functions import described, load_function, taken

MESSAGE = struct.Struct("!cQQ")  # one of the following, number of the child, its seed
OPEN_TOOLS, OPEN_ENVIRONMENT, KILL = b"t", b"e", b"k"
LONGEST_TEXT = 100_000  # characters of what a tool or an environment returns


class ToolError(Exception):
    """A call of a tool has failed; the text is for the model."""


class WrongResult(Exception):
    """An environment's method returned what it should not."""


# ---- in a child: tools and an environment ----------------------------------------------------------------------------


class Tools:
    """The functions of --tools, for one conversation."""

    def __init__(self, functions: list[Callable]):
        self.functions = functions
        self.runner = asyncio.Runner()  # one event loop for all calls, to which connections may be bound

    def call(self, name: str, arguments: dict) -> str:
        """Return the text that a tool answers with. Raise ToolError if it fails."""
        functions = {function.__name__: function for function in self.functions}
        try:
            return as_text(self.finish(functions[name](**arguments)))
        except BaseException as error:  # SystemExit, too
            raise ToolError(cut(f"{type(error).__name__}: {error}")) from error

    def finish(self, result):
        """Return the result of a function, which may be asynchronous."""
        return self.runner.run(result) if inspect.iscoroutine(result) else result


class Environment(Tools):
    """An instance of --environment and its tools, for one conversation."""

    def __init__(self, make: Callable):
        super().__init__([])
        self.make = make

    def reset(self, row: dict) -> str | list[dict] | None:
        """Make the instance, and return what it adds to the prompt. gymnasium's (observation, info) is one, too."""
        self.instance = self.make()
        result = self.finish(self.instance.reset(**taken(self.instance.reset, [], row)))
        self.functions = tools_of(self.instance)
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
            result = result[0]
        if isinstance(result, list) and all(isinstance(message, dict) and "role" in message for message in result):
            return result
        return as_observation("reset", result)

    def step(self, text: str) -> tuple[str | None, float, bool]:
        """Return what the environment answers to a turn of the model: (observation, reward, done).

        gymnasium's (observation, reward, terminated, truncated, info) is read as that, too.
        """
        result = self.finish(self.instance.step(text))
        if isinstance(result, tuple) and len(result) == 5:
            result = (*result[:2], result[2] or result[3])
        if not isinstance(result, tuple) or len(result) != 3:
            raise WrongResult(f"step returned {described(result)}, not (observation, reward, done)")
        observation, reward, done = result
        return as_observation("step", observation), as_reward("step", reward), as_flag("step", done)

    def outcome(self) -> tuple[float | None, bool]:
        """Return (reward, done) of an environment without `step`, its attributes; None without a reward."""
        reward, done = getattr(self.instance, "reward", None), getattr(self.instance, "done", False)
        return None if reward is None else as_reward("attribute", reward), as_flag("attribute", done)


def tools_of(instance) -> list[Callable]:
    """Return the functions of an environment that the model may call.

    Those that its method `tools` returns; else, as in TRL's environment_factory, its public methods but `reset`, if it
    has no `step`.
    """
    if hasattr(instance, "tools"):
        return list(instance.tools())
    if hasattr(instance, "step"):
        return []
    names = [name for name, _ in inspect.getmembers(type(instance), inspect.isroutine)]
    return [getattr(instance, name) for name in names if not name.startswith("_") and name != "reset"]


def as_text(value) -> str:
    """Return what a tool returned as text: None is "", and what is no text is written as JSON."""
    if value is None:
        return ""
    if not isinstance(value, str):
        try:
            value = json.dumps(value, ensure_ascii=False, default=lambda array: array.tolist())
        except Exception:
            raise TypeError(f"the tool returned {described(value)}, which is neither text nor JSON") from None
    return cut(value)


def cut(text: str) -> str:
    """Return a text of at most LONGEST_TEXT characters, and a note if that is not all of it."""
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}\n[cut, of {len(text)} characters]"


def as_observation(source: str, value) -> str | None:
    """Return the observation that a method returned; raise WrongResult if it is none."""
    if not isinstance(value, str | None):
        wanted = "a text, a list of messages or None" if source == "reset" else "a text or None as observation"
        raise WrongResult(f"{source} returned {described(value)}, not {wanted}")
    return value and cut(value)


def as_reward(source: str, value) -> float:
    """Return a reward, a number of any kind, as a float. (A text is refused, even if float() could read it.)"""
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise WrongResult(f"{source}: the reward is {described(value)}, not a number")
    return float(value)


def as_flag(source: str, value) -> bool:
    """Return `done` as a bool. (A float, a text or a dict is refused: the values are in another order.)"""
    if isinstance(value, float | None) or not hasattr(value, "__bool__"):
        raise WrongResult(f"{source}: done is {described(value)}, not True or False")
    return bool(value)


def as_line(message: dict) -> bytes:
    """Return a message as a line of JSON. A half of a surrogate pair, which no tokenizer takes, becomes "?"."""
    return json.dumps(message, ensure_ascii=False).encode(errors="replace") + b"\n"


def serve(connection: socket.socket, owner: Tools, timeout: float) -> None:
    """Answer the calls of one conversation until its socket is closed."""
    for line in connection.makefile("rb"):
        method, *arguments = json.loads(line)
        # The trainer has a child killed after the time limit; if it is gone, the kernel does it, a bit later.
        signal.setitimer(signal.ITIMER_REAL, timeout + 5)
        try:
            answer = as_line({"result": getattr(owner, method)(*arguments)})
        except ToolError as error:
            answer = as_line({"tool_error": str(error)})
        except WrongResult as error:
            answer = as_line({"error": str(error)})
        except BaseException as error:
            answer = as_line({"error": f"{method} raised {reason(error)}"})
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.sendall(answer)


def reason(error: BaseException) -> str:
    """Return an exception's type and text, and the last line of a user's file that its traceback passes through."""
    frames = traceback.extract_tb(error.__traceback__)
    # load_function puts users' files into sys.modules by their paths.
    places = [f" ({frame.filename}:{frame.lineno})" for frame in frames if frame.filename in sys.modules]
    return f"{type(error).__name__}{places[-1] if places else ''}: {error}"


# ---- the server ------------------------------------------------------------------------------------------------------


def main() -> None:
    settings = json.loads(sys.argv[1])
    trainer = socket.socket(fileno=os.dup(0))
    # A tool that reads gets nothing, and what it prints goes to stderr.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)
    functions, make, flag = [], None, ""
    try:
        for name in settings["tools"]:
            flag = f"--tools {name}"
            functions.append(load_function(name))
        if settings["environment"]:
            flag = f"--environment {settings['environment']}"
            make = load_function(settings["environment"])
    except BaseException as error:
        trainer.sendall(as_line({"flag": flag, "error": reason(error)}))
        return
    # In a fork: transformers takes memory, and an instance that is made for the check leaves no trace.
    checker = fork(lambda: trainer.sendall(as_line(description(settings, functions, make))))
    ended = os.waitid(os.P_PID, checker, os.WEXITED | os.WNOWAIT)
    kill(checker)  # with what the environment has started
    if ended.si_status == 0:
        fork_children(trainer, functions, make, settings["timeout"])


def fork_children(trainer: socket.socket, functions: list[Callable], make: Callable | None, timeout: float) -> None:
    """Start and kill children, as the trainer says, until it is gone."""
    if "numpy" in sys.modules:
        importlib.import_module("numpy.random")  # here once, not in each child
    gc.freeze()  # children would copy what the garbage collector writes to
    children: dict[int, int] = {}  # number -> process id, which is its own until the child is waited for

    def run_child(connection: socket.socket, kind: bytes, seed: int) -> None:
        trainer.close()
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        serve(connection, Tools(functions) if kind == OPEN_TOOLS else Environment(make), timeout)

    while True:
        message, sockets, _, _ = socket.recv_fds(trainer, MESSAGE.size, 1, socket.MSG_WAITALL)
        if not message:
            break
        kind, number, seed = MESSAGE.unpack(message)
        if kind == KILL:
            kill(children.pop(number, None))
            continue
        with socket.socket(fileno=sockets[0]) as connection:
            try:
                children[number] = fork(functools.partial(run_child, connection, kind, seed))
            except OSError:
                traceback.print_exc()  # the trainer sees that the socket is closed
    for child in children.values():
        kill(child)


def fork(act: Callable) -> int:
    """Call a function in a child process, in a process group of its own; return its id."""
    child = os.fork()
    with contextlib.suppress(OSError):
        os.setpgid(child, child)  # both processes do it, so that neither has to wait for the other
    if child:
        return child
    try:
        act()
    except ConnectionError:  # the trainer is gone
        pass
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def kill(child: int | None) -> None:
    """Kill a child, if there is one, and all that it has started."""
    if child is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)


# ---- checks at the start ---------------------------------------------------------------------------------------------


def description(settings: dict, functions: list[Callable], make: Callable | None) -> dict:
    """Return what the trainer has to know of the tools and the environment, or what is wrong with them."""
    found = {"tools": [], "environment": [], "has_step": False}
    flag = ""
    try:
        for name, function in zip(settings["tools"], functions):
            flag = f"--tools {name}"
            found["tools"].append(schema(function))
        if make:
            flag = f"--environment {settings['environment']}"
            found |= describe_environment(make())
    except BaseException as error:
        return {"flag": flag, "error": reason(error)}
    names = [schema["function"]["name"] for schema in found["tools"] + found["environment"]]
    twice = next((name for name in names if names.count(name) > 1), None)
    return {"flag": flag, "error": f"there are two tools {twice}"} if twice else found


def describe_environment(instance) -> dict:
    """Return {"environment": schemas of its tools, "has_step": whether it has `step`}.

    Raises:
        TypeError: if it is no environment.
    """
    has_step = hasattr(instance, "step")
    for method in ("reset", "step", "tools"):
        if not callable(getattr(instance, method, None)) and (method == "reset" or hasattr(instance, method)):
            raise TypeError(f"has no method {method}")
    try:
        schemas = [schema(function) for function in tools_of(instance)]
    except Exception as error:
        hint = "" if has_step else "; without a method step, its public methods are tools"
        raise TypeError(f"{error}{hint}") from error
    if not has_step and not schemas:
        raise TypeError("has neither a method step nor tools")
    return {"environment": schemas, "has_step": has_step}


def schema(function: Callable) -> dict:
    """Return the schema of a tool, which is shown to the model. Raise an exception if it lacks hints or a docstring."""
    if isinstance(function, type) or not hasattr(function, "__name__"):
        raise TypeError(f"{described(function)} is no function")
    from transformers.utils import chat_template_utils  # takes a second

    chat_template_utils.is_torch_available = lambda: False  # torch would be imported for a type that no tool has
    return chat_template_utils.get_json_schema(function)


if __name__ == "__main__":
    main()
