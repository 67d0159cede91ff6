"""Processes of tools and environments: what they answer, what fails in them, and that nothing is left of them."""

import asyncio
import contextlib
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT

from plumbing.turns.processes import EnvironmentFailure, ToolError, ToolProcesses

TOOLS = '''
import asyncio, os, random, subprocess, sys, time
from typing import Literal

calls = []

def add(a: int, b: float = 1, *, sign: Literal["+", "-"] = "+", note: str | None = None) -> float:
    """Add two numbers.

    Args:
        a: one.
        b: the other.
        sign: of b.
        note: says what for.
    """
    return a + b if sign == "+" else a - b

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
    await asyncio.sleep(0)
    return text

def read() -> str:
    """Return a line of stdin."""
    return sys.stdin.readline()

def no_hint(a):
    """Do it.

    Args:
        a: what.
    """

def no_docstring(a: int):
    return a

class Thing:
    pass

number = 5
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
        def rounds() -> int:
            """Return how many rounds were played."""
            return self.rounds
        return [rounds, self.peek]

    def peek(self, what: str) -> str:
        """Run an expression.

        Args:
            what: to run.
        """
        return eval(what)

class Counter:
    """As TRL's environment_factory takes it."""

    def __init__(self):
        self.reward = 0.0

    def reset(self, start, **row):
        self.count = start

    def increment(self, by: int) -> str:
        """Count.

        Args:
            by: how much.
        """
        self.count += by
        self.reward, self.done = np.float32(self.count), np.bool_(self.count > 5)
        return str(self.count)

    def _hidden(self):
        pass

class Gym:
    """As gymnasium has it."""

    def reset(self, *, seed=None, options=None):
        return f"start {seed}", {"info": 1}

    def step(self, action):
        return action[::-1], np.int64(1), False, np.bool_(action == "end"), {}

class Asynchronous:
    async def reset(self, **row):
        import asyncio
        self.loop = asyncio.get_running_loop()
        return [{"role": "system", "content": "hello"}]

    async def step(self, response):
        import asyncio
        return None, float("nan"), asyncio.get_running_loop() is self.loop

class NoReset:
    def step(self, response):
        pass

class OnlyReset:
    def reset(self):
        pass

class Needs:
    def __init__(self, size):
        pass
    def reset(self):
        pass

class Misnamed:
    def reset(self):
        pass
    def play(self, response: str):
        pass

class Other(Counter):
    def add(self, a: int) -> int:
        """Add.

        Args:
            a: one.
        """
'''


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The files of tools and environments: a function (tools, environment) -> what ToolProcesses takes."""
    folder = tmp_path_factory.mktemp("tools")
    (folder / "tools.py").write_text(TOOLS)
    (folder / "game.py").write_text(GAME)
    tools, game = f"{folder}/tools.py:", f"{folder}/game.py:"
    return lambda names, environment="": (tuple(tools + name for name in names), environment and game + environment)


@pytest.fixture(scope="module")
def started(files):
    """A function that starts ToolProcesses, once for each kind, with a time limit of a minute."""
    found = {}

    def start(names=("add", "run", "later", "read"), environment="Game") -> ToolProcesses:
        if (names, environment) not in found:
            found[names, environment] = ToolProcesses(*files(names, environment), 60.0)
        return found[names, environment]

    return start


def converse(processes: ToolProcesses, *calls, row={"secret": 5}, seed=1) -> list:  # noqa: B006
    """Return the results of calls (method, arguments...) of one conversation after a reset, or the errors' texts.

    The call ("limit", seconds) sets the time limit of those that follow.
    """

    async def run():
        process, results = processes.open(seed), []
        try:
            if row is not None:
                results.append(await process.reset(row))
            for method, *arguments in calls:
                if method == "limit":
                    (processes.timeout,) = arguments
                    continue
                try:
                    results.append(await getattr(process, method)(*arguments))
                except ToolError as error:
                    results.append(f"error: {error}")
        except EnvironmentFailure as error:
            results.append(f"failure: {error}")
        finally:
            process.kill()
            processes.timeout = 60.0
        return results

    return asyncio.run(run())


def run(code: str):
    return "call", "run", {"code": code}


def test_a_conversation_with_tools_and_an_environment(started):
    calls = [
        ("step", "3"), ("call", "add", {"a": 1, "b": 2.5}), ("call", "add", {"a": 1, "sign": "-", "note": None}),
        ("call", "later", {"text": "\ud83d"}), ("call", "rounds", {}), ("call", "read", {}), ("step", "5"),
    ]  # fmt: skip
    expected = [" go", ("higher", 0.5, False), "3.5", "0", "?", "1", "", ("lower", 0.5, True)]
    assert converse(started(), *calls) == expected
    names = [schema["function"]["name"] for schema in started().schemas]
    assert names == ["add", "run", "later", "read", "rounds", "peek"] and started().has_step


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("None", ""),
        ("'\\n text'", "\n text"),
        ("{'a': [1, None, 'ä']}", '{"a": [1, null, "ä"]}'),
        ("__import__('numpy').arange(3)", "[0, 1, 2]"),
        ("print('to stdout')", ""),
        ("os.write(1, b'{}') and None", ""),
        ("'a' * (1 << 20)", "a" * 100_000 + "\n[cut, of 1048576 characters]"),
        ("1 / 0", "error: ZeroDivisionError: division by zero"),
        ("sys.exit(3)", "error: SystemExit: 3"),
        ("exec('raise KeyboardInterrupt')", "error: KeyboardInterrupt: "),
        ("{1}", '"{1}"'),
        ("{(1, 2): 3}", "error: TypeError: keys must be str"),
        ("os._exit(0)", "error: run ended its process"),
        ("os.kill(os.getpid(), 11)", "error: run ended its process"),
        ("os.closerange(3, 50)", "error: run ended its process"),
    ],
)
def test_what_a_tool_returns(started, code, result):
    # Whatever it is, the next call is answered, and so is the environment.
    ended, after, played = converse(started(), run(code), run("calls.append(1) or len(calls)"), ("step", "9"))[1:]
    assert ended.startswith(result) and len(ended) <= max(len(result), 120)
    assert (after, played) == ("1", ("lower", 0.5, False))


def test_what_hangs_is_killed_alone(started, tmp_path):
    hang = run(f"open('{tmp_path}/pid', 'w').write(str(subprocess.Popen(['sleep', '60']).pid)) and time.sleep(60)")
    calls = [("limit", 1.0), hang, ("limit", 60.0), run("calls"), ("step", "3"), ("limit", 1.0)]
    found = converse(started(), run("calls.append(1)"), *calls, ("step", "time.sleep(60)"), ("step", "3"))
    assert found[1:] == [
        "", "error: run gave no answer within --timeout 1 s", "[]", ("higher", 0.5, False),
        "failure: step gave no answer within --timeout 1 s",
    ]  # fmt: skip
    wait_until(lambda: not is_running(int((tmp_path / "pid").read_text())))  # a process of the tool's


def wait_until(holds) -> None:
    for _ in range(200):
        if holds():
            return
        time.sleep(0.05)
    raise AssertionError("it does not become so")


def test_calls_that_do_not_fit(started):
    calls = [("call", "mul", {}), ("call", "add", {}), ("call", "add", {"a": 1, "z": 2})]
    assert converse(started(), *calls, row=None) == [
        "error: there is no tool 'mul', there are add, run, later, read, rounds, peek",
        "error: TypeError: add() missing 1 required positional argument: 'a'",
        "error: TypeError: add() got an unexpected keyword argument 'z'",
    ]


@pytest.mark.parametrize(
    ("row", "step", "expected"),
    [
        ({"reset": "None"}, "(None, np.float64(-1), np.True_)", [None, (None, -1.0, True)]),
        ({"reset": "[{'role': 'user'}]"}, "('', True, 0)", [[{"role": "user"}], ("", 1.0, False)]),
        ({}, "('x', np.array(2), False, True, {})", [" go", ("x", 2.0, True)]),
        ({}, "('x', 1)", [" go", "failure: step: ValueError: not enough values to unpack (expected 3, got 2)"]),
        ({}, "None", [" go", "failure: step: TypeError: cannot unpack non-iterable NoneType object"]),
        ({}, "(1, 1, False)", [" go", "failure: step: TypeError: the observation is '1', not a text or None"]),
        ({}, "('x', '1', False)", [" go", "failure: step: TypeError: the reward is '1', not a number"]),
        ({}, "('x', None, False)", [" go", "failure: step: TypeError: the reward is 'None', not a number"]),
        ({}, "('x', 1, {})", [" go", "failure: step: TypeError: done is '{}', not True or False"]),
        ({}, "('x', False, 1.0)", [" go", "failure: step: TypeError: done is '1.0', not True or False"]),
        ({"reset": "3"}, "", ["failure: reset: TypeError: the observation is '3', not a text or None"]),
        ({"reset": "[{'role': 1j}]"}, "", [re.compile("failure: reset: TypeError: .* not JSON serializable")]),
        ({"reset": "[{'role': '\\ud83d'}]"}, "(None, 1, False)", [[{"role": "?"}], (None, 1.0, False)]),
        ({"answer": 3}, "", [re.compile("failure: reset: TypeError: .* missing 1 required .*argument: 'secret'")]),
        ({}, "1 / 0", [" go", re.compile(r"failure: step: ZeroDivisionError \(.*game.py:15\): division")]),
        ({}, "exit(3)", [" go", re.compile(r"failure: step: SystemExit \(.*game.py:15\): 3")]),
        ({}, "os._exit(1)", [" go", "failure: step ended its process"]),
    ],
)  # fmt: skip
def test_what_an_environment_returns(started, row, step, expected):
    *before, last = converse(
        started(), *[("step", step)] * bool(step), row=row if "answer" in row else {"secret": 5, **row}
    )
    assert before == expected[:-1]
    assert expected[-1].match(last) if isinstance(expected[-1], re.Pattern) else expected[-1] == last


def test_tools_of_an_environment_that_fail(started):
    # What a tool raises is for the model; an environment that is gone is a failure.
    calls = [("call", "peek", {"what": what}) for what in ("1 / 0", "os._exit(0)")]
    *_, raised, ended = converse(started(), *calls)
    assert raised == "error: ZeroDivisionError: division by zero" and ended == "failure: call ended its process"


def test_environments_do_not_share_state_and_have_the_rows_random_numbers(started):
    processes = started()

    async def play(secret: int, seed: int) -> tuple:
        process = processes.open(seed)
        try:
            await process.reset({"secret": secret})
            answers = [await process.step("5") for _ in range(secret)]
            drawn = await process.call("peek", {"what": "[random.random(), np.random.rand()]"})
            return answers[-1][0], await process.call("rounds", {}), drawn
        finally:
            process.kill()

    async def run():
        return await asyncio.gather(*[play(*pair) for pair in ((1, 7), (9, 7), (2, 8))])

    first, second, other = asyncio.run(run())
    assert first[:2] == ("lower", "1") and second[:2] == ("higher", "9")
    assert first[2] == second[2] != other[2]


def test_other_forms_of_environments(started):
    calls = [("call", "increment", {"by": 2}), ("outcome",), ("call", "increment", {"by": 3}), ("outcome",)]
    counter = started((), "Counter")
    assert converse(counter, ("outcome",), *calls, row={"start": 1, "x": 0}) == [
        None, (0.0, False), "3", (3.0, False), "6", (3.0, True)
    ]  # fmt: skip
    assert [schema["function"]["name"] for schema in counter.schemas] == ["increment"] and not counter.has_step

    gym = started((), "Gym")
    megabyte = "ab" * (1 << 19)
    found = converse(gym, ("step", megabyte), ("step", "end"), row={"seed": 3, "prompt": megabyte})
    observation = "ba" * 50_000 + "\n[cut, of 1048576 characters]"
    assert found == ["start 3", (observation, 1.0, False), ("dne", 1.0, True)] and gym.has_step and not gym.schemas

    messages, (observation, reward, done) = converse(started((), "Asynchronous"), ("step", "x"), row={})
    assert messages == [{"role": "system", "content": "hello"}]
    assert observation is None and math.isnan(reward) and done  # one event loop for all calls


def test_many_at_once_and_nothing_is_left(started):
    """Each is a process of its own, which shares the files that the fork server has imported, and no torch."""
    processes, found = started(), []

    async def play(number: int) -> tuple:
        process = processes.open(number)
        try:
            await process.reset({"secret": number})
            found.append(process.environment.process.pid)
            return await process.step("50"), await process.call("add", {"a": number})
        finally:
            process.kill()

    async def play_all():
        return await asyncio.gather(*map(play, range(40)))

    results = asyncio.run(play_all())
    assert results == [(("higher" if n > 50 else "lower", 0.5, n == 50), str(n + 1)) for n in range(40)]
    assert len(set(found)) == 40
    wait_until(lambda: not any(map(is_running, found)))


TRAINER = """
import asyncio, sys
import torch  # as a trainer does
from plumbing.turns.processes import ToolProcesses

async def train():
    processes = ToolProcesses((sys.argv[1] + ":run",), sys.argv[2] + ":Game", 60.0)
    process = processes.open(1)
    await process.reset({"secret": 1})
    code = "'torch' in sys.modules or (subprocess.Popen(['sleep', '99']).pid, os.getpid(), os.getppid())"
    print(process.environment.process.pid, await process.call("run", {"code": code}), flush=True)
    await process.call("run", {"code": "time.sleep(99)"})

if __name__ == "__main__":
    asyncio.run(train())
"""


def test_nothing_is_left_of_a_trainer_that_was_killed(files, tmp_path):
    """A trainer is a script that imports torch; its tools do not, and end with it, and all that they have started."""
    (tmp_path / "trainer.py").write_text(TRAINER)
    names = [name.rpartition(":")[0] for name in files(("run",))[0]] + [files((), "Game")[1].rpartition(":")[0]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, tmp_path / "trainer.py", *names]
    trainer = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
    found = list(map(int, re.findall(r"\d+", trainer.stdout.readline())))
    assert len(found) == 4 and all(map(is_running, found))
    trainer.kill()
    trainer.wait()
    wait_until(lambda: not any(map(is_running, found)))


def test_a_server_that_has_ended_is_started_anew(started):
    processes = started()
    os.kill(multiprocessing.forkserver._forkserver._forkserver_pid, signal.SIGKILL)
    time.sleep(0.5)
    assert converse(processes, ("step", "5")) == [" go", ("lower", 0.5, True)]


def is_running(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("tools", "environment", "line"),
    [
        (["nothing"], "", r"--tools .*tools.py:nothing: .*AttributeError: .*tools.py has no function 'nothing'"),
        (["number"], "", "--tools .*: .*AttributeError: .* has no function 'number'"),
        (["no_hint"], "", "--tools .*no_hint: .*: Argument a is missing a type hint in .*no_hint"),
        (["add", "no_docstring"], "", "--tools .*no_docstring: .*: .* because it has no docstring!"),
        (["Thing"], "", "--tools .*Thing: .*TypeError: .* is not a function"),
        (["add", "run", "add"], "", "--tools, --environment: there are two tools add"),
        (["add"], "Other", "--tools, --environment: there are two tools add"),
        ([], "NoReset", "--environment .*: .*TypeError: has no method reset"),
        ([], "OnlyReset", "--environment .*: .*TypeError: has neither a method step nor tools"),
        ([], "Misnamed", "--environment .*: .* play .* no docstring!; without a method step, .*"),
        ([], "Needs", "--environment .*game.py:Needs: .*TypeError: .*missing 1 required .*argument: 'size'"),
    ],
)
def test_what_is_wrong_with_tools_and_environments(files, capfd, tools, environment, line):
    with pytest.raises(SystemExit) as end:
        ToolProcesses(*files(tools, environment), 2.0)
    assert end.value.code == 2 and re.fullmatch(f"error: {line}\n", capfd.readouterr().err)


@pytest.mark.parametrize(
    ("tools", "environment", "line"),
    [
        (("tools.py",), "", "--tools tools.py: is not of the form path/to/file.py:name"),
        (("there/is/none.py:add",), "", "--tools there/is/none.py:add: there is no file there/is/none.py"),
        ((), "game.py:", "--environment game.py:: is not of the form path/to/file.py:name"),
    ],
)
def test_names_of_nothing(capsys, tools, environment, line):
    with pytest.raises(SystemExit):
        ToolProcesses(tools, environment, 2.0)
    assert capsys.readouterr().err == f"error: {line}\n"


@pytest.mark.parametrize(
    ("text", "line"), [("\n1 / 0", "broken.py:2): division by zero"), ("import os; os._exit(0)", "ended")]
)
def test_a_file_that_cannot_be_imported(tmp_path, capfd, text, line):
    (tmp_path / "broken.py").write_text(text)
    with pytest.raises(SystemExit):
        ToolProcesses((f"{tmp_path}/broken.py:x",), "", 2.0)
    assert line in capfd.readouterr().err


@pytest.fixture(scope="module")
def python_tool(tmp_path_factory):
    """Processes with the tool that runs Python, and a text that the servers of its programs have as argument."""
    mark = str(tmp_path_factory.mktemp("python") / "mark-packages")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", mark)
        processes = ToolProcesses((f"{ROOT}/plumbing/turns/python_tool.py:python",), "", 60.0)
    return processes, mark


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("for i in range(2):\n    print(i)\nif __name__ == '__main__': print('{}')", "0\n1\n{}\n"),
        ("print(1)\n1 / 0", "1\nZeroDivisionError: division by zero\n"),
        ("x = (", "SyntaxError: '(' was never closed (code.py, line 1)\n"),
        ("print('a'); exit(1)", "a\n"),
        ("print(input())", "EOFError: EOF when reading a line\n"),
        ("import os; os.fork()", "PermissionError: [Errno 1] Operation not permitted\n"),
    ],
)
def test_python_tool(python_tool, code, result):
    assert converse(python_tool[0], ("call", "python", {"code": code}), row=None) == [result]


def test_a_program_that_does_not_end_is_gone_with_its_conversation(python_tool):
    processes, mark = python_tool
    calls = [("call", "python", {"code": "1"}), ("limit", 1.0), ("call", "python", {"code": "while True: pass"})]
    assert converse(processes, *calls, row=None) == ["", "error: python gave no answer within --timeout 1 s"]
    wait_until(lambda: not any(map(is_running, processes_with(mark))))


def processes_with(word: str) -> list[int]:
    """Return the ids of the processes that have a word as argument."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/cmdline") as words:
            found += [int(name)] * (word in words.read().split("\0"))
    return found
