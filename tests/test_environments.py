"""docs/agents.md: each of its blocks of code is run."""

import asyncio
import importlib
import re
import shlex
from pathlib import Path

import helpers
import pytest

from extras.episodes.tool_processes import start_tools
from plumbing.run.command import parse

PAGE = (helpers.ROOT / "docs" / "agents.md").read_text()
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
    assert FILES.keys() == {"guess.py", "agent.py"}
    process_of, _ = start_tools((f"{folder}/guess.py:middle",), f"{folder}/guess.py:Guess", 30.0)

    async def play() -> list:
        process = process_of(1)
        results = [await process.ask("reset", {"prompt": "Guess", "secret": 7})]
        results += [await process.ask("step", guess) for guess in ("9", "low", " 7 ")]
        results.append(await process.ask("call", "middle", {"low": 3, "high": 11}))
        process.kill()
        return results

    steps = [["Lower.", 0.0, False], ["Higher.", 0.0, False], ["", 1.0, True]]
    assert asyncio.run(play()) == [" Answer with a number alone.", *steps, "7"]


def test_the_commands_and_the_agent(folder):
    (guess,) = filter(None, COMMANDS)
    args = parse(importlib.import_module("grpo").Args, guess[2:])
    assert (args.environment, args.tools) == ("guess.py:Guess", ("guess.py:middle",))
    assert start_tools((), f"{folder}/agent.py:play", 30.0, "--agent")[1] == []
