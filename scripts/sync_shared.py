"""Keeps equal what the algorithm scripts share by design: each holds its own copy, so that it can be read alone.

    python scripts/sync_shared.py grpo.py            copy from grpo.py into the scripts that have the same things
    python scripts/sync_shared.py grpo.py --check    change nothing; a line for each difference, and exit code 1

Shared are top-level functions and classes of the same name, fields of `Args` of the same name (type and docstring; the
default is the script's own), and blocks between `# ---- shared: NAME` and `# ---- end shared` of the same name.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("grpo.py", "rloo.py", "ppo.py", "reward_model.py")
# What has one name and may differ, and why.
OWN = {"Args": "each algorithm has its own flags; its fields are compared one by one", "main": "the algorithm itself"}
OWN |= {"check_args": "checks the flags of its own file", "held_models": "each algorithm trains its own models"}
OWN |= dict.fromkeys(("Args.clip_low", "Args.clip_high", "Args.loss_aggregation"), "its default hangs on grpo's --loss")
OWN |= dict.fromkeys(
    ("Args.num_epochs", "Args.dataset", "Args.eval_dataset", "Args.seed", "collate", "load_train_and_eval"),
    "reward_model.py goes over preference pairs, the others over prompts and rollouts",
)


def parts(source: str) -> dict[str, tuple[int, int, str]]:
    """What a script shares: {name: (first line, line after the last, text that has to be equal)}, lines from 0."""
    lines, found = source.splitlines(keepends=True), {}

    def add(name: str, start: int, end: int, compared: str) -> None:
        if name not in OWN:
            found[name] = (start, end, compared)

    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            start = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
            add(node.name, start, node.end_lineno, ast.dump(node))
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            for field, doc in zip(node.body, node.body[1:]):
                if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr):
                    add(
                        f"Args.{field.target.id}",
                        doc.lineno - 1,
                        doc.end_lineno,
                        ast.dump(field.annotation) + ast.dump(doc),
                    )
    for match in re.finditer(r"^ *# -+ shared: ([\w -]*\w)[^\n]*\n.*?^ *# -+ end shared[^\n]*\n", source, re.M | re.S):
        start = source[: match.start()].count("\n")
        add(f"block {match[1]}", start, start + match[0].count("\n"), match[0])
    assert all(0 <= start < end <= len(lines) for start, end, _ in found.values())
    return found


def text(source: str, part: tuple[int, int, str]) -> list[str]:
    return source.splitlines(keepends=True)[part[0] : part[1]]


def sync(master: Path, others: list[Path], check: bool) -> list[str]:
    """Copy into (or with `check` compare with) the other scripts; a line for each difference.

    A field of Args is copied with its docstring only: a difference in its type is for a person to mend.
    """
    report, source = [], master.read_text()
    shared = parts(source)
    for path in others:
        target = path.read_text()
        theirs = parts(target)
        different = [name for name in theirs if name in shared and theirs[name][2] != shared[name][2]]
        lines = target.splitlines(keepends=True)
        for name in sorted(different, key=lambda name: -theirs[name][0]):  # from the end: line numbers stay valid
            lines[theirs[name][0] : theirs[name][1]] = text(source, shared[name])
            report.append(f"{path.name}: {name} {'differs from' if check else 'copied from'} {master.name}")
        if different and not check:
            path.write_text("".join(lines))
            left = [n for n, part in parts(path.read_text()).items() if n in shared and part[2] != shared[n][2]]
            report += [f"{path.name}: {name} still differs, in its type: mend it by hand" for name in left]
    return report


def main(words: list[str]) -> int:
    names, check = [word for word in words if word != "--check"], "--check" in words
    if len(names) != 1 or Path(names[0]).name not in SCRIPTS:
        print(f"error: name the script to copy from, one of {', '.join(SCRIPTS)}", file=sys.stderr)
        return 2
    master = ROOT / Path(names[0]).name
    others = [ROOT / name for name in SCRIPTS if name != master.name and (ROOT / name).exists()]
    report = sync(master, others, check)
    print("\n".join(report) or f"{len(others)} scripts share what they have in common with {master.name}")
    return int(check and bool(report))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
