"""The two processes of a program with asserts or calls: one runs the program, the other the tests.

tests -> Remote, for what the program has -> a line of JSON -> functions and objects of the program

The tests never meet an object that the program has made. A process sends data as JSON, from which
the other one makes equal data. For anything else, the other one gets a Remote, which can ask for
calls, attributes and items.

A request is [key in `held`, arguments, named arguments]. An answer is [result, arguments that the
call has changed, names of the exception's classes, its arguments]. Before it answers, a process may
send requests of its own. The sandbox runs this file once, then `main` in both.
"""

import builtins
import contextlib
import functools
import importlib
import json
import operator
import os
import re
import signal
import sys
import types
from typing import Any

SIMPLE = frozenset((type(None), bool, int, float, str))
# Other data: arguments that make an equal value. What derives from a type becomes one of it.
PLAIN: dict[str, Any] = {
    "builtins.dict": lambda x: [[[*item] for item in x.items()]],
    **dict.fromkeys(
        "builtins.list builtins.tuple builtins.set builtins.frozenset builtins.bytes "
        "builtins.bytearray collections.deque".split(),
        lambda x: [[*x]],
    ),
    **dict.fromkeys(
        "builtins.int builtins.float builtins.str builtins.complex".split(),
        lambda x: [*x.__getnewargs__()],
    ),
    **dict.fromkeys(
        "builtins.range fractions.Fraction decimal.Decimal datetime.date datetime.datetime "
        "datetime.time datetime.timedelta".split(),
        lambda x: x.__reduce__()[1],
    ),
}
# An object is not asked for these, which judge a value, unless the asserts name a class.
METHODS = {name for kind in (str, list, dict, set) for name in dir(kind)}
BUILTINS = dict(vars(builtins))
TYPES: dict[Any, Any] = {name: kind for name, kind in BUILTINS.items() if isinstance(kind, type)}
held: dict[Any, Any] = {}  # what the other process may call; that of the tests holds functions only
module: Any = types.ModuleType("response")
sys.modules["response"] = module
names = vars(module)  # of the program
reader: Any  # of the messages of the other process
writer: Any


class Remote:
    """A function or an object of the other process."""

    def __init__(self, key: int):
        vars(self)["_key"] = key

    def __call__(self, /, *arguments: Any, **named: Any):
        return ask(self._key, *arguments, **named)

    def __getattr__(self, name: str):
        # numpy would read from the address that an __array_interface__ gives.
        if name.startswith("__") or name in METHODS:
            raise AttributeError(name)
        return ask("getattr", self, name)

    def operate(self, name: str, *others: Any):
        return ask(name, self, *others)

    def compare(self, name: str, other: Any):
        """Ask about two objects. The program gets no value that it could agree with."""
        return ask(name, self, other) if isinstance(other, Remote) else NotImplemented

    def compute(self, name: str, other: Any, reflected: bool = False):
        """Ask for a sum or a product. That of an object and a value has to be an object: as data it
        would be what the program likes.
        """
        result = ask(name, other, self) if reflected else ask(name, self, other)
        are_objects = isinstance(other, Remote) or isinstance(result, Remote)
        return result if are_objects else NotImplemented

    def __contains__(self, value: Any) -> bool:
        # As where there is no such method, unless the asserts name a class; see METHODS.
        return value in list(self.operate("iter")) if METHODS else self.operate("contains", value)


for name in "iter next len bool str repr getitem setitem setattr instancecheck".split():
    setattr(Remote, f"__{name}__", functools.partialmethod(Remote.operate, name))
for name in "eq ne lt le gt ge".split():
    setattr(Remote, f"__{name}__", functools.partialmethod(Remote.compare, name))
for name in "add sub mul truediv floordiv mod pow matmul".split():
    setattr(Remote, f"__{name}__", functools.partialmethod(Remote.compute, name))
    setattr(Remote, f"__r{name}__", functools.partialmethod(Remote.compute, name, reflected=True))


def encode(value: Any):
    """Return what `make` makes a value from: a list, an object of one key, or the value itself."""
    if type(value) in SIMPLE:
        return value
    if type(value) is list:
        return value[:] if SIMPLE.issuperset(map(type, value)) else [encode(x) for x in value]
    if isinstance(value, Remote):
        return {"yours": [value._key]}
    if isinstance(value, type) and value in TYPES.values():
        return {"type": [value.__name__]}
    if hasattr(value, "dtype"):
        return {"array": encode([value.tolist(), value.dtype.str, [*value.shape]])}
    for base in type(value).__mro__:
        name = f"{base.__module__}.{base.__name__}"
        if name in PLAIN:
            return {name: encode(PLAIN[name](value))}
    held[len(held)] = value
    return {"mine": [len(held) - 1]}


def make(encoded: dict):
    """Return the value of an object of one key, whose arguments are made already."""
    [(name, arguments)] = encoded.items()
    module, _, kind = name.rpartition(".")
    if module:
        return PLAIN[name] and getattr(importlib.import_module(module), kind)(*arguments)
    makers: dict[str, Any] = {
        "array": array,
        "mine": Remote,
        "yours": held.get,
        "type": TYPES.get,
    }
    return makers[name](*arguments)


def array(values: list, dtype: str, shape: list[int]):
    """Return an array or a number of numpy."""
    import numpy

    return numpy.array(values, dtype).reshape(shape)[()]


def ask(key: Any, /, *arguments: Any, **named: Any):
    """Return what the other process returns for a call of what it holds, or raise what it raises."""
    send([key, encode([*arguments]), encode(named)])
    result, changed, raised, reasons = receive()
    if raised:
        kind = [TYPES[name] for name in raised if name in TYPES][0]
        # It would end a loop of the tests over map(function, ...) as if all had been right.
        if kind is StopIteration and key != "next":
            kind = RuntimeError
        raise kind(*reasons)
    for old, new in zip(arguments, changed):
        if isinstance(old, (list, dict, set)):
            old.clear()
            old.__init__(new)  # type: ignore[misc]
    return result


def send(message: list) -> None:
    writer.write(json.dumps(message) + "\n")


def receive() -> list:
    """Return the next answer, after having answered the requests that come before it."""
    for line in reader:
        message = json.loads(line, object_hook=make)
        if len(message) == 4:
            return message
        send(answer(*message))
    os._exit(1)  # the other process has ended: no `except` of the tests may catch this


def answer(key: Any, arguments: list, named: dict) -> list:
    """Return the answer to a request."""
    before = encode(arguments)
    try:
        result = encode(held[key](*arguments, **named))
        after = encode(arguments)
        return [result, after if after != before else [], [], []]
    except BaseException as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return [None, [], kinds, encode([*error.args])]


# ---- the process of the program ------------------------------------------------------------------


def provide(imports: str) -> None:
    """Let the program find what some imports define, as it finds builtins."""
    found: dict[str, Any] = {}
    exec(imports, found)
    vars(builtins).update(found | BUILTINS)


def run_program(program: str) -> None:
    """Answer requests, of which the first one starts the program, until the tests end."""

    def start() -> list[str]:
        with contextlib.suppress(SystemExit):  # its functions are there to be tested
            exec(compile(program, "code.py", "exec", dont_inherit=True), names)
        return [*names]

    held.update(vars(operator) | BUILTINS, instancecheck=type.__instancecheck__)
    held.update(start=start, look_up=look_up)
    receive()


def look_up(name: str):
    """Return what the program has by a name, or the method of its class Solution."""
    return names[name] if name in names else getattr(names["Solution"](), name)


# ---- the process of the tests --------------------------------------------------------------------


class Names(dict):
    """The builtins; behind them the names of the program, and what it finds."""

    def __missing__(self, name: str):
        if name not in self["theirs"]:
            return vars(builtins)[name]
        if name[0].isupper():
            METHODS.clear()
        return ask("look_up", name)


def run_tests(tests: str) -> None:
    """Run asserts, then calls of a function, and print the list of their values."""
    asserts, function, calls = json.loads(tests)
    theirs = ask("start")
    own = Names(BUILTINS, theirs=theirs)
    asked = set(theirs).intersection(re.findall(r"\w+", asserts))
    if asked <= own.keys():  # asserts of functions that have names of builtins
        for name in asked:
            del own[name]
    sys.stdout = None
    exec(compile(asserts, "tests.py", "exec"), {"__builtins__": own, "__name__": "__main__"})
    values = [ask("look_up", function)(*call) for call in calls]
    os.write(1, json.dumps(values).encode())
    os._exit(0)


def main(run: str) -> None:
    """Do what one of the processes does."""
    global reader, writer
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as in `receive`
    sys.set_int_max_str_digits(0)
    reader = open(3)
    writer = open(4, "w", 1)
    globals()[run](sys.stdin.read())
