"""Runs programs of a model: in processes under limits on this machine, or on a SandboxFusion server.

caller -> plumbing/rewards/sandbox_program.py (namespaces) -> a process for each input (limits, Landlock)
"""

import contextlib
import ctypes
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "sandbox_program.py")


def run(code: str, inputs: list[str], seconds: float, server: str = "") -> list[tuple[int, str]]:
    """Run a program once for each input, which it reads from stdin, until it fails on one of them.

    Return (status, stdout) of each: the exit code, or 128 + its number if a signal, as of the time limit, ended it.

    Args:
        seconds: of wall clock, for all inputs together.
        server: the address of a SandboxFusion server; "" for this machine.

    Raise RuntimeError, OSError or an exception of urllib3 if programs cannot be run.
    """
    return run_there(server, code, inputs, seconds) if server else run_here(code, inputs, seconds)[1]


def run_here(code: str, inputs: list[str], seconds: float) -> tuple[str, list[tuple[int, str]]]:
    """Return what does not hold programs on this machine ("" for nothing), and the results."""
    job = json.dumps([code, inputs, time.monotonic() + seconds]).encode()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, tempfile.TemporaryFile() as output:
        home = f"{folder}/home"
        process = subprocess.Popen(
            [sys.executable, "-I", "-X", "utf8", PROGRAM, folder, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.defpath, "HOME": home, "TMPDIR": home, "OMP_NUM_THREADS": "1"},  # one core a program
            start_new_session=True,
        )
        try:
            process.communicate(job, timeout=1.2 * seconds)  # its clock ends it before
        except subprocess.TimeoutExpired:
            return "", []
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what the program has left behind
            process.wait()
        if process.returncode:
            raise RuntimeError(f"the process of a program ended with exit code {process.returncode}")
        output.seek(0)
        missing, results = json.load(output)
    return missing, [(status, stdout) for status, stdout in results]


def run_there(server: str, code: str, inputs: list[str], seconds: float) -> list[tuple[int, str]]:
    """Run a program on a SandboxFusion server, by POST /run_code."""
    import urllib3

    retries = urllib3.Retry(3, backoff_factor=1, status_forcelist=(429, 502, 503, 504), allowed_methods=None)
    address, end, results = f"{server.rstrip('/').removesuffix('/run_code')}/run_code", time.monotonic() + seconds, []
    for text in inputs:
        left = max(1.0, end - time.monotonic())
        body = {"code": code, "language": "python", "stdin": text, "run_timeout": left}
        response = urllib3.request("POST", address, json=body, retries=retries, timeout=left + 5)
        answer = response.json()
        if response.status != 200 or answer["status"] == "SandboxError":
            raise RuntimeError(f"{address}: status {response.status}, {str(answer)[:200]}")
        program = answer["run_result"]
        results.append((program["return_code"] if program["status"] == "Finished" else 1, program["stdout"]))
        if results[-1][0]:
            break
    return results


@functools.cache
def hide_this_process() -> None:
    """Let no other process of this user look into this one, which knows expected outputs (PR_SET_DUMPABLE)."""
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)


@functools.cache
def open_limits() -> str:
    """Return what does not hold programs on this machine, "" for nothing. Raise RuntimeError if none runs."""
    missing, results = run_here("print(input())", ["1"], 60.0)
    if results != [(0, "1\n")]:
        raise RuntimeError("a program that prints what it reads does not run within the limits")
    return missing
