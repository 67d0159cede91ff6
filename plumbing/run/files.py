"""The files of a run folder: folders and files that are whole or absent, and the readers of its logs and args.json."""

import json
import os
import shutil
from typing import Callable

from utils import World


def save_folder(folder: str, world: World, write: Callable[[str], None]) -> None:
    """Save a folder that appears complete or not at all: it is written under another name and renamed.

    Args:
        write: called on all ranks with the path to write to.
    """
    parent, name = os.path.split(folder)
    temporary = os.path.join(parent, f".{name}.tmp")

    def begin() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        os.makedirs(temporary)

    def publish() -> None:
        if os.path.exists(folder):
            remove_folder(folder)
        os.rename(temporary, folder)

    world.on_main(begin)
    write(temporary)
    world.barrier()
    world.on_main(publish)


def remove_folder(folder: str) -> None:
    """Remove a folder that is gone for its readers before any file in it is."""
    parent, name = os.path.split(folder)
    removed = os.path.join(parent, f".{name}.old")
    shutil.rmtree(removed, ignore_errors=True)  # left by a kill
    os.rename(folder, removed)
    shutil.rmtree(removed, ignore_errors=True)


def replace_file(path: str, text: str) -> None:
    """Write a file that has its old or its new content at any instant."""
    with open(f"{path}.tmp", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(f"{path}.tmp", path)


def append(path: str, rows: list[dict]) -> None:
    """Append rows to a .jsonl file."""
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read_log(folder: str, name: str = "metrics.jsonl") -> list[dict]:
    """Return the rows of a log of a run, [] if there is none, without a last line that a kill cut short.

    Raises:
        ValueError: if another line cannot be read.
    """
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        lines = file.read().split("\n")[:-1]
    try:
        return json.loads("[" + ",\n".join(lines) + "]")  # one array, so that json's error has the number of the line
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_args(folder: str) -> dict:
    """Return a run's args.json, {"args": {flag: value}, "defaults": ..., "script": ..., ...}; {} if there is none."""
    path = os.path.join(folder, "args.json")
    if not os.path.exists(path):
        return {}
    with open(path, encoding="utf-8") as file:
        return json.load(file)
