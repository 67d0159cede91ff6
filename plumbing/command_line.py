"""A command line -> the dataclass of its flags; what is wrong with it is one line that names the flag, and exit code 2.

Imports utils, plumbing.flags (ConfigArgs) and plumbing.config_file, which reads flags from a file.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import os
import sys
import textwrap
from typing import Annotated, Callable

import tyro
from tyro import _errors  # where tyro keeps its hook for errors; requirements.txt pins the version

from plumbing.config_file import config_words, is_text
from plumbing.flags import ConfigArgs
from utils import fail


def parse(cls: type, words: list[str] | None = None, title: str = "algorithm", beside: tuple[type, ...] = ()):
    """Parse a command line into the dataclass `cls`; `--help` has a group of flags for each of its base classes.

    --config FILE stands for the flags in that file, before all others.

    Args:
        words: the command line without the program's name; None for that of this process.
        title: of the group of the flags that `cls` itself declares.
        beside: further dataclasses, whose flags are read elsewhere, but are suggested for one that does not exist.
    Raises:
        SystemExit: with code 2, after a line that says what is wrong (from one rank of a node).
    """
    # tyro groups flags by nested dataclasses. Nested values would make `args.data.dataset` of `args.dataset`, so the
    # groups exist while parsing only.
    groups, grouped = [], set()
    for owner in (cls, *cls.__bases__):
        members = []
        for declaring in [cls] if owner is cls else owner.__mro__[-2::-1]:
            for name, text in docstrings(declaring).items():
                if name not in grouped:
                    field = cls.__dataclass_fields__[name]
                    flag = Annotated[field.type, tyro.conf.arg(help=text), tyro.conf.OmitArgPrefixes]
                    default = dataclasses.field(default=field.default, default_factory=field.default_factory)
                    members.append((name, flag, default))
                    grouped.add(name)
        group = dataclasses.make_dataclass("Group", members)
        name = title if owner is cls else owner.__name__.removesuffix("Args").lower() or "inherited"
        groups.append((name, group, dataclasses.field(default_factory=group)))
    about_config = tyro.conf.arg(help=docstrings(ConfigArgs)["config"])
    groups.append(("config", Annotated[str, about_config], dataclasses.field(default="")))
    words = sys.argv[1:] if words is None else words
    with errors_in_a_line(words, flag_names(cls, ConfigArgs, *beside)):
        known, _ = tyro.cli(ConfigArgs, args=words, return_unknown_args=True, add_help=False)
        parsed = tyro.cli(
            dataclasses.make_dataclass("Flags", groups),
            description=inspect.getmodule(cls).__doc__,
            args=[*(config_words(known.config, cls) if known.config else []), *words],
            console_outputs=os.environ.get("LOCAL_RANK", "0") == "0",  # --help, too, is from one rank of a node
        )
    del parsed.config
    return cls(**{name: value for group in vars(parsed).values() for name, value in vars(group).items()})


def parse_ungrouped(cls: type, words: list[str] | None = None, **options):
    """Parse a command line by tyro.cli and its options; for commands of a few flags, which have no --config."""
    words = sys.argv[1:] if words is None else words
    with errors_in_a_line(words, flag_names(cls)):
        return tyro.cli(cls, args=words, **options)


def run_subcommand(commands: dict[str, Callable], words: list[str] | None = None, description: str = "") -> None:
    """Call the function that a command line names first, with the flags that follow as its arguments."""
    words = sys.argv[1:] if words is None else words
    name = words[0] if words else ""
    if name in ("-h", "--help"):
        tyro.extras.subcommand_cli_from_dict(commands, args=words, description=description)
    if name not in commands:
        fail(f"{name or 'the first word'}: has to be one of {', '.join(commands)}")
    with errors_in_a_line(words, list(inspect.signature(commands[name]).parameters)):
        tyro.cli(commands[name], args=words[1:], prog=f"{os.path.basename(sys.argv[0])} {name}")


def flag_names(*classes: type) -> list[str]:
    return [field.name for cls in classes for field in dataclasses.fields(cls)]


def errors_in_a_line(words: list[str], names: list[str]):
    """Return the context in which tyro's errors are one line each, in place of a box; `names`: of all flags."""
    for word in words:
        if not is_text(word):
            fail(f"{ascii(word)}: is no valid text")
    return _errors.on_parse_error(functools.partial(refuse, words, names))


def refuse(words: list[str], names: list[str], event: _errors.ParseErrorEvent) -> None:
    """End the run with a line for an error of tyro's; return for kinds that no flag here can have."""
    if isinstance(event, _errors.UnrecognizedArgs):
        word = event.tokens[0].partition("=")[0]
        if "--" in words:
            fail(f"{word}: stands behind --, where no flags are read")
        if not word.startswith("-"):
            behind = flag_before(words, event.tokens[0])
            fail(f"{word or repr(word)}{behind}: no flag takes this word; flags of yes or no stand alone")
        near = difflib.get_close_matches(word.lstrip("-").replace("-", "_"), [*names, "help"], 1)
        fail(f"{word}: there is no such flag" + (f"; did you mean --{near[0]}?" if near else "; --help lists them"))
    if isinstance(event, _errors.MissingArgs):
        fail(f"{' '.join(flag_of(missing.arg) for missing in event.missing_arguments)}: has to be given")
    if isinstance(event, _errors.BadValue):
        fail(f"{flag_of(event.argument)}: takes a value")
    if isinstance(event, _errors.InvalidChoice):
        # Where a flag may have no value, tyro names None, too, and all in the order of a set.
        choices = sorted({*event.choices} - {"None"}) if "None" in event.choices else event.choices
        fail(f"{flag_of(event.argument)} {event.value}: has to be one of {', '.join(choices)}")
    if isinstance(event, _errors.InstantiationFailure) and event.argument is not None:
        # Of a value that may be None, tyro lists the errors of all types; the last is that of the number.
        fail(f"{flag_of(event.argument)}: {event.message.rpartition(']: ')[2]}")


def flag_before(words: list[str], word: str) -> str:
    """Return behind which flag a word stands, as a part of a message; "" if it stands at several places."""
    flag, found = "", []
    for given in words:
        name, equals, value = given.partition("=")
        if name.startswith("--"):
            flag = f" behind {name}"
        if word == (value if equals else given):
            found.append(flag)
    return found[0] if len(found) == 1 else ""


def flag_of(argument) -> str:
    """Return a flag as it is written in Args, with underscores."""
    return f"--{argument.lowered.name_or_flags[0].lstrip('-').replace('-', '_')}"


@functools.cache
def docstrings(cls: type) -> dict[str, str]:
    """Return the text under each field that a dataclass itself declares, {name: text}; "" for a field without one."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
    found = {}
    for statement, after in zip(body, [*body[1:], None]):
        if isinstance(statement, ast.AnnAssign):
            text = getattr(getattr(after, "value", None), "value", None) if isinstance(after, ast.Expr) else None
            found[statement.target.id] = " ".join(text.split()) if isinstance(text, str) else ""
    return found
