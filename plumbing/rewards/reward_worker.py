"""The process in which answers are checked, and the caller's end of it: what hangs or crashes there can be killed.

A line of JSON goes in, lines of JSON come out. The first line in is {"load": [reward names], "timeout": seconds}. It is
answered with {"loaded": true}, with "warning": text if there is one, or with {"reward": name, "error": why}. Each later
line in is a call:
    {"reward": name, "prompts": [...], "responses": [...], "ids": [[token ids], ...], "columns": {"answer": [...], ...}}
A built-in reward answers {"scores": [x]} or {"error": why} for each response, so that the caller can tell which one is
stuck. A function from a file gets all responses and answers once. {"equal_answers": [responses]}, for a vote among
them, is answered with {"answers": [...]}: see `equal_answers` in plumbing/rewards/math_verifier.py.

This module imports plumbing/rewards/verifiers.py, math_verifier.py and reward_functions.py only (and sandbox.py for the reward
`code`), so a worker starts in a tenth of a second and without torch.
"""

import contextlib
import functools
import importlib
import importlib.util
import json
import logging
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from typing import Callable

from plumbing.rewards.functions import load_function, score_by
from plumbing.rewards.math_verifier import equal_answers
from plumbing.rewards.verifiers import VERIFIERS

POLL = 0.1  # seconds between two looks at whether the run is interrupted

# Not from utils, which imports torch.
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LARGEST = 1e18  # score; the square of a larger one would not fit into float32, and its advantage become 0


def never() -> bool:
    """Return that the run is not interrupted."""
    return False


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


class Worker:
    """A Python process that reads and writes lines of JSON."""

    def __init__(self, *words: str):
        """Start Python with these words of its command line."""
        self.process = start_python(*words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.lines: queue.Queue = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def send(self, message) -> None:
        with contextlib.suppress(BrokenPipeError):  # that the process has died is seen when its answer is read
            self.process.stdin.write(json.dumps(message, default=str).encode() + b"\n")
            self.process.stdin.flush()

    def receive(self, timeout: float, interrupted: Callable[[], bool] = never):
        """Return the next answer; if none comes, kill the process and return {"error": why, "dead": True}.

        Once the run is interrupted nobody waits for the answer: {"error": why} is returned.
        """
        end = time.monotonic() + timeout
        while not interrupted() and (left := end - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                line = self.lines.get(timeout=min(POLL, left))
                if line is None:
                    return {"error": f"its process ended with exit code {self.process.wait()}", "dead": True}
                return json.loads(line)
        if interrupted():
            return {"error": "the run is interrupted"}
        self.kill()
        return {"error": f"gave no answer within --reward_timeout {timeout:g} s", "dead": True}

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


# ---- in the process --------------------------------------------------------------------------------------------------


def main() -> None:
    logging.disable(logging.WARNING)  # math-verify warns at every call that its time limits are off
    # What a reward function prints must not get between the answers: it goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    process = os.getpid()

    def answer(**message) -> None:
        if os.getpid() != process:  # a child that a function has forked, and that came back from it
            os._exit(1)
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    settings = json.loads(sys.stdin.readline())
    timeout, functions, warning = settings["timeout"], {}, {}
    for name in settings["load"]:
        try:
            functions[name] = load_verifier(name, timeout) if name in VERIFIERS else load_function(name)
            warning |= sandbox_warning() if name == "code" else {}
        except BaseException as error:
            answer(reward=name, error=f"{type(error).__name__}: {error}")
            return
    answer(loaded=True, **warning)

    for line in sys.stdin:
        for call in calls(json.loads(line), functions):
            # The caller kills this process after the time limit; if the caller is gone, the kernel does, a bit later.
            signal.setitimer(signal.ITIMER_REAL, timeout + 5)
            try:
                answer(**call())
            except BaseException as error:
                traceback.print_exc()
                answer(error=f"{type(error).__name__}: {error}")
        signal.setitimer(signal.ITIMER_REAL, 0)


def load_verifier(name: str, timeout: float) -> Callable:
    """Return the function of a built-in reward; import its package now, as that can take longer than a call may."""
    check, package = VERIFIERS[name].check, VERIFIERS[name].package
    if package:
        module = package.replace("-", "_")
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"takes the package {package} (pip install {package})")
        importlib.import_module(module)
    # Less than the call may take: a program that is stuck scores 0, a call that is stuck has no score.
    return functools.partial(check, seconds=0.8 * timeout) if name == "code" else check


def sandbox_warning() -> dict[str, str]:
    from plumbing.rewards import sandbox

    warning = sandbox.open_limits()
    return {"warning": warning} if warning else {}


def calls(request: dict, functions: dict[str, Callable]) -> list[Callable[[], dict]]:
    """Return the calls that answer a request: one for each response to a built-in reward, else one for all of them."""
    if "equal_answers" in request:
        return [lambda: {"answers": equal_answers(request["equal_answers"])}]
    name, responses, columns = request["reward"], request["responses"], request["columns"]
    function = functions[name]
    if name not in VERIFIERS:
        return [lambda: {"scores": score_by(function, request["prompts"], responses, request["ids"], columns)}]
    values = columns.get(VERIFIERS[name].column, [None] * len(responses))
    return [lambda response=r, value=v: {"scores": [function(response, value)]} for r, v in zip(responses, values)]


def columns_of(rows: list[dict]) -> dict[str, list]:
    """Return the columns that prompts had in their files, a value a prompt; None where a row lacks one."""
    tables = [row.get("columns", {}) for row in rows]
    names = sorted({name for table in tables for name in table})
    return {name: [table.get(name) for table in tables] for name in names}


def finite_or_nan(score) -> float:
    """Return a score as a float; NaN for None, infinity and what is over LARGEST."""
    score = math.nan if score is None else float(score)
    return score if abs(score) <= LARGEST else math.nan


if __name__ == "__main__":
    main()
