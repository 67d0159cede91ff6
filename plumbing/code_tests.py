"""The tests of the reward `code`: what they look like, and whether the program of a response passes them.

The program is the last ```python, ```py or bare ``` block of a response, or the whole response without one. The tests
of a row are one of
  - Python with asserts (MBPP; HumanEval with its `check(name)` called at the end), as one text or a list of texts, also
    as JSON: run after the program, in the same interpreter;
  - {"inputs": [...], "outputs": [...]}, also as JSON (APPS, TACO, DeepCoder): what the program reads and has to print,
    each a text or a list of lines. Compared line by line, spaces at the ends aside; a number that the expected output
    writes with a point may differ by 1e-6;
  - the same with "fn_name": lists of arguments, and the values that this function (or method of a class Solution) has
    to return, compared as JSON. A value may stand in a list of its own, as in APPS.

Expected outputs never enter the program's process, so they cannot be forged. Asserts do: exiting early or printing does
not pass them, but a program that looks for the token in the frames above it can forge the report, and an object that is
equal to everything passes an assert. For programs that are trained hard against their tests, prefer outputs.

Programs run in plumbing/sandbox.py.
"""

import ast
import json
import math
import re
import textwrap
import time

from plumbing import sandbox


def passes(response: str, answer, seconds: float) -> bool:
    """Return whether the program of a response passes all tests of a row within so many seconds of wall clock.

    Raise ValueError for tests of another form, RuntimeError if the sandbox has ended.
    """
    tests, program = read_tests(answer), code_of(response)
    deadline = time.monotonic() + seconds
    run = lambda **job: sandbox.programs().run({"code": program, **job}, deadline - time.monotonic())
    if isinstance(tests, str):
        return run(tests=tests)["report"] is not None
    inputs, outputs, function = tests
    if not function:
        return all(same_output(run(stdin=text), expected) for text, expected in zip(inputs, outputs))
    try:
        values = json.loads(run(function=function, calls=inputs)["report"] or "[]")
    except (ValueError, RecursionError):  # a value that only its own interpreter can write
        return False
    return len(values) == len(outputs) and all(v == out or [v] == out for v, out in zip(values, outputs))


def code_of(response: str) -> str:
    """Return the last block of Python in a response, else the whole response."""
    blocks = re.findall(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", response, re.DOTALL | re.MULTILINE)
    blocks = [body for language, body in blocks if language.lower() in ("python", "python3", "py", "")]
    return textwrap.dedent(blocks[-1]) if blocks else response


def read_tests(answer) -> str | tuple[list, list, str | None]:
    """Return the tests of a row: Python with asserts, or (inputs, outputs, name of the function or None).

    Raise ValueError for tests of another form.
    """
    tests = answer
    if isinstance(tests, str) and tests.lstrip()[:1] in ("{", "["):
        tests = json.loads(tests)
    if isinstance(tests, dict):
        return read_inputs_and_outputs(tests)
    if isinstance(tests, list) and all(isinstance(test, str) for test in tests):
        tests = "\n".join(tests)
    if not isinstance(tests, str):
        raise ValueError(f"tests are Python asserts or {{inputs, outputs}}, not {type(tests).__name__}")
    check_asserts(tests)
    return tests


def read_inputs_and_outputs(tests: dict) -> tuple[list, list, str | None]:
    inputs, outputs, function = (tests.get(key) for key in ("inputs", "outputs", "fn_name"))
    if not (isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs) > 0):
        raise ValueError("tests need as many outputs as inputs, in two lists")
    if function:
        if not all(isinstance(arguments, list) for arguments in inputs):
            raise ValueError(f"tests of the function {function!r} need a list of arguments as each input")
        return inputs, outputs, function
    lines = [side if isinstance(side, list) else [side] for side in inputs + outputs]
    if not all(isinstance(line, str) for side in lines for line in side):
        raise ValueError("tests without fn_name need texts, or lists of lines, as inputs and outputs")
    texts = ["\n".join(side) for side in lines]
    return texts[: len(inputs)], texts[len(inputs) :], None


def check_asserts(tests: str) -> None:
    """Raise ValueError for tests that are not Python or that every program passes."""
    try:
        statements = ast.parse(tests).body
    except (SyntaxError, RecursionError) as error:
        raise ValueError(f"tests are not Python: {error}") from error
    # A check(candidate) that nothing calls would pass every program.
    definitions = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign)
    runs = ast.Module([statement for statement in statements if not isinstance(statement, definitions)], [])
    asserts = any(isinstance(node, ast.Assert) for node in ast.walk(ast.Module(statements, [])))
    if not asserts or not any(isinstance(node, (ast.Assert, ast.Call)) for node in ast.walk(runs)):
        raise ValueError("tests assert nothing (or define a function that nothing calls)")


def same_output(result: dict, expected: str) -> bool:
    """Return whether a program ended well and printed what is expected."""
    printed, wanted = ([line.split() for line in text.strip().splitlines()] for text in (result["stdout"], expected))
    if result["status"] or [len(line) for line in printed] != [len(line) for line in wanted]:
        return False
    return all(same_word(*words) for line, other in zip(printed, wanted) for words in zip(line, other))


def same_word(word: str, expected: str) -> bool:
    """Return whether a printed word is the expected one, or about the same number."""
    try:
        close = "." in expected and math.isclose(float(word), float(expected), rel_tol=1e-6, abs_tol=1e-6)
    except ValueError:
        close = False
    return word == expected or close
