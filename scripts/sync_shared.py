"""Keeps equal what the algorithm scripts share by design: each holds its own copy, so that it can be read alone.

    python scripts/sync_shared.py grpo.py                   copy from grpo.py into the other scripts
    python scripts/sync_shared.py grpo.py --check           change nothing; a line for each difference, and exit code 1
    python scripts/sync_shared.py grpo.py my_fork.py --only generate collect     copy these parts into a fork

Shared are top-level functions and classes of the same name, and fields of `Args` of the same name (type and docstring;
the default is the script's own). Into a fork, which differs on purpose, goes only what --only names: without it, what
differs is printed, as by --check. Names that a file lacks after that are found by `ruff check --select F821`.
"""

import ast
import itertools
import re
import sys
from pathlib import Path

import tyro

SCRIPTS = ("grpo.py", "rloo.py", "ppo.py", "reward_model.py", "distill.py")
MAY_DIFFER = (  # what has one name and may differ
    "Args",  # each algorithm has its own flags; fields are compared one by one
    "main",  # the algorithm itself
    "collect",  # rloo.py adds ReMax's greedy responses, ppo.py statistics of scores, distill.py responses of the rows
    "final_scores",  # ppo.py normalizes and clips scores
    "Policy",  # ppo.py's supervised rows have a temperature of 1, distill.py's student has a teacher
    "policy_metrics",  # ppo.py adds the loss on supervised rows
    "Args.clip_low",  # its default depends on grpo's --loss
    "Args.clip_high",  # its default depends on grpo's --loss
    "Args.loss_aggregation",  # its default depends on grpo's --loss and on rloo's --ratio
)


def parts(source: str) -> dict[str, tuple[list[str], str]]:
    """Return what a script may share, {name: (what has to be equal, its lines)}: functions, classes, fields of Args."""
    nodes = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            nodes[node.name] = [*node.decorator_list, node]
            for field, text in itertools.pairwise(node.body) if node.name == "Args" else ():
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    nodes[f"Args.{field.target.id}"] = [field, text]
    lines = source.splitlines(keepends=True)
    return {
        name: (
            [ast.dump(getattr(node, "annotation", node)) for node in part],
            "".join(lines[part[0].lineno - 1 : part[-1].end_lineno]),
        )
        for name, part in nodes.items()
        if name not in MAY_DIFFER
    }


def differences(source: str, target: str) -> list[str]:
    """Return the names of the parts that two scripts have both, but not equal. Layout and comments do not count."""
    ours, theirs = parts(source), parts(target)
    return [name for name in theirs if name in ours and theirs[name][0] != ours[name][0]]


def copy(source: str, target: str, name: str) -> str:
    """Return the target with the named part of the source in place of its own. A field keeps its default."""
    (_, ours), (_, theirs) = parts(source)[name], parts(target)[name]
    new = ours
    if name.startswith("Args."):
        default = r'(?s) = .*?(?=\n    """)'
        new = ours.replace(re.search(default, ours)[0], re.search(default, theirs)[0], 1)
    return target.replace(theirs, new)


def main(source: Path, targets: tuple[Path, ...] = (), /, only: tuple[str, ...] = (), check: bool = False) -> int:
    """Copy what is shared from a script into others, and print what was copied, or differs.

    Args:
        source: script to copy from.
        targets: files to copy into; default: the other scripts.
        only: copy these parts and no others.
        check: change nothing.
    Returns:
        the exit code, 1 if something differs that was not copied.
    """
    code = 0
    for path in targets or [source.parent / name for name in SCRIPTS if name != source.name]:
        copies = not check and (only or path.name in SCRIPTS)
        for name in differences(source.read_text(), path.read_text()):
            if only and name not in only:
                continue
            print(f"{path.name}: {name} {'copied' if copies else 'differs'} from {source.name}")
            if copies:
                path.write_text(copy(source.read_text(), path.read_text(), name))
            else:
                code = 1
    return code


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
