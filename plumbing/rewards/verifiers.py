r"""The functions that check an answer: from a response and a column of its row to a score.

They run in processes (plumbing/processes.py), which are killed when a check hangs. A check that
raises an exception gives no score, a wrong answer gives 0. plumbing/rewards/answers.py defines the
final answer. The larger checks are in extras/verifiers/.
"""

import functools
import importlib
import logging
import re
from typing import Callable, NamedTuple

from plumbing.rewards.answers import gold_answer, marked_number, plain_number, stated_text


class Verifier(NamedTuple):
    """A built-in reward."""

    check: Callable[..., float]
    # Of the row, whose value `check` gets as second argument; "" if it reads the response only.
    column: str
    package: str = "re"  # that it imports
    # Seconds of CPU time, after which the response is wrong if the reference is not to blame.
    limit: float = float("inf")
    read: Callable = str  # that column; raises an exception where nothing can be compared with it
    most: int = 1  # responses in a call: more where asking a process takes longer than the check


def gsm8k(response: str, answer) -> float:
    """Return 1 if the last "#### number" of the response is the reference number (strict GSM8K)."""
    return float(marked_number(response) == reference_number(answer))


def reference_number(answer):
    """Return the number of a reference; raise ValueError if it is not one."""
    number = plain_number(gold_answer(answer))
    if number is None:
        raise ValueError(f"{answer!r:.60} is not a number")
    return number


def exact(response: str, answer) -> float:
    """Return 1 if the final answer of the response, or all of it, is the reference, without space
    around it.
    """
    return float(
        bool({stated_text(response), response.strip()} & {gold_answer(answer), str(answer).strip()})
    )


def format(response: str, _=None) -> float:
    """Return 1 for the form of DeepSeek-R1: <think> ... </think> <answer> ... </answer>, each tag
    once, none empty.
    """
    form = r"\s*<think>\s*\S.*?</think>\s*<answer>\s*\S.*?</answer>\s*"
    once = all(response.count(tag) == 1 for tag in ("<think>", "</think>", "<answer>", "</answer>"))
    return float(once and bool(re.fullmatch(form, response, re.DOTALL)))


SMALL = {
    "gsm8k": Verifier(gsm8k, "answer", read=reference_number, most=64),
    "exact": Verifier(exact, "answer", read=gold_answer, most=64),
    "format": Verifier(format, "", most=64),
}
# Name of --reward: the module of extras/verifiers/ whose VERIFIER it is.
MODULES = {
    "math": "math_verifier",
    "code": "code_tests",
    "ifeval": "ifeval",
    "reasoning_gym": "reasoning_gym",
}
NAMES = (*SMALL, *MODULES)


@functools.cache
def verifier(name: str) -> Verifier:
    """Return the built-in reward of one of NAMES."""
    if name in SMALL:
        return SMALL[name]
    return importlib.import_module(f"extras.verifiers.{MODULES[name]}").VERIFIER


class Checks:
    """What a process of verifiers does."""

    def __init__(self):
        # math-verify warns at every call that its time limits are off.
        logging.disable(logging.WARNING)

    def score(self, check: Callable, calls: list[tuple]) -> tuple[list, str]:
        """Return the score of a check with each of the arguments, None where it raises an
        exception, and the last one of these.
        """
        scores = []
        reason = ""
        for arguments in calls:
            try:
                scores.append(check(*arguments))
            except BaseException as error:
                scores.append(None)
                reason = f"{type(error).__name__}: {error}"[:1000]
        return scores, reason
