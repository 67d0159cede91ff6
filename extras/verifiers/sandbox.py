"""Runs programs of a model in processes under limits.

caller -> this file as a program of its own (namespaces) -> a process for each input (limits,
Landlock, seccomp)

docs/data_and_rewards.md says what holds the program. Each input has a new process, without a
secret, an expected output or the caller's environment. The program sees names and sizes of files
and names of processes. What attacks the kernel itself may do more: run all of this in a container.

Imports the standard library only: the interpreter of the programs is isolated (-I).
"""

import ctypes
import marshal
import os
import resource
import select
import signal
import struct
import sys
import time
import types
from collections.abc import Iterator

CPU_SECONDS = 10
# Bytes of address space of its one process, of which the interpreter uses about 50 MB.
MEMORY = 1 << 30
FILE_SIZE = 4 << 20  # bytes of each file, and of what it prints
FOLDER_SIZE = 64 << 20  # bytes of all files together, where there are namespaces
OPEN_FILES = 64
THREADS = 256

DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
# And Python with its packages.
READABLE = (
    "/lib /lib64 /usr/lib /usr/lib64 /usr/local/lib /usr/share /etc/ld.so.cache /etc/localtime "
    "/etc/mime.types /proc/self /sys/devices/system/cpu"
).split()
# System calls that are refused, with their numbers on x86_64 and aarch64, 999 for none. "only":
# unless an argument, counted from 0, equals a number or has a bit; "not": if it does. A program
# keeps to one process, so that the limits of this process hold all its memory, and nothing survives
# it. It cannot send itself a SIGKILL, so that one from outside can be told.
SYSTEM_CALLS = """
socket             41 198
socketpair         53 199  not 1 & 2          # SOCK_DGRAM, which sends to any address
io_uring_setup    425 425                     # what it carries out passes no filter
fork               57 999
vfork              58 999
clone              56 220  only 0 & 0x10000   # CLONE_THREAD
unshare           272  97
setns             308 268
mount             165  40
bpf               321 280
perf_event_open   298 241
userfaultfd       323 282
add_key           248 217
request_key       249 218
keyctl            250 219
shmget             29 194                     # what these four make stays in memory
msgget             68 186
semget             64 190
mq_open           240 180
mq_unlink         241 181                     # what others have made, like the next eight
shmat              30 196
shmctl             31 195
semop              65 193
semctl             66 191
semtimedop        220 192
msgsnd             69 189
msgrcv             70 188
msgctl             71 187
io_setup          206   0                     # of a number that is limited for all users together
syslog            103 116                     # the kernel's log
memfd_create      319 279                     # memory that is not address space
memfd_secret      447 447
truncate           76  45                     # Landlock holds it from Linux 6.2 on
kill               62 129  only 0 = {pid}
kill               62 129  not 1 = 9          # SIGKILL
tgkill            234 131  only 0 = {pid}
tgkill            234 131  not 2 = 9
fcntl              72  25  not 1 = 10         # F_SETSIG: the signal of a descriptor
timer_create      222 107                     # sends any signal
setrlimit         160 164  not 0 = 0          # RLIMIT_CPU, at which the kernel sends SIGKILL
prlimit64         302 261  not 1 = 0
tkill             200 130
rt_sigqueueinfo   129 138
rt_tgsigqueueinfo 297 240
pidfd_send_signal 424 424
fcntl              72  25  not 1 = 8          # F_SETOWN: signals to others, like the next three
fcntl              72  25  not 1 = 15         # F_SETOWN_EX
ioctl              16  29  not 1 = 0x8901     # FIOSETOWN
ioctl              16  29  not 1 = 0x8902     # SIOCSPGRP
prctl             157 167  not 0 = 1          # PR_SET_PDEATHSIG: it ends with its parent
ptrace            101 117
pidfd_getfd       438 438
process_vm_readv  310 270
process_vm_writev 311 271
prlimit64         302 261  only 0 = 0         # of itself
sched_setaffinity 203 122  only 0 = 0
sched_setparam    142 118
sched_setscheduler 144 119
sched_setattr     314 274
setpriority       141 140
ioprio_set        251  30
"""
# What Landlock leaves alone: modes, owners, times and other attributes of files. These calls do
# nothing and succeed, as shutil.copy requires.
ATTRIBUTES = """
chmod              90 999
fchmod             91  52
fchmodat          268  53
fchmodat2         452 452
chown              92 999
fchown             93  55
lchown             94 999
fchownat          260  54
utime             132 999
utimes            235 999
futimesat         261 999
utimensat         280  88
setxattr          188   5
lsetxattr         189   6
fsetxattr         190   7
setxattrat        463 463
removexattr       197  14
lremovexattr      198  15
fremovexattr      199  16
removexattrat     466 466
file_setattr      469 469
ioctl              16  29  not 1 = 0x40086602  # FS_IOC_SETFLAGS
ioctl              16  29  not 1 = 0x401C5820  # FS_IOC_FSSETXATTR
"""
# The column above, 0 for none, and AUDIT_ARCH_*
COLUMN, ARCHITECTURE = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}.get(
    os.uname().machine, (0, 0)
)
libc = ctypes.CDLL(None, use_errno=True)
# The kernel's version, below 1 for none.
LANDLOCK = libc.syscall(444, None, 0, 1)


def run(code: str, inputs: list[str], seconds: float, tests: str = "") -> Iterator[tuple[int, str]]:
    """Run a program once for each input, which it reads from stdin.

    Yield (0, what does not hold programs on this machine, "" for nothing), then the (status,
    stdout) of each run. The status is the exit code, or 128 + its number if a signal, as at a
    limit, ended it. Who takes no further result ends the program: the next inputs are not run.

    Args:
        seconds: of wall clock, for all inputs together.
        tests: what a second process reads from stdin; it is in the memory of no other one. If there
            are tests, the code defines, without limits, the `main` of both processes. Each reads
            from descriptor 3 what the other one writes into 4. The result is that of the tests.

    Raise RuntimeError or OSError, also between results, if programs cannot be run, or if something
    else kills one, as the kernel does where memory runs out.
    """
    # Not in the process of a program, which imports this file as well and starts faster without.
    import subprocess
    import tempfile

    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as job,
        tempfile.TemporaryFile("w+") as of_tests,
    ):
        of_tests.write(tests)
        of_tests.seek(0)
        deadline = time.monotonic() + seconds
        marshal.dump([code, inputs, deadline, of_tests.fileno() if tests else 0], job)
        job.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-Xutf8", "-Xint_max_str_digits=0", __file__, folder],
            stdin=job,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[of_tests.fileno()],
            env={
                "PATH": os.defpath,
                "HOME": folder,
                "TMPDIR": folder,
                "OMP_NUM_THREADS": "1",  # one core a program
                "MALLOC_ARENA_MAX": "1",  # else each thread gets a heap of 64 MiB of address space
            },
            start_new_session=True,
        )
        try:
            for _ in ["", *inputs]:
                status, text = marshal.load(process.stdout)  # type: ignore[arg-type]
                yield status, text.decode(errors="replace")
        except EOFError:
            raise RuntimeError(
                "programs cannot be run, or one was killed, as where memory runs out"
            ) from None
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # also what a program without filter left
            process.communicate()
            # Folders in folders, so deep that neither a path nor recursion reaches the last one, are
            # moved side by side.
            folders = [folder]
            for parent in folders:
                for entry in list(os.scandir(parent)):
                    if entry.is_dir(follow_symlinks=False):
                        os.chmod(entry, 0o700)
                        folders.append(tempfile.mktemp(dir=folder))
                        os.rename(entry, folders[-1])


def open_limits() -> str:
    """Return what does not hold programs on this machine, "" for nothing. Raise RuntimeError if
    none runs.
    """
    (_, missing), *results = run("print(input())", ["1"], 60.0)
    if results != [(0, "1\n")]:
        raise RuntimeError("a program that prints what it reads does not run within the limits")
    return missing


# ---- the process that runs a program, once for each input ----------------------------------------


def checked(result: int) -> int:
    """Return the result of a call of the C library. Raise the OSError with which it has failed."""
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def end_with_parent() -> None:
    """Let this process end when its parent does; if that has ended already, the next `write` fails."""
    checked(libc.prctl(1, signal.SIGKILL))  # PR_SET_PDEATHSIG


def main(folder: str) -> None:
    """Run the program that is on stdin, and write what `run` yields."""
    end_with_parent()
    # Programs, too: who ends a run may send it to all of its processes.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code, inputs, deadline, of_tests = marshal.load(sys.stdin.buffer)
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory runs out, the kernel ends programs first
    missing = []
    if LANDLOCK <= 0:
        missing.append("no Landlock: they can read and write every file of this user")
    if not COLUMN:
        missing.append("no filter of system calls: they can use sockets and start processes")
    try:
        enter_namespaces(folder)
    except OSError as error:
        missing.append(f"no namespaces ({error.strerror}): they can fill the disk")
    write(0, "; ".join(missing).encode())
    for text in inputs:
        write(*run_once(code, text, deadline, folder, of_tests))


def write(status: int, text: bytes) -> None:
    marshal.dump((status, text), sys.stdout.buffer)
    sys.stdout.flush()


def enter_namespaces(folder: str) -> None:
    """Go on in a process that sees no other one and no network, and changes files in the folder
    only.

    The folder is in memory. Raise OSError if refused, after which programs can be run all the same.
    """
    uid = os.getuid()
    gid = os.getgid()
    # NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET
    checked(libc.unshare(0x20000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000))
    # Process 1 of the new namespace, whose end is the end of all processes there.
    if child := os.fork():
        os.waitpid(child, 0)
        os._exit(0)
    end_with_parent()
    for file, line in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        with open(f"/proc/self/{file}", "w") as mapping:
            mapping.write(line)
    # mount_setattr (Linux 5.12), AT_RECURSIVE for all mounts: MOUNT_ATTR_RDONLY, MS_PRIVATE.
    attributes = struct.pack("QQQQ", 1, 0, 0x40000, 0)
    checked(libc.syscall(442, -100, b"/", 0x8000, attributes, 32))
    options = b"mode=700,size=%d,nr_inodes=4096" % FOLDER_SIZE
    checked(libc.mount(b"none", folder.encode(), b"tmpfs", 2 | 4, options))  # MS_NOSUID | MS_NODEV


def run_once(
    code: str, text: str, deadline: float, folder: str, of_tests: int = 0
) -> tuple[int, bytes]:
    """Return the exit code of a program (128 + signal, as in a shell) and what it printed before
    the deadline. Raise RuntimeError if it was killed, but not for a limit.

    Args:
        of_tests: the descriptor that a second process reads its tests from, see `run`; 0 for none.
    """
    # In memory: the program could put a link in the place of a file in its folder. Descriptors, not
    # files: the program's process closes them, and ends as Python does.
    stdin = os.memfd_create("stdin")
    stdout = os.memfd_create("stdout")
    os.pwrite(stdin, text.encode(errors="replace"), 0)
    module = types.ModuleType("__main__")
    pipes = [*os.pipe(), *os.pipe()]
    # What each process runs, and its descriptors from 0 on.
    jobs = [(code, [stdin, stdout, 2])]
    if of_tests:
        exec(code, vars(module))
        jobs = [
            ("main('run_program')", [stdin, 2, 2, pipes[0], pipes[3]]),
            ("main('run_tests')", [of_tests, stdout, 2, pipes[2], pipes[1]]),
        ]
    children = {}
    for source, descriptors in jobs:
        child = os.fork()
        if not child:
            end_with_parent()
            if descriptors[0] == of_tests:
                libc.prctl(4, 0)  # PR_SET_DUMPABLE: no program looks into it
            os.chdir(folder)
            # By way of higher numbers: the first nine are taken, at the latest by the pipes.
            for number, copy in enumerate([*map(os.dup, descriptors)]):
                os.dup2(copy, number)
            os.closerange(len(descriptors), 1024)
            restrict(folder)
            sys.argv[:] = ["code.py"]
            sys.modules["__main__"] = module
            exec(source, vars(module))
            sys.exit()
        children[child] = os.pidfd_open(child)
    for pipe in pipes:  # a process reads to the end once the other one has ended
        os.close(pipe)
    running = [*children.values()]
    while not (ended := select.select(running, [], [], 0.05)[0]) and time.monotonic() < deadline:
        if not all(map(within_limits, children, running)):
            break
    for child, process in children.items():
        os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if process in ended and status == -signal.SIGKILL:
            raise RuntimeError("something else has killed the program or its tests")
        os.close(process)
    printed = os.pread(stdout, FILE_SIZE, 0)
    os.close(stdin)
    os.close(stdout)
    return status if status >= 0 else 128 - status, printed


def within_limits(child: int, process: int) -> bool:
    """Return whether a child, and its pidfd, has used no more CPU time and threads than it may.

    Here rather than by RLIMIT_CPU, whose SIGKILL would look like the kernel's for lack of memory,
    and RLIMIT_NPROC, which would not hold root.
    """
    with open(f"/proc/self/fdinfo/{process}") as file:  # the number that /proc has for the child
        threads = f"/proc/{file.read().partition('Pid:')[2].split()[0]}/task"
    # See clock_getcpuclockid(3) for the clock.
    return time.clock_gettime(~child << 3 | 2) < CPU_SECONDS and len(os.listdir(threads)) <= THREADS


def restrict(folder: str) -> None:
    """Give up for good what this process may do, except to compute, read READABLE and use
    `folder`.
    """
    for name, limit in dict(AS=MEMORY, FSIZE=FILE_SIZE, NOFILE=OPEN_FILES, CORE=0).items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    checked(libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)))
    checked(libc.prctl(38, 1, 0, 0, 0))  # PR_SET_NO_NEW_PRIVS
    if LANDLOCK > 0:
        confine(folder)
    if COLUMN:
        filter_system_calls()


def confine(folder: str) -> None:
    """Let this process use files in `folder`, read READABLE and use DEVICES; refuse TCP and signals
    to others.
    """
    # LANDLOCK_ACCESS_FS_*: READ_*, WRITE_FILE, REMOVE_* and MAKE_*; from version 2 on REFER, from 3
    # on TRUNCATE too.
    write_file = 2
    read_file = 4
    read_folder = 8
    everything = {1: 0x1FFE, 2: 0x3FFE}.get(LANDLOCK, 0x7FFE)
    readable = [*READABLE, os.path.dirname(os.path.dirname(os.__file__)), *sys.path]
    rights = {
        path: read_file | read_folder if os.path.isdir(path) else read_file for path in readable
    }
    rights |= dict.fromkeys(DEVICES, read_file | write_file) | {folder: everything}
    # The rights of files, of TCP (bind, connect) and of what reaches processes outside (abstract
    # sockets, signals).
    ruleset = struct.pack("QQQ", everything, 3 if LANDLOCK >= 4 else 0, 3 if LANDLOCK >= 6 else 0)
    rules = checked(libc.syscall(444, ruleset, len(ruleset), 0))
    for path, right in rights.items():
        if os.path.exists(path):
            opened = os.open(path, os.O_PATH)
            checked(libc.syscall(445, rules, 1, struct.pack("=Qi", right, opened), 0))
            os.close(opened)
    checked(libc.syscall(446, rules, 0))
    os.close(rules)


def filter_system_calls() -> None:
    """Refuse SYSTEM_CALLS for good, and let ATTRIBUTES do nothing.

    https://docs.kernel.org/userspace-api/seccomp_filter.html
    """
    load, equal, at_least, any_bit, end = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF_*
    # SECCOMP_RET_*: EPERM, no error, ENOSYS
    allowed = 0x7FFF0000
    killed = 0x80000000
    refused = 0x50001
    done = 0x50000
    absent = 0x50026
    # A step: operation, how many steps to skip if it holds and if not, operand. "load" reads the
    # number of the call at 0, the architecture at 4, and from 16 on the arguments, of 8 bytes each.
    steps = [(load, 0, 0, 4), (equal, 1, 0, ARCHITECTURE), (end, 0, 0, killed), (load, 0, 0, 0)]
    # Calls of x32 or newer than this table, and clone3, whose flags no filter can read: for ENOSYS,
    # the C library takes older ones.
    steps += [(at_least, 0, 1, 470), (end, 0, 0, absent), (equal, 0, 1, 435), (end, 0, 0, absent)]
    for table, answer in ((SYSTEM_CALLS, refused), (ATTRIBUTES, done)):
        for line in table.format(pid=os.getpid()).strip().splitlines():
            words = line.partition("#")[0].split()
            row = [(end, 0, 0, answer)]
            if len(words) > 3:
                word, argument, operator, value = words[3:]
                only = word == "only"
                test = (any_bit if operator == "&" else equal, only, not only, int(value, 0))
                row = [(load, 0, 0, 16 + 8 * int(argument)), test, *row, (load, 0, 0, 0)]
            steps += [(equal, 0, len(row), int(words[COLUMN])), *row]
    steps.append((end, 0, 0, allowed))
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    # PR_SET_SECCOMP
    checked(libc.prctl(22, 2, struct.pack("HP", len(steps), ctypes.addressof(filters))))


if __name__ == "__main__":
    main(sys.argv[1])
