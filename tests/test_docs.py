"""What README.md and docs/ name exists: flags, paths, links, and the functions of the reading
map.
"""

import ast
import functools
import importlib
import itertools
import re
from pathlib import Path

import helpers
import pytest
import torch
import yaml
from helpers import ROOT

import utils

PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").glob("*.md"))]
MAP = ROOT / "docs" / "reading_map.md"
REFERENCE = re.compile(r"`([\w/]+\.py): ([\w.]+)`")  # `grpo.py: group_advantages`
# 1. `grpo.py`: `main` calls `collect`
LISTED = re.compile(r"^\d+\. `([\w/]+\.py)`: (.*)$", re.MULTILINE)
# Of torchrun, tyro, hf upload and pytest.
FOREIGN = set(
    "nproc_per_node nnodes node_rank rdzv_backend rdzv_endpoint rdzv_id max_restarts shutdown_timeout "
    "help delete long no no_async_scheduling".split()
)

# ---- what there is -------------------------------------------------------------------------------


@functools.cache
def tree_of(name: str) -> ast.Module:
    return ast.parse((ROOT / name).read_text())


def defines(name: str, dotted: str) -> bool:
    """Return whether a file defines a name, such as "generate", "Policy.forward" or "Args.loss"."""
    module = importlib.import_module(
        name.removesuffix(".py").removeprefix("scripts/").replace("/", ".")
    )
    first, _, member = dotted.partition(".")
    value = getattr(module, first, None)
    is_here = getattr(value, "__module__", module.__name__) == module.__name__
    return value is not None and is_here and (not member or hasattr(value, member))


@functools.cache
def flags() -> set[str]:
    """Return the flags of all commands: the fields of every class called Args or SomethingArgs, and
    the parameters of the functions of files that give functions to tyro.
    """
    found = set()
    folders = (
        "*.py",
        "plumbing/**/*.py",
        "extras/**/*.py",
        "scripts/*.py",
        "assets/*.py",
        "tests/agreement/agree.py",
    )
    for path in (path for folder in folders for path in ROOT.glob(folder)):
        tree = tree_of(str(path.relative_to(ROOT)))
        text = path.read_text()
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Args"):
                found |= {x.target.id for x in node.body if isinstance(x, ast.AnnAssign)}
        if "tyro." in text:
            found |= {
                x.arg
                for node in tree.body
                if isinstance(node, ast.FunctionDef)
                for x in node.args.args
            }
        found |= set(re.findall(r'add_argument\("--(\w+)"', text))
    return found | {f"no_{name}" for name in found}


# ---- what a page names ---------------------------------------------------------------------------


def unknown_flags(text: str) -> set[str]:
    text = re.sub(r"^pip .*$|`pip [^`]*`", "", text, flags=re.MULTILINE)
    named = {
        word.replace("-", "_").rstrip("_")
        for word in re.findall(r"(?<![\w-])--([a-z][\w-]*)", text)
    }
    return named - flags() - FOREIGN


def missing_paths(text: str) -> set[str]:
    """Return the paths in code, inline or in a block, that look like files of this repository and
    do not exist.
    """
    code = " ".join(re.findall(r"```.*?```|`[^`]*`", text, re.DOTALL))
    in_a_folder = r"(?:plumbing|extras|scripts|tests|docs|results|assets)/(?:[\w.-]+/?)*"
    named = re.findall(rf"(?<![\w/.:~*${{-])(?:{in_a_folder}|[\w-]+\.(?:py|sh|md))(?![\w/*])", code)
    made = {"my_reward.py", "judge.py", "my_method.py", "scripts/train/my_method.sh", "ppo_8b.sh"}
    # files that the page itself shows
    made |= set(re.findall(r"^# (\w+\.py)\b", text, re.MULTILINE))
    # in tables
    folders = ("plumbing", "extras", "scripts")
    short = {path.name for folder in folders for path in ROOT.glob(f"{folder}/**/*")}
    return {x for x in named if x not in made and not (ROOT / x).exists() and x not in short}


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path: Path, text: str) -> list[str]:
    broken = []
    for link in re.findall(r"\]\((?!http)([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if not target.exists() or anchor and anchor not in anchors(target):
            broken.append(link)
    return broken


def broken_references(text: str) -> list[str]:
    found = REFERENCE.findall(text)
    found += [
        (name, dotted)
        for name, line in LISTED.findall(text)
        for dotted in re.findall(r"`([\w.]+)`", line)
    ]
    return [
        f"{name}: {dotted}"
        for name, dotted in found
        if not (ROOT / name).exists() or not defines(name, dotted)
    ]


# ---- tests ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_names_what_exists(path):
    text = path.read_text()
    assert not unknown_flags(text)
    assert not missing_paths(text)
    assert not broken_links(path, text)
    assert not broken_references(text)


def test_what_does_not_exist_is_found():
    """So that the test above cannot pass for want of looking."""
    assert unknown_flags("`--seed`, `--sead`, `--no-non_stop_penalty`, --loss") == {"sead"}
    text = "`scripts/demo.sh` `scripts/nothing.sh` `sac.py` `rows.py` `runs/a.json` scripts/x.sh"
    assert missing_paths(text) == {"scripts/nothing.sh", "sac.py"}
    links = "[a](docs/rollouts.md#vllm) [b](docs/no.md) [c](docs/rollouts.md#no) [d](https://a.b) ![e](assets/demo.png)"
    assert broken_links(ROOT / "README.md", links) == ["docs/no.md", "docs/rollouts.md#no"]
    text = "`grpo.py: generate` `grpo.py: Args.seed` `grpo.py: Args.no` `sac.py: main`\n2. `utils.py`: `Sums`, `Run`"
    assert broken_references(text) == ["grpo.py: Args.no", "sac.py: main", "utils.py: Run"]


def test_the_example_of_a_fork_trains(tmp_path, monkeypatch):
    """Its diff fits grpo.py; what comes of it logs the new metric, and trains by each of its
    flags.
    """
    diff = re.search(r"```diff\n(.*?)```", (ROOT / "docs" / "forking.md").read_text(), re.DOTALL)[1]
    fork = (ROOT / "grpo.py").read_text()
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        before, after = (
            "".join(line[1:] for line in lines if line[0] in kinds) for kinds in (" -", " +")
        )
        assert fork.count(before) == 1, before
        fork = fork.replace(before, after)
    (tmp_path / "my_method.py").write_text(fork)
    monkeypatch.syspath_prepend(tmp_path)
    values = {**helpers.workspace(tmp_path), "eval_every": 0, "total_episodes": 8}
    trained = []
    for changed in ({}, {"uncertain_coef": 0.1}, {"entropy_floor": 9.0}):
        values["run_name"] = " ".join(["run", *changed])
        helpers.run_here(values | changed, "my_method")
        assert 0 < helpers.metrics_of(values)[-1]["policy/uncertain_share"] <= 1
        trained.append(helpers.weights_of(helpers.folder_of(values) / "final")["lm_head.weight"])
    assert not any(torch.equal(trained[0], other) for other in trained[1:])


def test_the_version_is_the_same_everywhere():
    """In utils.py, the newest heading of CHANGELOG.md and CITATION.cff."""
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    assert newest == cited == utils.VERSION


def test_the_reading_map_has_every_equation():
    """Every function in the section of equations of an algorithm. No name stands without its
    file.
    """
    assert not re.findall(r"`([A-Za-z_][\w.]*(?<!\.py))`", LISTED.sub("", MAP.read_text()))
    named = {dotted for _, dotted in REFERENCE.findall(MAP.read_text())}
    for name in ("grpo.py", "rloo.py", "ppo.py", "reward_model.py", "distill.py"):
        section = re.search(
            r"\n# The equations.*?\n# -+\n(.*?)\n# -+\n", (ROOT / name).read_text(), re.DOTALL
        )[1]
        functions = set(re.findall(r"^def (\w+)", section, re.MULTILINE))
        assert functions and functions <= named, name


def test_every_metric_has_a_formula():
    """Every name that stands in the code as it is; of those that are put together there, as
    reward/SOURCE is, none.
    """
    metric = r"(?:objective|loss|policy|teacher|val|rollout|eval|time|perf|train)/\w*[a-z]"
    named = set(re.findall(rf"`({metric})`", (ROOT / "docs" / "metrics.md").read_text()))
    named |= {name.replace("eval/", "train/") for name in named}
    found = set()
    scripts = ("grpo", "rloo", "ppo", "reward_model", "distill", "utils")  # not what a fork adds
    folders = (ROOT.glob(f"{folder}/**/*.py") for folder in ("plumbing", "extras"))
    for path in (*(ROOT / f"{name}.py" for name in scripts), *itertools.chain(*folders)):
        found |= set(re.findall(rf'"({metric})"', path.read_text()))
    assert len(found) > 30
    assert found <= named
