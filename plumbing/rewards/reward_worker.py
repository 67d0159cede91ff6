"""Starts Python for plumbing/turns/tool_processes.py, until that uses multiprocessing."""

import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def start_python(*words: str, **files) -> subprocess.Popen:
    """Start Python with these words of its command line. It can import plumbing, whatever the current folder is.

    Args:
        files: its stdin and stdout, see subprocess.Popen.
    """
    path = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
    # In a session of its own: a Ctrl-C at the terminal is for the trainer. -P keeps the current folder's files from
    # standing in for packages.
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.Popen([sys.executable, "-P", *words], start_new_session=True, env=environment, **files)
