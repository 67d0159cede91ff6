"""A command, from its command line to its exit code: how it gets its flags, and what it prints of an
error.
"""

import atexit
import contextlib
import faulthandler
import functools
import io
import json
import os
import re
import sys
import time
import traceback
from typing import Any, Iterator

import torch
import torch.distributed as dist
import tyro
import yaml
from pydantic import TypeAdapter
from torch.distributed.elastic.multiprocessing import errors
from tqdm import tqdm

from plumbing.data import rows
from plumbing.run.log import shortened
from plumbing.run.ranks import status
from utils import (
    EXIT_INTERRUPTED,
    Interrupted,
    UserError,
    as_user_error,
    first_line,
    one_line,
    say,
    warn,
)


@atexit.register  # before vLLM loads Triton, so it runs last
def silence_triton() -> None:
    """Drop what is printed from here on: Triton, which vLLM brings, lists memory of its own at the
    end of each process, in 30 lines.
    """
    if "triton" in sys.modules:
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


OUT_OF_MEMORY = (  # printed where a torch.OutOfMemoryError ends a run
    "a GPU is out of memory: lower --micro_batch_tokens or --generation_batch_size, "
    "shard the models (--shard fsdp or fsdp_offload), or train adapters (--lora_rank 32)"
)


# ---- flags ---------------------------------------------------------------------------------------


def parse(cls: type[Any], line: list[str] | None = None):
    """Read a command line into the dataclass `cls`. It overrides the flags of --config FILE, and
    these the defaults.

    A class may have `from_model(model)`, which returns the defaults for a --model, and
    `from_run(flags)`, which returns its flags for a --config that is the args.json of a run.

    Args:
        line: the arguments after the program's name; None for those of this process.
    Raises:
        UserError: for a rule that the flags break.
        SystemExit: with code 2, after tyro's message (printed by one rank of a node).
    """
    description = sys.modules[cls.__module__].__doc__
    read = functools.partial(
        tyro.cli, cls, args=line, description=description, use_underscores=True
    )
    silent = os.environ.get("LOCAL_RANK", "0") != "0"  # only the first rank of a node prints
    with contextlib.redirect_stderr(io.StringIO() if silent else sys.stderr):
        args = read()
        config = getattr(args, "config", "")
        values = from_file(cls, config) if config else {}
        if values:
            args = read(default=cls(**values))
        if hasattr(cls, "from_model"):
            args = read(default=cls(**(cls.from_model(args.model) | values)))
        check_rules(args)
        for message in broken(args, "warnings"):
            warn(message)
        set_system_prompt(args)
    if config:
        args.config = ""  # its flags are those of the run now, and args.json is a --config itself
    return args


def from_file(cls: type[Any], path: str) -> dict:
    """Return the flags of a .json or .yaml file, {"learning_rate": 1e-6, ...}, or of the args.json
    of a run.
    """
    with as_user_error(f"--config {path}"), open(path) as file:
        is_json = path.endswith(".json")
        values = json.load(file, object_pairs_hook=unique) if is_json else yaml.load(file, Yaml)
        if isinstance(values, dict) and "args" in values:
            values = getattr(cls, "from_run", dict)(values["args"])
    rows.validate(f"--config {path}", values, TypeAdapter(cls))
    for name in values.keys() - cls.__dataclass_fields__:
        raise UserError(f"--config {path}: there is no flag {name!r}")
    return values


def unique(pairs: list[tuple]) -> dict:
    """Return a dict of keys and their values; raise ValueError for a key that comes twice."""
    values: dict = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"has {key!r} twice")
        values[key] = value
    return values


class Yaml(yaml.SafeLoader):
    """Reads YAML with `unique` keys; those of a merge (<<) may come again."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        unique([(str(key.value), None) for key, _ in node.value])
        return super().construct_mapping(node, deep)


def set_system_prompt(args: Any) -> None:
    """Set a --system_prompt that is not given by the first source of --reward."""
    if getattr(args, "system_prompt", "") is None:
        known = {} if args.chat_template == "none" else args.SYSTEM_PROMPTS
        args.system_prompt = known.get(args.reward[0], "")
        say(f"--system_prompt {args.system_prompt!r}, by --reward {args.reward[0]}")


def check_rules(args: Any) -> None:
    """Raise a UserError for flags that break a rule of their classes."""
    for message in broken(args, "rules"):
        raise UserError(message)


def broken(args: Any, kind: str) -> Iterator[str]:
    """Yield what the "rules" or "warnings" that flags do not meet say, with the values of the flags
    that they name.
    """
    for cls in reversed(type(args).__mro__):
        for holds, message in vars(cls).get(kind, lambda _: ())(args):
            if not holds:
                flags = [x for x in re.findall(r"--(\w+)", message) if hasattr(args, x)]
                yield f"{message} ({', '.join(f'{x} {getattr(args, x)!r}' for x in flags)})"


# ---- errors --------------------------------------------------------------------------------------


@contextlib.contextmanager
def report_errors() -> Iterator[None]:
    """Turn what a command raises into its exit code.

    A UserError, and what `as_known` explains, prints one line and exits with 2; Interrupted exits
    with 75. Anything else is raised again, with the rank and the phase, and reported to torchrun.
    """
    status.rescue = str  # an earlier run in this process has left its own
    handler = errors.get_error_handler()  # torchrun's
    handler.initialize()
    try:
        yield
    except Interrupted:
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        if not isinstance(error, UserError):
            place = f"rank {os.environ.get('RANK', '0')} of {os.environ.get('WORLD_SIZE', '1')}, "
            place += f"in the phase {status.phase!r}{status.rescue()}"
            known = as_known(error, place)
            if known is None:
                error.add_note(f"({place})")
                handler.record_exception(error)
                raise
            error = known
        if error.local or os.environ.get("LOCAL_RANK", "0") == "0":
            tqdm.write(f"error: {shortened(one_line(str(error)), 900)}", sys.stderr)
        sys.exit(2)
    finally:
        faulthandler.cancel_dump_traceback_later()


def as_known(error: Exception, place: str) -> UserError | None:
    """Return what a user can do about an error of a library, or None for an unknown one.

    Known are: too little memory, a lost connection to another rank (whose message has the cause),
    and what could not be loaded.

    Args:
        place: the rank and the phase.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return UserError(f"{place}: {OUT_OF_MEMORY} ({first_line(error)})", local=True)
    if isinstance(error, dist.DistError) or "gloo/transport" in str(error):
        # torchrun takes the rank that ended first for the root cause, and counts whole seconds.
        time.sleep(2)
        reason = "another rank has ended; its message has the reason"
        if "timed out" in str(error).lower():
            reason = f"--collective_timeout: {status.late or first_line(error)}"
        return UserError(f"{place}: {reason}", local=True)
    if status.phase == "load" and isinstance(error, (OSError, ValueError, ImportError)):
        raised = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(raised.filename)} line {raised.lineno}"
        return UserError(f"{first_line(error)} ({where})", local=True)
    return None
