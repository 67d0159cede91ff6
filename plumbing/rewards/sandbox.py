"""Runs programs of a model: in processes under limits on this machine, or on a SandboxFusion server.

caller -> this file as a program of its own (namespaces) -> a process for each input (limits, Landlock)

docs/data_and_rewards.md says what holds the program: limits, Landlock and namespaces. Each input has a new process,
without a secret, an expected output or the caller's environment. The program sees names and sizes of files and names of
processes. One that attacks on purpose may do more: run all of this in a container.

Imports the standard library only: the interpreter of the programs is isolated (-I).
"""

import contextlib
import ctypes
import functools
import json
import os
import resource
import select
import signal
import struct
import sys
import time
import types

CPU_SECONDS = 10
MEMORY = 1 << 30  # bytes of address space, of which the interpreter uses about 50 MB
FILE_SIZE = 16 << 20  # bytes of each file
OUTPUT = 4 << 20  # bytes of what it prints, of which the rest is dropped
FOLDER_SIZE = 64 << 20  # bytes of all files together, where there are namespaces
OPEN_FILES = 64
PROCESSES = 256  # and threads, where there are namespaces and the user is not root, whom no limit holds

DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
READABLE = (  # and Python with its packages
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share", "/etc/ld.so.cache", "/etc/localtime",
    "/etc/mime.types", "/proc/self", "/sys/devices/system/cpu",
)  # fmt: skip
libc = ctypes.CDLL(None, use_errno=True)
LANDLOCK = libc.syscall(ctypes.c_long(444), None, ctypes.c_size_t(0), 1)  # the kernel's version, below 1 for none


def run(code: str, inputs: list[str], seconds: float, server: str = "") -> list[tuple[int, str]]:
    """Run a program once for each input, which it reads from stdin, until it fails on one of them.

    Return (status, stdout) of each: the exit code, or 128 + its number if a signal, as of the time limit, ended it.

    Args:
        seconds: of wall clock, for all inputs together.
        server: the address of a SandboxFusion server; "" for this machine.

    Raise RuntimeError, OSError or an exception of urllib3 if programs cannot be run.
    """
    return run_there(server, code, inputs, seconds) if server else run_here(code, inputs, seconds)[1]


def run_here(code: str, inputs: list[str], seconds: float) -> tuple[str, list[tuple[int, str]]]:
    """Return what does not hold programs on this machine ("" for nothing), and the results."""
    import subprocess  # not in the process of a program, which imports this file as well and starts faster without
    import tempfile

    job = json.dumps([code, inputs, time.monotonic() + seconds]).encode()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, tempfile.TemporaryFile() as output:
        home = f"{folder}/home"
        process = subprocess.Popen(
            [sys.executable, "-I", "-X", "utf8", os.path.abspath(__file__), folder, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.defpath, "HOME": home, "TMPDIR": home, "OMP_NUM_THREADS": "1"},  # one core a program
            start_new_session=True,
        )
        try:
            process.communicate(job, timeout=1.2 * seconds)  # its clock ends it before
        except subprocess.TimeoutExpired:
            return "", []
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what the program has left behind
            process.wait()
        if process.returncode:
            raise RuntimeError(f"the process of a program ended with exit code {process.returncode}")
        output.seek(0)
        missing, results = json.load(output)
    return missing, [(status, stdout) for status, stdout in results]


def run_there(server: str, code: str, inputs: list[str], seconds: float) -> list[tuple[int, str]]:
    """Run a program on a SandboxFusion server, by POST /run_code."""
    import urllib3

    retries = urllib3.Retry(3, backoff_factor=1, status_forcelist=(429, 502, 503, 504), allowed_methods=None)
    address, end, results = f"{server.rstrip('/').removesuffix('/run_code')}/run_code", time.monotonic() + seconds, []
    for text in inputs:
        left = max(1.0, end - time.monotonic())
        body = {"code": code, "language": "python", "stdin": text, "run_timeout": left}
        response = urllib3.request("POST", address, json=body, retries=retries, timeout=left + 5)
        answer = response.json()
        if response.status != 200 or answer["status"] == "SandboxError":
            raise RuntimeError(f"{address}: status {response.status}, {str(answer)[:200]}")
        program = answer["run_result"]
        results.append((program["return_code"] if program["status"] == "Finished" else 1, program["stdout"]))
        if results[-1][0]:
            break
    return results


@functools.cache
def open_limits() -> str:
    """Return what does not hold programs on this machine, "" for nothing. Raise RuntimeError if none runs."""
    missing, results = run_here("print(input())", ["1"], 60.0)
    if results != [(0, "1\n")]:
        raise RuntimeError("a program that prints what it reads does not run within the limits")
    return missing


# ---- the process that runs a program, once for each input ------------------------------------------------------------


def check(result: int) -> int:
    """Return the result of a call of the C library. Raise the OSError with which it has failed."""
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def end_with(parent: int) -> None:
    """Let this process end with the parent of this descriptor, which may have ended already."""
    check(libc.prctl(1, signal.SIGKILL, 0, 0, 0))  # PR_SET_PDEATHSIG
    if select.select([parent], [], [], 0)[0]:
        os._exit(1)


def main(folder: str, caller: int) -> None:
    """Run the program on stdin, and print [what does not hold it, [(status, stdout) of each input]]."""
    end_with(os.pidfd_open(caller))
    code, inputs, deadline = json.load(sys.stdin)
    missing = [] if LANDLOCK > 0 else ["no Landlock: they can read and write every file of this user"]
    try:
        enter_namespaces(folder)
    except OSError as error:
        missing.append(f"no namespaces ({error.strerror}): they can use the network and fill the disk")
    results = []
    for text in inputs:
        results.append(run_once(code, text, deadline, folder))
        if results[-1][0]:
            break
    print(json.dumps(["; ".join(missing), results]))


def enter_namespaces(folder: str) -> None:
    """Go on in a process that sees no other one and no network, with the folder in memory. Raise OSError if refused."""
    uid, gid = os.getuid(), os.getgid()
    # NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET
    check(libc.unshare(0x20000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000))
    for file, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{file}", "w") as mapping:
            mapping.write(line)
    check(libc.mount(None, b"/", None, 0x4000 | 0x40000, None))  # MS_REC | MS_PRIVATE
    options = b"mode=700,size=%d,nr_inodes=4096" % FOLDER_SIZE
    check(libc.mount(b"none", folder.encode(), b"tmpfs", 2 | 4, options))  # MS_NOSUID | MS_NODEV
    parent = os.pidfd_open(os.getpid())
    if child := os.fork():  # process 1 of the new namespace, whose end is the end of all processes there
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    end_with(parent)


def run_once(code: str, text: str, deadline: float, folder: str) -> tuple[int, str]:
    """Return the exit code of a program (128 + signal, as in a shell) and what it printed before the deadline."""
    os.makedirs(os.environ["HOME"], exist_ok=True)
    with open(f"{folder}/stdin", "wb") as file:
        file.write(text.encode(errors="replace"))
    # Descriptors, not files: the program's process closes them, and ends as Python does.
    stdin = os.open(f"{folder}/stdin", os.O_RDONLY)
    stdout = os.open(f"{folder}/stdout", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    parent = os.pidfd_open(os.getpid())
    child = os.fork()
    if not child:
        end_with(parent)
        os.chdir(os.environ["HOME"])
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        os.closerange(3, 1024)
        restrict(folder)
        sys.argv[:] = ["code.py"]
        sys.modules["__main__"] = module = types.ModuleType("__main__")
        exec(compile(code, "code.py", "exec", dont_inherit=True), vars(module))
        sys.exit()
    ended = os.pidfd_open(child)
    select.select([ended], [], [], max(0.0, deadline - time.monotonic()))
    os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for descriptor in (stdin, ended, parent):
        os.close(descriptor)
    with open(stdout, "rb") as file:
        file.seek(0)
        return status if status >= 0 else 128 - status, file.read(OUTPUT).decode(errors="replace")


def restrict(folder: str) -> None:
    """Give up for good what this process may do, except to compute, to read READABLE and to use `folder`."""
    limits = dict(CPU=CPU_SECONDS, AS=MEMORY, FSIZE=FILE_SIZE, NOFILE=OPEN_FILES, CORE=0)
    if os.getppid() == 1:  # without a namespace, the kernel counts all processes of the user
        limits["NPROC"] = PROCESSES
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    check(libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)))
    check(libc.prctl(38, 1, 0, 0, 0))  # PR_SET_NO_NEW_PRIVS
    if LANDLOCK > 0:
        confine(folder)


def confine(folder: str) -> None:
    """Let this process use files in `folder`, read READABLE and use DEVICES; refuse TCP and signals to others."""
    # LANDLOCK_ACCESS_FS_*: READ_*, WRITE_FILE, REMOVE_* and MAKE_*; later versions have REFER and TRUNCATE too.
    write_file, read_file, read_folder = 2, 4, 8
    everything = 0x1FFE | (0x2000 if LANDLOCK >= 2 else 0) | (0x4000 if LANDLOCK >= 3 else 0)
    readable = [*READABLE, os.path.dirname(os.path.dirname(os.__file__)), *filter(os.path.exists, sys.path)]
    rights = {path: read_file | read_folder if os.path.isdir(path) else read_file for path in readable}
    rights |= {device: read_file | write_file for device in DEVICES} | {folder: everything}
    # The rights of files, of TCP (bind, connect) and of what reaches processes outside (abstract sockets, signals).
    ruleset = struct.pack("QQQ", everything, 3 if LANDLOCK >= 4 else 0, 3 if LANDLOCK >= 6 else 0)
    rules = check(libc.syscall(ctypes.c_long(444), ruleset, ctypes.c_size_t(len(ruleset)), 0))
    for path, right in rights.items():
        if os.path.exists(path):
            opened = os.open(path, os.O_PATH)
            check(libc.syscall(ctypes.c_long(445), rules, 1, struct.pack("=Qi", right, opened), 0))
            os.close(opened)
    check(libc.syscall(ctypes.c_long(446), rules, 0))
    os.close(rules)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
