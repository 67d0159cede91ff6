"""The limits that a program of a model cannot lift: sizes, files (Landlock) and system calls (seccomp).

What each of them holds stands in plumbing/rewards/sandbox_server.py, which imports this. Nothing of ours is imported here.
"""

import ctypes
import math
import os
import platform
import resource
import signal
import struct

CPU_SECONDS = 10  # of a program
MEMORY = 1 << 30  # bytes of address space, of which the interpreter itself takes about 50 MB
FILE_SIZE = 16 << 20  # bytes of each file, and of output
OPEN_FILES = 64
THREADS = 256  # where there are namespaces and the user is not root, whom no limit holds; else memory limits them

DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
# What a program reads outside of its folder, where the kernel has Landlock; the server adds Python and its packages.
READABLE = (
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share", "/etc/ld.so.cache", "/etc/localtime",
    "/etc/mime.types", "/proc/self", "/sys/devices/system/cpu",
)  # fmt: skip


def check(result: int) -> None:
    """Raise the OSError with which a call of the C library has failed."""
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def restrict(libc, seconds: float, folder: str, readable: list[str], private: bool) -> None:
    """Give up for good what this process may do, but to compute, to read `readable`, and to use `folder`."""
    cpu = math.ceil(min(CPU_SECONDS, max(seconds, 1.0)))
    limits = dict(CPU=cpu, AS=MEMORY, FSIZE=FILE_SIZE, NOFILE=OPEN_FILES, CORE=0)
    if private:  # without a namespace of its own, the kernel counts all processes of the user
        limits["NPROC"] = THREADS
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    check(libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)))
    check(libc.prctl(1, signal.SIGKILL, 0, 0, 0))  # PR_SET_PDEATHSIG: dies with the server
    check(libc.prctl(38, 1, 0, 0, 0))  # PR_SET_NO_NEW_PRIVS
    confine_files(libc, folder, readable)
    deny_system_calls(libc)


def landlock_version(libc) -> int:
    """Return the kernel's version of Landlock, below 1 if it has none."""
    return libc.syscall(ctypes.c_long(444), None, ctypes.c_size_t(0), 1)


def confine_files(libc, folder: str, readable: list[str]) -> None:
    """Let this process use files in `folder`, read `readable` and use DEVICES, where the kernel has Landlock."""
    version = landlock_version(libc)
    if version < 1:
        return
    # LANDLOCK_ACCESS_FS_*: READ_*, WRITE_FILE, REMOVE_* and MAKE_*; later versions have REFER and TRUNCATE too.
    write_file, read_file, read_folder = 2, 4, 8
    everything = 0x1FFE | (0x2000 if version >= 2 else 0) | (0x4000 if version >= 3 else 0)
    rights = {path: read_file | read_folder if os.path.isdir(path) else read_file for path in readable}
    rights |= {device: read_file | write_file for device in DEVICES} | {folder: everything}
    ruleset = struct.pack("Q", everything)
    check(rules := libc.syscall(ctypes.c_long(444), ruleset, ctypes.c_size_t(len(ruleset)), 0))
    for path, right in rights.items():
        if os.path.exists(path):
            opened = os.open(path, os.O_PATH)
            check(libc.syscall(ctypes.c_long(445), rules, 1, struct.pack("=Qi", right, opened), 0))
            os.close(opened)
    check(libc.syscall(ctypes.c_long(446), rules, 0))
    os.close(rules)


# System calls that a program is denied: (number on x86_64, on aarch64), None where there is none.
DENIED = (
    (57, None), (58, None), (59, 221), (322, 281),  # fork, vfork, execve, execveat
    (62, 129), (200, 130), (234, 131), (129, 138), (297, 240), (424, 424),  # kill and its kin
    (101, 117), (310, 270), (311, 271), (438, 438),  # ptrace, process_vm_readv and _writev, pidfd_getfd
    (41, 198), (425, 425),  # socket, io_uring_setup (which could make one)
    (272, 97), (308, 268), (165, 40), (166, 39),  # unshare, setns, mount, umount2
    # What Landlock leaves alone: chmod, chown, utime, setxattr, removexattr and their kin, file_setattr.
    (90, None), (91, 52), (268, 53), (452, 452), (92, None), (93, 55), (94, None), (260, 54),
    (132, None), (235, None), (261, None), (280, 88),
    (188, 5), (189, 6), (190, 7), (463, 463), (197, 14), (198, 15), (199, 16), (466, 466), (469, 469),
    (29, 194), (68, 186), (240, 180), (64, 190),  # shmget, msgget, mq_open, semget: they outlive the program
    (319, 279), (447, 447),  # memfd_create, memfd_secret: memory beside the limit of address space
    (141, 140), (251, 30), (203, 122),  # setpriority, ioprio_set, sched_setaffinity, which reach other processes
    (142, 118), (144, 119), (314, 274),  # sched_setparam, sched_setscheduler, sched_setattr, likewise
    (248, 217), (249, 218), (250, 219), (321, 280), (298, 241), (323, 282),  # keys, bpf, perf events, userfaultfd
)  # fmt: skip


def deny_system_calls(libc) -> None:
    """Install a seccomp filter that denies DENIED, and others by one of their arguments."""
    machine = ("x86_64", "aarch64").index(platform.machine())
    architecture = (0xC000003E, 0xC00000B7)[machine]
    load, equal, at_least, any_bit, end = 0x20, 0x15, 0x35, 0x45, 0x06
    allowed, denied, absent, killed = 0x7FFF0000, 0x50001, 0x50026, 0x80000000  # SECCOMP_RET_*: EPERM, ENOSYS
    # (numbers, which argument, test, operands, what follows if one of them holds, and if none does)
    by_argument = (
        ((56, 220), 0, any_bit, (0x10000,), allowed, denied),  # clone: CLONE_THREAD
        ((302, 261), 0, equal, (0,), allowed, denied),  # prlimit64: of itself
        ((157, 167), 0, equal, (1,), denied, allowed),  # prctl: PR_SET_PDEATHSIG
        ((53, 199), 1, any_bit, (2,), denied, allowed),  # socketpair: SOCK_DGRAM, which can send to other sockets
        ((72, 25), 1, equal, (8, 15), denied, allowed),  # fcntl: F_SETOWN and _EX, which choose who gets a signal
        # ioctl: the same (FIOSETOWN, SIOCSPGRP), and attributes of files (FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR)
        ((16, 29), 1, equal, (0x8901, 0x8902, 0x40086602, 0x401C5820), denied, allowed),
    )
    # (operation, steps to skip if it holds, and if not, operand). The system call's number stands at 0 of its data, the
    # architecture at 4, the arguments from 16 on, 8 bytes each.
    steps = [(load, 0, 0, 4), (equal, 1, 0, architecture), (end, 0, 0, killed), (load, 0, 0, 0)]
    steps += [(at_least, 0, 1, 0x40000000), (end, 0, 0, denied)]  # x32, the second numbering of x86_64
    for numbers in DENIED:
        if numbers[machine]:
            steps += [(equal, 0, 1, numbers[machine]), (end, 0, 0, denied)]
    steps += [(equal, 0, 1, 435), (end, 0, 0, absent)]  # clone3, its flags cannot be read here: clone is taken then
    for numbers, argument, test, operands, holds, otherwise in by_argument:
        steps += [(equal, 0, 2 + 2 * len(operands), numbers[machine]), (load, 0, 0, 16 + 8 * argument)]
        for operand in operands:
            steps += [(test, 0, 1, operand), (end, 0, 0, holds)]
        steps.append((end, 0, 0, otherwise))
    filters = b"".join(struct.pack("HBBI", *step) for step in [*steps, (end, 0, 0, allowed)])
    filters = ctypes.create_string_buffer(filters, len(filters))
    check(libc.prctl(22, 2, struct.pack("HP", len(filters) // 8, ctypes.addressof(filters)), 0, 0))  # PR_SET_SECCOMP
