"""Files that a run leaves: each whole or not there at all, with checksums, and one line where one cannot be used.

Imports utils only.
"""

import contextlib
import json
import os
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Callable

from torch.distributed.checkpoint.api import CheckpointException

from utils import World, fail, first_line, warn

CHECKSUMS = "checksums.json"  # of the files of a folder, in it: {path: CRC-32}
TORCH_WRITER = "inline_container.cc"  # the file of torch that writes what torch.save saves
RUST_ERROR = "(os error"  # in the errors of safetensors, and of tokenizers, which has no class for them


@contextlib.contextmanager
def writing(path: str):
    """End the run with one line if what this context writes to `path` cannot be written, as on a full disk."""
    try:
        yield
    except CheckpointException as failed:  # on all ranks
        fail(f"{path}: cannot be written ({why_not_written(next(iter(failed.failures.values()))[0])})")
    except Exception as error:
        if not isinstance(error, OSError) and not any(words in str(error) for words in (TORCH_WRITER, RUST_ERROR)):
            raise
        fail(f"{path}: cannot be written ({why_not_written(error)})", local=True)


def why_not_written(error: BaseException) -> str:
    """Return what an error says of a file that could not be written; torch's own says nothing to a user."""
    if TORCH_WRITER in str(error):
        return "not all of it; is the disk full?"
    return getattr(error, "strerror", None) or first_line(error)


def run_folder(output_dir: str, name: str) -> str:
    """Return the folder of a run in --output_dir; end the run if there can be none of this name."""
    if not output_dir:
        fail("--output_dir: is empty; . is the folder that you are in")
    if not os.path.normpath(os.path.join(os.sep, "runs", name)).startswith(os.path.join(os.sep, "runs", "")):
        fail(f"--run_name {name}: has to name a folder in --output_dir")
    parent = output_dir
    while not os.path.exists(parent):
        parent = os.path.dirname(parent) or os.curdir
    if not os.path.isdir(parent) or not os.access(parent, os.W_OK | os.X_OK):
        fail(f"--output_dir {output_dir}: {parent} is no folder that can be written to")
    try:
        os.stat(os.path.join(parent, name))
    except FileNotFoundError:
        pass
    except OSError as error:  # too long a name, say
        fail(f"--run_name {name}: cannot make a folder of this name ({error.strerror})")
    return os.path.join(output_dir, name)


@contextlib.contextmanager
def replacing(path: str):
    """Yield the path of a file to write, which then takes the place of `path`; if that fails, nothing of it is left."""
    try:
        yield f"{path}.tmp"
        os.replace(f"{path}.tmp", path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(f"{path}.tmp")
        raise


def replace_file(path: str, text: str) -> None:
    """Write a file that has its old or its new content, whatever happens meanwhile."""
    with writing(path), replacing(path) as temporary, open(temporary, "w") as file:
        file.write(text)


def append(path: str, rows: list[dict]) -> None:
    """Append rows to a .jsonl file."""
    with writing(path), open(path, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read_jsonl(path: str) -> list[dict]:
    """Return the rows of a file that a run wrote, [] if there is none, without a last line that a kill cut short.

    A line that is no JSON ends the run.
    """
    if not os.path.exists(path):
        return []
    rows = []
    with open(path, errors="replace") as file:
        for number, line in enumerate(file, 1):
            if line.endswith("\n"):
                try:
                    rows.append(json.loads(line))
                except ValueError as error:
                    fail(f"{path} line {number}: is no JSON ({error}); mend or remove this line")
    return rows


def fsync(path: str) -> None:
    """Wait until a file, or the list of files of a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def save_folder(folder: str, world: World, write: Callable, with_checksums: bool = False) -> None:
    """Save a folder that appears complete or not at all: a temporary one, fsynced and renamed.

    If it cannot be written, all ranks end, with one line, and nothing of it is left.

    Args:
        write: called on all ranks as `write(path, on_main)`. `on_main(act)` is a collective that lets rank 0 write.
    """
    parent, name = os.path.split(folder)
    temporary, replaced = os.path.join(parent, f".{name}.tmp"), os.path.join(parent, f".{name}.old")

    def on_main(act: Callable[[], None]) -> None:
        def acting() -> None:
            with writing(folder):
                act()

        world.on_main(acting)

    def begin() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        os.makedirs(temporary)

    def publish() -> None:
        if with_checksums:
            with open(os.path.join(temporary, CHECKSUMS), "w") as file:
                json.dump(checksums(temporary), file, indent=1)
        for path, folders, files in os.walk(temporary):
            for item in (*files, *folders):
                fsync(os.path.join(path, item))
        fsync(temporary)
        if os.path.exists(folder):
            shutil.rmtree(replaced, ignore_errors=True)  # left by a kill
            os.rename(folder, replaced)
        os.rename(temporary, folder)
        fsync(parent)
        shutil.rmtree(replaced, ignore_errors=True)

    try:
        on_main(begin)
        with writing(folder):
            write(temporary, on_main)
        world.barrier()
        on_main(publish)
    except SystemExit:  # leave room on a full disk
        if world.main:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove_folder(folder: str) -> None:
    """Remove a folder that is gone for its readers before any file in it is; warn if it cannot be removed."""
    parent, name = os.path.split(folder)
    removed = os.path.join(parent, f".{name}.old")
    try:
        shutil.rmtree(removed, ignore_errors=True)
        os.rename(folder, removed)
        shutil.rmtree(removed)
    except OSError as error:
        warn(f"{folder}: cannot be removed ({why_not_written(error)})")


def checksums(folder: str) -> dict[str, int]:
    """Return the CRC-32 of every file in and below a folder, CHECKSUMS itself aside."""
    paths = [os.path.join(path, name) for path, _, names in os.walk(folder) for name in names if name != CHECKSUMS]
    with ThreadPoolExecutor() as pool:
        return {os.path.relpath(path, folder): x for path, x in zip(paths, pool.map(checksum, paths))}


def checksum(path: str) -> int:
    total = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            total = zlib.crc32(block, total)
    return total


def damage(folder: str) -> str:
    """Return which file of a folder that was saved with checksums is missing or not as it was saved; "" if none is."""
    listed = os.path.join(folder, CHECKSUMS)
    try:
        with open(listed) as file:
            # As pairs: a dict would keep one of two entries, where damage has given a file the name of another one.
            expected = [(name, value) for name, value in json.load(file, object_pairs_hook=list)]
        found = checksums(folder)
    except (OSError, ValueError, TypeError) as error:
        return f"{listed} cannot be read ({first_line(error)})"
    for name, value in expected:
        if found.get(name) != value:
            return f"{os.path.join(folder, name)} is {'damaged' if name in found else 'missing'}"
    return ""
