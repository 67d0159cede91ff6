"""The server of programs of a model, which plumbing/rewards/sandbox.py starts: each runs in a process under limits.

The server lives as long as the reward worker, a program at most as long as the server. What holds a program:
  - A new process, forked from the server, which holds nothing: no secret, no other program, an empty environment.
  - Limits of CPU time, address space, file size and open files; a wall clock, after which it is killed.
  - A seccomp filter: no process (so a limit holds for all that it does; RLIMIT_NPROC would not hold a fork bomb of
    root), no other program, no socket but a pair of its own, no signal, tracing, mount or namespace, no memory that
    counts nowhere, no other process's priority or cores, no change of a file's owner, mode, times or attributes.
  - No capabilities, and none to gain.
  - Where the kernel has Landlock: it writes only in its folder, reads there and in READABLE, and looks into no other
    process.
  - Where the kernel allows namespaces: it sees no other process, no network, no /proc and no device but DEVICES, and
    writes only in a folder in memory, which goes with it.
What remains: names, sizes and times of files everywhere; without Landlock or namespaces what `Programs.warning` says.

Imports plumbing/rewards/sandbox_limits.py.
"""

import ast
import atexit
import builtins
import contextlib
import ctypes
import importlib
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import types
import typing

from plumbing.rewards.sandbox_limits import DEVICES, READABLE, check, landlock_version, restrict

FOLDER_SIZE = 64 << 20  # bytes of all files together, where there are namespaces
FILES = ("stdin", "stdout", "stderr", "report")  # of a program, open as 0 to 3
MEMORY_FOLDER = "/dev/shm"  # where its folder is if there are namespaces

# ---- the server ------------------------------------------------------------------------------------------------------


def serve(packages: list[str]) -> None:
    """Run a program for each line of JSON on stdin, one at a time, and answer {"status", "stdout", "report"}."""
    libc = ctypes.CDLL(None, use_errno=True)
    sys.path.extend(packages)
    readable = [*READABLE, os.path.dirname(os.path.dirname(os.__file__)), *packages]  # .../lib of .../lib/python3.x
    warnings = [enter_namespaces(libc)]
    private = warnings[0] is None
    if landlock_version(libc) < 1:
        warnings.append("no Landlock here: it can read every file of this user, the data set included")
        if not private:
            warnings.append(
                "it can write wherever this user can, read its processes' environment and, unless the kernel "
                "restricts ptrace, write into them; run this in a container"
            )
    libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: programs of the same user cannot look in here
    print(json.dumps({"warning": "; ".join(filter(None, warnings)) or None}), flush=True)
    # Each line is read in a process of its own: no program finds another's text or output in the memory it comes from.
    ended = False
    while not ended:
        select.select([0], [], [])
        handler = os.fork()
        if not handler:
            check(libc.prctl(1, signal.SIGKILL, 0, 0, 0))  # PR_SET_PDEATHSIG: dies with the server
            os._exit(answer_line(libc, readable, private))
        ended = os.waitpid(handler, 0)[1] != 0


def answer_line(libc, readable: list[str], private: bool) -> int:
    """Answer a line of stdin; return 0, or 1 if the worker has gone."""
    line, replies = open(0, "rb", closefd=False).readline(), open(1, "w", closefd=False)
    if not line:
        return 1
    result = run_in_process(libc, json.loads(line), readable, private)
    try:
        print(json.dumps(result), file=replies, flush=True)
    except BrokenPipeError:
        return 1
    return 0


def enter_namespaces(libc) -> str | None:
    """Enter namespaces without processes and network, all files read only, and no devices but DEVICES.

    Return a warning if that fails.
    """
    uid, gid = os.getuid(), os.getgid()
    try:
        # NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
        check(libc.unshare(0x20000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000))
        for file, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{file}", "w") as mapping:
                mapping.write(line)
        if os.fork():
            os._exit(0)  # the child is process 1 of the new namespace: its end is the end of all in there
        check(libc.mount(None, b"/", None, 0x4000 | 0x40000, None))  # MS_REC | MS_PRIVATE
        check(libc.mount(b"none", b"/proc", b"tmpfs", 0, b"mode=755,nr_inodes=8"))
        os.makedirs("/proc/self/fd")  # /dev/stdin leads there
        for number, name in enumerate(FILES):
            os.symlink(f"{MEMORY_FOLDER}/{name}", f"/proc/self/fd/{number}")
        devices = [device.encode() for device in DEVICES if os.path.exists(device)]
        for device in devices:
            check(libc.mount(device, device, None, 0x1000, None))  # MS_BIND
        # Read only, no set-user-id, no devices (root's own could be written to), recursively; then DEVICES again.
        set_attributes(libc, b"/", 0x8000, 1 | 2 | 4, 0)
        for device in devices:
            set_attributes(libc, device, 0, 0, 4)
        return None
    except OSError as error:
        return f"no namespaces here ({error.strerror}): the code in responses can see processes and fill the disk"


def set_attributes(libc, path: bytes, flags: int, on: int, off: int) -> None:
    """Turn attributes of a mount on and off (mount_setattr)."""
    attributes = struct.pack("4Q", on, off, 0, 0)
    check(libc.syscall(ctypes.c_long(442), -100, path, flags, attributes, ctypes.c_size_t(len(attributes))))


def run_in_process(libc, job: dict, readable: list[str], private: bool) -> dict:
    """Run a program in a new process until it ends, its time is up or the worker has gone.

    Args:
        readable: what it may read outside of its folder. private: whether `enter_namespaces` worked.
    """
    token = os.urandom(16).hex()
    text = job.get("stdin", "").encode(errors="replace")
    folder = make_folder(libc, private, len(text))
    os.symlink(os.devnull, f"{folder}/stderr")
    files = [open(f"{folder}/{name}", "w+b", buffering=0) for name in FILES]
    home = f"{folder}/home"
    os.mkdir(home)
    files[0].write(text)
    files[0].seek(0)
    program = os.fork()
    if not program:
        try:
            os.environ.update(HOME=home, TMPDIR=home)
            tempfile.tempdir = home
            os.chdir(home)
            for number, file in enumerate(files):
                os.dup2(file.fileno(), number)
            os.closerange(len(files), 1024)
            restrict(libc, job["seconds"], folder, readable, private)
            run_program(job, token)
        finally:
            os._exit(1)
    ended = os.pidfd_open(program)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(0, select.POLLIN)  # the worker has gone
    poll.poll(1000 * job["seconds"])
    os.kill(program, signal.SIGKILL)
    status = os.waitpid(program, 0)[1]
    os.close(ended)
    remove_folder(libc, folder, private)
    _, printed, _, reported = [read_and_close(file) for file in files]
    reported = reported.removeprefix(token) if reported.startswith(token) else None
    return {"status": status, "stdout": printed, "report": reported}


def make_folder(libc, private: bool, room: int) -> str:
    """Make the folder of a program's files: in memory where there are namespaces, else on the disk.

    Args:
        room: bytes that it has to hold beside FOLDER_SIZE.
    """
    if not private:
        return tempfile.mkdtemp()
    options = b"mode=700,size=%d,nr_inodes=4096" % (FOLDER_SIZE + room)
    check(libc.mount(b"none", MEMORY_FOLDER.encode(), b"tmpfs", 2 | 4, options))  # MS_NOSUID | MS_NODEV
    return MEMORY_FOLDER


def remove_folder(libc, folder: str, private: bool) -> None:
    if private:
        check(libc.umount2(folder.encode(), 2))  # MNT_DETACH
        return
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):  # folders of any depth, which take seconds: nobody waits for it
        subprocess.Popen(["rm", "-rf", folder], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def read_and_close(file) -> str:
    """Return the text of an open file. No program can have written more than FILE_SIZE bytes to it."""
    with file:
        file.seek(0)
        return file.read().decode(errors="replace")


# ---- in the program's process: the program ---------------------------------------------------------------------------


def run_program(job: dict, token: str) -> None:
    """Run the program and its tests in this process, and end it; what they find goes to file 3, after `token`."""
    module = types.ModuleType("__main__" if "stdin" in job else "response")
    names = vars(module)
    sys.modules["__main__"] = sys.modules[module.__name__] = module
    sys.argv[:] = ["response.py"]
    builtins.exit = builtins.quit = sys.exit  # as in any Python that imports the module site
    status = 0
    try:
        # Both are compiled before anything of the response runs.
        program = compile(job["code"], "code.py", "exec", dont_inherit=True)
        tests = ast.parse(job.get("tests", ""))
        bound, replaceable = bind_names(tests), modules_of(tests)
        tests = compile(tests, "tests.py", "exec", dont_inherit=True)
        if "function" in job:  # what the statements of such problems take for granted
            names.update({name: getattr(typing, name) for name in typing.__all__})
        before = [(live, dict(live)) for live in (sys.modules, *map(vars, replaceable))]
        try:
            exec(program, names)
        except SystemExit:
            if "stdin" in job:
                raise  # else its functions are there to be tested
        for live, values in before:
            live.update(values)
        if "stdin" not in job:
            names.update(bound, __name__="__main__")  # so that a main guard in the tests does not skip them
            exec(tests, names)
            method = hasattr(module, "Solution") and not hasattr(module, job.get("function", ""))
            owner = module.Solution() if method else module
            values = [json.dumps(getattr(owner, job["function"])(*call)) for call in job.get("calls", ())]
            with open(3, "w") as file:
                file.write(f"{token}[{','.join(values)}]")
            os._exit(0)
    except SystemExit as end:
        status = int(end.code not in (None, 0))
    except BaseException:
        status = 1
    # What the interpreter does at its end, without going back to the server's loop.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)


def bind_names(tests: ast.Module) -> dict:
    """Rename the builtins that tests use, and return them by their new names: a program may define or replace `abs`.

    Tests that use no other name are left alone: what they test is called like a builtin (`assert sum(10, 15) == 6`).
    """
    nodes = list(ast.walk(tests))
    used = [node for node in nodes if isinstance(node, ast.Name)]
    defined = {getattr(node, field, None) for node in nodes for field in ("name", "asname", "arg")}
    defined |= {node.id for node in used if not isinstance(node.ctx, ast.Load)}
    used = [node for node in used if node.id not in defined]
    bound = [node for node in used if hasattr(builtins, node.id) and not node.id.startswith("_")]
    if len(bound) == len(used):
        return {}
    values = {f"builtin {node.id}": getattr(builtins, node.id) for node in bound}
    for node in bound:
        node.id = f"builtin {node.id}"
    return values


def modules_of(tests: ast.Module) -> list[types.ModuleType]:
    """Import the modules that tests import, and return them and builtins: what a program puts there is undone.

    Not sys, of which programs replace stdin and stdout with good reason.
    """
    imports = [node for node in ast.walk(tests) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {getattr(node, "module", None) or alias.name for node in imports for alias in node.names} - {"sys"}
    found = [builtins]
    for name in names:
        with contextlib.suppress(Exception):  # the tests fail when they come to it
            found.append(importlib.import_module(name))
    return found
