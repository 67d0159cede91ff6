"""The processes in which programs of a model run, each under limits, and the caller's end of them.

    reward worker -> server (this file as a command, started once) -> a process for each program

The server lives as long as the worker, a program at most as long as the server. The server knows no expected output: it
gets programs, what they read, and asserts. What holds a program:
  - A new process, forked from the server, which holds nothing but earlier programs: no secret, an empty environment.
  - Limits of CPU time, address space, file size and open files; a wall clock, after which it is killed.
  - A seccomp filter under which it can make no process (so a limit holds for all that it does; RLIMIT_NPROC would not
    hold a fork bomb of root) and no socket, and can neither send a signal, trace, mount nor make a namespace.
  - No capabilities, and none to gain.
  - Where the kernel has Landlock: it writes only in its folder and looks into no other process.
  - Where the kernel allows namespaces: it sees no other process, no network, no /proc and no device, and writes only in
    a folder in memory, which goes with it.
What remains: it reads all files that the user may read; without namespaces also what `Programs.warning` says.

This file imports nothing of ours, because the server starts isolated from this folder.
"""

import atexit
import ctypes
import functools
import json
import math
import os
import platform
import resource
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import types
import typing

CPU_SECONDS = 10  # of a program
MEMORY = 1 << 30  # bytes of address space, of which the interpreter itself takes about 50 MB
FILE_SIZE = 16 << 20  # bytes of each file, and of output
FOLDER_SIZE = 64 << 20  # bytes of all files together, where there are namespaces
OPEN_FILES = 64
THREADS = 256  # where there are namespaces and the user is not root, whom no limit holds; else memory limits them


# ---- the caller's end ------------------------------------------------------------------------------------------------


class Programs:
    """A server of programs and the pipe to it."""

    def __init__(self):
        packages = [path for path in sys.path if path.endswith("-packages")]  # numpy, if it is installed
        self.server = subprocess.Popen(
            [sys.executable, "-I", "-S", "-X", "utf8", os.path.abspath(__file__), *packages],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PATH": os.defpath, "TMPDIR": tempfile.gettempdir(), "OMP_NUM_THREADS": "1"},  # one core a program
            start_new_session=True,  # it has to outlive the worker, if only to remove a folder
        )
        hello = self.server.stdout.readline()
        if not hello:
            raise RuntimeError("the server of programs did not start")
        self.warning: str | None = json.loads(hello)["warning"]  # of what does not hold a program on this machine
        if self.run({"code": "import random\nprint(input())", "stdin": "1"}, 60.0)["stdout"] != "1\n":
            raise RuntimeError("a program that prints what it reads does not run within the limits")

    def run(self, job: dict, seconds: float) -> dict:
        """Run a program for at most so many seconds of wall clock.

        Args:
            job: "code", and one of "stdin" (a text to read), "tests" (Python to run after it), or "function" and
                "calls" (lists of arguments).
        Returns:
            "status": 0 if it ended well. "stdout": what it printed. "report": None unless it ran to its end; for
            "calls" a JSON list of the values returned.
        """
        try:
            self.server.stdin.write(json.dumps({**job, "seconds": max(seconds, 0.0)}).encode() + b"\n")
            self.server.stdin.flush()
            return json.loads(self.server.stdout.readline())
        except (OSError, ValueError) as error:
            programs.cache_clear()  # the next response gets a new one
            raise RuntimeError("the server of programs has ended") from error


programs = functools.cache(Programs)  # one server a worker


# ---- the server ------------------------------------------------------------------------------------------------------


def serve(packages: list[str]) -> None:
    """Run a program for each line of JSON on stdin, one at a time, and answer {"status", "stdout", "report"}."""
    libc = ctypes.CDLL(None, use_errno=True)
    sys.path.extend(packages)
    null = os.open(os.devnull, os.O_WRONLY)  # opened now, as there may be no devices below
    warning = enter_namespaces(libc)
    private = warning is None
    if not private and landlock(libc) < 1:
        warning += (
            "; no Landlock either: it can write wherever this user can, read its processes' environment and, "
            "unless the kernel restricts ptrace, write into them; run this in a container"
        )
    libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: programs of the same user cannot look in here
    requests, replies = open(0, "rb", closefd=False), open(1, "w", closefd=False)
    print(json.dumps({"warning": warning}), file=replies, flush=True)
    for line in requests:
        result = run_in_process(libc, json.loads(line), null, private)
        try:
            print(json.dumps(result), file=replies, flush=True)
        except BrokenPipeError:  # the worker has gone
            os._exit(0)


def enter_namespaces(libc) -> str | None:
    """Enter namespaces without processes, network and devices, all files read only; return a warning if that fails."""
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
        # mount_setattr, recursively: read only, no set-user-id, no devices (root's own could be written to)
        attributes = struct.pack("4Q", 1 | 2 | 4, 0, 0, 0)
        check(libc.syscall(ctypes.c_long(442), -100, b"/", 0x8000, attributes, ctypes.c_size_t(32)))
        check(libc.mount(b"none", b"/proc", b"tmpfs", 1, b"size=0"))  # MS_RDONLY
        return None
    except OSError as error:
        return f"no namespaces here ({error.strerror}): the code in responses can see processes and fill the disk"


def run_in_process(libc, job: dict, null: int, private: bool) -> dict:
    """Run a program in a new process until it ends, its time is up or the worker has gone.

    Args:
        null: /dev/null, open for writing. private: whether `enter_namespaces` worked.
    """
    token = os.urandom(16).hex()
    stdin, stdout, report = files = [os.memfd_create(name) for name in ("stdin", "stdout", "report")]
    os.write(stdin, job.get("stdin", "").encode(errors="replace"))
    os.lseek(stdin, 0, os.SEEK_SET)
    folder = make_folder(libc, private)
    program = os.fork()
    if not program:
        try:
            os.environ.update(HOME=folder, TMPDIR=folder)
            os.chdir(folder)
            for number, file in enumerate((stdin, stdout, null, report)):
                os.dup2(file, number)
            os.closerange(4, 1024)
            restrict(libc, job["seconds"], folder, private)
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
    _, printed, reported = [read_and_close(file) for file in files]
    reported = reported.removeprefix(token) if reported.startswith(token) else None
    return {"status": status, "stdout": printed, "report": reported}


def make_folder(libc, private: bool) -> str:
    """Make the folder of a program: in memory where there are namespaces, else on the disk."""
    if not private:
        return tempfile.mkdtemp()
    options = b"mode=700,size=%d,nr_inodes=4096" % FOLDER_SIZE
    check(libc.mount(b"none", b"/dev/shm", b"tmpfs", 2 | 4, options))  # MS_NOSUID | MS_NODEV
    return "/dev/shm"


def remove_folder(libc, folder: str, private: bool) -> None:
    if private:
        check(libc.umount2(folder.encode(), 2))  # MNT_DETACH
        return
    try:
        os.rmdir(folder)
    except OSError:  # it holds something, in folders of any depth: too much for shutil.rmtree
        subprocess.run(["rm", "-rf", folder], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def read_and_close(file: int) -> str:
    """Return the text of an open file of at most FILE_SIZE bytes."""
    with open(file, "rb") as opened:
        opened.seek(0)
        return opened.read().decode(errors="replace")


def check(result: int) -> None:
    """Raise the OSError with which a call of the C library has failed."""
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


# ---- in the program's process: limits --------------------------------------------------------------------------------


def restrict(libc, seconds: float, folder: str, private: bool) -> None:
    """Give up for good what this process may do, except to compute, to read, and to write in `folder`."""
    cpu = math.ceil(min(CPU_SECONDS, max(seconds, 1.0)))
    limits = dict(CPU=cpu, AS=MEMORY, FSIZE=FILE_SIZE, NOFILE=OPEN_FILES, CORE=0)
    if private:  # without a namespace of its own, the kernel counts all processes of the user
        limits["NPROC"] = THREADS
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    check(libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)))
    check(libc.prctl(1, signal.SIGKILL, 0, 0, 0))  # PR_SET_PDEATHSIG: dies with the server
    check(libc.prctl(38, 1, 0, 0, 0))  # PR_SET_NO_NEW_PRIVS
    write_only_in(libc, folder)
    deny_system_calls(libc)


def landlock(libc, rights: bytes | None = None) -> int:
    """Return a new Landlock ruleset; without `rights`, the kernel's version of Landlock, below 1 if it has none."""
    return libc.syscall(ctypes.c_long(444), rights, ctypes.c_size_t(8 if rights else 0), 0 if rights else 1)


def write_only_in(libc, folder: str) -> None:
    """Let this process write only in `folder`, where the kernel has Landlock."""
    version = landlock(libc)
    if version < 1:
        return
    # LANDLOCK_ACCESS_FS_*: WRITE_FILE, REMOVE_* and MAKE_*; later versions have REFER and TRUNCATE too.
    writes = 0x1FF2 | (0x2000 if version >= 2 else 0) | (0x4000 if version >= 3 else 0)
    check(rules := landlock(libc, struct.pack("Q", writes)))
    below = struct.pack("=Qi", writes, os.open(folder, os.O_PATH))
    check(libc.syscall(ctypes.c_long(445), rules, 1, below, 0))
    check(libc.syscall(ctypes.c_long(446), rules, 0))
    os.closerange(4, 16)


# System calls that a program is denied: (number on x86_64, on aarch64), None where there is none.
DENIED = (
    (57, None), (58, None),  # fork, vfork
    (62, 129), (200, 130), (234, 131), (129, 138), (297, 240), (424, 424),  # kill and its kin
    (101, 117), (310, 270), (311, 271), (438, 438),  # ptrace, process_vm_readv and _writev, pidfd_getfd
    (41, 198), (425, 425),  # socket, io_uring_setup (which could make one)
    (272, 97), (308, 268), (165, 40), (166, 39),  # unshare, setns, mount, umount2
    (90, None), (91, 52), (268, 53), (452, 452),  # chmod and its kin, which Landlock leaves alone
    (29, 194), (68, 186), (240, 180),  # shmget, msgget, mq_open: memory that outlives the program
    (248, 217), (249, 218), (250, 219), (321, 280), (298, 241), (323, 282),  # keys, bpf, perf events, userfaultfd
)  # fmt: skip


def deny_system_calls(libc) -> None:
    """Install a seccomp filter that denies DENIED, new processes, other processes' limits, and most of prctl."""
    machine = ("x86_64", "aarch64").index(platform.machine())
    native, clone, prlimit, prctl = ((0xC000003E, 56, 302, 157), (0xC00000B7, 220, 261, 167))[machine]
    load, equal, at_least, any_bit, end = 0x20, 0x15, 0x35, 0x45, 0x06
    allowed, denied, absent, killed = 0x7FFF0000, 0x50001, 0x50026, 0x80000000  # SECCOMP_RET_*: EPERM, ENOSYS
    # (operation, steps to skip if it holds, and if not, operand); the system call's number, architecture and first
    # argument stand at 0, 4 and 16 of its data.
    steps = [(load, 0, 0, 4), (equal, 1, 0, native), (end, 0, 0, killed), (load, 0, 0, 0)]
    steps += [(at_least, 0, 1, 0x40000000), (end, 0, 0, denied)]  # x32, the second numbering of x86_64
    for numbers in DENIED:
        if numbers[machine]:
            steps += [(equal, 0, 1, numbers[machine]), (end, 0, 0, denied)]
    steps += [(equal, 0, 1, 435), (end, 0, 0, absent)]  # clone3, its flags cannot be read here: clone is taken then
    tests = {clone: (any_bit, 0, 1, 0x10000), prlimit: (equal, 0, 1, 0), prctl: (equal, 1, 0, 1)}
    for number, test in tests.items():  # allowed with CLONE_THREAD; for itself; but for PR_SET_PDEATHSIG
        steps += [(equal, 0, 4, number), (load, 0, 0, 16), test, (end, 0, 0, allowed), (end, 0, 0, denied)]
    filters = b"".join(struct.pack("HBBI", *step) for step in [*steps, (end, 0, 0, allowed)])
    filters = ctypes.create_string_buffer(filters, len(filters))
    check(libc.prctl(22, 2, struct.pack("HP", len(filters) // 8, ctypes.addressof(filters)), 0, 0))  # PR_SET_SECCOMP


# ---- in the program's process: the program ---------------------------------------------------------------------------


def run_program(job: dict, token: str) -> None:
    """Run the program and its tests in this process, and end it; what they find goes to file 3, after `token`."""
    module = types.ModuleType("__main__" if "stdin" in job else "response")
    sys.modules["__main__"] = sys.modules[module.__name__] = module
    sys.argv[:] = ["response.py"]
    status = 0
    try:
        # Both are compiled before anything of the response runs.
        program = compile(job["code"], "code.py", "exec", dont_inherit=True)
        tests = compile(job.get("tests", ""), "tests.py", "exec", dont_inherit=True)
        if "function" in job:  # what the statements of such problems take for granted
            vars(module).update({name: getattr(typing, name) for name in typing.__all__})
        exec(program, vars(module))
        if "stdin" not in job:
            exec(tests, vars(module))
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


if __name__ == "__main__":
    serve(sys.argv[1:])
