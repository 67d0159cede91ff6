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
from plumbing.turns.templates import ToolCall, pattern_reader
from plumbing.turns.tool_processes import ToolProcesses

PAGE = (helpers.ROOT / "docs" / "environments.md").read_text()
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = [
    shlex.split(line)
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for line in block.replace("\\\n", "").splitlines()
]

# In place of packages that are not installed.
PACKAGES = {
    "gymnasium.py": """
class Lake:
    def reset(self, seed):
        self.field = seed
        return self.field, {}

    def step(self, action):
        self.field += action
        return self.field, 1.0, False, True, {}

def make(name):
    return Lake()
""",
    "echo_env.py": """
from types import SimpleNamespace

class EchoAction:
    def __init__(self, message):
        self.message = message

class EchoEnv:
    def __init__(self, base_url):
        self.started = False

    def sync(self):
        return self

    def reset(self):
        self.started = True

    def step(self, action):
        observation = SimpleNamespace(echoed_message=action.message)
        return SimpleNamespace(observation=observation, reward=None, done=self.started and action.message == "bye")
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the page's files."""
    made = tmp_path_factory.mktemp("page")
    for name, text in (FILES | PACKAGES).items():
        (made / name).write_text(text)
    return made


def converse(folder: Path, environment: str, row: dict, *calls, tools: tuple[str, ...] = ()) -> list:
    """Return what `reset` and then each of the calls, (method, arguments...), gives."""
    processes = ToolProcesses(tuple(f"{folder / name}" for name in tools), f"{folder / environment}", 30.0)

    async def results() -> list:
        process = processes.open(1)
        found = [await process.reset(row)]
        for method, *arguments in calls:
            found.append(await getattr(process, method)(*arguments))
        process.kill()
        return found

    try:
        return asyncio.run(results())
    finally:
        processes.close()


def test_every_block_is_run():
    assert PAGE.count("```") == 2 * (len(FILES) + PAGE.count("```bash"))
    assert FILES.keys() == {"guess.py", "counter.py", "lake.py", "echo.py", "my_reward.py", "tools.py"}
    assert len(FILES["guess.py"].splitlines()) <= 30


def test_environments(folder):
    steps = [("step", "9"), ("step", "low"), ("call", "middle", {"low": 3, "high": 11}), ("step", " 7 ")]
    got = converse(folder, "guess.py:Guess", {"prompt": "Guess", "secret": 7}, *steps, tools=("guess.py:middle",))
    asks, *steps = got
    assert asks == " Answer with a number alone."
    assert steps == [("Lower.", 0.0, False), ("Higher.", 0.0, False), "7", (None, 1.0, True)]
    add = lambda number: ("call", "add", {"number": number})
    got = converse(folder, "counter.py:Counter", {"goal": 5}, add(2), ("outcome",), add(3), ("outcome",))
    assert got[1:] == ["The counter is at 2 of 5.", (0.0, False), "The counter is at 5 of 5.", (1.0, True)]
    got = converse(folder, "lake.py:Lake", {"seed": 4}, ("step", "up"), ("step", "jump"))
    expected = [("You stand on field 7.", 1.0, True), ("Say one of left, down, right, up.", 0.0, False)]
    assert got == [" You stand on field 4.", *expected]
    assert converse(folder, "echo.py:Echo", {}, ("step", "hi"), ("step", "bye")) == [
        None,
        ("hi", 0.0, False),
        ("bye", 0.0, True),
    ]


def test_the_reward_and_the_pattern(folder):
    space = {}
    exec(FILES["my_reward.py"], space)
    turns = [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}]
    assert space["few_calls"]([], [], [turns, turns[:1]], answer=[]) == [-0.1, 0]
    (base,) = [words for words in COMMANDS if "--tool_call_pattern" in words]
    args = cli.parse(importlib.import_module("grpo").Args, base[2:])
    processes = ToolProcesses((f"{folder / args.tools[0]}",), "", 30.0)
    processes.close()
    read = pattern_reader(args.tool_call_pattern, processes.schemas)
    assert read("It is <search>rain</search>") == [ToolCall("search", {"query": "rain"})]
    assert args.turn_stop == ("</search>",) and args.chat_template == "none"


def test_the_complete_example(folder):
    """Its commands, with a small model and small sizes."""
    write, train, evaluate = COMMANDS[:3]
    assert write == ["python", "guess.py", ">guess.jsonl"]
    done = subprocess.run([sys.executable, "guess.py"], cwd=folder, capture_output=True, text=True, check=True)
    (folder / "guess.jsonl").write_text(done.stdout)
    assert len(done.stdout.splitlines()) == 2000 and json.loads(done.stdout.splitlines()[0]).keys() == {
        "prompt",
        "secret",
    }
    model = helpers.tiny_model(folder / "model", chat=True, max_position_embeddings=512)
    sizes = {"model": model, "output_dir": str(folder / "runs"), "max_turn_length": 8, "max_response_length": 120}
    small = {"rollout_batch_size": 2, "group_size": 2, "mini_batch_size": 4, "total_episodes": 4, "kl_coef": 0.0}
    for words, changes in ((train, {**small, "run_name": "train"}), (evaluate, {"num_prompts": 2, "run_name": "eval"})):
        script = Path(words[1]).stem
        args = cli.parse(importlib.import_module(script).Args, words[2:])
        here = lambda name: str(folder / name)
        named = {"dataset": here(args.dataset), "environment": here(args.environment), "tools": here(args.tools[0])}
        kept = {name: getattr(args, name) for name in ("system_prompt", "max_turns", "reward")}
        helpers.run({**kept, **named, **sizes, **changes}, script=script)
    (metrics,) = [row for row in helpers.read_lines(folder / "runs" / "train" / "metrics.jsonl") if row["step"] == 1]
    assert metrics["conversation/turns"] > 1 and metrics["conversation/observation_tokens"] > 0
    assert sum(metrics[f"stop_reason/{name}"] for name in ("stop", "done", "max_turns", "length", "error")) == 1
    samples = helpers.read_lines(folder / "runs" / "eval" / "samples.jsonl")
    assert len(samples) == 16 and {turn["content"] for s in samples for turn in s["turns"][1::2]} <= {
        "Higher.",
        "Lower.",
    }
