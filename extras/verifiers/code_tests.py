"""The tests of the reward `code`: what they look like, and whether the program of a response passes
them.

The program is the last ```python or ```py block of what counts of a response (`final_text` in
plumbing/rewards/answers.py), without one the last bare ``` block, or all of it. The tests of a row
are one of
  - Python with asserts (MBPP; HumanEval with its `check(name)` called at the end), as one text or a
    list of texts, also as JSON: run after the program, in the same interpreter, with __name__ ==
    "__main__". unittest's are refused;
  - {"inputs": [...], "outputs": [...]}, also as JSON (APPS, TACO, DeepCoder): what the program
    reads and has to print, each a text or a list of lines. Compared line by line, without spaces at
    the ends; a number that the expected output writes with a point may differ by 1e-6;
  - the same with "fn_name": lists of arguments, and the values that this function (or method of a
    class Solution) has to return, compared as JSON. A value may be in a list of one, as in APPS.
    LIBRARIES are imported, as on LeetCode.

Expected outputs never enter a process that runs a program. Asserts do. Exiting, printing, other
builtins or functions of math and numpy, and values that equal anything do not pass them
(tests/data/attacks_on_asserts.jsonl); a program that searches the frames of its interpreter can.
For programs that are trained hard against their tests, prefer outputs.
"""

import ast
import functools
import json
import math
import os
import re
import textwrap
from pathlib import Path
from typing import Annotated, Any

import pydantic

from plumbing.rewards.answers import final_text
from plumbing.rewards.verifiers import Verifier

HARNESS = Path(__file__).with_name("harness.py").read_text()
Text = Annotated[str, pydantic.BeforeValidator(lambda x: "\n".join(x) if is_lines(x) else x)]
LIBRARIES = "typing bisect collections functools heapq itertools math operator re string".split()
DEFINITIONS = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign)


def is_lines(value: Any) -> bool:
    """Return whether a value is a list of texts."""
    return isinstance(value, list) and all(isinstance(line, str) for line in value)


class Outputs(pydantic.BaseModel):
    """What a program reads and has to print."""

    inputs: list[Text]
    outputs: list[Text]
    fn_name: None = None


class Calls(pydantic.BaseModel):
    """The arguments of a function's calls and their values."""

    inputs: list[list]
    outputs: list
    fn_name: str
    asserts: str = ""


def read_tests(answer: Any) -> Outputs | Calls:
    """Return the tests of a row. Raise ValueError, TypeError or SyntaxError for tests of another
    form.
    """
    if isinstance(answer, str) and answer.lstrip()[:1] in ("{", "["):
        answer = json.loads(answer)
    if isinstance(answer, (str, list)):
        asserts = answer if isinstance(answer, str) else "\n".join(answer)
        if "TestCase" in asserts:
            raise ValueError("unittest classes are not supported, only asserts")
        if all(isinstance(statement, DEFINITIONS) for statement in ast.parse(asserts).body):
            raise ValueError("asserts that nothing calls would pass every program")
        return Calls(inputs=[], outputs=[], fn_name="", asserts=asserts)
    tests = pydantic.TypeAdapter(Outputs | Calls).validate_python(answer)
    if not len(tests.inputs) == len(tests.outputs) > 0:
        raise ValueError(f"tests have {len(tests.inputs)} inputs and {len(tests.outputs)} outputs")
    return tests


def code(response: str, answer: Any, seconds: float = 24.0) -> float:
    """Return 1 if the program of a response passes all tests of its row, else 0; see `sandbox.run`.

    Raise an exception for tests of another form, and if no program can be run.
    """
    from extras.verifiers import sandbox

    # PR_SET_DUMPABLE: no program looks into this process, which knows the outputs
    sandbox.libc.prctl(4, 0, 0, 0, 0)
    tests = read_tests(answer)
    program = code_of(response)
    if isinstance(tests, Outputs):
        results, _ = sandbox.run(program, tests.inputs, seconds)
        # Fewer results than outputs end with one that failed.
        return float(all(map(same_output, results, tests.outputs)))
    secret = os.urandom(16).hex()
    given = {
        "program": program,
        "asserts": tests.asserts,
        "libraries": LIBRARIES if tests.fn_name else ["typing"],
        "function": tests.fn_name,
        "calls": tests.inputs,
        "secret": secret,
    }
    harness = f"{HARNESS}\nmain(**json.loads({json.dumps(given)!r}))"
    results, _ = sandbox.run(harness, [""], seconds)
    _, *report = next(results)[1].split(secret)
    if len(report) != 2:
        return 0.0
    try:
        values = json.loads(report[0])
        return float(
            len(values) == len(tests.outputs) and all(map(same_value, values, tests.outputs))
        )
    except (ValueError, RecursionError):  # a value that only its interpreter can write
        return 0.0


# (fence, language, block), to a line with the same fence or to the end.
BLOCK = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*(\w*).*\n((?s:.*?))(?:^[ \t]*\1|\Z)", re.MULTILINE)


def code_of(response: str) -> str:
    """Return the last block of Python in the `final_text` of a response, else all of it."""
    text = final_text(response)
    blocks = BLOCK.findall(text)
    tagged = [
        block for _, language, block in blocks if language.lower() in ("python", "python3", "py")
    ]
    programs = tagged or [block for _, language, block in blocks if not language]
    return textwrap.dedent(programs[-1]) if programs else text


def same_output(result: tuple[int, str], expected: str) -> bool:
    """Return whether a program ended well and printed what is expected."""
    status, printed = result
    return not status and same_words(
        *(re.findall(r"\S+|\n", text.strip()) for text in (printed, expected))
    )


def same_value(value: Any, expected: Any) -> bool:
    """Return whether a value, or a list of it, is the expected one, its floats about the same."""
    if value == expected or [value] == expected:
        return True
    # One scalar or bracket a line.
    write = functools.partial(json.dumps, indent=0, sort_keys=True, separators=("", ":\n"))
    wanted = write(expected).split("\n")
    return any(same_words(write(x).split("\n"), wanted) for x in (value, [value]))


def same_words(words: list[str], expected: list[str]) -> bool:
    """Return whether words are the expected ones; a number that is expected with a point may differ
    by 1e-6.
    """
    close = functools.partial(math.isclose, rel_tol=1e-6, abs_tol=1e-6)
    try:
        return all(
            x == y or "." in y and close(float(x), float(y))
            for x, y in zip(words, expected, strict=True)
        )
    except ValueError:  # more or fewer words, or one that is not a number
        return False


VERIFIER = Verifier(code, "answer", read=read_tests)
