"""A tool that runs Python programs in the sandbox of the reward `code`: --tools
scripts/train/python_tool.py:python
"""

import multiprocessing
import os
import sys

from extras.verifiers import sandbox

SECONDS = 10.0  # of wall clock for a program
# The sandbox returns what a program prints to stdout, so stderr and exceptions go there, for the
# model to read.
PROGRAM = """
import sys
sys.stderr, sys.tracebacklimit = sys.stdout, 0  # of an exception, type and text only
exec(compile({code!r}, "code.py", "exec"), {{"__name__": "__main__"}})
"""


def python(code: str) -> str:
    """Run a Python program and return what it prints. Variables are not kept for the next program.

    Args:
        code: the program, which has to print its results.
    """
    _, (status, printed) = sandbox.run(PROGRAM.format(code=code), [""], SECONDS)
    return printed + (
        f"Error: the program crashed, or ran for over {SECONDS:g} s" if status > 128 else ""
    )


# Once, in the process from which they are forked, rather than in each process of a conversation.
if multiprocessing.parent_process() is None:
    missing = sandbox.open_limits()
    if missing and os.environ.get("RANK", "0") == "0":
        print(f"warning: scripts/train/python_tool.py: {missing}", file=sys.stderr)
