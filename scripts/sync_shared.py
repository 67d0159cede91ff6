"""Keeps equal what the algorithm scripts share by design: each holds its own copy, so that it can be read alone.

    python scripts/sync_shared.py grpo.py                   copy from grpo.py into the other scripts
    python scripts/sync_shared.py grpo.py --check           change nothing; a line for each difference, and exit code 1
    python scripts/sync_shared.py grpo.py my_fork.py --only generate collect     copy these parts into a fork

Shared are top-level functions and classes of the same name, and fields of `Args` of the same name (type and docstring;
the default is the script's own). Into a fork, which differs on purpose, goes only what --only names. If a part uses a
flag, an import or another name that a target lacks, nothing is copied, one line says what is missing, and the exit code
is 2.
"""

import argparse
import ast
import builtins
import functools
import symtable
import sys
from pathlib import Path

SCRIPTS = ("grpo.py", "rloo.py", "ppo.py", "reward_model.py")
OWN = {  # what has one name and may differ, and why
    "Args": "each algorithm has its own flags; fields are compared one by one",
    "main": "the algorithm itself",
    "check_args": "checks the flags of its own file",
    "Args.clip_low": "its default hangs on grpo's --loss",
    "Args.clip_high": "its default hangs on grpo's --loss",
    "Args.loss_aggregation": "its default hangs on grpo's --loss and on rloo's --ratio",
    "Args.num_epochs": "passes over a rollout, in reward_model.py over the data set",
}


tree = functools.cache(ast.parse)  # of a file's text: each is asked for many times


def parts(source: bytes) -> dict[str, list[ast.AST]]:
    """Return what a script may share, {name: nodes}: a function, a class, or type and docstring of a field of Args."""
    found = {}
    for node in tree(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = [node]
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            for field, text in zip(node.body, node.body[1:]):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    found[f"Args.{field.target.id}"] = [field.annotation, text]
    return {name: nodes for name, nodes in found.items() if name not in OWN}


def differences(source: bytes, target: bytes) -> list[str]:
    """Return the names of the parts that two scripts have both, but not equal. Layout and comments do not count."""
    ours, theirs = parts(source), parts(target)
    dump = lambda nodes: [ast.dump(node) for node in nodes]
    return [name for name in theirs if name in ours and dump(theirs[name]) != dump(ours[name])]


def span(source: bytes, node: ast.AST) -> slice:
    """Return where a node stands in its file, its decorators included."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    decorators = getattr(node, "decorator_list", [])
    begin = starts[decorators[0].lineno - 1] if decorators else starts[node.lineno - 1] + node.col_offset
    return slice(begin, starts[node.end_lineno - 1] + node.end_col_offset)


def copy(source: bytes, target: bytes, names: list[str]) -> bytes:
    """Return the target with the named parts of the source in place of its own."""
    ours, theirs = parts(source), parts(target)
    changes = [
        (span(target, old), source[span(source, new)])
        for name in names
        for old, new in zip(theirs[name], ours[name])
    ]  # fmt: skip
    for place, text in sorted(changes, key=lambda change: -change[0].start):  # from the end: places stay valid
        target = target[: place.start] + text + target[place.stop :]
    return target


# ---- what a part needs of the file that it stands in -----------------------------------------------------------------


@functools.cache
def definitions(source: bytes) -> dict[str, str]:
    """Return the top-level names of a file and where they are from: "plumbing.rollout.batch.collate", "" for its own."""
    found = {}
    for statement in tree(source).body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            found[statement.name] = ""
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found[node.id] = ""
            elif isinstance(node, ast.Import):
                for name in node.names:
                    found[name.asname or name.name.partition(".")[0]] = name.name
            elif isinstance(node, ast.ImportFrom):
                for name in node.names:
                    found[name.asname or name.name] = f"{node.module}.{name.name}"
    return found


def fields(path: Path, cls: str = "Args") -> set[str]:
    """Return the fields of a dataclass, with those that it inherits from other files of the project."""
    if not path.exists():
        return set()
    source = path.read_bytes()
    known, found = definitions(source), set()
    for node in tree(source).body:
        if isinstance(node, ast.ClassDef) and node.name == cls:
            found |= {field.target.id for field in node.body if isinstance(field, ast.AnnAssign)}
            for base in node.bases:
                name, *rest = ast.unparse(base).split(".")
                module, _, owner = ".".join([known.get(name) or name, *rest]).rpartition(".")
                found |= fields(path.parent / f"{module.replace('.', '/')}.py" if module else path, owner)
    return found


def names_used(text: bytes) -> set[str]:
    """Return the names that a piece of code looks up outside of itself, builtins aside."""
    top = symtable.symtable(text.decode(), "part", "exec")
    tables, names = [top], {symbol.get_name() for symbol in top.get_symbols()}
    while tables:
        tables += (table := tables.pop()).get_children()
        names |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}
    bound = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned()}
    return names - bound - {*dir(builtins)}


def flags_used(nodes: list[ast.AST]) -> set[str]:
    """Return NAME of every args.NAME and self.args.NAME."""
    attributes = [node for part in nodes for node in ast.walk(part) if isinstance(node, ast.Attribute)]
    owner = lambda node: getattr(node.value, "id", getattr(node.value, "attr", ""))
    return {node.attr for node in attributes if owner(node) == "args"}


def lacking(source: bytes, target: Path, names: list[str]) -> list[str]:
    """Return what the named parts of the source use and the target does not have, as words for a message."""
    there, here, flags = definitions(target.read_bytes()), definitions(source), fields(target)
    ours, found = parts(source), []
    for part in names:
        nodes = ours[part]
        used = {name for node in nodes for name in names_used(source[span(source, node)])}
        # A name that is one thing here and another there, such as an import and a function, is missing, too.
        known = {name for name, origin in there.items() if here.get(name, origin) == origin}
        missing = [here.get(name) or name for name in sorted(used - known)]
        missing += [f"--{name}" for name in sorted(flags_used(nodes) - flags)]
        found += [f"{name} (in {part})" for name in missing]
    return found


# ---- the command -----------------------------------------------------------------------------------------------------


def sync(source: Path, targets: list[Path], check: bool, only: list[str] | None = None) -> list[str]:
    """Copy into the targets, or with `check` compare with them; return a line for each difference.

    Raises:
        ValueError: if a target lacks what a part uses, or what to copy into a fork is not said; nothing is copied then.
    """
    text = source.read_bytes()
    if unknown := [name for name in only or [] if name not in parts(text)]:
        raise ValueError(f"--only {' '.join(unknown)}: {source.name} has no such part to share")
    names = {path: differences(text, path.read_bytes()) for path in targets}
    names = {path: [name for name in found if not only or name in only] for path, found in names.items()}
    for path, found in names.items():
        if found and path.name not in SCRIPTS and not check and not only:
            raise ValueError(f"{path.name} differs on purpose: name with --only what to copy of {' '.join(found)}")
    missing = {path: lacking(text, path, found) for path, found in names.items()}
    if not check and any(missing.values()):
        lines = [f"{path.name} lacks {', '.join(found)}" for path, found in missing.items() if found]
        raise ValueError(f"nothing is copied from {source.name}: {'; '.join(lines)}")
    for path, found in names.items():
        if found and not check:
            path.write_bytes(copy(text, path.read_bytes(), found))
    action = "differs from" if check else "copied from"
    return [f"{path.name}: {name} {action} {source.name}" for path, found in names.items() for name in found]


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="script to copy from")
    parser.add_argument(
        "targets", type=Path, nargs="*", help="files to copy into; default: the other scripts beside it"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="copy these parts and no others")
    parser.add_argument("--check", action="store_true", help="change nothing")
    args = parser.parse_args(words)
    beside = [args.source.parent / name for name in SCRIPTS if name != args.source.name]
    targets = args.targets or [path for path in beside if path.exists() and args.source.name in SCRIPTS]
    try:
        if not targets:
            raise ValueError(f"{args.source} is none of {', '.join(SCRIPTS)}: name the files to copy into")
        report = sync(args.source, targets, args.check, args.only)
    except (OSError, SyntaxError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(report) or f"{args.source.name} and {', '.join(path.name for path in targets)} do not differ")
    return int(args.check and bool(report))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
