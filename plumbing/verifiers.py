"""The process in which answers are checked: whatever hangs or crashes here is killed without harm to the training.

`Rewards` starts it with a line {"load": [names], "timeout": seconds}, which it answers with {"loaded": true}
(and "warning": text, if there is one) or {"reward": name, "error": why}, then sends a line of JSON a call:
    {"reward": name, "prompts": [...], "responses": [...], "columns": {"answer": [...], ...}}
A built-in reward answers {"scores": [x]} or {"error": why} response by response, so that the reader can tell which one
is stuck; a function from a file answers once for all.

The reward `code` runs what responses hold, each program in a process of its own under limits (see `serve_programs`):
worker -> server (this file with the argument "programs", started once, which knows no expected output) -> program. The
server goes on only as long as the worker lives, and a program only as long as the server does.
"""

import ast
import atexit
import ctypes
import functools
import importlib.util
import json
import logging
import math as mathematics
import os
import platform
import re
import resource
import select
import signal
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
import types
import typing


def gold_answer(answer) -> str:
    """The reference answer of a row: what follows the last "####" in a GSM8K solution, else the text itself."""
    answer = int(answer) if isinstance(answer, float) and answer.is_integer() else answer  # a column with gaps in it
    return str(answer).rsplit("####", 1)[-1].strip()


def plain_number(text: str) -> str:
    """A number without thousands separators, currency and a final full stop."""
    return text.replace(",", "").replace("$", "").strip().rstrip(".")


def gsm8k(response: str, answer) -> float:
    """Strict GSM8K: 1 if the last "#### number" of the response is the reference number."""
    found = re.findall(r"####\s*(-?[$]?-?[\d,]*\.?\d+)", response)
    return float(bool(found) and plain_number(found[-1]) == plain_number(gold_answer(answer)))


def exact(response: str, answer) -> float:
    """1 if the response is the reference answer, leading and trailing white space aside."""
    return float(response.strip() in (gold_answer(answer), str(answer).strip()))


def last_box(text: str) -> str | None:
    r"""The content of the last \boxed{} of a text, None without one."""
    _, box, after = text.rpartition("\\boxed{")
    depth, escaped = 1, False
    for end, character in enumerate(after if box else ""):
        if not escaped:
            depth += (character == "{") - (character == "}")
        escaped = character == "\\" and not escaped
        if not depth:
            return after[:end].strip()
    return None


# A reference to be read as text: a number, perhaps with a unit in words ("1,234 apples"), words, or text with $...$.
# Of any other text math-verify would take some number, so "(1, 2)" would be 2: that is read as a formula.
IS_TEXT = re.compile(
    r"[-+]?[$]?(\d{1,3}(,\d{3})+|\d+)?(\.\d+)?\s*(%|(?!(and|or)\b)[A-Za-z]{2,}( [A-Za-z]+)*)?\.?$"
    r"|(?s:.*)(?<!\\)[$]"
)


def math(response: str, answer) -> float:
    """1 if the response's final answer (its last box, if it has one) equals the reference as mathematics.

    Parsed and compared by math-verify.
    """
    from math_verify import parse, verify

    gold = gold_answer(answer)
    # The library's own time limits need signals; this process is killed from outside instead.
    reference = parse(gold if IS_TEXT.match(gold) else f"${gold}$", parsing_timeout=None)
    if not reference:
        raise ValueError(f"math-verify cannot parse the reference answer {gold!r}")
    return float(verify(reference, parse_response(response), timeout_seconds=None))


def parse_response(response: str) -> list:
    """The final answer of a response as math-verify reads it: [expression, text], or [] for none."""
    from math_verify import parse

    box = last_box(response)  # the library would join several into a set
    return parse(response if box is None else f"$\\boxed{{{box}}}$", parsing_timeout=None)


def format(response: str, answer) -> float:
    """1 for the form of DeepSeek-R1: <think> ... </think> <answer> ... </answer> and nothing else, each once."""
    whole = re.fullmatch(r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*", response, re.DOTALL)
    once = all(response.count(tag) == 1 for tag in ("<think>", "</think>", "<answer>", "</answer>"))
    return float(bool(whole) and once)


def final_answer(response: str) -> str | None:
    r"""What stands in the last <answer>...</answer> of a response; if a \boxed{} is in there, the content of the last.

    Without the tag, the content of the response's last \boxed{}; without that too, None.
    """
    answers = re.findall(r"<answer>(.*?)</answer>", response, re.DOTALL)
    box = last_box(answers[-1] if answers else response)
    return answers[-1].strip() if answers and box is None else box


def reasoning_gym(response: str, source) -> float:
    """The score that the reasoning_gym task itself gives, often between 0 and 1 for an answer that is partly right.

    Its scorer gets the `final_answer`; where there is none, all that follows </think>. Most tasks give little to a text
    that merely contains the right answer, so longer responses should be told of the tag by --system_prompt. An answer
    that the scorer cannot read (some raise) is 0, as long as it can read the right one.

    Args:
        source: [task, size, seed, index], which makes the problem again: the row's column "reasoning_gym".
    """
    if not (isinstance(source, list) and len(source) == 4):
        raise ValueError('the row has no column "reasoning_gym": it is not from --dataset reasoning_gym:TASK')
    task, size, seed, index = source
    dataset, answer = reasoning_gym_dataset(task, size, seed), final_answer(response)
    entry, answer = dataset[index], response.rpartition("</think>")[2].strip() if answer is None else answer
    try:
        return float(dataset.score_answer(answer, entry=entry))
    except Exception:
        dataset.score_answer(entry["answer"], entry=entry)
        return 0.0


@functools.cache
def reasoning_gym_dataset(task: str, size: int, seed: int):
    import reasoning_gym

    return reasoning_gym.create_dataset(task, size=size, seed=seed)


def knights(response: str, answer) -> float:
    """1 if the response calls each person of the reference, and no one else, a knight or a knave as the reference does.

    Reference: "Zoey is a knave, and Oliver is a knight." (the column solution_text of K-and-K/knights-and-knaves).
    Of the response counts its `final_answer`; without one, what follows the last "conclusion" after </think>; without
    that too, the last paragraph. Each "knight" or "knave" in there has to belong to a statement such as "Zoey is a
    knave", "Zoey: knave" or "Zoey = knave" about a person of the reference. So a second role for someone, a choice
    ("Zoey is a knave or a knight"), a stranger and a person left out are all 0.
    """
    known = dict(re.findall(r"([^\W\d_][\w'’-]*) is an? (knight|knave)\b", str(answer).lower()))
    if not known:
        raise ValueError(f'the reference {answer!r} has no "NAME is a knight" or "NAME is a knave"')
    text = final_answer(response)
    if text is None:
        *others, text = re.split("conclusion", response.rpartition("</think>")[2].strip(), flags=re.IGNORECASE)
        text = text if others else re.split(r"\n\s*\n", text)[-1]
    text = re.sub(r"\\[a-z]+|_", " ", text.lower())  # LaTeX commands; an underscore would be a part of a word
    gap = r"[^\w.,;!?\n]+"
    people = "|".join(re.escape(name) for name in sorted(known, key=len, reverse=True))
    person = rf"(?<!\w)(?<!\w['’-])({people})(?!['’-]?\w)"  # the whole name: not the Ann of Mary-Ann
    statements = re.findall(rf"{person}{gap}(?:is{gap})?(?:an?{gap}|the{gap})?(knight|knave)\b", text)
    roles = re.findall(r"knight|knave", text)
    return float(len(statements) == len(roles) and set(statements) == set(known.items()))


# ---- code: programs are run in processes of their own ----------------------------------------------------------------

CPU_SECONDS = 10  # a program
MEMORY = 1 << 30  # bytes of address space, of which the interpreter itself takes about 50 MB
FILE_SIZE = 16 << 20  # bytes a file, and of output
FOLDER_SIZE = 64 << 20  # bytes of all files together, where mounts are possible
OPEN_FILES = 64
THREADS = 256  # where there are namespaces and the user is not root, which no limit holds; else memory limits them


def code(response: str, answer) -> float:
    """1 if the Python of the response passes all tests of the row; 0 if not, be it by a crash or at a limit.

    The code is the last ```python, ```py or bare ``` block, or the whole response without one. The tests are one of
      - Python with asserts (MBPP; HumanEval with its `check(name)` called at the end), as one text or a list of texts,
        also as JSON: run after the code, in the same interpreter;
      - {"inputs": [...], "outputs": [...]}, also as JSON (APPS, TACO, DeepCoder): what the program reads and has to
        print, each a text or a list of lines. Compared line by line, spaces at the ends aside; a number that the
        expected output writes with a point may differ by 1e-6;
      - the same with "fn_name": lists of arguments, and the values that this function (or method of a class Solution)
        has to return, compared as JSON. A value may stand in a list of its own, as in APPS.
    Other tests raise ValueError. Processes of its own, sockets and signals are denied to a program; threads are not.

    Expected outputs never enter the program's process, so they cannot be forged. Asserts do: exiting early or printing
    does not pass them, but code that looks for the token in the frames above it can forge the report, and an object
    that is equal to everything passes an assert. For code that is trained hard against its tests, prefer outputs.
    """
    tests, program = read_tests(answer), code_of(response)
    deadline = time.monotonic() + Programs.seconds
    run = lambda **job: programs().run({"code": program, **job}, deadline - time.monotonic())
    if isinstance(tests, str):
        return float(run(tests=tests)["report"] is not None)
    inputs, outputs, function = tests
    if not function:
        return float(all(same_output(run(stdin=text), expected) for text, expected in zip(inputs, outputs)))
    try:
        values = json.loads(run(function=function, calls=inputs)["report"] or "[]")
    except (ValueError, RecursionError):  # a value that only its own interpreter can write
        return 0.0
    return float(len(values) == len(outputs) and all(v == out or [v] == out for v, out in zip(values, outputs)))


def code_of(response: str) -> str:
    """The last block of Python in a response, else the whole of it."""
    blocks = re.findall(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", response, re.DOTALL | re.MULTILINE)
    blocks = [body for language, body in blocks if language.lower() in ("python", "python3", "py", "")]
    return textwrap.dedent(blocks[-1]) if blocks else response


def read_tests(answer) -> str | tuple[list, list, str | None]:
    """The tests of a row, see `code`: Python, or inputs, outputs and the name of the function, if it is one."""
    tests = answer
    if isinstance(tests, str) and tests.lstrip()[:1] in ("{", "["):
        tests = json.loads(tests)
    if isinstance(tests, dict):
        inputs, outputs, function = (tests.get(key) for key in ("inputs", "outputs", "fn_name"))
        if not (isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs) > 0):
            raise ValueError("tests need as many outputs as inputs, in two lists")
        if function:
            if not all(isinstance(arguments, list) for arguments in inputs):
                raise ValueError(f"tests of the function {function!r} need a list of arguments as each input")
            return inputs, outputs, function
        lines = [side if isinstance(side, list) else [side] for side in inputs + outputs]
        if not all(isinstance(line, str) for side in lines for line in side):
            raise ValueError("tests without fn_name need texts, or lists of lines, as inputs and outputs")
        texts = ["\n".join(side) for side in lines]
        return texts[: len(inputs)], texts[len(inputs) :], None
    if isinstance(tests, list) and all(isinstance(test, str) for test in tests):
        tests = "\n".join(tests)
    if not isinstance(tests, str):
        raise ValueError(f"tests are Python asserts or {{inputs, outputs}}, not {type(tests).__name__}")
    try:
        statements = ast.parse(tests).body
    except (SyntaxError, RecursionError) as error:
        raise ValueError(f"tests are not Python: {error}") from error
    # A check(candidate) that nothing calls would pass everything.
    definitions = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign)
    runs = ast.Module([statement for statement in statements if not isinstance(statement, definitions)], [])
    asserts = any(isinstance(node, ast.Assert) for node in ast.walk(ast.Module(statements, [])))
    if not asserts or not any(isinstance(node, (ast.Assert, ast.Call)) for node in ast.walk(runs)):
        raise ValueError("tests assert nothing (or define a function that nothing calls)")
    return tests


def same_output(result: dict, expected: str) -> bool:
    """Whether a program ended well and printed what is expected, see `code`."""

    lines, others = ([line.split() for line in text.strip().splitlines()] for text in (result["stdout"], expected))
    if result["status"] or [len(line) for line in lines] != [len(line) for line in others]:
        return False
    return all(same_word(*words) for line, other in zip(lines, others) for words in zip(line, other))


def same_word(word: str, expected: str) -> bool:
    """Whether a word that was printed is the expected one, or about the same number."""
    try:
        close = "." in expected and mathematics.isclose(float(word), float(expected), rel_tol=1e-6, abs_tol=1e-6)
    except ValueError:
        close = False
    return word == expected or close


class Programs:
    """The worker's end of the server of programs."""

    seconds = 24.0  # wall clock of all tests of a response; `main` takes 80 % of --reward_timeout

    def __init__(self):
        packages = [path for path in sys.path if path.endswith("-packages")]  # numpy, if it is installed
        self.server = subprocess.Popen(
            [sys.executable, "-I", "-S", "-X", "utf8", os.path.abspath(__file__), "programs", *packages],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PATH": os.defpath, "TMPDIR": tempfile.gettempdir(), "OMP_NUM_THREADS": "1"},  # one core a program
            start_new_session=True,  # it has to outlive the worker, if only to remove a folder
        )
        hello = self.server.stdout.readline()
        if not hello:
            raise RuntimeError("the server of programs did not start")
        self.warning = json.loads(hello)["warning"]
        if self.run({"code": "import random\nprint(input())", "stdin": "1"}, 60.0)["stdout"] != "1\n":
            raise RuntimeError("a program that prints what it reads does not run within the limits")

    def run(self, job: dict, seconds: float) -> dict:
        """Run a program for so many seconds of wall clock: {"status": 0 if it ended well, "stdout", "report"}."""
        try:
            self.server.stdin.write(json.dumps({**job, "seconds": max(seconds, 0.0)}).encode() + b"\n")
            self.server.stdin.flush()
            return json.loads(self.server.stdout.readline())
        except (OSError, ValueError) as error:
            programs.cache_clear()  # the next response gets a new one
            raise RuntimeError("the server of programs has ended") from error


programs = functools.cache(Programs)


def serve_programs(packages: list[str]) -> None:
    """Run a program for each line of JSON, one at a time, and answer {"status", "stdout", "report"}.

    What holds a program:
      - a new process, forked from this one, which holds nothing but earlier programs: no secret, empty environment;
      - limits of CPU time, address space, file size, open files; the wall clock, after which it is killed;
      - a seccomp filter under which it can neither make a process (so a limit is a limit of the whole, the fork bomb of
        root included, which RLIMIT_NPROC exempts) nor a socket, nor send a signal, trace, mount or make a namespace;
      - no capabilities, and none to gain; where the kernel has Landlock, it writes only in its folder and looks into no
        other process; where the kernel allows it, namespaces in which it sees no other process, no network, no /proc
        and no device, and can write only in a folder in memory, which goes with it.
    What remains: it reads the files that the user may read. Where there are no namespaces, see the warnings below.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    sys.path.extend(packages)
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
        null = os.open(os.devnull, os.O_WRONLY)
        check(libc.syscall(ctypes.c_long(442), -100, b"/", 0x8000, attributes, ctypes.c_size_t(32)))
        check(libc.mount(b"none", b"/proc", b"tmpfs", 1, b"size=0"))  # MS_RDONLY
        private, warning = True, None
    except OSError as error:
        null, private = os.open(os.devnull, os.O_WRONLY), False
        warning = f"no namespaces here ({error.strerror}): the code in responses can see processes and fill the disk"
        if landlock(libc) < 1:
            warning += (
                "; no Landlock either: it can write wherever this user can, read its processes' environment and, "
                "unless the kernel restricts ptrace, write into them; run this in a container"
            )
    libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: programs of the same user cannot look in here
    requests, replies = open(0, "rb", closefd=False), open(1, "w", closefd=False)
    print(json.dumps({"warning": warning}), file=replies, flush=True)
    for line in requests:
        job, token = json.loads(line), os.urandom(16).hex()
        files = [os.memfd_create(name) for name in ("stdin", "stdout", "report")]
        os.write(files[0], job.get("stdin", "").encode(errors="replace"))
        os.lseek(files[0], 0, os.SEEK_SET)
        folder = "/dev/shm" if private else tempfile.mkdtemp()
        if private:
            options = b"mode=700,size=%d,nr_inodes=4096" % FOLDER_SIZE
            check(libc.mount(b"none", folder.encode(), b"tmpfs", 2 | 4, options))  # MS_NOSUID | MS_NODEV
        program = os.fork()
        if not program:
            try:
                os.environ.update(HOME=folder, TMPDIR=folder)
                os.chdir(folder)
                for number, file in enumerate((files[0], files[1], null, files[2])):
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
        if private:
            check(libc.umount2(folder.encode(), 2))  # MNT_DETACH
        else:
            try:
                os.rmdir(folder)
            except OSError:  # it holds something, in folders of any depth: too much for shutil.rmtree
                subprocess.run(["rm", "-rf", folder], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, stdout, report = [read_whole(file) for file in files]
        report = report.removeprefix(token) if report.startswith(token) else None
        try:
            print(json.dumps({"status": status, "stdout": stdout, "report": report}), file=replies, flush=True)
        except BrokenPipeError:  # the worker has gone
            os._exit(0)


def check(result: int) -> None:
    """Raise what a call of the C library has failed with."""
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def read_whole(file: int) -> str:
    """The text of an open file of at most FILE_SIZE bytes, which is closed."""
    with open(file, "rb") as whole:
        whole.seek(0)
        return whole.read().decode(errors="replace")


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


def landlock(libc, rights: bytes | None = None) -> int:
    """A new Landlock ruleset, or without `rights` the version of Landlock in the kernel; below 1 if there is none."""
    return libc.syscall(ctypes.c_long(444), rights, ctypes.c_size_t(8 if rights else 0), 0 if rights else 1)


def restrict(libc, seconds: float, folder: str, private: bool) -> None:
    """Give up what this process may do, for good, but for writing in `folder`: see `serve_programs`."""
    cpu = mathematics.ceil(min(CPU_SECONDS, max(seconds, 1.0)))
    limits = dict(CPU=cpu, AS=MEMORY, FSIZE=FILE_SIZE, NOFILE=OPEN_FILES, CORE=0)
    # Without a namespace of its own, the count is of all processes of the user.
    for name, limit in (limits | dict(NPROC=THREADS) if private else limits).items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    check(libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)))
    check(libc.prctl(1, signal.SIGKILL, 0, 0, 0))  # PR_SET_PDEATHSIG: dies with the server
    check(libc.prctl(38, 1, 0, 0, 0))  # PR_SET_NO_NEW_PRIVS
    if (version := landlock(libc)) >= 1:
        # LANDLOCK_ACCESS_FS_*: WRITE_FILE, REMOVE_* and MAKE_*; later versions have REFER and TRUNCATE too.
        writes = 0x1FF2 | (0x2000 if version >= 2 else 0) | (0x4000 if version >= 3 else 0)
        check(rules := landlock(libc, struct.pack("Q", writes)))
        below = struct.pack("=Qi", writes, os.open(folder, os.O_PATH))
        check(libc.syscall(ctypes.c_long(445), rules, 1, below, 0))
        check(libc.syscall(ctypes.c_long(446), rules, 0))
        os.closerange(4, 16)
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


def run_program(job: dict, token: str) -> None:
    """Run the code and its tests in this process, which ends here; what they find goes to file 3, after `token`."""
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


BUILTIN = {  # a function of a response and of what the row holds in a column; a package that it takes
    "math": (math, "answer", "math-verify"),
    "gsm8k": (gsm8k, "answer", None),
    "exact": (exact, "answer", None),
    "format": (format, "answer", None),
    "knights": (knights, "answer", None),
    "reasoning_gym": (reasoning_gym, "reasoning_gym", "reasoning-gym"),
    "code": (code, "answer", None),
}


def load_function(name: str):
    """The function of "path/to/file.py:function"."""
    path, _, function = name.rpartition(":")
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    spec = importlib.util.spec_from_file_location("reward_function", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(getattr(module, function, None)):
        raise AttributeError(f"{path} has no function {function!r}")
    return getattr(module, function)


def load_package(name: str) -> None:
    """Import a package now, as that can take longer than the first call may."""
    module = name.replace("-", "_")
    if importlib.util.find_spec(module) is None:
        raise ModuleNotFoundError(f"takes the package {name} (pip install {name})")
    importlib.import_module(module)


def as_numbers(scores, count: int) -> list:
    """What a reward function returned, as `count` floats or Nones."""
    scores = list(scores)
    if len(scores) != count:
        raise ValueError(f"returned {len(scores)} scores for {count} responses")
    return [None if score is None else float(score) for score in scores]


def main() -> None:
    logging.disable(logging.WARNING)  # math-verify warns at every call that its time limits are off
    # What a reward function prints must not get between the answers: it goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**message) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    settings = json.loads(sys.stdin.readline())
    functions, notes = {}, {}
    for name in settings["load"]:
        try:
            function, column, package = BUILTIN.get(name) or (load_function(name), None, None)
            functions[name] = function, column
            if package:
                load_package(package)
            if name == "code":
                Programs.seconds = 0.8 * settings["timeout"]
                notes = {"warning": programs().warning} if programs().warning else {}
        except BaseException as error:
            answer(reward=name, error=f"{type(error).__name__}: {error}")
            return
    answer(loaded=True, **notes)

    for line in sys.stdin:
        request = json.loads(line)
        (function, column), responses, columns = functions[request["reward"]], request["responses"], request["columns"]
        # A built-in reward is called once a response, a function from a file once with all of them.
        calls = zip(responses, columns.get(column, [None] * len(responses))) if column else [None]
        for call in calls:
            # The caller kills this process after the time limit; if the caller is gone, the kernel does, a bit later.
            signal.setitimer(signal.ITIMER_REAL, settings["timeout"] + 5)
            try:
                if call is None:
                    answer(scores=as_numbers(function(request["prompts"], responses, **columns), len(responses)))
                else:
                    answer(scores=[function(*call)])
            except BaseException as error:
                traceback.print_exc()
                answer(error=f"{type(error).__name__}: {error}")
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    serve_programs(sys.argv[2:]) if sys.argv[1:2] == ["programs"] else main()
