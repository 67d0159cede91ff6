"""Functions from users' files (--reward, --tools, --environment), and the start of the processes
that call them.

Imports nothing of this project, and no torch: the processes start in a fraction of a second.
"""

import contextlib
import importlib.util
import inspect
import operator
import os
import re
import sys
import threading
import types
from collections.abc import Callable

SECONDS_TO_LOAD = 300.0  # for imports of users' files, which may be slow on a busy file system
starting = threading.Lock()
modules: dict[str, types.ModuleType] = {}  # users' files, by their paths


def load_function(name: str) -> Callable:
    """Return the function or class of "path/to/file.py:function", or the method of
    ":judge.score".
    """
    path, _, function = name.rpartition(":")
    file = os.path.abspath(path)
    if file not in modules:
        folder, base = os.path.split(file)
        sys.path.insert(0, folder)  # for what it imports
        # The processes of a pool that a function makes import the file by this name.
        name = base.removesuffix(".py")
        if "." in name or name in sys.modules:  # that of another file
            name = re.sub(r"\W", "_", file)
        spec = importlib.util.spec_from_file_location(name, file)
        # Where pickle and dataclasses look for its names.
        modules[file] = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(modules[file])
    return operator.attrgetter(function)(modules[file])


def accepted(function: Callable, named: dict) -> dict:
    """Return those of the named arguments that a function has parameters for."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values()):
        return named
    return {name: value for name, value in named.items() if name in parameters}


@contextlib.contextmanager
def without_main():
    """Hide the script that runs here from a process that starts within, which would import it, and
    torch with it.
    """
    with starting:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main
