"""What the scripts share stays the same, every flag is read, and imports go one way."""

import ast
import contextlib
import dataclasses
import functools
import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT
from test_docs import missing_paths, tree_of, unknown_flags

sync_shared = importlib.import_module("sync_shared")
PLUMBING = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("plumbing/**/*.py"))
EXTRAS = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("extras/**/*.py"))
SCRIPTS = sync_shared.SCRIPTS
SHELL = sorted(ROOT.glob("scripts/**/*.sh"))  # for README.md and docs/ see test_docs.py


# ---- scripts/sync_shared.py ----------------------------------------------------------------------

FIRST = '''"""One."""
import functools


class Args:
    seed: int = 1
    """Seed."""
    size: int = 2
    """Größe of it."""


# Why this is so.
@functools.cache
def mean(x, args):
    """The mean."""
    return sum(x) / len(x) * args.size / args.seed  # here


class Batch:
    rows: list


def main(args):
    return mean(1)
'''
# what makes the second script of the first and is no drift: defaults, layout, comments, what is not
# shared
CHANGES = {
    "One.": "Two.",
    "seed: int = 1": "seed: int = 7",
    "size: int = 2": "size: int = 5",
    '"""Größe of it."""': '"""Größe of it."""\n    other: float = 0.1\n    """Other."""',
    "# Why this is so.": "\n# ---- a banner ----",
    "  # here": "",
    "rows: list": "rows: list  # here",
    "return mean(1)": "return 2",
}
SECOND = functools.reduce(lambda text, change: text.replace(*change), CHANGES.items(), FIRST)
DRIFTS = {  # what is changed in the second script -> what is reported
    ("sum(x) / len(x)", "sum(x) / (len(x) + 1)"): "mean",
    ('"""The mean."""', '"""The äverage."""'): "mean",
    ("@functools.cache\n", ""): "mean",
    ("rows: list ", "rows: tuple "): "Batch",
    ("Größe of it.", "Größen of\n    them."): "Args.size",
    ("size: int", "size: Literal[\n        1, 2\n    ]"): "Args.size",
}


def sync(folder, second: str, file: str = "ppo.py", **options) -> str:
    """Run the command on a folder with two scripts; return the second script after it."""
    (folder / "grpo.py").write_text(FIRST)
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text(second)
    sync_shared.main(folder / "grpo.py", (folder / file,), **options)
    return (folder / file).read_text()


@pytest.mark.parametrize(
    "drift", DRIFTS, ids=lambda drift: drift[1].split("\n")[0].strip() or "no decorator"
)
def test_drift_is_reported_and_mended(tmp_path, drift, capsys):
    """The default of a flag, comments and all that is not shared stay as they are."""
    drifted = SECOND.replace(*drift)
    what = DRIFTS[drift]
    mended = sync(tmp_path, drifted)
    assert capsys.readouterr().out == f"ppo.py: {what} copied from grpo.py\n"
    assert (
        ast.dump(ast.parse(mended)) == ast.dump(ast.parse(SECOND)) != ast.dump(ast.parse(drifted))
    )
    assert "# ---- a banner ----\n" in mended and "size: int = 5" in mended
    assert sync(tmp_path, mended) == mended and not capsys.readouterr().out


def test_some_parts_of_a_fork(tmp_path, capsys):
    """--only names what is copied of what differs, else a fork would be lost."""
    drifted = SECOND.replace("len(x)", "2").replace("rows: list", "rows: set")
    fork = sync(tmp_path, drifted, "fork.py", only=("mean",))
    assert ast.dump(ast.parse(fork)) == ast.dump(
        ast.parse(SECOND.replace("rows: list", "rows: set"))
    )
    capsys.readouterr()
    for name in ("fork.py", "another/ppo.py"):
        assert sync(tmp_path, drifted, name) == drifted
        assert capsys.readouterr().out.count(" differs from grpo.py\n") == 2


# ---- the scripts that exist ----------------------------------------------------------------------


def test_scripts_share_the_same_code(monkeypatch):
    """All but what may differ, and that does: an entry that nothing needs would hide a drift to
    come.
    """
    allowed = {*sync_shared.MAY_DIFFER}
    monkeypatch.setattr(sync_shared, "MAY_DIFFER", ())
    scripts = [sync_shared.parts((ROOT / name).read_text()) for name in SCRIPTS]
    shared = (
        (name, one, other) for one in scripts for other in scripts for name in one.keys() & other
    )
    assert {name for name, one, other in shared if one[name][0] != other[name][0]} == allowed


def names_read(*trees: ast.Module) -> set[str]:
    """Return NAME of every args.NAME, a.NAME and self.args.NAME, and the words of texts next to a
    getattr(args, ...), which are read with the prefix of the critic's flags, too.
    """
    names = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value
            names |= (
                {node.attr} if getattr(owner, "id", getattr(owner, "attr", "")) == "args" else set()
            )
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and re.search(
            r"getattr\((self\.)?args\b", ast.unparse(node)
        ):
            texts = [
                n.value
                for n in ast.walk(node)
                if isinstance(n, ast.Constant) and isinstance(n.value, str)
            ]
            names |= {
                prefix + word
                for prefix in ("", "critic_")
                for text in texts
                for word in text.split()
            }
    return names


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_flag_is_read(name):
    """By the script, in plumbing/ or in extras/: rules of a flag in cli.py do not make it do anything."""
    readers = [file for file in (*PLUMBING, *EXTRAS) if file != "plumbing/cli.py"]
    args = importlib.import_module(name.removesuffix(".py")).Args
    flags = {field.name for field in dataclasses.fields(args)} - {"config"}
    assert not flags - names_read(*map(tree_of, (name, "utils.py", *readers)))


@pytest.mark.parametrize(
    "name", [*SCRIPTS, "plumbing/cli.py", "scripts/evaluate.py", "scripts/reward_server.py"]
)
def test_every_flag_is_documented(name):
    """By a docstring right under it, which is what --help shows."""
    classes = [
        n for n in tree_of(name).body if isinstance(n, ast.ClassDef) and n.name.endswith("Args")
    ]
    assert classes
    for field, text in ((f, t) for cls in classes for f, t in zip(cls.body, [*cls.body[1:], None])):
        if isinstance(field, ast.AnnAssign):
            documented = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            assert documented and len(str(text.value.value)) > 8, field.target.id


# ---- what shell scripts, docstrings and messages name --------------------------------------------


@pytest.mark.parametrize("path", SHELL, ids=lambda path: str(path.relative_to(ROOT)))
def test_shell_scripts_name_what_exists(path):
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = re.sub(r"\\\n", " ", path.read_text()).split("\n")
    # commands with other flags
    others = re.compile(r"\b(pip|uv|venv|pytest|git|nvidia-smi|grep|curl|SBATCH|srun)\b")
    text = "\n".join(
        line for line in lines if not others.search(line) or re.search(r"\w+\.py\b.* --", line)
    )
    assert not unknown_flags(text)
    if path.name != "evidence.sh":  # which makes files
        assert not missing_paths(f"`{text}`")


@pytest.mark.parametrize("name", [*SCRIPTS, "utils.py", *PLUMBING, *EXTRAS])
def test_flags_in_docstrings_and_messages_exist(name):
    texts = [
        n.value
        for n in ast.walk(tree_of(name))
        if isinstance(n, ast.Constant) and isinstance(n.value, str)
    ]
    named = {flag for text in texts for flag in unknown_flags(text)}
    # git's, vLLM's
    assert not named - {"abbrev", "always", "dirty", "exclude", "worker_extension_cls"}
    assert not missing_paths(ast.get_docstring(tree_of(name)) or "")


# ---- imports, paths, versions --------------------------------------------------------------------

COMMANDS = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("[as]*/**/*.py"))
LOCAL = {Path(name).stem for name in (*SCRIPTS, "utils.py", *COMMANDS)} | {
    "plumbing",
    "extras",
    "guess",
}
# a folder of plumbing/ imports only those before it
ORDER = ("models", "data", "rewards", "rollout", "run")


def imported(name: str) -> set[str]:
    """Return what a file imports when it runs, wherever in it: "utils", "torch.nn",
    "plumbing.data.mixture".
    """
    modules = set()
    blocks = [node for node in ast.walk(tree_of(name)) if isinstance(node, ast.If)]
    for_types = {
        node
        for block in blocks
        if ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
    }
    for node in {*ast.walk(tree_of(name))} - for_types:
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


@pytest.mark.parametrize("name", [*SCRIPTS, "utils.py", *PLUMBING, *EXTRAS])
def test_imports_go_one_way(name):
    """Commands -> algorithms -> extras/ -> folders of plumbing/ in their order -> utils; plumbing/
    imports extras/ only inside the function that a flag calls.
    """
    modules = {
        module
        for module in imported(name)
        if module.partition(".")[0] in LOCAL and not module.startswith("utils")
    }
    folder, _, room = name.rpartition(".")[0].partition("/")
    room = room.partition("/")[0]
    if name == "utils.py":
        assert not modules
        return
    others = {"grpo.generate", "grpo.ROLLOUT_OUTPUTS"} if name == "distill.py" else set()
    assert all(module.startswith(("plumbing.", "extras.")) for module in modules - others)
    if folder != "extras":
        assert not {module for module in imported_at_start(name) if module.startswith("extras")}
    if folder == "plumbing" and room in ORDER:
        later = ORDER[ORDER.index(room) + 1 :]
        assert not [
            module
            for module in modules
            if module.startswith("plumbing.") and module.split(".")[1] in later
        ]


def imported_at_start(name: str) -> set[str]:
    """Return what a file imports when it is imported itself."""
    nodes = [node for node in tree_of(name).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    return {
        alias.name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}"
        for node in nodes
        for alias in node.names
    }


def test_commands_have_what_they_import_on_their_path():
    """From any folder, though Python looks in that of the script only. Errors have one line."""
    for path in ROOT.glob("scripts/*.py"):
        text = path.read_text()
        assert "__main__" not in text or "    with report_errors():\n" in text, path
        first = re.search(r"^(import|from) (utils|plumbing|grpo)\b", text, re.M)
        if first and "__main__" in text:
            assert (
                0
                < re.search(r"^import repository\b|^sys.path.insert\(0, ", text, re.M).start()
                < first.start()
            ), path


def test_no_path_of_one_machine():
    """Nothing under a home or a scratch folder, in any file of the repository."""
    if not shutil.which("git"):
        pytest.skip("needs git")
    command = "git ls-files --cached --others --exclude-standard -z".split()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    folders = "home root Users work tmp mnt data scratch".split()
    pattern = re.compile(rb"(?<![\w.$}~/-])/(" + "|".join(folders).encode() + rb")/[\w.-]+")
    for path in (ROOT / name for name in done.stdout.split("\0") if name):
        if path.is_file() and path.suffix != ".safetensors":
            assert not pattern.search(path.read_bytes()), path


PINNED = dict(re.findall("^(.+)==(.+)$", (ROOT / "requirements.txt").read_text(), re.M))


def test_what_is_pinned_is_what_is_installed():
    """Else something else that is installed, vLLM say, does not go with requirements.txt."""
    for name, version in PINNED.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # vllm, on a CPU
            assert importlib.metadata.version(name).partition("+")[0] == version, name


def test_what_is_pinned_is_what_is_imported():
    """But for wandb, which --track names, and for what docs/ or a command let the user install."""
    files = (*SCRIPTS, "utils.py", *PLUMBING, *EXTRAS, *COMMANDS)
    modules = {module.partition(".")[0] for name in files for module in imported(name)}
    modules -= LOCAL | sys.stdlib_module_names
    others = {"assets", "reasoning_gym", "if_verifiable", "langdetect", "trl", "verifiers"}
    others |= {"bitsandbytes"}
    renamed = {"yaml": "pyyaml", "math_verify": "math-verify"}
    assert {renamed.get(name, name) for name in modules - others} == PINNED.keys() - {
        "wandb",
        "latex2sympy2_extended",  # of math-verify, whose verdicts it decides
    }
