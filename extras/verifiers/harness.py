"""The two processes of a program with asserts or calls: one runs the program, the other the tests.

tests -> Remote, for what the program has -> a message -> functions and objects of the program

The tests never meet an object that the program has made. A process sends data, from which the other
one makes equal data. For anything else, the other one gets a Remote, which can ask for calls,
attributes and items.

Copies lose something: the class of a value, or that two names have one list. So asserts that fail
run once more, all in the process of the program, unless they only compare values. If they hold there,
there is no score: the program may have made them hold.

A request is [key in `held`, arguments, named arguments]. An answer is [result, arguments that the
call has changed, class of the exception, its arguments]. Before it answers, a process may send
requests of its own. The sandbox runs this file once, then `main` in both.
"""

import builtins
import contextlib
import functools
import importlib
import io
import json
import operator
import os
import pickle
import re
import signal
import sys
import types
from typing import Any

# The arguments that make equal data of types which JSON lacks. What derives from a type becomes one
# of it.
ARGUMENTS: dict[Any, str] = {
    lambda x: [[*x]]: "builtins.list builtins.tuple builtins.set builtins.frozenset builtins.bytes "
    "builtins.bytearray",
    lambda x: [[*x.items()]]: "builtins.dict collections.OrderedDict",
    lambda x: [x.default_factory, [*x.items()]]: "collections.defaultdict",
    lambda x: [[*x], x.maxlen]: "collections.deque",
    lambda x: x.__getnewargs__(): "builtins.int builtins.float builtins.str builtins.complex",
    lambda x: x.__reduce__()[1]: "builtins.range builtins.slice collections.Counter "
    "decimal.Decimal fractions.Fraction datetime.date datetime.datetime datetime.time "
    "datetime.timedelta datetime.timezone",
    lambda x: [x.key]: "zoneinfo.ZoneInfo",
}
PLAIN = {name: arguments for arguments, names in ARGUMENTS.items() for name in names.split()}
# An object is not asked for these, which judge a value, unless the asserts name a class.
METHODS = {name for kind in (str, list, dict, set) for name in dir(kind)}
BUILTINS = dict(vars(builtins))
# What asserts may use without an import, by name.
MODULES = {name: name for name in sys.stdlib_module_names} | {"np": "numpy"}
TYPES = {name: kind for name, kind in BUILTINS.items() if isinstance(kind, type)}
Encoded = bytes | str  # a message, see `encode`
lost: list = []  # what may have failed asserts, as they had a copy of it
held: dict = {}  # what the other process may call; that of the tests holds functions only
sys.modules["response"] = module = types.ModuleType("response")
names = vars(module)  # of the program
reader: Any  # of the messages of the other process
writer: Any


class Remote:
    """A function or an object of the other process."""

    def __init__(self, key: int | str):
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
        if isinstance(other, Remote):
            return ask(name, self, other)
        # An object of Python's own classes, such as the keys of a dict, can equal a value.
        if ask("getattr", ask("type", self), "__module__") != "response":
            lost.append(self)
        return NotImplemented

    def compute(self, name: str, other: Any):
        """Ask for a sum or a product. That of an object and a value has to be an object: as data it
        would be what the program likes.
        """
        result = ask(name[1:], other, self) if name[0] == "r" else ask(name, self, other)
        return result if Remote in (type(other), type(result)) else NotImplemented

    def __contains__(self, value: Any) -> bool:
        # As where there is no such method, unless the asserts name a class; see METHODS.
        return value in list(self) if METHODS else self.operate("contains", value)


OPERATORS = {
    Remote.operate: "iter next len bool str repr format hash getitem setitem delitem setattr instancecheck",
    Remote.compare: "eq ne lt le gt ge",
    Remote.compute: "add sub mul truediv floordiv mod pow matmul "
    "radd rsub rmul rtruediv rfloordiv rmod rpow rmatmul",
}
for method, operators in OPERATORS.items():
    for name in operators.split():
        setattr(Remote, f"__{name}__", functools.partialmethod(method, name))


class Pickler(pickle.Pickler):
    """Writes data of builtin types. Raises TypeError for other values."""

    reducer_override = None  # type: ignore[assignment]


class Unpickler(pickle.Unpickler):
    """Reads what a Pickler writes. It finds nothing that a pickle could call."""

    find_class = None  # type: ignore[assignment]


def encode(message: list) -> Encoded:
    """Return a pickle of a message or, if it holds more than a Pickler writes, its JSON."""
    file = io.BytesIO()
    try:
        Pickler(file).dump(message)
    except TypeError:
        return json.dumps(encode_value(message))
    return file.getvalue()


def encode_value(value: Any):
    """Return what `make` makes a value from: a list, an object of one key, or the value itself."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [*map(encode_value, value)]
    if isinstance(value, Remote):
        return {"yours": [value._key]}
    if isinstance(value, type) and (value in TYPES.values() or issubclass(value, BaseException)):
        return {"class": [kind.__name__ for kind in value.__mro__]}
    if hasattr(value, "dtype"):
        return {"array": encode_value([value.tolist(), value.dtype.str, [*value.shape]])}
    for base in type(value).__mro__:
        name = f"{base.__module__}.{base.__name__}"
        if name in PLAIN:
            return {name: encode_value(PLAIN[name](value))}
    key = len(held)
    held[key] = value
    return {"mine": [key]}


def make(encoded: dict):
    """Return the value of an object of one key, whose arguments are made already."""
    [(name, arguments)] = encoded.items()
    makers: Any = {"array": array, "class": class_of, "mine": Remote, "yours": held.get}
    if name in PLAIN:
        module, _, kind = name.rpartition(".")
        return getattr(importlib.import_module(module), kind)(*arguments)
    return makers[name](*arguments)


def array(values: list, dtype: str, shape: list[int]):
    """Return an array or a number of numpy."""
    import numpy

    return numpy.array(values, dtype).reshape(shape)[()]


@functools.cache
def class_of(name: str, *bases: str):
    """Return a builtin class. Exceptions get a class of their own below it: `except` with a name of
    the program never catches what a failed assert raises.
    """
    kind = TYPES.get(name) or class_of(*bases)
    return type(name, (kind,), {}) if issubclass(kind, BaseException) else kind


def ask(key: Any, /, *arguments: Any, **named: Any):
    """Return what the other process returns for a call of what it holds, or raise what it raises."""
    send(encode([key, [*arguments], named]))
    result, changed, raised, reasons = receive()
    if raised:
        # It would end a loop of the tests over map(function, ...) as if all had been right.
        if issubclass(raised, StopIteration) and key != "next":
            raised = RuntimeError
        raise raised(*reasons)
    # What is in a changed argument may have another name.
    lost.extend(new for new in changed if isinstance(new, (list, tuple, dict)))
    for old, new in zip([*arguments, *named.values()], changed):
        if hasattr(type(old), "clear"):  # such as a list's
            old.clear()
            (getattr(old, "update", None) or old.extend)(new)
        elif hasattr(type(old), "setflags"):  # an array of numpy
            old[...] = new
    return result


def send(encoded: Encoded) -> None:
    pickle.dump(encoded, writer)
    writer.flush()


def receive() -> list:
    """Return the next answer, after having answered the requests that come before it."""
    while True:
        try:
            sent = Unpickler(reader).load()
            if isinstance(sent, str):
                message = json.loads(sent, object_hook=make)
            else:
                message = Unpickler(io.BytesIO(sent)).load()
        except BaseException:
            os._exit(1)  # the other process has ended: no `except` of the tests may catch this
        if len(message) == 4:
            return message
        send(answer(message, sent))


def answer(message: list, sent: Encoded) -> Encoded:
    """Return the answer to a request, which was sent as the bytes or text `sent`."""
    key, arguments, named = message
    try:
        result = held[key](*arguments, **named)
        changed = [*arguments, *named.values()] if encode(message) != sent else []
        return encode([result, changed, None, []])
    except BaseException as error:
        return encode([None, [], type(error), [*error.args]])


# ---- the process of the program ------------------------------------------------------------------


def provide(imports: list[str]) -> None:
    """Let the program find what some imports define, as it finds builtins."""
    with contextlib.suppress(ImportError):  # see `run_tests`
        exec("\n".join(imports), vars(builtins))
    vars(builtins).update(BUILTINS)


def run_program(program: str) -> None:
    """Run the program, then answer requests until the tests end."""

    def run(asserts: str = "") -> None:
        names["__name__"] = "response"
        with contextlib.suppress(SystemExit):  # its functions are there to be tested
            exec(program, names)
        if asserts:
            names["__name__"] = "__main__"
            exec(asserts, names)

    run()
    held.update(
        vars(operator) | BUILTINS, response=module, run=run, instancecheck=type.__instancecheck__
    )
    receive()


# ---- the process of the tests --------------------------------------------------------------------

PROGRAM = Remote("response")


def run_tests(tests: str) -> None:
    """Run the asserts, or else the calls of a function, and print a report in JSON:
    - a list of the values of the calls, or an empty one if the asserts hold;
    - a text, if there is no score: why;
    - nothing, as this process ends by an exception: the program has not passed.
    """
    asserts, function, calls = json.loads(tests)
    sys.stdout = None
    defined = {*ask("dir", PROGRAM)}
    values = [
        ask("getattr", PROGRAM if function in defined else PROGRAM.Solution(), function)(*call)
        for call in calls
    ]
    report = run_asserts(asserts, defined) if asserts else values
    os.write(1, json.dumps(report, default=as_list).encode())
    os._exit(0)


def as_list(x: Any) -> list:
    """Return what JSON lacks as a list, for `json.dumps`; raise a TypeError for a set, whose order is
    another one in each process, and for bytes.
    """
    if isinstance(x, set | frozenset | bytes | bytearray):
        raise TypeError(f"{x!r:.80} is no list")
    # The program makes the list, all at once: one without an end takes its memory, not its time.
    return x.tolist() if hasattr(x, "tolist") else ask("list", x)


def run_asserts(asserts: str, defined: set[str]) -> list | str:
    """Return the report on asserts (see `run_tests`), or raise what they raise.

    Args:
        defined: the names that the program has.
    """
    used = []  # names that the asserts have looked up in the program

    def raised(of_program: set[str]):
        """Run the asserts, which find some names in the program; return what they raise."""

        class Globals(dict):
            """The global names of the asserts. A KeyError leads to Python's builtins."""

            def __missing__(self, name: str):
                if name in of_program:
                    used.append(name)
                    if name[0].isupper():
                        METHODS.clear()
                    return ask("getattr", PROGRAM, name)
                return importlib.import_module(MODULES[name])

        try:
            exec(asserts, Globals(__name__="__main__"))
        except BaseException as error:
            return error

    # Builtins and modules are Python's: the program does not choose what judges it. But if asserts
    # use nothing else, a function that they test has such a name.
    error = raised(defined - BUILTINS.keys() - MODULES.keys())
    if not used:
        error = raised(defined)
    if error is None:
        return [] if used else "asserts use nothing of the program"
    # An ImportError that the program has raised arrives without a name.
    if isinstance(error, ImportError) and error.name:
        return f"asserts cannot be run: {error}"
    # A wrong value is as wrong in the process of the program.
    if isinstance(error, AssertionError) and not (lost or tell_copies(asserts, defined)):
        raise error
    ask("run", asserts)  # raises what they raise there
    return "asserts hold in the process of the program, but not with copies of its data"


def tell_copies(asserts: str, defined: set[str]) -> bool:
    """Return whether asserts do what may tell an object from a copy of it: more than comparing
    values, or giving a name of the program or of Python another value.
    """
    import ast  # slow, and for asserts that fail only

    for node in ast.walk(ast.parse(asserts)):
        match node:
            case (
                ast.Expr(ast.Call(ast.Attribute()))
                | ast.Attribute(ctx=ast.Store())
                | ast.Subscript(ctx=ast.Store())
                | ast.Delete()
            ):
                return True
            case ast.Name(name, ast.Store()) | ast.FunctionDef(name):
                if name in defined | BUILTINS.keys():
                    return True
    return bool(re.search(r"\b(is|id|type|callable|__\w+__)\b", asserts))


def main(run: str) -> None:
    """Do what one of the processes does."""
    global reader, writer
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as in `receive`
    reader = open(3, "rb")
    writer = open(4, "wb")
    globals()[run](sys.stdin.read())
