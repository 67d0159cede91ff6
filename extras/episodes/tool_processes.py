"""The processes in which tools, environments and agents run: one for each conversation, forked from
one that has imported the users' files.

A call that lasts longer than --timeout is interrupted; a process that gives no answer then is
killed.
"""

import functools
import os
import resource
from typing import Any, Callable

from extras.episodes.tools import Tools
from plumbing.processes import (
    SECONDS_TO_LOAD,
    Ended,
    Failed,
    ForkServer,
    Late,
    Process,
    run_until_done,
)
from utils import UserError


class ToolError(Exception):
    """A call of a tool has failed; the text is for the model."""


class EnvironmentFailure(Exception):
    """An environment raised an exception, hung, died, or returned a value of the wrong type."""


class ToolProcess:
    """The process of one conversation, see `Process`."""

    def __init__(
        self, server: ForkServer, tools: list[str], environment: str, timeout: float, seed: int
    ):
        """`seed`: of the random numbers of tools and environment."""
        self.process = Process(server, Tools, tools, environment, seed)
        self.kill = self.process.kill
        self.timeout = timeout
        self.gone = EnvironmentFailure if environment else ToolError

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Return the result of a method of `Tools`.

        Raises:
            ToolError: a tool failed.
            EnvironmentFailure: the environment failed, or its process is gone.
        """
        name = arguments[0] if method == "call" else method
        try:
            return await self.process.ask(self.timeout, method, *arguments, interrupt=True)
        except Late:
            raise self.gone(f"{name} gave no answer within {self.timeout:g} s") from None
        except Ended as error:
            raise self.gone(f"{name}: {error}") from None
        except Failed as error:
            if method == "call":  # the model does not need the place
                raise ToolError(error.without_place) from None
            raise EnvironmentFailure(f"{method}: {' '.join(str(error)[:500].split())}") from None


def start_tools(
    tools: tuple[str, ...], environment: str, timeout: float, flag: str = "--environment"
) -> tuple[Callable[[int], ToolProcess], list[dict]]:
    """Load and describe the tools and the environment of a run, or in its place the agent; raise a
    UserError if that fails. Return what makes a ToolProcess of a seed, and the schemas of all tools.

    `flag` is that of the environment.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # a process has a descriptor
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 1 << 16)), hard))
    paths = list(map(os.path.abspath, tools))
    of_environment = environment and os.path.abspath(environment)
    server = ForkServer(list(filter(None, [*paths, of_environment])))
    process_of = functools.partial(ToolProcess, server, paths, of_environment, timeout)
    process = process_of(0)
    process.timeout = SECONDS_TO_LOAD

    async def describe() -> list[dict]:
        try:
            return await process.ask("describe")
        finally:
            process.kill()

    try:
        return process_of, run_until_done(describe())
    except (ToolError, EnvironmentFailure) as error:
        names = " ".join(filter(None, [*tools, environment]))
        raise UserError(f"{'--tools' if tools else flag} {names}: {error}", local=True) from error
