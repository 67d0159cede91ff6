"""Keeps equal what the algorithm scripts share by design: each holds its own copy, so that it can be read alone.

    python scripts/sync_shared.py grpo.py                   copy from grpo.py into the other scripts
    python scripts/sync_shared.py grpo.py --check           change nothing; a line for each difference, and exit code 1
    python scripts/sync_shared.py grpo.py my_fork.py --only generate collect     copy these parts into a fork

Shared are top-level functions and classes of the same name, and fields of `Args` of the same name (type and docstring;
the default is the script's own). Into a fork, which differs on purpose, goes only what --only names: without it, what
differs is printed, as by --check. Names that a file lacks after that are found by `ruff check --select F821`.
"""

import ast
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


def parts(source: str) -> dict[str, list[ast.AST]]:
    """Return what a script may share, {name: nodes}: a function, a class, or a field of Args and its docstring."""
    nodes = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            nodes[node.name] = [node]
            for field, text in zip(node.body, node.body[1:]) if node.name == "Args" else ():
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    nodes[f"Args.{field.target.id}"] = [field, text]
    return {name: value for name, value in nodes.items() if name not in MAY_DIFFER}


def differences(source: str, target: str) -> list[str]:
    """Return the names of the parts that two scripts have both, but not equal. Layout and comments do not count."""
    ours, theirs = parts(source), parts(target)
    dump = lambda nodes: [ast.dump(getattr(node, "annotation", node)) for node in nodes]
    return [name for name in theirs if name in ours and dump(theirs[name]) != dump(ours[name])]


def lines_of(text: str, nodes: list[ast.AST]) -> str:
    """Return the lines of a part, the decorators included."""
    first = min(node.lineno for node in (nodes[0], *getattr(nodes[0], "decorator_list", [])))
    return "".join(text.splitlines(keepends=True)[first - 1 : nodes[-1].end_lineno])


def copy(source: str, target: str, name: str) -> str:
    """Return the target with the named part of the source in place of its own. A field keeps its default."""
    new, old = parts(source)[name], parts(target)[name]
    text = lines_of(source, new)
    if name.startswith("Args."):
        annotation = ast.get_source_segment(source, new[0].annotation)
        default = ast.get_source_segment(target, old[0].value)
        text = f"    {old[0].target.id}: {annotation} = {default}\n" + lines_of(source, new[1:])
    return target.replace(lines_of(target, old), text)


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
        names = [name for name in differences(source.read_text(), path.read_text()) if not only or name in only]
        copies = not check and (only or path.name in SCRIPTS)
        for name in names:
            print(f"{path.name}: {name} {'copied' if copies else 'differs'} from {source.name}")
            if copies:
                path.write_text(copy(source.read_text(), path.read_text(), name))
            else:
                code = 1
    return code


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
