"""The size of the project stays within its limits; `python tests/test_size.py` prints the table.

What counts in Python is tokens, without comments, docstrings and line ends: a limit on lines makes
lines dense.
"""

import dataclasses
import functools
import re
import subprocess
import sys
import tokenize
from pathlib import Path

from conftest import ROOT

SCRIPTS = {
    "grpo": 5_945,
    "rloo": 5_110,
    "ppo": 6_410,
    "distill": 3_810,
    "reward_model": 1_900,
    "utils": 3_320,
}
NOT_COUNTED = (
    tokenize.ENCODING,
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def paths_of(*patterns: str) -> set[Path]:
    """Return the files that match the patterns, but for what people sent: input of tests."""
    reported = ROOT / "tests/data/reported"
    found = {path for pattern in patterns for path in ROOT.glob(pattern)}
    return {path for path in found if reported not in path.parents}


def lines(*patterns: str) -> int:
    """Return the lines of the files that match the patterns."""
    return sum(len(path.read_text().splitlines()) for path in paths_of(*patterns))


def words(*patterns: str) -> int:
    """Return the words of the files that match the patterns."""
    return sum(len(path.read_text().split()) for path in paths_of(*patterns))


def tokens(*patterns: str) -> int:
    """Return the Python tokens of the files that match the patterns."""
    count = 0
    for path in paths_of(*patterns):
        with open(path, "rb") as file:
            for token in tokenize.tokenize(file.readline):
                is_docstring = token.type == tokenize.STRING and token.string.startswith('"""')
                count += not is_docstring and token.type not in NOT_COUNTED
    return count


@functools.cache
def modules() -> tuple[list[str], list[str]]:
    """Return which of our modules `import grpo` loads, and all that the scripts do, in a process of
    their own.
    """
    code = "import sys, grpo; print(*sys.modules); import distill, ppo, reward_model, rloo; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    of_grpo, of_all = map(str.split, done.stdout.splitlines())
    return [name for name in of_grpo if (ROOT / f"{name.replace('.', '/')}.py").is_file()], of_all


def files_of_a_step() -> list[str]:
    """Return the files that docs/reading_map.md lists for one step."""
    text = (ROOT / "docs" / "reading_map.md").read_text()
    section = re.search(r"## The files of one step\n(.*?)\n## ", text, re.DOTALL)[1]
    return re.findall(r"^\d+\. `([\w/]+\.py)`", section, re.MULTILINE)


def table() -> dict[str, tuple[int, int]]:
    """Return {what: (how much there is, the limit)}."""
    from grpo import Args

    plumbing = [path for path in ROOT.glob("plumbing/**/*.py") if path.read_text()]
    everything = ("*.py", "plumbing/**/*.py", "extras/**/*.py", "scripts/**/*.py", "assets/**/*.py")
    rows = {
        "Python outside tests, tokens": (tokens(*everything), 110_170),
        "plumbing/, tokens": (tokens("plumbing/**/*.py"), 45_380),
        "extras/, tokens": (tokens("extras/**/*.py"), 24_575),
        "plumbing/, files": (len(plumbing), 37),
        "plumbing/, files outside of its folders": (
            sum(path.parent.name == "plumbing" for path in plumbing),
            3,
        ),
        "tests/, tokens": (tokens("tests/**/*.py"), 159_680),
        "JavaScript of the report, lines": (lines("assets/report/*.js"), 300),
        "style and page of the report, lines": (
            lines("assets/report/*.css", "assets/report/*.html"),
            260,
        ),
        "docs/, words": (words("docs/*.md"), 14_000),
        "README.md, lines": (lines("README.md"), 150),
        "flags of grpo.py": (len(dataclasses.fields(Args)), 106),
        "our modules that import grpo loads": (len(modules()[0]), 35),
        "files of one step": (len(files_of_a_step()), 10),
    }
    for name, limit in SCRIPTS.items():
        rows[f"{name}.py, tokens"] = (tokens(f"{name}.py"), limit)
    return rows


def test_sizes():
    assert not {what: size for what, size in table().items() if size[0] > size[1]}


def test_importing_a_script_loads_nothing_that_a_flag_asks_for():
    """What takes seconds, or is not installed everywhere."""
    of_all = set(modules()[1])
    assert (
        not {"vllm", "wandb", "matplotlib", "peft", "datasets", "reasoning_gym", "pandas"} & of_all
    )
    assert not {module for module in of_all if module.startswith("extras")}


def test_the_files_of_one_step_exist():
    assert files_of_a_step() and all((ROOT / name).is_file() for name in files_of_a_step())


if __name__ == "__main__":
    for what, (size, limit) in table().items():
        print(f"{what:<42} {size:>7,} of {limit:>7,}{'' if size <= limit else '  TOO MUCH'}")
