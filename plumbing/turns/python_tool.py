"""A tool that runs Python programs in the sandbox of the reward `code`: --tools plumbing/turns/python_tool.py:python

Imports plumbing/rewards/sandbox.py (the process in which programs of a model run).
"""

import os
import sys

from plumbing.rewards.sandbox import Programs, programs

SECONDS = 10.0  # of wall clock, that a program has
# What ends a program is printed, for the model to see: the sandbox gives only what was printed.
PROGRAM = """
try:
    exec(compile({code!r}, "code.py", "exec"), {{"__name__": "__main__"}})
except Exception as error:
    print(f"{{type(error).__name__}}: {{error}}")
"""


def python(code: str) -> str:
    """Run a Python program and return what it prints. Variables are not kept for the next program.

    Args:
        code: the program, which has to print its results.
    """
    result = programs().run({"code": PROGRAM.format(code=code), "stdin": ""}, SECONDS)
    killed = os.WIFSIGNALED(result["status"])
    return result["stdout"] + (f"Error: the program crashed, or took over {SECONDS:g} s" if killed else "")


def warn_of_open_limits() -> None:
    """Print what does not hold a program on this machine. (Later each conversation has a server of its own.)"""
    started = Programs()
    if started.warning and os.environ.get("RANK", "0") == "0":
        print(f"warning: plumbing/turns/python_tool.py: {started.warning}", file=sys.stderr)
    started.server.stdin.close()
    started.server.wait()


warn_of_open_limits()  # once, when --tools is loaded
