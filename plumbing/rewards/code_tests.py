"""The tests of the reward `code`: what they look like, and whether the program of a response passes them.

The program is the last ```python, ```py or bare ``` block of what counts of a response (`final_text` in
plumbing/rewards/answers.py), or all of that if there is none. The tests of a row are one of
  - Python with asserts (MBPP; HumanEval with its `check(name)` called at the end), as one text or a list of texts, also
    as JSON: run after the program, in the same interpreter, with __name__ == "__main__". Not unittest's;
  - {"inputs": [...], "outputs": [...]}, also as JSON (APPS, TACO, DeepCoder): what the program reads and has to print,
    each a text or a list of lines. Compared line by line, spaces at the ends aside; a number that the expected output
    writes with a point may differ by 1e-6;
  - the same with "fn_name": lists of arguments, and the values that this function (or method of a class Solution) has
    to return, compared as JSON. A value may stand in a list of its own, as in APPS.

Expected outputs never enter the program's process, so they cannot be forged. Asserts do: exiting early or printing does
not pass them, but a program that looks for the token in the frames above it can forge the report, and an object that is
equal to everything passes an assert. For programs that are trained hard against their tests, prefer outputs.

Programs run in plumbing/rewards/sandbox.py's server.
"""

import ast
import itertools
import json
import math
import re
import textwrap
import time
from typing import Iterator

from plumbing.rewards import sandbox
from plumbing.rewards.answers import final_text


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
    report = run(function=function, calls=inputs)["report"] or "[]"
    if len(report) > 32 * len(json.dumps(outputs)):  # more than any way to write these numbers takes
        return False
    try:
        values = json.loads(report)
        return len(values) == len(outputs) and all(
            same_value(value, expected) or same_value([value], expected) for value, expected in zip(values, outputs)
        )
    except (ValueError, OverflowError, RecursionError):  # a value that only its own interpreter can write
        return False


def code_of(response: str) -> str:
    """Return the last block of Python in the `final_text` of a response, else all of it."""
    text = final_text(response)
    program, language, lines = text, None, []
    for line in text.splitlines(keepends=True):
        if language is None:  # outside of a block
            if opening := re.match(r"[ \t]*```[ \t]*(\w*)", line):
                language, lines = opening[1].lower(), []
        elif line.strip() != "```":
            lines.append(line)
        else:
            if language in ("python", "python3", "py", ""):
                program = textwrap.dedent("".join(lines))
            language = None
    return program


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
    """Raise ValueError for tests that are not Python, that every program passes, or that are unittest's."""
    try:
        tree = ast.parse(tests)
    except (SyntaxError, RecursionError) as error:
        raise ValueError(f"tests are not Python: {error}") from error
    defined = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    if any(ast.unparse(base).endswith("TestCase") for node in defined for base in getattr(node, "bases", ())):
        raise ValueError("tests are asserts that run as they stand, not classes of unittest")
    # A check(candidate) that nothing calls would pass every program.
    runs = [node for statement in tree.body if statement not in defined for node in ast.walk(statement)]
    uses = {node.id for node in runs if isinstance(node, ast.Name)} & {node.name for node in defined}
    asserts = any(isinstance(node, ast.Assert) for node in (ast.walk(tree) if uses else runs))
    if not asserts:
        raise ValueError("tests assert nothing (or define a function that nothing calls)")


def same_output(result: dict, expected: str) -> bool:
    """Return whether a program ended well and printed what is expected."""
    words = itertools.zip_longest(split(result["stdout"]), split(expected), fillvalue="")
    return not result["status"] and all(same_word(word, other) for word, other in words)


def split(text: str) -> Iterator[str]:
    """Yield the words and line ends of a text, one by one: far more may be printed than is expected."""
    return (word[0] for word in re.finditer(r"\S+|\n", text.strip()))


def same_value(value, expected) -> bool:
    """Return whether a value is the expected one, its floats about the same."""
    if isinstance(expected, float) and isinstance(value, (int, float)):
        return close(value, expected)
    if isinstance(expected, list) and isinstance(value, list):
        return len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(expected, dict) and isinstance(value, dict):
        return value.keys() == expected.keys() and all(same_value(value[key], expected[key]) for key in expected)
    return value == expected


def same_word(word: str, expected: str) -> bool:
    """Return whether a printed word is the expected one, or about the same number."""
    try:
        return word == expected or ("." in expected and close(float(word), float(expected)))
    except ValueError:
        return False


def close(number: float, expected: float) -> bool:
    return math.isclose(number, expected, rel_tol=1e-6, abs_tol=1e-6)
