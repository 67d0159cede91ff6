"""docs/environments.md: each of its blocks of code is run."""

import asyncio
import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import helpers
import pytest

from plumbing import cli
from plumbing.turns.conversations import ToolProcess, ToolProcesses

PAGE = (helpers.ROOT / "docs" / "environments.md").read_text()
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = [
    shlex.split(line, comments=True)
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for line in block.replace("\\\n", "").splitlines()
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the page's files."""
    made = tmp_path_factory.mktemp("page")
    for name, text in FILES.items():
        (made / name).write_text(text)
    return made


def test_the_environment(folder):
    assert PAGE.count("```") == 2 * (len(FILES) + PAGE.count("```bash"))
    assert FILES.keys() == {"guess.py", "my_reward.py", "search.py"}
    processes = ToolProcesses((f"{folder}/guess.py:middle",), f"{folder}/guess.py:Guess", 30.0)

    async def play() -> list:
        process = ToolProcess(processes, 1)
        results = [await process.ask("reset", {"prompt": "Guess", "secret": 7})]
        results += [await process.ask("step", guess) for guess in ("9", "low", " 7 ")]
        results.append(await process.ask("call", "middle", {"low": 3, "high": 11}))
        process.kill()
        return results

    steps = [["Lower.", 0.0, False], ["Higher.", 0.0, False], ["", 1.0, True]]
    assert asyncio.run(play()) == [" Answer with a number alone.", *steps, "7"]


def test_the_reward_and_the_search(folder):
    space = {}
    exec(FILES["my_reward.py"] + FILES["search.py"], space)
    turns = [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}]
    assert space["few_calls"]([], [], [turns, turns[:1]], answer=[]) == [-0.1, 0]
    search = space["Search"]()
    found = "<result>Paris is the capital of France.</result>"
    assert search.step("Well: <search>Paris</search>") == (found, 0.0, False)
    assert search.step("Paris.") == (None, 0.0, True)
    (base,) = [command for command in COMMANDS if "--turn_stop" in command]
    args = cli.parse(importlib.import_module("grpo").Args, base[2:])
    assert args.turn_stop == ("</search>",) and args.chat_template == "none"


def test_the_complete_example(folder):
    """Its data set has the columns that the environment asks for, and its flags are good."""
    write, train = COMMANDS[:2]
    assert write == ["python", "guess.py", ">guess.jsonl"]
    done = subprocess.run(
        [sys.executable, "guess.py"], cwd=folder, capture_output=True, text=True, check=True
    )
    rows = list(map(json.loads, done.stdout.splitlines()))
    assert len(rows) == 2000 and rows[0].keys() == {"prompt", "secret"}
    args = cli.parse(importlib.import_module("grpo").Args, train[2:])
    assert (args.environment, args.tools, args.reward) == (
        "guess.py:Guess",
        ("guess.py:middle",),
        ("environment",),
    )
