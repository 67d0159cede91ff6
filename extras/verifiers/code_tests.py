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
from typing import Annotated, Any

import pydantic

from plumbing.rewards.answers import final_text
from plumbing.rewards.verifiers import Verifier

# Runs a program and its asserts, then prints a secret, the values of its calls as JSON, and the
# secret again. The program must not replace what checks it, so a name in the asserts is looked up
#   1. in `own`: builtins and copies of modules, from before the program;
#   2. in `names`, those of the program, to which the asserts add theirs.
# What the asserts compare goes through `plain`, which refuses values that equal anything.
HARNESS = """
import ast, builtins, importlib, json, os, sys, types
run, write, leave, load, dumps = exec, os.write, os._exit, __import__, json.dumps
before, copies, libraries, tests = dict(vars(builtins)), {{}}, {{}}, {asserts!r}
copied = "cmath collections copy decimal fractions functools itertools json math numpy numpy.linalg numpy.testing"
for name in copied.split():  # if the asserts use it; a copy of others would hide what asserts patch
    package, _, last = name.rpartition(".")
    if last in tests:
        try:
            original = importlib.import_module(name)
        except ImportError:
            continue
        copies[name] = copy = types.ModuleType(name)
        vars(copy).update(vars(original))
        if package in copies:
            setattr(copies[package], last, copy)

def import_copy(name, names=None, local=None, wanted=(), level=0):
    found = load(name, names, local, wanted, level)  # for "import a.b" this is a
    return copies.get(name.partition(".")[0] if name in copies and not wanted else name, found)

# Takes the names that the asserts store.
class Shared(dict):
    def __setitem__(self, name, value):
        original = [key for key in copies if copies[key] is value]
        if original or name in own:
            own[name] = value
        names[name] = sys.modules[original[0]] if original else value

# Returns a value, unless it, or one that it holds, equals what no program can know.
def plain(value, simple=frozenset((int, str, float, bool)), probes=(object(), 2**89 - 1, "{word}", ["{word}"])):
    if type(value) not in simple:
        if isinstance(value, (list, tuple, set, frozenset, dict)):
            for held in value.values() if isinstance(value, dict) else value:
                plain(held)
        for probe in probes:
            try:
                equal = bool(value == probe)
            except Exception:
                continue
            if equal:
                raise AssertionError("a value that equals others, too")
    return value

module = types.ModuleType("response")
sys.modules["__main__"] = sys.modules["response"] = module
names = vars(module)
for library in {libraries}:
    exec(f"import {{library}}\\nfrom {{library}} import *", libraries)
vars(builtins).update(libraries | before)  # where no function of theirs is taken for one of the program
tests = ast.parse(tests)
nodes = list(ast.walk(tests))
used = {{node.id for node in nodes if isinstance(node, ast.Name)}}
for node in nodes:
    if isinstance(node, ast.Compare):
        node.left, *node.comparators = [
            x if isinstance(x, ast.Constant) else ast.Call(ast.Name("{word}", ast.Load()), [x], [])
            for x in (node.left, *node.comparators)
        ]
tests = compile(ast.fix_missing_locations(tests), "tests.py", "exec")
try:
    exec(compile({program!r}, "code.py", "exec"), names)
except SystemExit:
    pass  # its functions are there to be tested
vars(builtins).update(before)
calls = json.loads({calls!r})
owner = module.Solution() if calls and not hasattr(module, {function!r}) else module
# The second place of lookup is where Python looks for builtins.
own = before | {{"{word}": plain, "__builtins__": names, "__name__": "__main__"}}
if not used & names.keys() - before.keys():  # asserts of functions that have names of builtins
    for name in used & names.keys():
        del own[name]
for name in libraries.keys() - before.keys():
    names.setdefault(name, libraries[name])
names.update(__import__=import_copy, __build_class__=before["__build_class__"])
run(tests, own, Shared())
values = [dumps(getattr(owner, {function!r})(*call)) for call in calls]
write(1, "{word}[{{}}]{word}".format(",".join(values)).encode())
leave(0)
"""
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
    word = os.urandom(16).hex()
    harness = HARNESS.format(
        program=program,
        libraries=LIBRARIES if tests.fn_name else ["typing"],
        asserts=tests.asserts,
        function=tests.fn_name,
        calls=json.dumps(tests.inputs),
        word=word,
    )
    results, _ = sandbox.run(harness, [""], seconds)
    _, *report = results[0][1].split(word)
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
