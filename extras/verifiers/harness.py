"""Runs a program and its asserts, then prints a secret, the values of its calls as JSON, and the
secret again.

The text of this file, with a call of `main` at its end, is what the sandbox runs. The program must
not replace what checks it, so a name in the asserts is looked up
  1. in `own`: builtins and copies of modules, from before the program;
  2. in `names`, those of the program, to which the asserts add theirs.
What the asserts compare goes through `plain`, which refuses values that equal anything.
"""

import ast
import builtins
import importlib
import json
import os
import sys
import types
from typing import Any

# Copied if the asserts use them; a copy of another module would hide what the asserts patch.
COPIED = (
    "cmath collections copy decimal fractions functools itertools json math numpy numpy.linalg "
    "numpy.testing"
).split()
SIMPLE = frozenset((int, str, float, bool))
# What no program can know.
PROBES = (object(), 2**89 - 1, os.urandom(16).hex(), [os.urandom(16).hex()])


def copies_of_modules(asserts: str) -> dict[str, types.ModuleType]:
    """Return the copies of those of COPIED that the asserts name, by their names."""
    copies: dict[str, types.ModuleType] = {}
    for name in COPIED:
        package, _, last = name.rpartition(".")
        if last in asserts:
            try:
                original = importlib.import_module(name)
            except ImportError:
                continue
            copies[name] = copy = types.ModuleType(name)
            vars(copy).update(vars(original))
            if package in copies:
                setattr(copies[package], last, copy)
    return copies


def plain(value: Any) -> Any:
    """Return a value, unless it, or one that it holds, equals what no program can know."""
    if type(value) not in SIMPLE:
        if isinstance(value, (list, tuple, set, frozenset, dict)):
            for held in value.values() if isinstance(value, dict) else value:
                plain(held)
        for probe in PROBES:
            try:
                equal = bool(value == probe)
            except Exception:
                continue
            if equal:
                raise AssertionError("a value that equals others, too")
    return value


def main(
    program: str, asserts: str, libraries: list[str], function: str, calls: list, secret: str
) -> None:
    """Run the program, then its asserts, then the calls of a function; print the report and exit.

    Args:
        libraries: modules that the program finds imported.
        calls: lists of arguments.
    """
    # From before the program.
    run, write, leave, load, dumps = exec, os.write, os._exit, __import__, json.dumps
    before = dict(vars(builtins))
    copies = copies_of_modules(asserts)
    imported: dict[str, Any] = {}

    def import_copy(
        name: str, names: Any = None, local: Any = None, wanted: Any = (), level: int = 0
    ) -> types.ModuleType:
        found = load(name, names, local, wanted, level)  # for "import a.b" this is a
        return copies.get(name.partition(".")[0] if name in copies and not wanted else name, found)

    class Shared(dict):
        """Takes the names that the asserts store."""

        def __setitem__(self, name: str, value: Any) -> None:
            original = [key for key in copies if copies[key] is value]
            if original or name in own:
                own[name] = value
            names[name] = sys.modules[original[0]] if original else value

    def checked(compared: ast.expr) -> ast.expr:
        if isinstance(compared, ast.Constant):
            return compared
        return ast.Call(ast.Name(secret, ast.Load()), [compared], [])

    module: Any = types.ModuleType("response")
    sys.modules["__main__"] = sys.modules["response"] = module
    names = vars(module)
    for library in libraries:
        exec(f"import {library}\nfrom {library} import *", imported)
    # Here no function of theirs is taken for one of the program.
    vars(builtins).update(imported | before)
    tree = ast.parse(asserts)
    nodes = list(ast.walk(tree))
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    for node in nodes:
        if isinstance(node, ast.Compare):
            node.left, *node.comparators = map(checked, (node.left, *node.comparators))
    tests = compile(ast.fix_missing_locations(tree), "tests.py", "exec")
    try:
        exec(compile(program, "code.py", "exec", dont_inherit=True), names)
    except SystemExit:
        pass  # its functions are there to be tested
    vars(builtins).update(before)
    owner = module.Solution() if calls and not hasattr(module, function) else module
    # The second place of lookup is where Python looks for builtins.
    own = before | {secret: plain, "__builtins__": names, "__name__": "__main__"}
    if not used & names.keys() - before.keys():  # asserts of functions that have names of builtins
        for name in used & names.keys():
            del own[name]
    for name in imported.keys() - before.keys():
        names.setdefault(name, imported[name])
    names.update(__import__=import_copy, __build_class__=before["__build_class__"])
    run(tests, own, Shared())
    values = [dumps(getattr(owner, function)(*call)) for call in calls]
    write(1, f"{secret}[{','.join(values)}]{secret}".encode())
    leave(0)
