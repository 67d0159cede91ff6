"""The tests of the reward `code`: what they look like, and whether the program of a response passes
them.

The program is the last ```python or ```py block of what counts of a response (`final_text` in
plumbing/rewards/answers.py), without one the last bare ``` block, or all of it. The tests of a row
are one of
  - Python with asserts (MBPP; HumanEval with its `check(name)` called at the end), as one text or a
    list of texts, also as JSON: run after the program, with __name__ == "__main__". Classes, such
    as unittest's, and calls of pytest.main are refused;
  - {"inputs": [...], "outputs": [...]}, also as JSON (APPS, TACO, DeepCoder): what the program
    reads and has to print, each a text or a list of lines. Compared line by line, without spaces at
    the ends; a number that the expected output writes with a point may differ by 1e-6;
  - the same with "fn_name": lists of arguments, and the values that this function (or method of a
    class Solution) has to return, compared as JSON. What JSON lacks, such as a tuple or a
    generator, counts as the list of its items, but for a set; in APPS and LiveCodeBench, tuples do. A value
    may be in a list of one, as in APPS. LIBRARIES are imported, as on LeetCode.

Expected outputs never enter the process of a program, and asserts do only after they have failed. A
second process, which has not run it, asks for calls by name and makes the values anew, see
harness.py. So asserts cannot patch or watch what the program uses: such rows are refused.
tests/data/attacks_on_asserts.jsonl has what does not pass them.
"""

import ast
import json
import math
import re
import textwrap
from pathlib import Path
from typing import Annotated, Any

import pydantic

from plumbing.rewards.answers import final_text
from plumbing.rewards.verifiers import Verifier

HARNESS = Path(__file__).with_name("harness.py").read_text()


def joined(lines: Any) -> str:
    """Return a text that may be given as its lines."""
    return lines if isinstance(lines, str) else "\n".join(lines)


Text = Annotated[str | list[str], pydantic.AfterValidator(joined)]
# What asserts cannot use, as they are not in the process of the program, or as it ends them.
REFUSED = (
    "mock unittest.mock patch monkeypatch builtins stdin stdout redirect_stdout capsys inspect "
    "seed setrecursionlimit getcontext modules environ __globals__ exit quit"
).split()
LIBRARIES = "typing bisect collections functools heapq itertools math operator re string".split()
DEFINITIONS = (ast.FunctionDef, ast.Import, ast.ImportFrom, ast.Assign)


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
    if isinstance(answer, str) and answer.lstrip()[:1] in "{[":
        answer = json.loads(answer)
    if isinstance(answer, (str, list)):
        asserts = joined(answer)
        tree = ast.parse(asserts)
        compile(tree, "asserts", "exec")
        for node in ast.walk(tree):
            match node:
                case ast.ClassDef() | ast.Attribute(attr="main"):
                    raise ValueError("asserts with a class or a runner of tests")
                case ast.Name(name) | ast.Attribute(attr=name) | ast.alias(name) if name in REFUSED:
                    raise ValueError(f"asserts with {name}, in another process than the program")
        if all(isinstance(statement, DEFINITIONS) for statement in tree.body):
            raise ValueError("asserts that nothing calls would pass every program")
        return Calls(inputs=[], outputs=[], fn_name="", asserts=asserts)
    tests = pydantic.TypeAdapter(Outputs | Calls).validate_python(answer)
    if not len(tests.inputs) == len(tests.outputs) > 0:
        raise ValueError(f"tests have {len(tests.inputs)} inputs and {len(tests.outputs)} outputs")
    return tests


def code(response: str, answer: Any, seconds: float = 24.0) -> float:
    """Return 1 if the program of a response passes all tests of its row, else 0; see `sandbox.run`.

    Raise an exception for tests of another form, and RuntimeError if there is no score: if no
    program can be run, or asserts hold in the process of the program only.
    """
    from extras.verifiers import sandbox

    # PR_SET_DUMPABLE: no program looks into this process, which knows the outputs
    sandbox.libc.prctl(4, 0)
    tests = read_tests(answer)
    program = code_of(response)
    if isinstance(tests, Outputs):
        results = sandbox.run(program, tests.inputs, seconds)  # type: ignore[arg-type]
        next(results)
        # Fewer results than outputs end with one that failed.
        return float(all(map(same_output, results, tests.outputs)))  # type: ignore[arg-type]
    # What the program may use without an import: LIBRARIES, or what its asserts import.
    libraries = LIBRARIES if tests.fn_name else ["typing"]
    imports = [f"import {name}\nfrom {name} import *" for name in libraries]
    nodes = ast.walk(ast.parse(tests.asserts))
    imports += [ast.unparse(x) for x in nodes if isinstance(x, (ast.Import, ast.ImportFrom))]
    source = f"{HARNESS}\nprovide({imports})"
    asked = json.dumps((tests.asserts, tests.fn_name, tests.inputs))
    _, (_, printed) = sandbox.run(source, [program], seconds, asked)
    try:
        report = json.loads(printed)  # see `run_tests` in harness.py
        if isinstance(report, str):
            raise RuntimeError(report)
        return float(
            len(report) == len(tests.outputs) and all(map(same_value, report, tests.outputs))
        )
    except (ValueError, RecursionError):  # no report, or a value that cannot be compared
        return 0.0


# (fence, language, block), to a line with the same fence or to the end.
BLOCK = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*(\w*).*\n((?s:.*?))(?:^[ \t]*\1|\Z)", re.MULTILINE)


def code_of(response: str) -> str:
    """Return the last block of Python in the `final_text` of a response, else all of it."""
    text = final_text(response)
    blocks = BLOCK.findall(text)
    for languages in (["python", "python3", "py"], [""]):
        for _, language, block in reversed(blocks):
            if language.lower() in languages:
                return textwrap.dedent(block)
    return text


def same_output(result: tuple[int, str], expected: str) -> bool:
    """Return whether a program ended well and printed what is expected."""
    status, printed = result
    return not status and same_words(
        *(re.findall(r"\S+|\n", text.strip()) for text in (printed, expected))
    )


def same_value(value: Any, expected: Any) -> bool:
    """Return whether a value, or a list of it, is the expected one, its floats about the same."""
    # One scalar or bracket a line.
    write = json.JSONEncoder(indent=0, sort_keys=True, separators=("", ":\n")).encode
    return any(
        x == expected or same_words(write(x).split("\n"), write(expected).split("\n"))
        for x in (value, [value])
    )


def same_words(words: list[str], expected: list[str]) -> bool:
    """Return whether words are the expected ones; a number that is expected with a point may differ
    by 1e-6.
    """
    try:
        return all(
            x == y or "." in y and math.isclose(float(x), float(y), rel_tol=1e-6, abs_tol=1e-6)
            for x, y in zip(words, expected, strict=True)
        )
    except ValueError:  # more or fewer words, or one that is not a number
        return False


VERIFIER = Verifier(code, "answer", read=read_tests)
