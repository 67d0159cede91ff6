"""What the scripts share stays the same, every flag is read, and what README and scripts name exists."""

import ast
import importlib
import re
import shutil
import subprocess
import sys

import helpers
import pytest
from helpers import ROOT

sync_shared = importlib.import_module("sync_shared")
SCRIPTS = [name for name in sync_shared.SCRIPTS if (ROOT / name).exists()]
TOOLS = sorted(path for path in (ROOT / "scripts").glob("*.py") if "tyro.cli" in path.read_text())
TEXTS = sorted(path for pattern in ("README.md", "scripts/*.sh", "scripts/**/*.sh") for path in ROOT.glob(pattern))


# ---- scripts/sync_shared.py ------------------------------------------------------------------------------------------

FIRST = '''"""One."""
import functools


@dataclass
class Args:
    seed: int = 1
    """Seed."""
    size: int = 2
    """Size of
    it."""


# Why this is so.
@functools.cache
def mean(x):
    """The mean."""
    return sum(x) / len(x)  # here


class Batch:
    rows: list


def only_here():
    return 1


def main(args):
    # ---- shared: rollout ----------------
    a = 1

    b = 2
    # ---- end shared ---------------------
    return a
'''
SECOND = '''"""Two."""
import functools


@dataclass
class Args:
    seed: int = 7
    """Seed."""
    size: int = 2
    """Size of it."""
    other: float = 0.1
    """Other."""


class Batch:
    rows: list  # layout and comments are free



def only_there():
    return 2


# ---- a banner ----
@functools.cache
def mean(x):
    """The mean."""
    return sum(x) / len(x)


def main(args):
    if args:
        # ---- shared: rollout ----
        a = 1

        b = 2
        # ---- end shared
        return 2
'''
DRIFTS = {  # what is changed in the second script -> what is reported
    ("sum(x) / len(x)", "sum(x) / (len(x) + 1)"): "definition mean",
    ('"""The mean."""', '"""The average."""'): "definition mean",
    ("@functools.cache\n", ""): "definition mean",
    ("rows: list ", "rows: tuple "): "definition Batch",
    ("b = 2", "b = 3"): "block rollout",
    ("b = 2", "b = 2  # a comment"): "block rollout",
    ("size: int", "size: float"): "Args field size",
    ("Size of it.", "Size of them."): "Args field size",
}


def sync(folder, *words) -> subprocess.CompletedProcess:
    script = [sys.executable, str(ROOT / "scripts" / "sync_shared.py"), "--root", str(folder)]
    return subprocess.run([*script, *words], capture_output=True, text=True)


def test_no_drift_where_there_is_none():
    assert sync_shared.differences({"grpo.py": FIRST, "ppo.py": SECOND}) == []
    assert sync_shared.copy(FIRST, SECOND) == (SECOND, [])


@pytest.mark.parametrize("drift", DRIFTS, ids=lambda drift: drift[1].strip() or "no decorator")
def test_drift_is_found_and_mended(drift):
    changed = SECOND.replace(*drift)
    assert changed != SECOND
    what = DRIFTS[drift]
    assert sync_shared.differences({"grpo.py": FIRST, "ppo.py": changed}) == [f"grpo.py and ppo.py: {what} differs"]
    mended, names = sync_shared.copy(FIRST, changed)
    ast.parse(mended)
    if what.startswith("Args"):  # fields stand among others and in another order: that is for a person
        assert (mended, names) == (changed, [])
        return
    assert names == [what.split()[-1]]
    assert sync_shared.differences({"grpo.py": FIRST, "ppo.py": mended}) == []
    assert sync_shared.copy(FIRST, mended) == (mended, [])
    outside = mended.replace("# Why this is so.\n", "").replace("# here", "").replace("  \n", "\n")
    if what == "block rollout":
        assert outside == SECOND
    else:  # nothing but the definition was touched
        assert "# ---- a banner ----\n" in mended and "only_there" in mended and "only_here" not in mended
    assert "# Why this is so.\n@functools.cache\ndef mean" in mended or what != "definition mean"


def test_the_command(tmp_path):
    (tmp_path / "grpo.py").write_text(FIRST)
    drifted = SECOND.replace("sum(x) / len(x)", "0").replace("b = 2", "b = 3")
    (tmp_path / "ppo.py").write_text(drifted)
    done = sync(tmp_path, "--check")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 2
    assert (tmp_path / "ppo.py").read_text() == drifted
    done = sync(tmp_path, "grpo.py")
    assert done.returncode == 0
    assert done.stdout.splitlines() == ["ppo.py: mean from grpo.py", "ppo.py: rollout from grpo.py"]
    assert (tmp_path / "grpo.py").read_text() == FIRST
    assert sync(tmp_path, "--check").returncode == 0
    assert sync(tmp_path, "grpo.py").stdout == "ppo.py: unchanged\n"
    assert sync(tmp_path, "sac.py").returncode == 2 and sync(tmp_path).returncode == 2


# ---- the scripts that exist ------------------------------------------------------------------------------------------


def test_scripts_share_the_same_code():
    assert sync_shared.differences({name: (ROOT / name).read_text() for name in SCRIPTS}) == []
    assert all(reason for reason in sync_shared.ALLOWED.values())


def tree_of(name: str) -> ast.Module:
    return ast.parse((ROOT / name).read_text())


def args_of(tree: ast.Module) -> list[str]:
    body = next(n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Args")
    return [n.target.id for n in body if isinstance(n, ast.AnnAssign)]


def names_read(*trees: ast.Module) -> set[str]:
    """NAME of every args.NAME and self.args.NAME that is read, and the words of texts that feed a getattr(args, ...)."""
    found = set()
    for node in (n for tree in trees for n in ast.walk(tree)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value
            if (
                isinstance(owner, ast.Name)
                and owner.id == "args"
                or isinstance(owner, ast.Attribute)
                and owner.attr == "args"
            ):
                found.add(node.attr)
        if isinstance(node, ast.FunctionDef):
            calls = [n for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
            if any(call.func.id == "getattr" and ast.unparse(call.args[0]).endswith("args") for call in calls):
                texts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
                found |= {word for text in texts for word in text.split()}
    return found


def test_names_read():
    """The check above is no better than this function."""
    tree = ast.parse(
        "def f(args, self):\n    a = args.one + self.args.two\n    args.three = 4\n    x.four\n    '--seven'\n"
        "def g(args):\n    for name in 'five six'.split():\n        getattr(args, name)\n"
    )
    assert names_read(tree) == {"one", "two", "five", "six"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_flag_is_read(name):
    tree = tree_of(name)
    unread = set(args_of(tree)) - names_read(tree, tree_of("utils.py"))
    assert not unread, f"nothing reads {sorted(unread)}"


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_flag_is_documented(name):
    fields = sync_shared.fields((ROOT / name).read_text())
    assert fields.keys() == set(args_of(tree_of(name))) and len(fields) > 20
    assert not [field for field, (_, text) in fields.items() if len(text) < 8]


def flags_of(name: str) -> set[str]:
    """The flags of a script, with underscores; of tyro's, --no- forms too."""
    source = (ROOT / name).read_text()
    known = {word.replace("-", "_") for word in re.findall(r'add_argument\(\s*"--([\w-]+)"', source)} | {"help"}
    if "tyro.cli" in source:
        known |= set(args_of(ast.parse(source)))
    return known | {f"no_{name}" for name in known}


def flags_named(text: str) -> set[str]:
    return {word.rstrip("_-").replace("-", "_") for word in re.findall(r"(?<![\w-])--([a-zA-Z][\w-]*)", text)}


# Flags of other programs. A line that calls one of these is not searched.
FOREIGN = re.compile(r"\b(pip|uv|venv|pytest|git|vllm serve|nvidia-smi|grep|sort|curl|ruff|docker|conda|apt-get)\b")
TORCHRUN = {
    "nproc_per_node",
    "nnodes",
    "node_rank",
    "rdzv_backend",
    "rdzv_endpoint",
    "rdzv_id",
    "standalone",
    "master_port",
}


def ours(text: str) -> str:
    """A text without the commands of other programs; lines that end with a backslash go on."""
    lines = re.sub(r"\\\n", " ", text).split("\n")
    return "\n".join(line for line in lines if not FOREIGN.search(line) or re.search(r"\w+\.py\b.* --", line))


def unknown_flags(text: str) -> set[str]:
    scripts = [*SCRIPTS, *(f"scripts/{path.name}" for path in sorted((ROOT / "scripts").glob("*.py")))]
    return flags_named(ours(text)) - TORCHRUN - {flag for name in scripts for flag in flags_of(name)}


def missing_paths(text: str) -> list[str]:
    """Paths in a text that look as if they were files of this repository, and are not there."""
    words = re.findall(
        r"(?<![\w/.:$}~*-])((?:scripts|tests|assets|\.ci)(?:/[\w.-]+)*/?|[\w-]+\.(?:py|txt|toml|md))(?![\w/*{:-])", text
    )
    made = {"path/to/file.py", "file.py", "reward.py", "installed-requirements.txt", "installed-test-tools.txt"}
    return [word for word in words if word not in made and not (ROOT / word.rstrip(".")).exists()]


def test_unknown_flags_and_missing_paths_are_found():
    """So that the two tests below cannot pass for want of looking."""
    assert unknown_flags("python grpo.py --seed 1 --sead 2 \\\n --loss x\ntorchrun --nproc_per_node 8") == {"sead"}
    assert unknown_flags("pip install --quiet x\n`--no-non-stop-penalty`") == set()
    assert missing_paths("bash scripts/nothing.sh, grpo.py, sac.py and tests/test_drift.py.") == [
        "scripts/nothing.sh",
        "sac.py",
    ]
    assert missing_paths("path/to/sac.py /abs/x.py runs/*.py `utils.py`, https://a.b/scripts/x.sh") == []


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_flags_and_paths_in_texts_exist(path):
    assert not unknown_flags(path.read_text())
    assert not missing_paths(path.read_text())


@pytest.mark.parametrize("name", SCRIPTS)
def test_flags_and_paths_in_docstrings_exist(name):
    """Of the module and of every flag, function and class: all that a script says of itself."""
    tree = tree_of(name)
    texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    own = [text for text in texts if flags_named(text) - flags_of(name) - TORCHRUN]
    assert not own
    assert not missing_paths(ast.get_docstring(tree))


@pytest.mark.parametrize("script", [*SCRIPTS, *(f"scripts/{path.name}" for path in TOOLS)])
def test_flags_in_messages_exist(script):
    """utils.py serves all scripts: what it says of a flag has to hold in one of them."""
    assert not unknown_flags(" ".join(re.findall(r'"([^"\n]*)"', (ROOT / "utils.py").read_text())))
    assert {"help"} <= flags_of(script)


def test_shell_scripts_parse():
    for path in TEXTS:
        if path.suffix == ".sh":
            done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr


def tracked_files() -> list:
    if not shutil.which("git"):
        pytest.skip("needs git")
    words = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_path_of_one_machine():
    """Nothing under a home or a scratch folder, in any file of the repository."""
    folders = ["home", "root", "Users", "work", "tmp", "mnt", "data", "scratch"]
    pattern = re.compile(rb"(?<![\w.$}~/-])/(" + "|".join(folders).encode() + rb")/[\w.-]+")
    found = {}
    for path in tracked_files():
        hits = (
            {match[0].decode() for match in pattern.finditer(path.read_bytes())}
            if path.suffix != ".safetensors"
            else set()
        )
        if hits and path != helpers.ROOT / "tests" / "test_drift.py":
            found[str(path.relative_to(ROOT))] = sorted(hits)
    assert not found


@pytest.mark.parametrize("name", [*SCRIPTS, "utils.py"])
def test_optional_packages_are_imported_where_they_are_used(name):
    """vllm, wandb, matplotlib and peft take seconds, or are not installed: only inside of functions."""
    tree, inside = tree_of(name), set()
    for function in (n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))):
        inside |= {id(n) for n in ast.walk(function)}
    for node in ast.walk(tree):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for module in modules:
            assert id(node) in inside or module.split(".")[0] not in {"vllm", "wandb", "matplotlib", "peft"}, module


def test_importing_a_script_loads_none_of_them():
    code = f"import sys, {', '.join(name[:-3] for name in SCRIPTS)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"vllm", "wandb", "matplotlib", "peft"} & set(done.stdout.split())


def test_scripts_stand_alone():
    """An algorithm imports the plumbing and nothing else of the repository."""
    local = {path.stem for path in ROOT.glob("*.py")}
    for name in SCRIPTS:
        imports = [n for n in ast.walk(tree_of(name)) if isinstance(n, (ast.Import, ast.ImportFrom))]
        found = {a.name for n in imports if isinstance(n, ast.Import) for a in n.names}
        found |= {n.module for n in imports if isinstance(n, ast.ImportFrom)}
        assert found & local <= {"utils"}, name


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_lists_every_flag(name):
    words = [sys.executable, str(ROOT / name), "--help"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    listed = set(flags_named(done.stdout))
    assert set(args_of(tree_of(name))) <= listed
