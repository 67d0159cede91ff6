"""What the scripts share stays the same, every flag is read, and what README and scripts name exists."""

import ast
import contextlib
import functools
import importlib
import re
import shutil
import subprocess
import sys

import helpers
import pytest
from helpers import ROOT

from plumbing import command_line

sync_shared = importlib.import_module("sync_shared")
ROOMS = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("plumbing/**/*.py"))
SCRIPTS = sync_shared.SCRIPTS
SHELL = sorted(ROOT.glob("scripts/**/*.sh"))  # for README.md and docs/ see test_docs.py


# ---- scripts/sync_shared.py ------------------------------------------------------------------------------------------

FIRST = '''"""One."""
import functools
from elsewhere import flags, scale


@dataclass
class Args(flags.RunArgs):
    seed: int = 1
    """Seed."""
    size: int = 2
    """Größe of it."""; PAIR = 3


# Why this is so.
@functools.cache
def mean(x, args):
    """The mean."""
    return sum(x) / len(x) * args.size / args.seed  # here


class Batch:
    rows: list


def only_here():
    return 1


def main(args):
    return mean(1)
'''
SECOND = '''"""Two."""
import functools
from elsewhere import flags


@dataclass
class Args(flags.RunArgs):
    seed: int = 7
    """Seed."""
    size: int = 5
    """Größe of it."""
    other: float = 0.1
    """Other."""


class Batch:
    rows: list  # layout and comments are free



def only_there():
    return 2


def scale(x):
    return x


# ---- a banner ----
@functools.cache
def mean(x, args):
    """The mean."""
    return sum(x) / len(x) * args.size / args.seed


def main(args):
    return 2
'''
FLAGS = """
class MoreArgs:
    folder: str = ""

class RunArgs(MoreArgs):
    resume: bool = False
"""
DRIFTS = {  # what is changed in the second script -> what is reported
    ("sum(x) / len(x)", "sum(x) / (len(x) + 1)"): "mean",
    ('"""The mean."""', '"""The äverage."""'): "mean",
    ("@functools.cache\n", ""): "mean",
    ("rows: list ", "rows: tuple "): "Batch",
    ("Größe of it.", "Größen of\n    them."): "Args.size",
    ("size: int", "size: Literal[\n        1, 2\n    ]"): "Args.size",
}


def sync(folder, second: str, *words, first: str = FIRST) -> tuple[int, str, str]:
    """Run the command on a folder with two scripts: exit code, what it says, and the second script after it."""
    (folder / "elsewhere").mkdir(exist_ok=True)
    (folder / "elsewhere" / "flags.py").write_text(FLAGS)
    (folder / "grpo.py").write_text(first)
    (folder / "ppo.py").write_text(second)
    command = [sys.executable, str(ROOT / "scripts" / "sync_shared.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert (folder / "grpo.py").read_text() == first and "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr, (folder / "ppo.py").read_text()


def test_no_drift_where_there_is_none(tmp_path):
    for words in (["grpo.py", "--check"], ["grpo.py"], ["grpo.py", "ppo.py"]):
        code, said, after = sync(tmp_path, SECOND, *words)
        assert code == 0 and "ppo.py:" not in said and after == SECOND


@pytest.mark.parametrize("drift", DRIFTS, ids=lambda drift: drift[1].split("\n")[0].strip() or "no decorator")
def test_drift_is_found_and_mended(tmp_path, drift):
    """The default of a flag, comments and all that is not shared stay as they are."""
    drifted, what = SECOND.replace(*drift), DRIFTS[drift]
    assert drifted != SECOND
    code, said, after = sync(tmp_path, drifted, "grpo.py", "--check")
    assert code == 1 and said == f"ppo.py: {what} differs from grpo.py\n" and after == drifted
    code, said, mended = sync(tmp_path, drifted, "grpo.py")
    assert code == 0 and said == f"ppo.py: {what} copied from grpo.py\n"
    assert ast.dump(ast.parse(mended)) == ast.dump(ast.parse(SECOND)) != ast.dump(ast.parse(drifted))
    assert "# ---- a banner ----\n" in mended and "size: int = 5" in mended
    assert sync(tmp_path, mended, "grpo.py", "--check")[0] == 0 and sync(tmp_path, mended, "grpo.py")[2] == mended


def test_some_parts_of_a_fork(tmp_path):
    """A file of any name is a target, alone; --only names what is copied of what differs, else a fork would be lost."""
    drifted = SECOND.replace("len(x)", "2").replace("rows: list", "rows: set")
    (tmp_path / "fork.py").write_text(drifted)
    code, said, after = sync(tmp_path, drifted, "grpo.py", "fork.py", "--only", "mean")
    assert code == 0 and said == "fork.py: mean copied from grpo.py\n" and after == drifted
    fork = (tmp_path / "fork.py").read_text()
    assert ast.dump(ast.parse(fork)) == ast.dump(ast.parse(SECOND.replace("rows: list", "rows: set")))
    for words, reason in (((), "with --only what to copy of Batch"), (("--only", "men", "main"), "--only men main: ")):
        code, said, _ = sync(tmp_path, drifted, "grpo.py", "fork.py", *words)
        assert code == 2 and reason in said and (tmp_path / "fork.py").read_text() == fork
    code, said, after = sync(tmp_path, drifted, "fork.py", "ppo.py")  # a fork is a source, too
    assert code == 0 and said == "ppo.py: mean copied from fork.py\n" and "len(x)" in after


LACKS = {  # what is changed in a function of the first script -> what the second one lacks
    ("sum(x)", "total(x)"): "total (in mean)",
    ("sum(x)", "only_here() * sum(x)"): "only_here (in mean)",
    ("sum(x)", "scale(sum(x))"): "elsewhere.scale (in mean)",  # it has something else of that name
    ("@functools.cache", "@functools.cache\n@cached"): "cached (in mean)",
    ("def mean(x, args)", "def mean(x: Tensor, args)"): "Tensor (in mean)",
    ("sum(x)", "sum(math.exp(y) for y in x)"): "math (in mean)",
    ("args.size /", "args.group_size /"): "--group_size (in mean)",
    ("size: int", "size: PositiveInt"): "PositiveInt (in Args.size)",
    ("rows: list", "rows: list = stored()"): "stored (in Batch)",
}


@pytest.mark.parametrize("change", LACKS, ids=lambda change: change[1])
def test_what_a_target_lacks_is_not_copied_into_it(tmp_path, change):
    """Nor is anything else copied, into any file."""
    first = FIRST.replace(*change)
    drifted = SECOND.replace("rows: list", "rows: tuple")
    assert first != FIRST
    code, said, after = sync(tmp_path, drifted, "grpo.py", first=first)
    assert code == 2 and after == drifted
    assert said == f"error: nothing is copied from grpo.py: ppo.py lacks {LACKS[change]}\n"
    assert sync(tmp_path, drifted, "grpo.py", "--check", first=first)[0] == 1  # a difference all the same


@pytest.mark.parametrize(
    "text", ["max(x) / len(x)", "[y + 1 for y in x] or (z := 1) + z", "args.folder * args.resume", "mean(x)"]
)
def test_what_a_target_has_is_copied_into_it(tmp_path, text):
    """Builtins, names of its own, inherited flags."""
    code, _, after = sync(tmp_path, SECOND, "grpo.py", first=FIRST.replace("sum(x) / len(x)", text))
    assert code == 0 and text in after


def test_what_cannot_be_copied_from_or_into(tmp_path):
    for words in (["sac.py"], [], ["--check"], ["grpo.py", "sac.py"], ["elsewhere/flags.py"], ["grpo.py", "broken.py"]):
        (tmp_path / "broken.py").write_text("def (")
        code, said, after = sync(tmp_path, SECOND, *words)
        assert code == 2 and "error: " in said and after == SECOND


# ---- the scripts that exist ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_share_the_same_code(name):
    """Whichever script is compared with: two may share what a third does not have."""
    others = [ROOT / other for other in SCRIPTS if other != name]
    assert sync_shared.sync(ROOT / name, others, check=True) == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_is_shared_could_be_copied(name):
    """Each part has what it uses in every script: a check that refused too much would refuse these."""
    source = (ROOT / name).read_bytes()
    ours = sync_shared.parts(source)
    for other in SCRIPTS:
        common = [part for part in sync_shared.parts((ROOT / other).read_bytes()) if part in ours]
        assert common and sync_shared.lacking(source, ROOT / other, common) == []


def test_what_may_differ_does(monkeypatch):
    """An entry of the list that nothing needs would hide a drift to come."""
    sources = [(ROOT / name).read_bytes() for name in SCRIPTS]
    assert all(len(reason) > 10 for reason in sync_shared.OWN.values())
    allowed = {*sync_shared.OWN}
    monkeypatch.setattr(sync_shared, "OWN", {})
    found = {name for one in sources for other in sources for name in sync_shared.differences(one, other)}
    assert found == allowed


def shared_lines(name: str) -> int:
    """Return how many lines of a script stand in top-level functions and classes that another script has, too."""
    functions = lambda script: {ast.dump(n): n for n in tree_of(script).body if isinstance(n, DEFINITIONS)}
    others = {dump for other in SCRIPTS if other != name for dump in functions(other)}
    found = [node for dump, node in functions(name).items() if dump in others]
    first = lambda node: min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return sum(node.end_lineno - first(node) + 1 for node in found)


@pytest.mark.parametrize("name", SCRIPTS)
def test_less_than_half_of_a_script_is_shared(name):
    lines = len((ROOT / name).read_text().splitlines())
    share = shared_lines(name) / lines
    print(f"{name}: {shared_lines(name)} of {lines} lines, {share:.0%}")
    assert share < 0.5
    assert share > 0.3 or name == "reward_model.py"  # else nothing was counted


DEFINITIONS = ast.FunctionDef | ast.ClassDef


@functools.cache
def tree_of(name: str) -> ast.Module:
    return ast.parse((ROOT / name).read_text())


def names_read(*trees: ast.Module) -> set[str]:
    """NAME of every args.NAME and self.args.NAME that is read, and the words of texts beside a getattr(args, ...);
    in a function with a parameter `prefix` they are read with each prefix="..." that a call gives, too."""
    keywords = [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.keyword) and n.arg == "prefix"]
    prefixes = {"", *(k.value.value for k in keywords if isinstance(k.value, ast.Constant))}
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
                own = prefixes if "prefix" in [arg.arg for arg in node.args.args] else {""}
                found |= {prefix + word for prefix in own for text in texts for word in text.split()}
    return found


def test_names_read():
    """The check above is no better than this function."""
    tree = ast.parse(
        "def f(args, self):\n    a = args.one + self.args.two\n    args.three = 4\n    x.four\n    '--seven'\n"
        "def g(args):\n    for name in 'five six'.split():\n        getattr(args, name)\n"
    )
    assert names_read(tree) == {"one", "two", "five", "six"}
    tree = ast.parse(
        "def f(args, prefix=''):\n    getattr(args, prefix + 'one')\nf(args, prefix='its_')\nf(args, 'no_')"
    )
    assert names_read(tree) >= {"one", "its_one"} and "no_one" not in names_read(tree)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_flag_is_read(name):
    """By the script or a room: checks of a flag in plumbing/flags.py do not make it do anything."""
    rooms = [room for room in ROOMS if room != "plumbing/flags.py"]
    unread = sync_shared.fields(ROOT / name) - names_read(*map(tree_of, (name, "utils.py", *rooms)))
    assert not unread, f"nothing reads {sorted(unread)}"


@pytest.mark.parametrize("name", [*SCRIPTS, "plumbing/flags.py", "plumbing/models/critic.py"])
def test_every_flag_is_documented(name):
    """By a docstring right under it, which is what --help shows."""
    classes = [n for n in tree_of(name).body if isinstance(n, ast.ClassDef) and n.name.endswith("Args")]
    assert len(classes) == (11 if name == "plumbing/flags.py" else 1)
    for field, text in ((f, t) for cls in classes for f, t in zip(cls.body, [*cls.body[1:], None])):
        if isinstance(field, ast.AnnAssign):
            documented = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            assert documented and len(str(text.value.value)) > 8, field.target.id


@functools.cache
def flags_of(name: str) -> set[str]:
    """The flags of a script, with underscores; of tyro's, --no- forms too."""
    source = (ROOT / name).read_text()
    known = {word.replace("-", "_") for word in re.findall(r'add_argument\(\s*"--([\w-]+)"', source)} | {"help"}
    if "command_line.parse" in source:
        known |= sync_shared.fields(ROOT / name) | sync_shared.fields(ROOT / "plumbing" / "flags.py", "ConfigArgs")
    return known | {f"no_{name}" for name in known}


def flags_named(text: str) -> set[str]:
    return {word.rstrip("_-").replace("-", "_") for word in re.findall(r"(?<![\w-])--([a-zA-Z][\w-]*)", text)}


# Flags of other programs. A line that calls one of these is not searched.
FOREIGN = re.compile(
    r"\b(pip|uv|venv|pytest|git|vllm serve|nvidia-smi|grep|sort|curl|ruff|docker|conda|apt-get|SBATCH)\b"
)
TORCHRUN = {
    "max_restarts",
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
    scripts = [path.relative_to(ROOT) for path in (*ROOT.glob("*.py"), *ROOT.glob("scripts/*.py"))]  # forks, too
    return flags_named(ours(text)) - TORCHRUN - {flag for name in scripts for flag in flags_of(str(name))}


def missing_paths(text: str) -> list[str]:
    """Paths in a text that look as if they were files of this repository, and are not there."""
    words = re.findall(
        r"(?<![\w/.:$}~*-])((?:scripts|tests|assets|\.ci)(?:/[\w.-]+)*/?|[\w-]+\.(?:py|txt|toml|md))"
        r"(?![\w/*{-]|:(?!\w))",  # "file.py:function" names a file, "tests: so and so" does not
        text,
    )
    made = {"path/to/file.py", "file.py", "my_reward.py", "installed-requirements.txt", "installed-test-tools.txt"}
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
    assert missing_paths("scripts/sac.py:train, scripts/plot.py:main") == ["scripts/sac.py"]


@pytest.mark.parametrize("path", SHELL, ids=lambda path: str(path.relative_to(ROOT)))
def test_flags_and_paths_in_shell_scripts_exist(path):
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


@pytest.mark.parametrize("name", ["utils.py", *ROOMS])
def test_flags_in_messages_exist(name):
    """These files serve all scripts: a flag that they name has to be one of theirs, or of another program."""
    texts = [n.value for n in ast.walk(tree_of(name)) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    assert not {flag for text in texts for flag in unknown_flags(text)} - {
        "porcelain",
        "worker_extension_cls",
        "delete",
    }  # git's, vLLM's, hf upload's


def test_shell_scripts_parse():
    for path in SHELL:
        done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_commands_find_what_they_import():
    """From any folder, though Python looks in that of the script only."""
    for path in ROOT.glob("scripts/*.py"):
        text = path.read_text()
        first = re.search(r"^(import|from) (utils|plumbing|grpo)\b", text, re.M)
        if first and "__main__" in text:
            assert 0 < text.find("\nsys.path.insert(0, ") < first.start(), path


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


OPTIONAL = {"vllm", "wandb", "matplotlib", "peft", "datasets", "reasoning_gym"}  # take seconds, or are not installed
OPTIONAL_ROOMS = {"vllm_engine", "vllm_servers"}
OPTIONAL_ROOMS |= {"hub", "model_card", "sandbox", "sandbox_server", "sandbox_limits"}


def test_importing_a_script_loads_nothing_that_a_flag_asks_for():
    code = f"import sys, {', '.join(name[:-3] for name in SCRIPTS)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not OPTIONAL & loaded and not {f"plumbing.{room}" for room in OPTIONAL_ROOMS} & loaded


def imported(name: str) -> set[str]:
    """Return what a file imports of the repository, wherever in it: "utils", "grpo", "plumbing.data.mixture"."""
    found = set()
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inside = node.module == "plumbing"
            found |= {f"plumbing.{alias.name}" for alias in node.names} if inside else {node.module}
    local = {path.stem for path in (*ROOT.glob("*.py"), *ROOT.glob("scripts/*.py"))}
    return {module for module in found if module in local or module.startswith("plumbing.")}


@pytest.mark.parametrize("name", [*SCRIPTS, "utils.py", *ROOMS])
def test_imports_go_one_way(name):
    """Commands -> algorithms -> rooms -> utils; a room names in its docstring the rooms that it imports."""
    found = imported(name) - {"utils"}
    if name == "utils.py":
        assert not found
    elif name in SCRIPTS:
        assert all(module.startswith("plumbing.") for module in found)
    else:
        about = ast.get_docstring(tree_of(name)) or ""
        assert not {module for module in found if not re.search(rf"\b{module.removeprefix('plumbing.')}\b", about)}


RL = {"algorithm", "run", "model", "data", "reward", "rollout", "conversation"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_lists_every_flag_in_its_group(name, capfd):
    with pytest.raises(SystemExit) as end:
        command_line.parse(importlib.import_module(name.removesuffix(".py")).Args, ["--help"])
    out = capfd.readouterr().out
    _, *boxes = re.split(r"^╭─ (\w+) options ─+╮$", out.replace("─ options", "─ no options"), flags=re.M)
    shown = {title: flags_named(box) for title, box in zip(boxes[::2], boxes[1::2])}
    groups = {"algorithm": {f.target.id for f in args_of(name).body if isinstance(f, ast.AnnAssign)}}
    for base in args_of(name).bases:
        owner = ast.unparse(base).removeprefix("flags.")
        room = {"CriticArgs": "critic", "ConversationArgs": "conversations"}.get(owner, "flags")
        inherited = sync_shared.fields(ROOT / "plumbing" / f"{room}.py", owner)
        groups[owner.removesuffix("Args").lower()] = inherited - groups["algorithm"]
    expected = {"algorithm", "run", "model"} if "reward" in name else RL | ({"critic"} if name == "ppo.py" else set())
    assert end.value.code == 0 and groups.keys() == shown.keys() - {"no"} == expected
    for title, names in groups.items():
        others = sync_shared.fields(ROOT / name) - names
        assert names <= shown[title] and "(default: " in out
        listed = set(re.findall(r"^│ --([\w-]+)", dict(zip(boxes[::2], boxes[1::2]))[title], re.M))
        assert not {flag.replace("-", "_") for flag in listed} & others


def args_of(name: str) -> ast.ClassDef:
    return next(n for n in tree_of(name).body if isinstance(n, ast.ClassDef) and n.name == "Args")


def test_what_is_pinned_is_what_is_installed():
    """Else something else that is installed, vLLM say, does not go with requirements.txt."""
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        name, _, version = line.partition("==")
        if version:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # vllm, on a CPU
                assert importlib.metadata.version(name).partition("+")[0] == version, line
