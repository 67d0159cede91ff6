"""The caller's end of the process in which programs of a model run: one server a reward worker, started once.

    reward worker -> server (plumbing/rewards/sandbox_server.py) -> a process for each line -> the program's

The server knows no expected output: it gets programs, what they read, and asserts. What holds a program: see there.
"""

import ctypes
import functools
import json
import os
import subprocess
import sys
import tempfile

# Isolated (-I) and without site-packages (-S), so that the server imports its own files and the standard library only.
SERVER = """
import sys
root, *packages = sys.argv[1:]
sys.path.append(root)
from plumbing.rewards import sandbox_server
sys.path.remove(root)
sandbox_server.serve(packages)
"""
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class Programs:
    """A server of programs and the pipe to it."""

    def __init__(self):
        packages = [path for path in sys.path if path.endswith("-packages")]  # numpy, if it is installed
        self.server = subprocess.Popen(
            [sys.executable, "-I", "-S", "-X", "utf8", "-c", SERVER, ROOT, *packages],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PATH": os.defpath, "TMPDIR": tempfile.gettempdir(), "OMP_NUM_THREADS": "1"},  # one core a program
            start_new_session=True,  # it has to outlive the worker, if only to remove a folder
        )
        hello = self.server.stdout.readline()
        if not hello:
            raise RuntimeError("the server of programs did not start")
        self.warning: str | None = json.loads(hello)["warning"]  # of what does not hold a program on this machine
        if self.run({"code": "import random\nprint(input())", "stdin": "1"}, 60.0)["stdout"] != "1\n":
            raise RuntimeError("a program that prints what it reads does not run within the limits")

    def run(self, job: dict, seconds: float) -> dict:
        """Run a program for at most so many seconds of wall clock.

        Args:
            job: "code", and one of "stdin" (a text to read), "tests" (Python to run after it), or "function" and
                "calls" (lists of arguments).
        Returns:
            "status": 0 if it ended well. "stdout": what it printed. "report": None unless it ran to its end; for
            "calls" a JSON list of the values returned.
        """
        try:
            self.server.stdin.write(json.dumps({**job, "seconds": max(seconds, 0.0)}).encode() + b"\n")
            self.server.stdin.flush()
            return json.loads(self.server.stdout.readline())
        except (OSError, ValueError) as error:
            programs.cache_clear()  # the next response gets a new one
            raise RuntimeError("the server of programs has ended") from error


programs = functools.cache(Programs)  # one server a worker


def hide_this_process() -> None:
    """Let no other process of this user look into this one, which knows expected outputs (PR_SET_DUMPABLE)."""
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
