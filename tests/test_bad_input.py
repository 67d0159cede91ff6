"""Bad files and rows: one line that names the flag, file and row, exit code 2, and no run folder.

Commands run in this process, in a folder of models and of FILES. Flags themselves are in
tests/test_cli.py.
"""

import json
import shlex
import shutil
from pathlib import Path

import helpers
import pytest
from helpers import ROWS, run_here, scalar_folder, tiny_model, write_files, write_rows

FLAGS, FILES, BROKEN = helpers.table("bad_input.yaml").values()
FILES |= {
    "data.jsonl": ROWS,
    "pairs.jsonl": [
        {"prompt": row["prompt"], "chosen": row["answer"], "rejected": "none"} for row in ROWS
    ],
    "long.jsonl": [{"prompt": "1" * 200, "answer": "1" * 60}],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The folder in which the commands run."""
    folder = tmp_path_factory.mktemp("input")
    write_files(folder, FILES)
    tiny_model(folder / "model")
    tiny_model(folder / "chat", chat=True)
    tiny_model(folder / "small", vocab_size=9)
    tiny_model(folder / "deep", num_hidden_layers=3)
    scalar_folder(folder / "model", folder / "scorer")
    scalar_folder(folder / "model", folder / "two labels", labels=2)
    scalar_folder(folder / "model", folder / "other vocabulary", tokens=("ab", "12"))
    for name, (file, content) in BROKEN.items():
        shutil.copytree(folder / "model", folder / name)
        path = folder / name / file
        if content is None:
            path.unlink()
            continue
        if isinstance(content, dict):
            content = json.dumps(json.loads(path.read_text()) | content)
        path.write_text(content, encoding="latin-1")
    (folder / "empty").mkdir()
    return folder


@pytest.fixture
def refused(folder, monkeypatch, capsys):
    """A function that runs a command and returns its line, after it has checked all else."""
    monkeypatch.chdir(folder)

    def run_command(command: str) -> str:
        script, *words = shlex.split(command)
        line = helpers.refused(capsys, run_here, [*shlex.split(FLAGS[script]), *words], script)
        assert len(line) < 1000 and not [*Path("runs").glob("*")]
        return line.removeprefix("error: ")

    return run_command


# How the line begins.
CASES = helpers.table("command_lines.json")
COMMANDS = CASES["files"] | {f"grpo --model '{name}'": f"--model {name}: " for name in BROKEN}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: ascii(command)[1:60])
def test_commands(refused, command, monkeypatch):
    # transformers would ask whether to run a model's own code
    monkeypatch.setattr("builtins.input", pytest.fail)
    line = refused(command)
    assert line.startswith(COMMANDS[command]), line


@pytest.mark.parametrize("script, row, flags", helpers.table("rows.yaml")["bad"])
def test_rows(refused, folder, script, row, flags):
    rows = list(FILES["pairs.jsonl" if script == "reward_model" else "data.jsonl"])
    write_rows(
        folder / "rows.jsonl",
        [*rows[:2], {"answer": "2", **row} if isinstance(row, dict) else row, *rows[3:]],
    )
    line = refused(f"{script} --dataset rows.jsonl {flags}")
    assert line.startswith("--dataset rows.jsonl row 3"), line
