"""The old name of plumbing.cli, until nothing imports it any more."""

import sys

import tyro

from plumbing.cli import parse as parse_new


def parse(cls, words=None, **_):
    return parse_new(cls, words)


parse_ungrouped = parse


def run_subcommand(commands, words=None, description=""):
    tyro.extras.subcommand_cli_from_dict(commands, args=sys.argv[1:] if words is None else words)
