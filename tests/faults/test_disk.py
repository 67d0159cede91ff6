"""Disks that are full and folders that cannot be written to, at each thing that a run writes, one rank and two.

Where a file system of a few kilobytes can be mounted, that is one; everywhere, a limit on the size of any file.
"""

import builtins
import contextlib
import errno
import io
import json
import multiprocessing
import os
import random
import resource
import shutil
import socket
import subprocess
from functools import partial
from pathlib import Path

import helpers
import pytest
import torch
from helpers import folder_of, metrics_of, read_lines, run, run_here, run_ranks, same_weights

import grpo
import utils
from plumbing.models import loading as models
from plumbing.models.sharding import Sharding
from plumbing.run import checkpoints, files, resume

SIZE = 2 << 20  # bytes of the file system that is mounted


@pytest.fixture
def disk(tmp_path):
    """A file system of SIZE bytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a file system here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@contextlib.contextmanager
def files_up_to(size: int):
    """No file grows beyond `size` bytes in this context, whoever writes it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def free(size: int, folder: str, main: bool):
    """The file system that `folder` is on has `size` free bytes at most."""
    taken = os.path.join(folder, "taken")
    if main:
        space = os.statvfs(folder)
        with open(taken, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, space.f_bfree * space.f_bsize - size)
    try:
        yield
    finally:
        if main:
            os.remove(taken)


# ---- checkpoint and final model: every size of a file, or of a disk, up to the one that is enough --------------------


def saves(rank: int, ranks: int, port: int, shard: str, model: str, folder: str, limits: list[tuple], pipe) -> None:
    """Save checkpoints and final models under one limit after another: what each ended with, and what it left.

    A process of several, which stay together however often they fail: so no rank waits in a collective that the other
    has left.
    """
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["WORLD_SIZE"] = str(ranks)
    world = utils.setup_processes()
    args = grpo.Args(model=model, shard=shard, kl_coef=0.0, precision="float32", learning_rate=0.1)
    sharding = Sharding(args, world, models.precision("float32", world.device))
    policy = grpo.load_policy(args, None, torch.float32, sharding.load_device)
    sharding.wrap(policy)
    optimizer = utils.Optimizer(policy, args, 10)
    for parameter in optimizer.parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tokenizer = models.load_tokenizer(model)
    state = {"step": 1, "prefetched": torch.randn(2000)}

    def save(final: bool) -> None:
        if final:
            checkpoints.save_final(folder, world, policy.model, tokenizer, model)
        else:
            checkpoints.save_checkpoint(folder, world, tokenizer, state, {"": policy.model}, {"": optimizer}, 0)

    told = []
    for limit, size, final in limits:
        world.barrier()
        said, code = io.StringIO(), 0
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            with free(size, folder, world.main) if limit == "disk" else files_up_to(size):
                world.barrier()
                try:
                    save(final)
                except SystemExit as end:
                    code = end.code
                world.barrier()
        left = sorted(os.path.relpath(x, folder) for x, _, _ in os.walk(folder))
        told.append((code, said.getvalue(), left))
        world.barrier()
        if world.main:
            for name in ("checkpoints", "final"):
                shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
    pipe.send(told)


def check_saves(folder: Path, model: str, ranks: int, shard: str, limits: list[tuple]) -> list[int]:
    """Return the exit codes of saves under `limits`, after checking what each rank said and left of each."""
    with contextlib.closing(socket.socket()) as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    context, ends, processes = helpers._server(), [], []
    for rank in range(ranks):
        end, pipe = multiprocessing.Pipe(duplex=False)
        words = (rank, ranks, port, shard, model, str(folder), limits, pipe)
        processes.append(context.Process(target=saves, args=words))
        processes[-1].start()
        ends.append(end)
    told = [end.recv() if end.poll(120) else pytest.fail("a rank hangs") for end in ends]
    for process in processes:
        process.join(20)
        process.kill()
    for limit, *each in zip(limits, *told, strict=True):
        codes, said, left = zip(*each)
        wanted = "final" if limit[2] else "checkpoints/step_1"
        assert set(codes) in ({0}, {2}), (limit, codes, said)
        errors = [line for text in said for line in text.replace("\r", "\n").split("\n") if "error" in line]
        if codes[0]:
            (line,) = errors
            assert line.startswith(f"error: {folder / wanted}: cannot be written ("), (limit, line)
            assert set(left[0]) <= {".", "checkpoints"}, (limit, left[0])
        else:
            assert not errors and wanted in left[0], limit
    return [code for code, *_ in told[0]]


RANKS = [(1, "none"), (2, "none"), (2, "fsdp")]


@pytest.mark.parametrize("ranks, shard", RANKS)
def test_files_that_cannot_be_whole(tmp_path, tiny_folder, long, ranks, shard):
    """The limit is drawn from those up to the largest file, so that small files meet it, too."""
    draw, count = random.Random(f"{ranks} {shard}"), 60 if long else 8
    limits = [("file", int(2 ** draw.uniform(0, 15.5)), number % 4 == 3) for number in range(count)]
    codes = check_saves(tmp_path, tiny_folder, ranks, shard, [*limits, ("file", 1 << 20, False)])
    assert 0 in codes[-1:] and codes.count(2) > count // 2


@pytest.mark.parametrize("ranks, shard", RANKS)
def test_a_disk_that_is_full(disk, tiny_folder, long, ranks, shard):
    """At each 4 KB of what is saved."""
    sizes = range(0, 260 << 10, 4 << 10)
    limits = [("disk", size, final) for size in sizes for final in (False, True)]
    limits = [*(limits if long else limits[::10]), ("disk", SIZE // 2, False)]
    codes = check_saves(disk, tiny_folder, ranks, shard, limits)
    assert codes[0] == 2 and codes[-1] == 0


# ---- logs and args.json, in whole runs -------------------------------------------------------------------------------


def fills_up(ending: str) -> None:
    """Let nothing be written any more to files of this ending."""
    opened = builtins.open

    def full(path, mode="r", *args, **options):
        writes = isinstance(path, str | os.PathLike) and str(path).endswith(ending) and set(mode) & set("wa+x")
        return opened("/dev/full" if writes else path, mode, *args, **options)

    builtins.open = full


def errors_of(text: str) -> list[str]:
    return [line for line in text.replace("\r", "\n").split("\n") if line.startswith("error:")]


WRITTEN = ("args.json.tmp", "metrics.jsonl.tmp", "metrics.jsonl", "samples.jsonl", "checksums.json")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict:
    values = helpers.workspace(tmp_path_factory.mktemp("disk"))
    return {**values, "total_episodes": 24, "save_every": 1, "num_epochs": 1, "run_name": "run"}


@pytest.fixture(scope="module")
def straight(base) -> dict:
    values = {**base, "run_name": "straight"}
    run_here(values)
    return values


def test_a_log_that_cannot_be_written(base, straight, tmp_path, monkeypatch, capsys):
    """One after the other in one run, which ends each time with one line, and goes on as if nothing had been."""
    values = {**base, "output_dir": str(tmp_path)}
    for number, ending in enumerate(WRITTEN):
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
            patch.setattr(builtins, "open", open)  # what `fills_up` changes is put back
            fills_up(ending)
            run_here({**values, "resume": number > 0})
        (line,) = errors_of(capsys.readouterr().err)
        assert end.value.code == 2 and ": cannot be written (" in line
        assert line.startswith(f"error: {folder_of(values)}/") and (ending[:4] in line or "step_" in line), line
        assert not list(folder_of(values).glob("checkpoints/.*"))
    run_here({**values, "resume": True})
    assert metrics_of(values) == metrics_of(straight)
    samples = [read_lines(folder_of(each) / "samples.jsonl") for each in (values, straight)]
    assert samples[0] == samples[1] and same_weights(folder_of(values) / "final", folder_of(straight) / "final")


def test_a_log_that_rank_0_cannot_write(base, tmp_path, long):
    """The other rank ends, too, at once, and says nothing more."""
    values = {**base, "output_dir": str(tmp_path)}
    for number, ending in enumerate(WRITTEN if long else ("metrics.jsonl", "samples.jsonl")):
        changes = {"resume": number > 0, "shard": "fsdp" if number % 2 else "none"}
        ranks = run_ranks({**values, **changes}, 2, (2, 2), {0: partial(fills_up, ending)})
        assert [len(errors_of(rank.err)) for rank in ranks] == [1, 0], ending
        assert not any("Traceback" in rank.err for rank in ranks), ending


def test_a_row_that_is_not_whole(tmp_path, capsys):
    """What a full disk has cut is left out when it is read, and written anew where the run goes on."""
    path = str(tmp_path / "metrics.jsonl")
    rows = [{"step": step, "text": "x" * 50} for step in range(20)]
    for size in range(0, 1400, 7):
        Path(path).unlink(missing_ok=True)
        with files_up_to(size), contextlib.suppress(SystemExit):
            for row in rows:
                files.append(path, [row])
        assert files.read_jsonl(path) == rows[: size // len(json.dumps(rows[-1]))][: len(files.read_jsonl(path))]
        assert capsys.readouterr().err in ("", f"error: {path}: cannot be written (File too large)\n")


def test_a_picture_that_cannot_be_drawn(base, tmp_path):
    """All that it shows is in metrics.jsonl, so the run ends as it would have: saved, for the scheduler to start it
    again."""
    values = {**base, "output_dir": str(tmp_path)}
    done = run(values, 75, curves=True, place=partial(interrupted_without_room, "curves.png.tmp"))
    warning = f"warning: {folder_of(values) / 'curves.png'}: cannot be written (No space left on device)"
    lines = [line for line in done.err.replace("\r", "\n").split("\n") if "curves.png" in line]
    assert len(lines) == 2 and all(line.endswith(warning) for line in lines)  # at step 0 (behind the bar), at the end
    assert "step 1 is saved, go on with --resume" in done.out


def interrupted_without_room(ending: str) -> None:
    fills_up(ending)
    helpers._signal_at("utils.Optimizer.step:1:SIGTERM")


def full_console(place: str) -> None:
    for number in (1, 2):
        os.dup2(os.open("/dev/full", os.O_WRONLY), number)
    if place:
        helpers._signal_at(place)


def test_a_console_that_is_full(base, straight, tmp_path):
    """What it shows is lost, and no more than that; a signal does what it always does."""
    values = {**base, "output_dir": str(tmp_path)}
    run(values, 75, place=partial(full_console, "utils.Optimizer.step:2:SIGTERM"))
    run({**values, "resume": True}, place=partial(full_console, ""))
    assert metrics_of(values) == metrics_of(straight)


def test_what_a_full_console_cannot_take(tmp_path):
    """A write may fail, or what it leaves to a flush."""
    for buffering in (1, -1):
        full = open("/dev/full", "w", buffering=buffering)
        console = utils.Console(full)
        assert console.write("text\n") == 5 and console.name == "/dev/full"
        console.flush()
        with contextlib.suppress(OSError):
            full.close()


def test_an_old_checkpoint_that_cannot_be_removed(tmp_path, monkeypatch, capsys):
    """It takes room, and no more than that."""
    (tmp_path / "step_1").mkdir()

    def busy(*paths) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(files.os, "rename", busy)
    files.remove_folder(str(tmp_path / "step_1"))
    assert capsys.readouterr().err == f"warning: {tmp_path / 'step_1'}: cannot be removed (Device or resource busy)\n"


def test_a_folder_that_is_read_only(base, disk, capsys):
    """A run neither begins nor goes on in it."""
    values = {**base, "output_dir": str(disk / "runs"), "eval_every": 0, "total_episodes": 8}
    run_here(values)
    resume.locks.clear()
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    for changes in ({"resume": True}, {"run_name": "other"}):
        with pytest.raises(SystemExit) as end:
            run_here({**values, **changes})
        (line,) = errors_of(capsys.readouterr().err)
        assert end.value.code == 2 and line.startswith(f"error: --output_dir {disk / 'runs'}: "), line
        assert line.endswith(" is no folder that can be written to"), line
