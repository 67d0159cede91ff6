"""The reward `code`: what passes and what does not, and what holds programs, with and without
namespaces.
"""

import contextlib
import ctypes
import functools
import json
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from helpers import table
from test_tool_processes import wait_until

from extras.verifiers import code_tests, sandbox

PROGRAMS = table("programs.yaml")
READ = PROGRAMS["shared"]["read"]


def score(response: str, tests, seconds: float = 10.0) -> float:
    return code_tests.code(response, tests, seconds)


# ---- right and wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize("right, tests", PROGRAMS["right"])
def test_right_and_wrong(right, tests):
    assert score(right, tests) == 1
    for wrong in ("a - b", "a + c", "a + "):
        assert score(right.replace("a + b", wrong), tests) == 0
    assert score("", tests) == 0


def rows_of(name: str) -> list:
    """Return the lines of a file in tests/data: [program, asserts], of attacks a right program too."""
    return [json.loads(line) for line in Path(ROOT, "tests/data", name).read_text().splitlines()]


LONG = ["print(input())", {"inputs": ["ü" * 10**6], "outputs": ["ü" * 10**6]}]
ASSERTS = rows_of("asserts_of_right_programs.jsonl")


@pytest.mark.parametrize("code, tests", [*PROGRAMS["passing"], LONG, *ASSERTS])
def test_right_programs_pass(code, tests):
    assert score(code, tests) == 1


TOLD = "asserts hold in the process of the program, but not with copies of its data"


@pytest.mark.parametrize("program, asserts", PROGRAMS["told"])
def test_asserts_that_copies_do_not_pass(program, asserts):
    """A right program has no score, a wrong one 0."""
    with pytest.raises(RuntimeError, match=TOLD):
        score(program, asserts)
    assert score(program, f"{asserts}\nassert f is None") == 0


@pytest.mark.parametrize("code, tests", PROGRAMS["wrong"])
def test_wrong_programs_fail(code, tests):
    assert score(code, tests) == 0


@pytest.mark.parametrize("program, asserts, right, told", rows_of("attacks_on_asserts.jsonl"))
def test_attacks_on_asserts(program, asserts, right, told):
    with pytest.raises(RuntimeError, match=TOLD) if told else contextlib.nullcontext():
        assert score(program, asserts) == 0
    assert score_of_right_program(right, asserts) == 1


score_of_right_program = functools.cache(score)


@pytest.mark.parametrize("printed, expected, same", PROGRAMS["outputs"])
def test_outputs_are_compared(printed, expected, same):
    assert code_tests.same_output((0, printed), expected) == same
    assert not code_tests.same_output((1, printed), expected)


@pytest.mark.parametrize("value, expected, same", PROGRAMS["values"])
def test_values_are_compared(value, expected, same):
    assert code_tests.same_value(value, expected) == same


def test_too_few_values_are_wrong(monkeypatch):
    """As if the process of the tests had been made to print them."""
    monkeypatch.setattr(sandbox, "run", lambda *_: iter([(0, ""), (0, "[]")]))
    assert score("", {"inputs": [[1]], "outputs": [1], "fn_name": "f"}) == 0


@pytest.mark.parametrize("response, code", PROGRAMS["responses"])
def test_code_of_a_response(response, code):
    assert code_tests.code_of(response) == code


@pytest.mark.parametrize("tests", PROGRAMS["not_tests"])
def test_tests_that_cannot_be_understood(tests):
    with pytest.raises(Exception, match="^(?!programs cannot be run)"):
        score("def f(*a): return unset", tests)


# ---- what holds programs -------------------------------------------------------------------------


def without_namespaces() -> None:
    """In a new process: a user namespace in which the kernel allows no further one, as a container
    often is.
    """
    uid = os.getuid()
    gid = os.getgid()
    assert ctypes.CDLL(None).unshare(0x10000000) == 0  # CLONE_NEWUSER
    for file, line in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        with open(f"/proc/self/{file}", "w") as mapping:
            mapping.write(line)
    with open("/proc/sys/user/max_user_namespaces", "w") as most:
        most.write("0")


def without_call(number: int) -> None:
    """In a new process: a kernel without a system call."""
    sandbox.SYSTEM_CALLS = f"none {number} {number}"
    sandbox.ATTRIBUTES = ""
    sandbox.filter_system_calls()


CALLER = """
import json, sys
sys.path.insert(0, sys.argv[1])
from extras.verifiers import sandbox
sandbox.libc.prctl(4, 0, 0, 0, 0)
print(json.dumps(sandbox.open_limits()), flush=True)
for line in sys.stdin:
    try:
        _, *results = sandbox.run(*json.loads(line))
    except RuntimeError as error:
        results = [str(error)]
    print(json.dumps(results), flush=True)
"""


class Caller:
    """A process that runs programs on a kernel of some kind."""

    def __init__(self, folder, before=None):
        self.temporary = folder
        environment = {**os.environ, "TMPDIR": str(folder), "SECRET": "do-not-tell"}
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", CALLER, str(ROOT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
                preexec_fn=before,
            )
        except subprocess.SubprocessError:
            pytest.skip("this kernel does not allow the namespace in which to forbid namespaces")
        self.missing = json.loads(self.process.stdout.readline())

    def send(self, code: str, *texts: str, seconds: float = 20.0, tests: str = "") -> None:
        self.process.stdin.write(json.dumps([code, texts or [""], seconds, tests]) + "\n")
        self.process.stdin.flush()

    def read(self):
        """Return the last [status, output] of a program, or why there is none."""
        return json.loads(self.process.stdout.readline())[-1]

    def run(self, code: str, *texts: str, seconds: float = 20.0) -> tuple[int, str]:
        self.send(code, *texts, seconds=seconds)
        return tuple(self.read())

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module", params=["namespaces", "no namespaces"])
def caller(request, tmp_path_factory):
    private = request.param == "namespaces"
    started = Caller(tmp_path_factory.mktemp("caller"), None if private else without_namespaces)
    started.private = private
    if "no Landlock" in started.missing or (private and "no namespaces" in started.missing):
        pytest.skip(f"this kernel has {started.missing}")
    assert private or started.missing.startswith("no namespaces")
    yield started
    assert os.listdir(started.temporary) == []
    started.end()


@pytest.mark.parametrize("code", PROGRAMS["ended"])
def test_limits(caller, code):
    start = time.monotonic()
    status, _ = caller.run(code, seconds=2.0)
    assert status != 0 and time.monotonic() - start < 8


@pytest.mark.parametrize("code, output", PROGRAMS["held"])
def test_limits_are_in_force(caller, code, output):
    assert caller.run(code) == (0, output)
    assert os.listdir(caller.temporary) == []


def test_the_time_limit_keeps_what_was_printed():
    code = "print(1, flush=True)\nimport time; time.sleep(60 * int(input()))"
    assert [*sandbox.run(code, "01", 4.0)][1:] == [(0, "1\n"), (137, "1\n")]


def test_the_limit_of_cpu_time(tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox, "CPU_SECONDS", 0.1)
    assert sandbox.run_once(PROGRAMS["ended"][0], "", math.inf, str(tmp_path)) == (137, b"")


@pytest.mark.parametrize("killed", ["", "run_program", "run_tests"])
def test_a_program_that_another_process_kills(caller, killed):
    """It is not wrong: it has no result. Its tests are a process of their own."""
    name = f"program {caller.process.pid}"
    code = f"import ctypes, time\nctypes.CDLL(None).prctl(15, b'{name}')\n"  # PR_SET_NAME
    if killed:
        named = f"if run == {killed!r}: ctypes.CDLL(None).prctl(15, b'{name}')"
        code = f"import ctypes, time\ndef main(run):\n    {named}\n    time.sleep(99)\n"
    else:
        code += "time.sleep(99)"
    caller.send(code, seconds=99.0, tests=killed)
    wait_until(lambda: processes("-x", name))
    os.kill(*processes("-x", name), signal.SIGKILL)
    assert caller.read() == "programs cannot be run, or one was killed, as where memory runs out"


def test_no_further_input_after_the_first_wrong_output():
    """And of what a program prints, only the outputs of one input are held, of 4 MiB at most."""
    waits = "n = int(input())\nprint(n)\nimport time; time.sleep(9999 * n)"
    assert score(waits, {"inputs": ["0", "1"], "outputs": ["1", "1"]}, 9999.0) == 0
    bomb = r"import os; [os.write(1, b'\xff' * 2**20) for _ in range(5)]"
    code = f"""
import resource
from extras.verifiers import sandbox
results = sandbox.run({bomb!r}, [""] * 12, 60.0)
next(results)
print({{(status, len(text)) for status, text in results}})
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
print(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])
"""
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    results, *memory = said.splitlines()
    assert results == "{(1, 4194304)}" and max(map(int, memory)) < 100 << 10  # KiB


def facts(number: int, path: Path) -> list:
    """Return what an attack would change of a process and of a file."""
    status = os.stat(path)
    return [
        os.sched_getscheduler(number),
        os.sched_getaffinity(number),
        os.getpriority(0, number),
        resource.prlimit(number, resource.RLIMIT_NOFILE),
        status.st_mode,
        status.st_uid,
        status.st_mtime,
        os.listxattr(path),
        path.read_text(),
    ]


def test_attacks(caller, tmp_path):
    """What tests/data/sandbox_attacks.txt tries, from sockets to other processes and attributes of
    files.
    """
    file = tmp_path / "old"
    victim = subprocess.Popen(["sleep", "60"])
    file.write_text("the expected output")
    os.setxattr(file, "user.old", b"1")
    before = facts(victim.pid, file)
    name = f"attack-{os.getpid()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as by_path,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        for server, address in ((by_path, str(tmp_path / "socket")), (abstract, f"\0{name}")):
            server.bind(address)
            server.listen()
        target = [str(file), str(tmp_path / "socket"), name, tcp.getsockname()[1], victim.pid]
        assert caller.run(
            Path(ROOT, "tests/data/sandbox_attacks.txt").read_text(), json.dumps(target)
        ) == (0, "")
        for server in (tcp, by_path, abstract):
            server.setblocking(False)
            with pytest.raises(BlockingIOError):
                server.accept()
    assert facts(victim.pid, file) == before
    assert victim.poll() is None and caller.process.poll() is None
    victim.kill()
    victim.wait()


def test_files_outside(caller, tmp_path):
    """Nothing is written outside of the folder, and nothing is read but Python and the system's
    libraries.
    """
    (tmp_path / "old").write_text("the expected output")
    path = str(tmp_path / "old")
    code = f"""
import os, shutil
def link(): os.symlink({path!r}, "link"); open("link")
def hard_link(): os.link({path!r}, "hard"); open("hard")
def relative(): os.chdir({str(tmp_path)!r}); open("old")
acts = (lambda: open({path!r}), lambda: os.listdir({str(tmp_path)!r}), lambda: os.listdir("/"), link, hard_link,
        lambda: open("/etc/passwd"), lambda: open("/proc/self/root" + {path!r}), lambda: open({sandbox.__file__!r}),
        lambda: open({str(tmp_path / "new")!r}, "w"), lambda: open({path!r}, "w"), lambda: os.remove({path!r}),
        lambda: os.rename({path!r}, "moved"), lambda: open("/usr/lib/new", "w"), lambda: open("/var/new-file", "w"),
        lambda: os.execv("/bin/cat", ["cat", {path!r}]), relative,
        *(lambda name=name: open("/proc/{caller.process.pid}/" + name) for name in ("environ", "mem", "fd/0")))
for number, act in enumerate(acts):
    try: act(); print("did", number)
    except OSError: pass
os.chdir(os.environ["HOME"])
os.makedirs("a/b")
with open("f", "w") as f: f.write("1")
os.rename("f", "a/b/g")
shutil.copy2("a/b/g", "copy")
print(open("a/b/g").read())
"""
    assert caller.run(code) == (0, "1\n")
    # A trap for the next input: a link to a file outside, where that would be written to.
    code = f"""
import os
for name in ("stdin", "stdout", "../stdin", "../stdout", os.getcwd()):
    for act in (os.remove, lambda x: os.rename(x, "moved"), lambda x: os.symlink({path!r}, x)):
        try: act(name)
        except OSError: pass
print(input())
"""
    assert caller.run(code, "1", "2") == (0, "2\n")
    assert os.listdir(tmp_path) == ["old"]
    assert (tmp_path / "old").read_text() == "the expected output"
    assert caller.run("import os\nprint(os.listdir())") == (0, "[]\n")
    if caller.private:  # else files are limited one by one
        full = "for i in range(100): open(f'{i}', 'wb').write(bytes(10**6))"
        assert caller.run(full)[0] == 1 and caller.run(full.replace("100", "50"))[0] == 0


def test_the_end_of_the_caller_is_the_end_of_its_programs(caller, tmp_path):
    other = Caller(tmp_path, None if caller.private else without_namespaces)
    other.send("import time; time.sleep(60)", seconds=100.0)
    wait_until(lambda: programs_of(other))
    other.end()
    wait_until(lambda: not programs_of(other))


def programs_of(caller) -> list[int]:
    """Return the processes whose command line names the caller's folder: others run programs at the
    same time.
    """
    return processes("-f", str(caller.temporary))


def processes(*words: str) -> list[int]:
    done = subprocess.run(["pgrep", *words], stdout=subprocess.PIPE)
    return list(map(int, done.stdout.split()))


def test_without_namespaces_and_landlock(tmp_path):
    """It says so, and programs run. The caller's memory and environment stay hidden."""
    caller = Caller(tmp_path, lambda: (without_namespaces(), without_call(444)))
    assert "no Landlock" in caller.missing and "no namespaces" in caller.missing
    assert caller.run(READ, "1 2") == (0, "3\n")
    hidden = (
        "for name in ('environ', 'mem', 'fd/0'):\n try: open(f'/proc/{}/{{name}}'); print(name)\n"
    )
    hidden += " except PermissionError: print(1)"
    assert caller.run(hidden.format(caller.process.pid)) == (0, "1\n1\n1\n")
    caller.end()


def test_namespaces_that_end_halfway(tmp_path):
    """As before Linux 5.12, or where AppArmor lets a user enter them but do nothing: each input
    gets its program.
    """
    caller = Caller(tmp_path, lambda: without_call(442))
    assert "no namespaces" in caller.missing
    assert caller.run(READ, "1 2", "3 4") == (0, "7\n")
    caller.end()
