"""What the scripts share stays the same, every flag is read, and imports go one way."""

import ast
import contextlib
import dataclasses
import functools
import importlib.metadata
import itertools
import re
import shutil
import subprocess
import sys

import helpers
import pytest
from helpers import ROOT
from test_docs import missing_paths, unknown_flags

PLUMBING = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("plumbing/**/*.py"))
SCRIPTS = ("grpo.py", "rloo.py", "ppo.py", "reward_model.py")
MAY_DIFFER = {  # what has one name and may differ, and why
    "Args": "each algorithm has its own flags; fields are compared one by one",
    "main": "the algorithm itself",
    "collect": "rloo.py adds ReMax's greedy responses, ppo.py the statistics of the scores",
    "final_scores": "ppo.py normalizes and clips scores",
    "Policy": "ppo.py's supervised rows have a temperature of 1",
    "policy_metrics": "ppo.py has no correction weights",
    "Args.clip_low": "its default depends on grpo's --loss",
    "Args.clip_high": "its default depends on grpo's --loss",
    "Args.loss_aggregation": "its default depends on grpo's --loss and on rloo's --ratio",
    "Args.num_epochs": "passes over a rollout, in reward_model.py over the data set",
}
SHELL = sorted(ROOT.glob("scripts/**/*.sh"))  # for README.md and docs/ see test_docs.py


@functools.cache
def tree_of(name: str) -> ast.Module:
    return ast.parse((ROOT / name).read_text())


def args_of(name: str) -> type:
    return importlib.import_module(name.removesuffix(".py")).Args


# ---- what the scripts share ------------------------------------------------------------------------------------------


def parts(source: str) -> dict[str, list[str]]:
    """Return what a script may share, {name: syntax}: a function, a class, or type and docstring of a field of Args."""
    nodes = {node.name: [node] for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    body = nodes["Args"][0].body
    for field, text in zip(body, body[1:]):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            nodes[f"Args.{field.target.id}"] = [field.annotation, text]
    return {name: list(map(ast.dump, several)) for name, several in nodes.items()}


def differences(source: str, target: str) -> set[str]:
    """Return the names of the parts that two scripts have both, but not equal. Layout and comments do not count."""
    ours, theirs = parts(source), parts(target)
    return {name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}


SCRIPT = '''
class Args:
    seed: int = 1
    """Seed."""
    size: int = 2
    """Size of it."""


@functools.cache
def mean(x, args):
    """The mean."""
    return sum(x) / len(x)
'''
DRIFTS = {  # what is changed in a script, and what is reported
    ("len(x)", "(len(x) + 1)"): {"mean"},
    ('"""The mean."""', '"""Mean."""'): {"mean"},
    ("@functools.cache\n", ""): {"mean"},
    ("Size of it.", "Sizes."): {"Args", "Args.size"},
    ("size: int", "size: float"): {"Args", "Args.size"},
    ("size: int = 2", "size: int = 5"): {"Args"},
    ("    return", "\n    # a comment\n    return"): set(),
}


def test_drift_is_found():
    for (old, new), found in DRIFTS.items():
        assert differences(SCRIPT, SCRIPT.replace(old, new)) == found, new


def test_scripts_share_the_same_code():
    """Each of them with each: two may share what a third does not have. An entry of MAY_DIFFER that nothing needs would
    hide a drift to come."""
    sources = {name: (ROOT / name).read_text() for name in SCRIPTS}
    pairs = itertools.combinations(SCRIPTS, 2)
    found = {name: pair for pair in pairs for name in differences(*map(sources.get, pair))}
    assert found.keys() == MAY_DIFFER.keys(), found


def names_read(*trees: ast.Module) -> set[str]:
    """Return NAME of every args.NAME, a.NAME and self.args.NAME, and the words of texts next to a getattr(args, ...),
    which are read with the prefix of the critic's flags, too."""
    names = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value
            names |= {node.attr} if getattr(owner, "id", getattr(owner, "attr", "")) == "args" else set()
        if isinstance(node, ast.FunctionDef) and re.search(r"getattr\((self\.)?args\b", ast.unparse(node)):
            texts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            names |= {prefix + word for prefix in ("", "critic_") for text in texts for word in text.split()}
    return names


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_flag_is_read(name):
    """By the script or in plumbing/: rules of a flag in cli.py do not make it do anything."""
    readers = [file for file in PLUMBING if file != "plumbing/cli.py"]
    flags = {field.name for field in dataclasses.fields(args_of(name))} - {"config"}
    assert not flags - names_read(*map(tree_of, (name, "utils.py", *readers)))


@pytest.mark.parametrize("name", [*SCRIPTS, "plumbing/cli.py", "scripts/evaluate.py", "scripts/reward_server.py"])
def test_every_flag_is_documented(name):
    """By a docstring right under it, which is what --help shows."""
    classes = [n for n in tree_of(name).body if isinstance(n, ast.ClassDef) and n.name.endswith("Args")]
    assert classes
    for field, text in ((f, t) for cls in classes for f, t in zip(cls.body, [*cls.body[1:], None])):
        if isinstance(field, ast.AnnAssign):
            documented = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            assert documented and len(str(text.value.value)) > 8, field.target.id


# ---- what shell scripts, docstrings and messages name ----------------------------------------------------------------


@pytest.mark.parametrize("path", SHELL, ids=lambda path: str(path.relative_to(ROOT)))
def test_shell_scripts_name_what_exists(path):
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = re.sub(r"\\\n", " ", path.read_text()).split("\n")
    others = re.compile(r"\b(pip|uv|venv|pytest|git|nvidia-smi|grep|curl|SBATCH|srun)\b")  # commands with other flags
    text = "\n".join(line for line in lines if not others.search(line) or re.search(r"\w+\.py\b.* --", line))
    assert not unknown_flags(text) and not missing_paths(f"`{text}`")


@pytest.mark.parametrize("name", [*SCRIPTS, "utils.py", *PLUMBING])
def test_flags_in_docstrings_and_messages_exist(name):
    texts = [n.value for n in ast.walk(tree_of(name)) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    named = {flag for text in texts for flag in unknown_flags(text)}
    assert not named - {"abbrev", "always", "dirty", "exclude", "worker_extension_cls"}  # git's, vLLM's
    assert not missing_paths(ast.get_docstring(tree_of(name)) or "")


# ---- imports, paths, versions ----------------------------------------------------------------------------------------

ORDER = ("models", "data", "rewards", "turns", "rollout", "run")  # a folder of plumbing/ imports only those before it


def imported(name: str) -> set[str]:
    """Return what a file imports of the repository, wherever in it: "utils", "grpo", "plumbing.data.mixture"."""
    modules = set()
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    local = {path.stem for path in (*ROOT.glob("*.py"), *ROOT.glob("scripts/*.py"))}
    return {module for module in modules if module.partition(".")[0] in local | {"plumbing"}}


@pytest.mark.parametrize("name", [*SCRIPTS, "utils.py", *PLUMBING])
def test_imports_go_one_way(name):
    """Commands -> algorithms -> folders of plumbing/ in their order -> utils."""
    modules, folder = {module for module in imported(name) if not module.startswith("utils")}, name.split("/")[1:2]
    if name == "utils.py":
        assert not modules
    else:
        assert all(module.startswith("plumbing.") for module in modules)
        if folder and folder[0] in ORDER:
            later = ORDER[ORDER.index(folder[0]) + 1 :]
            assert not [module for module in modules if module.split(".")[1] in later]


def test_importing_a_script_loads_nothing_that_a_flag_asks_for():
    """What takes seconds, or is not installed everywhere."""
    code = f"import sys, {', '.join(name[:-3] for name in SCRIPTS)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not {"vllm", "wandb", "matplotlib", "peft", "datasets", "reasoning_gym", "pandas"} & loaded
    optional = {"rollout.vllm_engine", "rollout.vllm_servers", "rewards.sandbox", "run.hub", "turns.conversations"}
    assert not {f"plumbing.{module}" for module in optional} & loaded


def test_commands_have_what_they_import_on_their_path():
    """From any folder, though Python looks in that of the script only."""
    for path in ROOT.glob("scripts/*.py"):
        text = path.read_text()
        first = re.search(r"^(import|from) (utils|plumbing|grpo)\b", text, re.M)
        if first and "__main__" in text:
            assert 0 < text.find("\nsys.path.insert(0, ") < first.start(), path


def test_no_path_of_one_machine():
    """Nothing under a home or a scratch folder, in any file of the repository."""
    if not shutil.which("git"):
        pytest.skip("needs git")
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    folders = "home root Users work tmp mnt data scratch".split()
    pattern = re.compile(rb"(?<![\w.$}~/-])/(" + "|".join(folders).encode() + rb")/[\w.-]+")
    for path in (helpers.ROOT / name for name in done.stdout.split("\0") if name):
        if path.is_file() and path.suffix != ".safetensors":
            assert not pattern.search(path.read_bytes()), path


def test_what_is_pinned_is_what_is_installed():
    """Else something else that is installed, vLLM say, does not go with requirements.txt."""
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        name, _, version = line.partition("==")
        if version:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # vllm, on a CPU
                assert importlib.metadata.version(name).partition("+")[0] == version, line
