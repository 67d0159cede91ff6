"""Processes of tools and environments: what they answer, what fails in them, and that nothing is
left of them.
"""

import asyncio
import math
import os
import re
import subprocess
import sys
import time

import pytest
from conftest import ROOT
from helpers import refused, table

from extras.episodes.tool_processes import EnvironmentFailure, ToolError, start_tools

TOOLS = '''
import contextlib, os, random, signal, subprocess, sys, time

calls = []

def scribble(text):
    for descriptor in range(3, 20):
        with contextlib.suppress(OSError):
            os.write(descriptor, text)

def add(a: int, b: float = 1) -> float:
    """Add two numbers.

    Args:
        a: one.
        b: the other.
    """
    return a + b

def run(code: str):
    """Run an expression.

    Args:
        code: in Python.
    """
    return eval(code)

async def later(text: str) -> str:
    """Return a text later.

    Args:
        text: to return.
    """
    return text

def no_hint(a):
    """Do it.

    Args:
        a: what.
    """
'''

GAME = '''
import random, time, os
import numpy as np

class Game:
    """Compares numbers."""

    def reset(self, secret, **row):
        self.secret, self.rounds = secret, 0
        return eval(row.get("reset", "' go'"))

    def step(self, response):
        self.rounds += 1
        if not response.isdigit():
            return eval(response)
        return ("higher" if int(response) < self.secret else "lower"), 0.5, int(response) == self.secret

    def tools(self):
        return [self.peek]

    def peek(self, what: str) -> str:
        """Run an expression.

        Args:
            what: to run.
        """
        return eval(what)

class Asynchronous:
    async def reset(self, **row):
        import asyncio
        self.loop = asyncio.get_running_loop()
        return "hello"

    async def step(self, response):
        import asyncio
        return None, float("nan"), asyncio.get_running_loop() is self.loop

class OnlyReset:
    def reset(self):
        pass

class Needs:
    def __init__(self, size):
        pass
'''


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The files of tools and environments: a function (tools, environment) -> the arguments of
    start_tools.
    """
    folder = tmp_path_factory.mktemp("tools")
    for name, text in {
        "tools": TOOLS,
        "game": GAME,
        "broken": "\n1 / 0",
        "ends": "import os; os._exit(0)",
    }.items():
        (folder / f"{name}.py").write_text(text)
    path = lambda name: f"{folder}/{name}"
    return lambda tools, environment="": (
        tuple(map(path, tools)),
        environment and path(environment),
    )


@pytest.fixture(scope="module")
def processes(files):
    return start_tools(
        *files(("tools.py:add", "tools.py:run", "tools.py:later"), "game.py:Game"), 60.0
    )


def converse(processes: tuple, *calls, row={"secret": 5}, seed=1) -> list:  # noqa: B006
    """Return the results of calls (method, arguments...) of one conversation after a reset, or the
    errors' texts.

    The call ("limit", seconds) sets the time limit of those that follow.
    """

    async def run():
        process = processes[0](seed)
        results = []
        try:
            if process.gone is EnvironmentFailure:
                results.append(await process.ask("reset", row))
            for method, *arguments in calls:
                if method == "limit":
                    (process.timeout,) = arguments
                    continue
                try:
                    results.append(await process.ask(method, *arguments))
                except ToolError as error:
                    results.append(f"error: {error}")
        except EnvironmentFailure as error:
            results.append(f"failure: {error}")
        finally:
            process.kill()
        return results

    return asyncio.run(run())


def run(code: str):
    return "call", "run", {"code": code}


def wait_until(holds) -> None:
    for _ in range(1200):
        if holds():
            return
        time.sleep(0.05)
    raise AssertionError("it does not become so")


def is_running(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (
        FileNotFoundError,
        ProcessLookupError,
    ):  # gone before it was opened, or before it was read
        return False


def test_a_conversation_with_tools_and_an_environment(processes):
    calls = [
        ("step", "3"),
        ("call", "add", {"a": 1, "b": 2.5}),
        ("call", "later", {"text": "\ud83d"}),
        ("call", "peek", {"what": "self.rounds"}),
        run("sys.stdin.readline()"),
        ("call", "mul", {}),
        ("call", "add", {}),
        ("step", "5"),
    ]
    expected = [" go", ["higher", 0.5, False], "3.5", "?", "1", ""]
    expected += ["error: LookupError: there is no tool 'mul', there are add, run, later, peek"]
    expected += [
        "error: TypeError: add() missing 1 required positional argument: 'a'",
        ["lower", 0.5, True],
    ]
    assert converse(processes, *calls) == expected
    assert [schema["function"]["name"] for schema in processes[1]] == [
        "add",
        "run",
        "later",
        "peek",
    ]


TABLE = table("tools.yaml")
LONG = {"'a' * (1 << 20)": "a" * 100_000}


@pytest.mark.parametrize("code, result", (TABLE["tools"] | LONG).items())
def test_what_a_tool_returns(processes, code, result):
    # Whatever it is, the next call is answered, and so is the environment.
    calls = [
        ("limit", 2.0 if "time.sleep(60)" in code else 60.0),
        run(code),
        ("limit", 60.0),
        run("calls.append(1) or len(calls)"),
        ("step", "9"),
    ]
    ended, after, played = converse(processes, *calls)[1:]
    assert ended.startswith(result) and len(ended) <= max(len(result), 120)
    assert (after, played) == ("1", ["lower", 0.5, False])


DEAF = "signal.signal(signal.SIGALRM, signal.SIG_IGN) and time.sleep(600)"
GONE = {DEAF: "run gave no answer within 1 s"}
BROKEN = ["os._exit(0)", "os.closerange(3, 50)"]
BROKEN += [f"scribble({text})" for text in ("b'9' * 99", "b'9\\n'", "b'9' * (1 << 22)")]
DIED = "the process of the call has ended, or wrote into its connection"
GONE |= dict.fromkeys(BROKEN, f"run: {DIED}")


@pytest.mark.parametrize("code", GONE)
def test_what_ends_its_process(processes, files, tmp_path, code):
    """The next call of a tool has a new process, an environment is gone; nothing is left of what a
    tool has started.
    """
    begin = run(
        f"open('{tmp_path}/pid', 'w').write(str(subprocess.Popen(['sleep', '60']).pid)) and None"
    )
    calls = [
        begin,
        run("calls.append(1)"),
        ("limit", 1.0 if code == DEAF else 60.0),
        run(code),
        ("limit", 60.0),
        run("calls"),
    ]
    assert converse(processes, *calls) == [" go", "", "", f"failure: {GONE[code]}"]
    wait_until(lambda: not is_running(int((tmp_path / "pid").read_text())))
    tools = start_tools(*files(("tools.py:run",)), 60.0)
    assert converse(tools, *calls) == ["", "", f"error: {GONE[code]}", "[]"]


@pytest.mark.parametrize("row, step, expected", TABLE["environments"])
def test_what_an_environment_returns(processes, row, step, expected):
    *before, last = converse(processes, *[("step", step)] * bool(step), row={"secret": 5, **row})
    assert before == expected[:-1]
    assert (
        re.fullmatch(expected[-1], last) if isinstance(expected[-1], str) else expected[-1] == last
    )


def test_tools_of_an_environment_that_fail(processes):
    # What a tool raises is for the model; an environment that is gone is a failure.
    calls = [("call", "peek", {"what": what}) for what in ("1 / 0", "os._exit(0)")]
    *_, raised, ended = converse(processes, *calls)
    assert raised == "error: ZeroDivisionError: division by zero"
    assert ended == f"failure: peek: {DIED}"


def test_random_numbers_are_the_rows(processes):
    drawn = lambda seed: converse(
        processes, ("call", "peek", {"what": "[random.random(), np.random.rand()]"}), seed=seed
    )
    assert drawn(7) == drawn(7) != drawn(8)


def test_an_asynchronous_environment(files):
    asynchronous = start_tools(*files((), "game.py:Asynchronous"), 60.0)
    added, (observation, reward, done) = converse(asynchronous, ("step", "x"), row={})
    # one event loop for all calls
    assert added == "hello" and observation == "" and math.isnan(reward) and done


def test_in_a_running_event_loop(files):
    """As that of a notebook, which goes on."""

    async def cell() -> tuple:
        made = start_tools(*files((), "game.py:Asynchronous"), 60.0)
        await asyncio.sleep(0.01)  # asks for the running loop
        return made

    assert converse(asyncio.run(cell()), ("step", "x"), row={})[0] == "hello"


TRAINER = """
import asyncio, sys
import torch  # as a trainer does
from extras.episodes.tool_processes import start_tools

async def train(process):
    await process.ask("reset", {"secret": 1})
    code = "'torch' in sys.modules or (subprocess.Popen(['sleep', '99']).pid, os.getpid(), os.getppid())"
    print(await process.ask("call", "run", {"code": code}), flush=True)
    await process.ask("call", "run", {"code": "9 ** 9 ** 9"})  # no exception ends it

if __name__ == "__main__":
    asyncio.run(train(start_tools((sys.argv[1],), sys.argv[2], 60.0)[0](1)))
"""


def test_nothing_is_left_of_a_trainer_that_was_killed(files, tmp_path):
    """A trainer is a script that imports torch; its tools do not, and end with it, and all that
    they have started.
    """
    (tmp_path / "trainer.py").write_text(TRAINER)
    (tool,), environment = files(("tools.py:run",), "game.py:Game")
    words = [sys.executable, tmp_path / "trainer.py", tool, environment]
    trainer = subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    found = list(map(int, re.findall(r"\d+", trainer.stdout.readline())))
    assert len(found) == 3 and all(map(is_running, found))
    trainer.kill()
    trainer.wait()
    wait_until(lambda: not any(map(is_running, found)))


def test_a_connection_that_closes_ends_what_a_tool_has_started(processes):
    """As where the process reads that the trainer is gone before its thread does."""

    async def close() -> str:
        tools = processes[0](1)
        code = "subprocess.Popen(['sleep', '99']).pid"
        started = await tools.ask("call", "run", {"code": code})
        tools.process.writer.close()
        return started

    started = int(asyncio.run(close()))
    wait_until(lambda: not is_running(started))


@pytest.mark.parametrize("tools, environment, line", TABLE["refused"])
def test_what_is_wrong_with_tools_and_environments(files, capfd, tools, environment, line):
    assert re.fullmatch(
        f"error: {line}", refused(capfd, start_tools, *files(tools, environment), 2.0)
    )


def test_python_tool(tmp_path, monkeypatch):
    """A program that does not end is gone with its conversation."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    processes = start_tools((f"{ROOT}/scripts/train/python_tool.py:python",), "", 60.0)
    programs = {
        "for i in range(2):\n    print(i)\nif __name__ == '__main__': print('{}')": "0\n1\n{}\n",
        "print(1)\n1 / 0": "1\nZeroDivisionError: division by zero\n",
        "x = (": "  File \"code.py\", line 1\n    x = (\n        ^\nSyntaxError: '(' was never closed\n",
        "print('a'); exit(1)": "a\n",
        "import sys; print('a'); print('b', file=sys.stderr); print('c'); sys.exit('why')": "a\nb\nc\nwhy\n",
        "class Mute(Exception): __str__ = None\nraise Mute": "Mute: <exception str() failed>\n",
    }

    async def call() -> None:
        process = processes[0](1)
        for code, printed in programs.items():
            assert await process.ask("call", "python", {"code": code}) == printed
        process.timeout = 1.0
        with pytest.raises(ToolError, match="TimeoutError: no answer in time"):
            await process.ask("call", "python", {"code": "while True: pass"})
        process.kill()

    asyncio.run(call())
    # The sandbox's process has a folder as an argument.
    wait_until(lambda: subprocess.run(["pgrep", "-f", f"sandbox.py {tmp_path}"]).returncode == 1)
