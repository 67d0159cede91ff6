"""The reward `code`: what passes and what does not, and programs that try to do harm, with and without namespaces."""

import contextlib
import ctypes
import json
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import ROOT
from tiny_models import make_tokenizer

from plumbing.rewards import code_tests, sandbox, verifiers
from plumbing.rewards.reward_processes import worker_count
from plumbing.rewards.sources import Rewards

CLONE_NEWUSER = 0x10000000


def without_landlock() -> None:
    """In a new process: neither namespaces nor Landlock, whose first system call a filter answers with ENOSYS."""
    without_namespaces()
    steps = ((0x20, 0, 0, 0), (0x15, 0, 1, 444), (0x06, 0, 0, 0x50026), (0x06, 0, 0, 0x7FFF0000))
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps), 32)
    assert ctypes.CDLL(None).prctl(22, 2, struct.pack("HP", 4, ctypes.addressof(filters)), 0, 0) == 0


def without_namespaces() -> None:
    """In a new process: a user namespace in which the kernel allows no further one, as a container often is."""
    uid, gid = os.getuid(), os.getgid()
    assert ctypes.CDLL(None).unshare(CLONE_NEWUSER) == 0
    for file, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{file}", "w") as mapping:
            mapping.write(line)
    with open("/proc/sys/user/max_user_namespaces", "w") as most:
        most.write("0")


class Worker:
    """A worker process as `Rewards` starts it. Its server of programs is known by `mark`, one of its arguments."""

    def __init__(self, folder, timeout=5.0, before=None):
        folder.mkdir()
        self.mark, self.temporary = str(folder / "mark-packages"), folder / "tmp"
        self.errors = folder / "stderr"
        self.temporary.mkdir()
        environment = {"PYTHONPATH": f"{self.mark}:{ROOT}", "TMPDIR": str(self.temporary), "SECRET": "do-not-tell"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "plumbing.rewards.reward_worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=open(self.errors, "w"), text=True, start_new_session=True, env={**os.environ, **environment},
            preexec_fn=before,
        )  # fmt: skip
        self.send({"load": ["code"], "timeout": timeout})
        self.loaded = self.receive()

    def send(self, message: dict) -> None:
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def receive(self) -> dict:
        return json.loads(self.process.stdout.readline())

    def answer(self, response: str, tests) -> dict:
        self.send({"reward": "code", "prompts": [""], "responses": [response], "columns": {"answer": [tests]}})
        return self.receive()

    def score(self, response: str, tests) -> float:
        return self.answer(response, tests)["scores"][0]

    def prints(self, program: str, output: str) -> bool:
        return self.score(program, {"inputs": [""], "outputs": [output]}) == 1

    def found(self) -> list[int]:
        """The processes that are its server and its programs."""
        found = []
        for process in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{process}/cmdline") as arguments:
                found += [int(process)] if f"{ROOT}\0{self.mark}\0" in arguments.read() else []
        return found

    def servers(self) -> int:
        """How many they are, where none is just ending: one if no program runs, else three."""
        end = time.monotonic() + 5
        while len(self.found()) == 2 and time.monotonic() < end:
            time.sleep(0.01)
        return len(self.found())


KERNELS = ["namespaces", "no namespaces"]


def started(kernel: str, folder, timeout: float):
    """A worker where the kernel allows namespaces, or one where it does not; nothing may be left of it."""
    allowed = kernel == "namespaces"
    try:
        worker = Worker(folder / "it", timeout, before=None if allowed else without_namespaces)
    except subprocess.SubprocessError:
        pytest.skip("this kernel does not allow the namespace in which to forbid namespaces")
    if allowed and "warning" in worker.loaded:
        worker.process.kill()
        pytest.skip(f"needs namespaces: {worker.loaded['warning']}")
    worker.private = allowed
    yield worker
    assert worker.servers() == 1 and os.listdir(worker.temporary) == []
    worker.process.kill()
    worker.process.wait()


@pytest.fixture(scope="module", params=KERNELS)
def worker(request, tmp_path_factory):
    """One whose programs have 4 s (80 % of 5)."""
    yield from started(request.param, tmp_path_factory.mktemp("worker"), 5.0)


@pytest.fixture(scope="module")
def at_once(tmp_path_factory):
    """A function that calls another one with each kind of worker side by side, as most programs wait for their limit.

    Programs have 2 s.
    """
    with contextlib.ExitStack() as stack:
        workers = []
        for kernel in KERNELS:
            with contextlib.suppress(pytest.skip.Exception):
                folder = tmp_path_factory.mktemp("hasty")
                workers.append(stack.enter_context(contextlib.contextmanager(started)(kernel, folder, 2.5)))
        pool = stack.enter_context(ThreadPoolExecutor(len(KERNELS)))
        yield lambda check: list(pool.map(check, workers)) or pytest.skip("no worker can be started")


def test_says_what_it_cannot_do(worker):
    assert worker.loaded["loaded"] is True
    assert ("no namespaces here" in worker.loaded.get("warning", "")) == (not worker.private)


# ---- right and wrong -------------------------------------------------------------------------------------------------

ASSERTS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0"
HUMANEVAL = "def check(candidate):\n    assert candidate(1, 2) == 3\n\ncheck(add)"
STDIN = {"inputs": ["1 2\n", "3 4"], "outputs": ["3\n", "7"]}
CALLS = {"inputs": [[1, 2], ["a", "b"]], "outputs": [3, ["ab"]], "fn_name": "add"}
ADD = "def add(a, b):\n    return a + b\n"
READ = "a, b = map(int, input().split())\nprint(a + b)\n"


@pytest.mark.parametrize(
    "right, tests",
    [
        (ADD, ASSERTS), (ADD, ASSERTS.split("\n")), (ADD, json.dumps(ASSERTS.split("\n"))), (ADD, HUMANEVAL),
        (READ, STDIN), (READ, json.dumps(STDIN)), (READ, STDIN | {"fn_name": None}),
        (READ, {"inputs": [["1 2", ""]], "outputs": [["3"]]}),
        (ADD, CALLS), (ADD, json.dumps(CALLS)),
        ("class Solution:\n    def add(self, a: List[int], b: Optional[str]):\n        return a + b", CALLS),
    ],
)  # fmt: skip
def test_right_and_wrong(worker, right, tests):
    assert worker.score(right, tests) == 1
    assert worker.score(right.replace("a + b", "a - b"), tests) == 0
    assert worker.score(right.replace("a + b", "a + c"), tests) == 0
    assert worker.score(right.replace("a + b", "a + "), tests) == 0
    assert worker.score("", tests) == 0


@pytest.mark.parametrize(
    "code, tests",
    [
        (READ + "exit()", STDIN), (READ + "quit(0)", STDIN), (ADD + "exit()", CALLS), (ADD + "exit()", ASSERTS),
        ("a, b = map(int, open('/dev/stdin').read().split())\nprint(a + b)", STDIN),
        ("import os\nprint('log', file=open(os.devnull, 'w'))\n" + READ, STDIN),
        ("import tempfile\nwith tempfile.TemporaryFile() as f: f.write(b'1')\n" + READ, STDIN),
        ("import tempfile\nwith tempfile.TemporaryDirectory() as f: open(f + '/x', 'w')\n" + READ, STDIN),
        ("import time, zoneinfo\ntime.localtime(), zoneinfo.available_timezones()\n" + READ, STDIN),
        ("import numpy\n" + READ, STDIN),
        ("def add(a, b): return [a + b, {'x': (a, 1)}]", CALLS | {"inputs": [[0.1, 0.2]] * 2,
                                                            "outputs": [[0.3, {"x": [0.1, 1]}]] * 2}),
        ("def max(a): return a\n" + ADD.replace("a +", "max(a) +"), ASSERTS.replace("== 3", "== max(3, 1)")),
        ("def sum(a, b): return 6", "assert sum(10, 15) == 6"),
        ("count = 0\ndef add():\n    global count\n    count += 1", "add()\nassert count == 1"),
        ("import sys, io\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer)\ndef add(): print(1)\n",
         "import sys\nadd()\nassert True"),
        (ADD, "import math, os.path\nfrom typing import *\ndef main():\n    assert math.isclose(add(1, 2), 3)\n"
         "if __name__ == '__main__':\n    main()"),
    ],
)  # fmt: skip
def test_right_programs_pass(worker, code, tests):
    assert worker.score(code, tests) == 1


@pytest.mark.parametrize(
    "code",
    [
        "import builtins\nbuiltins.exec = lambda *a: None",
        "abs = lambda x: 0",
        "def set(*a): return 1",
        "import builtins\nbuiltins.abs = lambda x: 0\nbuiltins.set = lambda x: 0",
        "import math\nmath.isclose = lambda *a, **k: True",
        "import sys, types\nsys.modules['math'] = types.SimpleNamespace(isclose=lambda *a: True)",
        "import builtins, types\nbuiltins.__import__ = lambda *a: types.SimpleNamespace(isclose=lambda *a: True)",
        "import builtins\ndef f(x):\n    builtins.abs = builtins.set = lambda x: 0\n    return {9}",
    ],
)
@pytest.mark.parametrize(
    "tests",
    [
        "assert f([1]) and True\nassert set(f([1])) == set([1])",
        "assert f([0]) is 1 or abs(len(f([0])) - 5) < 1e-6",
        "import math\nassert math.isclose(len(f([0])), 5)",
        "if __name__ == '__main__':\n    assert sorted(f([1])) == [1]",
    ],
)
def test_asserts_are_not_altered(worker, code, tests):
    assert worker.score("def f(x):\n    return {9}\n" + code, tests) == 0


def test_all_tests_have_to_pass(worker):
    assert worker.score("def add(a, b): return 3", ASSERTS) == 0
    assert worker.score("def add(a, b): return 3", CALLS | {"outputs": [3, 4]}) == 0
    assert worker.score("print(3)", STDIN) == 0
    assert worker.score("def add(a, b): return {1}", CALLS) == 0  # no JSON
    assert worker.score("def add(a, b):\n x = []\n for _ in range(10**5): x = [x]\n return x", CALLS) == 0
    assert worker.score("print(0)\nraise SystemExit(1)", {"inputs": [""], "outputs": ["0"]}) == 0
    assert worker.score("print(0)\n1 / 0", {"inputs": [""], "outputs": ["0"]}) == 0


@pytest.mark.parametrize(
    "printed, expected, same",
    [
        ("1 2 \n3\n\n", "1 2\n3", 1), ("1\n2 3", "1 2\n3", 0), ("1 2\n3 4", "1 2\n3", 0),
        ("0.3333333", "0.33333333", 1), ("0.334", "0.333", 0), ("1000000001", "1000000002", 0),
        ("3", "3.0", 1), ("nan", "0.5", 0), ("x", "0.5", 0), ("1 \r\n2\r\n", "1\n2", 1), ("1\n2\n3", "1\n2", 0),
        ("", "", 1), ("a", "", 0), ("", "a", 0), ("1\n\n2", "1\n2", 0),
    ],
)  # fmt: skip
def test_outputs_are_compared(printed, expected, same):
    assert code_tests.same_output({"status": 0, "stdout": printed}, expected) == same


def test_a_long_output_costs_no_memory():
    printed = "1 2\n" * (4 << 20)
    tracemalloc.start()
    assert not code_tests.same_output({"status": 0, "stdout": printed}, "1 2\n1 3")
    assert not code_tests.same_output({"status": 0, "stdout": printed}, "1 2\n" * 1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 << 20  # the text, 16 MiB, is copied once


@pytest.mark.parametrize(
    "value, expected, same",
    [
        (0.1 + 0.2, 0.3, 1), (3, 3.0, 1), (0.31, 0.3, 0), (3.0000000001, 3, 0), (math.inf, math.inf, 1),
        ([1, [0.1 + 0.2]], [1, [0.3]], 1), ([1], [1, 2], 0), ({"a": 0.1 + 0.2}, {"a": 0.3}, 1), ({"b": 1}, {"a": 1}, 0),
        ("0.30000001", "0.3", 0), (None, 0.3, 0), ("3", 3, 0), ([], {}, 0),
    ],
)  # fmt: skip
def test_values_are_compared(value, expected, same):
    assert code_tests.same_value(value, expected) == same


def test_finding_the_program_takes_linear_time():
    start = time.monotonic()
    for fence in ("```text\n", "```\n", "```python\n    a = 1\n"):
        code_tests.code_of(fence * 50_000)
    assert time.monotonic() - start < 2


@pytest.mark.parametrize(
    "response, code",
    [
        ("a = 1", "a = 1"),
        ("<think>\n```python\na = 1\n```\n</think>\nI do not know.", "I do not know."),
        ("<think>hm</think>\n<answer>\na = 1\n</answer>", "a = 1"),
        ("<think>hm</think> <answer>```python\na = 1\n```</answer> as\n```\na = 2\n```", "a = 1\n"),
        ("<think>\n```python\na = 1\n```\n</think>\n```python\na = 2\n```", "a = 2\n"),
        ("```python\na = 1\n```\n```python\na = 2", "a = 1\n"),
        ("Say:\n```python\na = 1\n```\nDone.", "a = 1\n"),
        ("```py\na = 1\n```\nor\n```\na = 2\n```", "a = 2\n"),
        ("```python\na = 1\n```\nprints\n```text\n1\n```", "a = 1\n"),
        ("```bash\nls\n```\nthen", "```bash\nls\n```\nthen"),
        ("1. So:\n   ```Python\n   if a:\n       b = '```'\n   ```\n", "if a:\n    b = '```'\n"),
    ],
)
def test_code_of_a_response(response, code):
    assert code_tests.code_of(response) == code


@pytest.mark.parametrize(
    "tests",
    [
        None, 7, "", "assert", "what is it?", "[1, 2", "{}", [], [1], "x = 1", "print(add(1, 2))", {"inputs": []},
        "def check(candidate):\n    assert candidate(1) == 2", "import unittest\nunittest.main()",
        "def check(candidate):\n    assert candidate(1) == 2\nprint('done')",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        assert f(1) == 2\nunittest.main()",
        {"inputs": [], "outputs": []}, {"inputs": [["1", 2]], "outputs": ["2"]},
        {"inputs": ["1"], "outputs": ["1", "2"]}, {"inputs": "12", "outputs": "12"}, {"inputs": [1], "outputs": [2]},
        {"inputs": [1], "outputs": [2], "fn_name": "f"}, {"inputs": [[1]], "outputs": ["2"]},
        {"inputs": ["1"], "outputs": [None]}, {"inputs": ["1"], "outputs": [[2]]}, [{"input": 1, "output": 2}],
    ],
)  # fmt: skip
def test_tests_that_cannot_be_understood(tests):
    with pytest.raises(ValueError):
        verifiers.code("def check(x): pass", tests)


def test_what_programs_do_at_their_end(worker):
    """Threads that nobody joins, atexit, sys.exit, a main guard, deep recursion in a large stack, reading file 0."""
    assert worker.prints("import atexit, sys\natexit.register(lambda: print(1))\nsys.exit()", "1")
    assert worker.prints(
        "import threading\nif __name__ == '__main__': threading.Thread(target=print, args=[1]).start()", "1"
    )
    assert worker.prints("import asyncio\nasync def f(): print(1)\nasyncio.run(f())", "1")
    assert worker.prints("print(open(0).read() or 1)", "1")
    deep = "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(2**28)\n"
    deep += "def f(n): return n and 1 + f(n - 1)\n"
    assert worker.prints(deep + "threading.Thread(target=lambda: print(f(10**5))).start()", "100000")
    assert worker.prints("print('\\ud800'.encode(errors='replace'), 'ü')", "b'?' ü")
    assert worker.score("if __name__ == '__main__': input()\n" + ADD, ASSERTS) == 1
    assert worker.score("from dataclasses import dataclass\n@dataclass\nclass A:\n    a: 'int'\n" + ADD, ASSERTS) == 1
    big = "x" * 10**6
    assert worker.score("print(input())", {"inputs": [big], "outputs": [big]}) == 1


# ---- harm ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(0)", "import os; os._exit(0)", "print('passed')", "print([1])", "raise SystemExit",
        "import os; os.write(3, b'[]'); os._exit(0)", "open(3, 'w').write('[]')", "import os; os.close(3)", "exit()",
        "import os; os.execv('/bin/true', ['true'])", "import builtins; builtins.compile = lambda *a, **k: 'pass'",
        "import os, threading; threading.Timer(0.2, os._exit, [0]).start(); import time; time.sleep(9)",
        "import atexit; atexit.register(print)",
    ],
)  # fmt: skip
def test_a_verdict_is_not_forged(worker, code):
    for tests in (ASSERTS, STDIN, CALLS):
        assert worker.score(code, tests) == 0


def test_a_daemon_of_the_response_does_not_report(worker):
    assert worker.score("import threading, time\nthreading.Thread(target=lambda: print(3)).start()", ASSERTS) == 0


IGNORE_SIGNALS = """
import signal
for s in range(1, 64):
    try: signal.signal(s, signal.SIG_IGN)
    except (OSError, ValueError): pass
"""


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass", "import time; time.sleep(1000)", "x = bytearray(10**10)",
        "x = []\nwhile True: x.append(bytearray(10**7))", "while True: print('x' * 10**5)",
        "f = open('f', 'wb')\nfor _ in range(10**4): f.write(bytes(10**6))",
        "open('f', 'wb').truncate(10**10)", "import threading\nthreading.Event().wait()",
        IGNORE_SIGNALS + "while True: pass", "import ctypes; ctypes.string_at(0)",
        "x = '(' * 10**6; eval(x)", "import sys; sys.stdin.close(); input()",
        "import os, resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "x = [open('/etc/localtime') for _ in range(99)]",
        "import threading as t\nt.stack_size(2**15)\nwhile True: t.Thread(target=t.Event().wait).start()",
        "import threading\nfor _ in range(2000): threading.Thread(target=threading.Event().wait).start()",
        "import os; os.chmod('.', 0); os.mkdir('x'); os.listdir('.')",
    ],
    ids=lambda value: value[:40],
)  # fmt: skip
def test_limits(at_once, code):
    """Each costs its score and no more than its time: the bound leaves room for a second test beside this one, and for
    machines on which fresh memory is slow."""

    def check(worker) -> None:
        start = time.monotonic()
        assert worker.score(code + "\nopen('x.', 'w')", STDIN) == 0
        assert time.monotonic() - start < 5
        assert worker.score(ADD, ASSERTS) == 1 and worker.servers() == 1

    at_once(check)


def test_limits_are_in_force(worker):
    names = "'CPU', 'AS', 'FSIZE', 'NOFILE', 'CORE'"
    shown = f"import resource as r\nfor x in ({names}): print(*r.getrlimit(getattr(r, 'RLIMIT_' + x)))"
    mega = 2**20
    assert worker.prints(shown, f"4 4\n{1024 * mega} {1024 * mega}\n{16 * mega} {16 * mega}\n64 64\n0 0")
    if worker.private:
        assert worker.prints("import resource\nprint(resource.getrlimit(resource.RLIMIT_NPROC))", "(256, 256)")
    alive = "import os\nfor i in range(1024):\n try: os.fstat(i); print(i)\n except OSError: pass"
    assert worker.prints(alive, "0\n1\n2\n3")


def test_cpu_time_is_limited_before_the_clock(tmp_path):
    """A program with two hours of wall clock has ten seconds of CPU: shown by its limit, not waited for."""
    worker = Worker(tmp_path / "it", timeout=9000.0)
    assert worker.prints("import resource\nprint(resource.getrlimit(resource.RLIMIT_CPU))", "(10, 10)")
    worker.process.kill()


def test_all_tests_share_the_time(at_once):
    def check(worker) -> None:
        start, tests = time.monotonic(), {"inputs": ["1"] * 9, "outputs": ["1"] * 9}
        assert worker.score("import time; time.sleep(0.8); print(input())", tests) == 0
        assert 1.5 < time.monotonic() - start < 3

    at_once(check)


FORKS = """
import ctypes, os, subprocess, time
libc, made = ctypes.CDLL(None), 0
def first(): os.fork()
def second(): subprocess.run(["sleep", "3"], check=True)
def third(): os.posix_spawn("/bin/sleep", ["sleep", "3"], {})
def fourth(): assert libc.syscall(%(clone)d, 17, 0, 0, 0, 0) < 0; raise OSError
def fifth(): assert libc.syscall(435, (ctypes.c_uint64 * 11)(0, 0, 0, 0, 17), 88) < 0; raise OSError
def sixth(): assert libc.syscall(0x40000000 + 57) < 0; raise OSError
def seventh(): assert libc.unshare(0x10000000) < 0; raise OSError
for make in (first, second, third, fourth, fifth, sixth, seventh) * 3:  # no more than 3 ** 7 where nothing holds
    try:
        make()
        time.sleep(3)
        os._exit(7)  # made a process: neither it nor its parent makes more
    except OSError:
        pass
print("contained")
"""


def test_fork_bomb(worker):
    clone = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
    assert worker.prints(FORKS % {"clone": clone}, "contained")
    assert worker.servers() == 1


def test_no_daemon_survives(at_once):
    daemon = """
import os, time
for step in range(2):
    try:
        if os.fork(): os._exit(0)
    except OSError: pass
    os.setsid() if os.getpid() != os.getsid(0) else None
time.sleep(20)
"""

    def check(worker) -> None:
        assert worker.score(daemon, STDIN) == 0
        assert worker.servers() == 1

    at_once(check)


def test_no_signals_no_tracing(worker):
    """Tried on three processes by name only; what else it could reach is asked with signal 0, which harms nothing."""
    victim = subprocess.Popen(["sleep", "60"])
    code = f"""
import ctypes, os
libc = ctypes.CDLL(None)
for process in ({worker.process.pid}, {victim.pid}, os.getppid()):
    for call in (lambda: os.kill(process, 9), lambda: os.killpg(process, 9), lambda: os.pidfd_open(process) and 1 / 0):
        try: call(); print("reached", process)
        except OSError: pass
        except ZeroDivisionError:
            if {worker.private} and process != os.getppid(): print("seen", process)
    if libc.ptrace(16, process, 0, 0) != -1: print("traced", process)
    if libc.prlimit(process, 0, None, ctypes.create_string_buffer(16)) != -1: print("limits of", process)
    try: open(f"/proc/{{process}}/mem", "r+b"); print("memory of", process)
    except OSError: pass
for process in range(2, 70000):
    try: os.kill(process, 0); print("could kill", process)
    except OSError: pass
print("done")
"""
    assert worker.prints(code, "done")
    assert victim.poll() is None and worker.process.poll() is None
    victim.kill()
    victim.wait()


def test_no_network(worker):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.5)
        port = server.getsockname()[1]
        assert worker.score(f"import socket\nsocket.create_connection(('127.0.0.1', {port}))\nprint(3)", STDIN) == 0
        with pytest.raises(TimeoutError):
            server.accept()
    for family in ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"):
        refused = (
            f"import socket\ntry: socket.socket(socket.{family}, socket.SOCK_DGRAM)\nexcept PermissionError: print(1)"
        )
        assert worker.prints(refused, "1")


def test_environment(worker):
    own = "import os\nprint(*sorted(os.environ))\n"
    own += "print(os.getcwd() == os.environ['HOME'] == os.environ['TMPDIR'], os.listdir())"
    assert worker.prints(own, "HOME LC_CTYPE OMP_NUM_THREADS PATH TMPDIR\nTrue []")
    code = """
import os
for process in %s:
    try: print(b"do-not-tell" in open(f"/proc/{process}/environ", "rb").read() and "found" or "")
    except OSError: pass
"""
    assert worker.prints(code % "(os.getppid(), 'self')", "")
    assert worker.prints(code % f"({worker.process.pid}, *range(70000))", "")
    if worker.private:
        assert worker.prints("import os; print(os.listdir('/proc/self'))", "['fd']")


def test_no_capabilities(worker):
    status = "import ctypes\nd = ctypes.create_string_buffer(24)\n"
    status += "print(ctypes.CDLL(None).capget(b'\\x22\\x05\\x08\\x20' + bytes(4), d), any(d.raw))"
    assert worker.prints(status, "0 False")
    assert worker.prints("import ctypes\nprint(ctypes.CDLL(None).prctl(39, 0, 0, 0, 0))", "1")  # PR_GET_NO_NEW_PRIVS


def test_no_write_outside(worker, tmp_path):
    (tmp_path / "old").write_text("kept")
    code = f"""
import ctypes, os
for act in (
    lambda: open({str(tmp_path / "new")!r}, "w"), lambda: open({str(tmp_path / "old")!r}, "w"),
    lambda: os.remove({str(tmp_path / "old")!r}), lambda: os.chmod({str(tmp_path / "old")!r}, 0),
    lambda: open("/var/new-file", "w"), lambda: open("/usr/lib/new", "w"), lambda: os.mknod("null", 0o020666, 259),
    lambda: open("/dev/full", "w"),
):
    try: act(); print("did it")
    except OSError: pass
libc = ctypes.CDLL(None)
print(libc.mount(b"none", b"/", None, 32, None), libc.mount(None, b"/", None, 32 | 4096, None))
print(libc.umount2(b"/proc", 2), libc.truncate({bytes(tmp_path / "old")!r}, 0))
os.makedirs("a/b")
with open("f", "w") as f: f.write("1")
os.rename("f", "a/b/g")
print(open("a/b/g").read())
"""
    assert worker.prints(code, "-1 -1\n-1 -1\n1")
    assert [path.name for path in tmp_path.iterdir()] == ["old"] and (tmp_path / "old").read_text() == "kept"
    if not worker.private:
        return  # the folder is on the disk: its files are limited one by one
    full = "for i in range(100): open(f'{i}', 'wb').write(bytes(10**6))"
    assert worker.score(full + "\nprint(3)", {"inputs": [""], "outputs": ["3"]}) == 0
    assert worker.prints(full.replace("100", "50") + "\nprint(3)", "3")


def test_no_read_outside(worker, tmp_path):
    (tmp_path / "rows.jsonl").write_text("the expected output")
    path = str(tmp_path / "rows.jsonl")
    code = f"""
import os
def link(): os.symlink({path!r}, "link"); open("link")
def hard_link(): os.link({path!r}, "hard"); open("hard")
def move(): os.rename({path!r}, "moved")
def root(): open("/proc/self/root" + {path!r})
def relative(): os.chdir({str(tmp_path)!r}); open("rows.jsonl")
def worker(): open("/proc/{worker.process.pid}/environ")
def code_tests(): open({sandbox.__file__!r})
acts = (lambda: open({path!r}), lambda: os.listdir({str(tmp_path)!r}), lambda: os.listdir("/"),
        lambda: open("/etc/passwd"), lambda: os.execv("/bin/cat", ["cat", {path!r}]))
for act in (*acts, link, hard_link, move, root, worker, code_tests, relative):
    try: act(); print("did", act)
    except OSError: pass
print("done")
"""
    assert worker.prints(code, "done")


def test_denied_system_calls(worker, tmp_path):
    """What changes files that are only read, reaches other processes, outlives the program, is memory without limit."""
    (tmp_path / "old").write_text("kept")
    path = str(tmp_path / "old")
    code = f"""
import fcntl, ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0: raise OSError(ctypes.get_errno(), name)
pipe, pair = os.pipe()[0], socket.socketpair()[0]
for act in (
    lambda: os.utime({path!r}), lambda: os.setxattr({path!r}, "user.a", b"1"), lambda: os.chown({path!r}, 0, 0),
    lambda: os.chown(0, os.getuid(), -1), lambda: os.removexattr({path!r}, "user.a"),
    lambda: os.setpriority(os.PRIO_PROCESS, 0, 5), lambda: os.nice(1), lambda: os.sched_setaffinity(0, [0]),
    lambda: os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0)),
    lambda: call("semget", 0, 1, 0o1600), lambda: call("shmget", 0, 1, 0o1600), lambda: call("msgget", 0, 0o1600),
    lambda: os.memfd_create("x"), lambda: fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getppid()),
    lambda: fcntl.ioctl(pair, 0x8901, os.getppid().to_bytes(4, "little")),
    lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM),
    lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_RAW),
    lambda: os.execv("/bin/true", ["true"]),
):
    try: act(); print("did", act.__code__.co_firstlineno, act.__code__.co_names)
    except PermissionError: pass
print("done")
"""
    assert worker.prints(code, "done")
    assert os.listxattr(path) == []


def test_nothing_stays_in_the_folder(worker):
    deep = "import os\nfor i in range(1500): os.mkdir('d'); os.chdir('d')\nprint(1)"
    assert worker.prints(deep, "1")
    assert worker.prints("import os\nos.mkdir('x', 0)\nos.umask(0o777)\nos.makedirs('y')\nprint(1)", "1")
    for _ in range(2):
        assert worker.prints("import os\nprint(os.listdir())\nos.makedirs('a/b')\nopen('a/b/c', 'w').write('x')", "[]")
    wait_for(lambda: os.listdir(worker.temporary) == [], 60)  # without namespaces, deep folders go in the background


def test_without_namespaces_and_landlock(tmp_path):
    """Then it says so, and what is left still holds: no process, no socket, no signal."""
    try:
        worker = Worker(tmp_path / "it", timeout=2.5, before=without_landlock)
    except subprocess.SubprocessError:
        pytest.skip("this kernel does not allow the namespace in which to forbid namespaces")
    assert "can write wherever this user can" in worker.loaded["warning"]
    assert "can read every file of this user" in worker.loaded["warning"]
    assert worker.prints(f"open({str(tmp_path / 'new')!r}, 'w'); print(1)", "1") and (tmp_path / "new").exists()
    hidden = "for name in ('environ', 'mem', 'fd/0'):\n try: open(f'/proc/{}/{{name}}'); print(name)\n"
    hidden += " except PermissionError: print(1)"
    assert worker.prints(hidden.format(worker.process.pid), "1\n1\n1")  # what knows the expected outputs
    for tests, right in ((ASSERTS, ADD), (STDIN, READ), (CALLS, ADD)):
        assert worker.score(right, tests) == 1 and worker.score("while True: pass", tests) == 0
    refused = "import os, socket\nfor f in {}: \n try: f(); print(0)\n except PermissionError: print(1)"
    assert worker.prints(
        refused.format(f"(os.fork, socket.socket, lambda: os.kill({worker.process.pid}, 9))"), "1\n1\n1"
    )
    worker.process.kill()
    worker.process.wait()


@pytest.mark.parametrize("namespaces", [True, False])
def test_the_end_of_the_worker_is_the_end_of_its_programs(worker, tmp_path, namespaces):
    if worker.private != namespaces:
        pytest.skip("the other worker")
    own = Worker(tmp_path / "it", timeout=100.0, before=None if namespaces else without_namespaces)
    code = "import time; open('f', 'w'); time.sleep(60)"
    own.send({"reward": "code", "prompts": [""], "responses": [code], "columns": {"answer": [ASSERTS]}})
    wait_for(lambda: own.servers() == 3 and (namespaces or any(own.temporary.iterdir())))
    os.killpg(own.process.pid, signal.SIGKILL)  # as `Worker.kill` does
    own.process.wait()
    wait_for(lambda: own.servers() == 0, 2)
    assert os.listdir(own.temporary) == []
    assert own.errors.read_text() == ""


def test_the_end_of_the_server_is_the_end_of_its_program(worker, tmp_path):
    """Also of a program that has asked to live on: the kernel kills it, and refuses to forget that it should."""
    own = Worker(tmp_path / "it", timeout=100.0, before=None if worker.private else without_namespaces)
    code = "import ctypes, time; print(ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)); open('f', 'w'); time.sleep(60)"
    own.send({"reward": "code", "prompts": [""], "responses": [code], "columns": {"answer": [STDIN]}})
    wait_for(lambda: own.servers() == 3)
    time.sleep(0.5)
    os.kill(min(own.found()), signal.SIGKILL)
    assert "server of programs has ended" in own.receive()["error"]
    wait_for(lambda: own.servers() == 0, 2)
    assert own.score(ADD, ASSERTS) == 1  # by a new one
    own.process.kill()
    own.process.wait()


def wait_for(condition, seconds=10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_server_that_died_is_replaced(worker, tmp_path):
    if not worker.private:
        pytest.skip("once is enough")
    programs = sandbox.programs()
    programs.server.kill()
    programs.server.wait()
    os.close(programs.server.stdin.fileno())
    programs.server.stdin = open(os.devnull, "wb")
    programs.server.stdout = open(os.devnull, "rb")
    with pytest.raises(RuntimeError, match="server of programs"):
        verifiers.code(ADD, ASSERTS)
    assert verifiers.code(ADD, ASSERTS) == 1


# ---- as the trainer uses it ------------------------------------------------------------------------------------------


def test_a_row_without_tests_has_no_score(worker):
    assert "ValueError" in worker.answer(ADD, "what is it?")["error"]
    assert worker.score(ADD, ASSERTS) == 1


def test_scores_reach_the_trainer():
    rewards = Rewards(("code",), 5.0, make_tokenizer())
    rows = [{"prompt": "p", "query": [1], "answer": tests} for tests in (ASSERTS, ASSERTS, STDIN, CALLS, None, STDIN)]
    texts = [f"So:\n```python\n{code}```" for code in (ADD, READ, READ, ADD, ADD, "while True: pass")]
    scores = rewards.score(rows, texts, [[]] * 6)["code"]
    rewards.close()
    assert [None if math.isnan(score) else score for score in scores] == [1, 0, 1, 1, None, 0]
    assert "ValueError" in rewards.sources["code"].failure


def test_a_stuck_server_costs_the_time_limit(monkeypatch, tmp_path):
    """A server that answers no more: its worker is killed at the limit, and a new worker with a new server goes on."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "mark-packages"))
    mark = f"{ROOT}\0{tmp_path / 'mark-packages'}\0"
    rewards = Rewards(("code",), 2.0, make_tokenizer())
    stopped = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{process}/cmdline") as arguments:
            stopped += [int(process)] if mark in arguments.read() else []
    for process in stopped:
        os.kill(process, signal.SIGSTOP)
    count, start = worker_count(), time.monotonic()
    rows = [{"prompt": "p", "query": [1], "answer": ASSERTS}] * (count + 2)
    scores = rewards.score(rows, [ADD] * (count + 2), [[]] * (count + 2))["code"]
    seconds = time.monotonic() - start
    for process in stopped:
        with contextlib.suppress(ProcessLookupError):  # it may have been killed with its worker
            os.kill(process, signal.SIGCONT)
    rewards.close()
    assert [math.isnan(score) for score in scores] == [True] * count + [False] * 2 and scores[-2:] == [1, 1]
    assert len(stopped) >= count and 2 <= seconds < 2 + 5  # one may have forked just then
