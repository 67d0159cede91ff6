"""A program `python` for the tests: what it is given runs in a process forked from one that has
imported everything.

A test, or a shell script in a test, calls it as it would call Python, with a script or with -m and
a module. Working folder, environment, output, signals and exit code are those of the call. It saves
five seconds of imports a call, and thirteen where vLLM is imported (helpers.vllm_preloaded).
"""

import contextlib
import json
import multiprocessing
import os
import runpy
import signal
import socketserver
import subprocess
import sys
import tempfile
import threading
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path

import helpers
from cluster import enter

# Passes what it is called with to the tests' process, signals to the process that this one forks,
# and its exit code on.
PROGRAM = """#!PYTHON -IS
import json, os, signal, socket, sys
line = socket.socket(socket.AF_UNIX)
line.connect("ADDRESS")
words = [word for word in sys.argv[1:] if word != "-u"]  # torchrun's, for output that is not buffered
call = {"words": words, "folder": os.getcwd(), "environment": dict(os.environ), "caller": os.getpid()}
line.sendall(json.dumps(call).encode() + b"\\n")
answers = line.makefile()
process = int(answers.readline())
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda number, _: os.kill(process, number))
code = int(answers.readline())
if code < 0:  # a signal ended it
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""

# process that runs the program -> the one that does what it asks for and leads a group
FORKED: dict[int, int] = {}


class Call(socketserver.StreamRequestHandler):
    """One call of the program, from the fork to the exit code."""

    lock = threading.Lock()  # multiprocessing's list of processes is not made for threads

    def handle(self) -> None:
        call = json.loads(self.rfile.readline())
        with self.lock:
            process = helpers._server().Process(target=execute, kwargs=call)
            process.start()
        FORKED[call["caller"]] = process.pid
        self.wfile.write(f"{process.pid}\n".encode())
        wait([process.sentinel, self.connection])  # the connection ends with the caller
        if not wait([process.sentinel], 0):
            os.killpg(process.pid, signal.SIGKILL)
        with self.lock:
            process.join(60)
        assert process.exitcode is not None, f"{call['words']} has not ended though it was killed"
        with contextlib.suppress(BrokenPipeError):
            self.wfile.write(f"{process.exitcode}\n".encode())


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 100


@contextlib.contextmanager
def python():
    """Path of the program, which works while this context lasts."""
    with tempfile.TemporaryDirectory() as folder, Server(f"{folder}/calls", Call) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        program = Path(folder, "python")
        program.write_text(
            PROGRAM.replace("PYTHON", sys.executable, 1).replace("ADDRESS", f"{folder}/calls", 1)
        )
        program.chmod(0o755)
        yield str(program)
        server.shutdown()


@contextlib.contextmanager
def torchrun(script, values: dict, log: Path, *options: str, **environment):
    """Two ranks of a script, in processes forked as above, whose output goes to a file."""
    launch = "-m torch.distributed.run --standalone --nproc_per_node 2".split()
    with python() as program, open(log, "w") as file:
        words = [program, *launch, *options, str(script), *helpers.words(values)]
        settings = {"PYTHON_EXEC": program, **environment}
        running = subprocess.Popen(words, stdout=file, stderr=file, env={**os.environ, **settings})
        try:
            yield running
        finally:
            running.kill()


def execute(words: list[str], folder: str, environment: dict, caller: int) -> None:
    """Do what `python WORDS` does, in a forked process, with the caller's output."""
    os.setsid()
    enter(caller)
    for number in (1, 2):
        os.dup2(os.open(f"/proc/{caller}/fd/{number}", os.O_WRONLY | os.O_APPEND), number)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.chdir(folder)
    # What would begin a new interpreter goes on in this process, or in a fork of it: a vLLM server
    # and its engine.
    os.execve = lambda path, words, environment: start(words[1:], environment)
    of_method = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: of_method(
        "fork" if method == "spawn" else method
    )
    start(words, environment)


def start(words: list[str], environment: dict) -> None:
    """Run a script or module as __main__, and end this process with its exit code."""
    os.environ.clear()
    os.environ.update(environment)
    # read when it is imported
    helpers.torch._dynamo.config.disable = environment.get("TORCH_COMPILE_DISABLE") == "1"
    if words[0] == "-m":
        sys.argv = words[1:]
        call = partial(runpy.run_module, words[1], alter_sys=True)
    else:
        sys.argv = words
        call = partial(runpy.run_path, words[0])
    helpers.run_and_exit(partial(call, run_name="__main__"))
