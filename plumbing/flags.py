"""The old name of plumbing.cli, until nothing imports it any more."""

from typing import Annotated  # noqa: F401

from pydantic import FiniteFloat as Float  # noqa: F401

from plumbing.cli import *  # noqa: F403
from plumbing.cli import FiniteFloat, PositiveInt, check

Floats, PositiveInts, ZeroOrAboveOne = tuple[FiniteFloat, ...], tuple[PositiveInt, ...], FiniteFloat
check_training_args = check_rl_args = check_rollout_args = check


def in_range(kind, allowed, meaning, several=False):
    return kind
