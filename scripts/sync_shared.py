"""Keeps equal what the algorithm scripts share by design: each holds its own copy, so that it can be read alone.

    python scripts/sync_shared.py grpo.py                   copy from grpo.py into the other scripts
    python scripts/sync_shared.py grpo.py --check           change nothing; a line for each difference, and exit code 1
    python scripts/sync_shared.py grpo.py my_fork.py --only generate collect     copy these parts into a fork

Shared are top-level functions and classes of the same name, and fields of `Args` of the same name (type and docstring;
the default is the script's own). Into a fork, which differs on purpose, goes only what --only names. Names that its new
file lacks are found by `ruff check --select F821`.
"""

import argparse
import ast
import sys
from pathlib import Path

SCRIPTS = ("grpo.py", "rloo.py", "ppo.py", "reward_model.py", "distill.py")
MAY_DIFFER = {  # what has one name and may differ, and why
    "Args": "each algorithm has its own flags; fields are compared one by one",
    "main": "the algorithm itself",
    "collect": "rloo.py adds ReMax's greedy responses, ppo.py the statistics of the scores, distill.py the data set's",
    "final_scores": "ppo.py normalizes and clips scores",
    "Policy": "ppo.py's supervised rows have a temperature of 1, distill.py's student has a teacher",
    "policy_metrics": "ppo.py has no correction weights",
    "Args.clip_low": "its default depends on grpo's --loss",
    "Args.clip_high": "its default depends on grpo's --loss",
    "Args.loss_aggregation": "its default depends on grpo's --loss and on rloo's --ratio",
}


def parts(source: bytes) -> dict[str, list[ast.AST]]:
    """Return what a script may share, {name: nodes}: a function, a class, or type and docstring of a field of Args."""
    nodes = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            nodes[node.name] = [node]
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            for field, text in zip(node.body, node.body[1:]):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    nodes[f"Args.{field.target.id}"] = [field.annotation, text]
    return {name: value for name, value in nodes.items() if name not in MAY_DIFFER}


def differences(source: bytes, target: bytes) -> list[str]:
    """Return the names of the parts that two scripts have both, but not equal. Layout and comments do not count."""
    ours, theirs = parts(source), parts(target)
    dump = lambda nodes: [ast.dump(node) for node in nodes]
    return [name for name in theirs if name in ours and dump(theirs[name]) != dump(ours[name])]


def span(source: bytes, node: ast.AST) -> slice:
    """Return where a node stands in its file, its decorators included."""
    lines = source.splitlines(keepends=True)
    start = lambda number: sum(map(len, lines[: number - 1]))
    decorators = getattr(node, "decorator_list", [])
    begin = start(decorators[0].lineno) if decorators else start(node.lineno) + node.col_offset
    return slice(begin, start(node.end_lineno) + node.end_col_offset)


def copy(source: bytes, target: bytes, names: list[str]) -> bytes:
    """Return the target with the named parts of the source in place of its own."""
    ours, theirs = parts(source), parts(target)
    changes = [(span(target, old), new) for name in names for old, new in zip(theirs[name], ours[name])]
    for place, new in sorted(changes, key=lambda change: -change[0].start):  # from the end: places stay valid
        target = target[: place.start] + source[span(source, new)] + target[place.stop :]
    return target


def main(line: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="script to copy from")
    parser.add_argument("targets", type=Path, nargs="*", help="files to copy into; default: the other scripts")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="copy these parts and no others")
    parser.add_argument("--check", action="store_true", help="change nothing")
    args = parser.parse_args(line)
    others = [args.source.parent / name for name in SCRIPTS if name != args.source.name]
    source, changed = args.source.read_bytes(), 0
    for path in args.targets or others:
        target = path.read_bytes()
        names = [name for name in differences(source, target) if not args.only or name in args.only]
        if path.name not in SCRIPTS and not (args.only or args.check):
            parser.error(f"{path.name} differs on purpose: name with --only what to copy of {' '.join(names)}")
        for name in names:
            print(f"{path.name}: {name} {'differs from' if args.check else 'copied from'} {args.source.name}")
        if names and not args.check:
            path.write_bytes(copy(source, target, names))
        changed += len(names)
    return int(args.check and changed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
