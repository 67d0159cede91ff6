"""Reward functions and servers that misbehave: each has its stated end, and none becomes a zero.

What a function that fails in its trial call says is in tests/test_rewards.py, what a server may answer in
tests/test_reward_client.py, and runs whose rewards fail in tests/test_run.py.
"""

import math
import time

import pytest
from tiny_models import make_tokenizer

from plumbing.rewards.reward_worker import Worker
from plumbing.rewards.sources import Rewards

# A call with 20 responses, of which the text is the row's number.
FUNCTIONS = """
import asyncio, os, signal, subprocess, sys, threading, time
print("imported", file=sys.stdout)
os.write(1, b'{"scores": [9]}\\n')

def good(prompts, responses, **columns): return [float(r) for r in responses]
def raises_at_17(prompts, responses, **columns): return [float(r) if r != "17" else 1 / 0 for r in responses]
def verl_at_17(solution_str, ground_truth): return float(solution_str) if solution_str != "17" else {}["score"]
def generates(prompts, responses, **columns):
    yield from map(float, responses[:17])
    raise ValueError("the 17th")
def text_in_between(prompts, responses, **columns): return [*map(float, responses[:17]), "17", 18.0, 19.0]
def short(prompts, responses, **columns): return [1.0] * 19
def long(prompts, responses, **columns): return [1.0] * 21
def table(prompts, responses, **columns): return dict.fromkeys(range(20), 1.0)
def text(prompts, responses, **columns): return "1" * 20
def none(prompts, responses, **columns): pass
def a_number(prompts, responses, **columns): return 0
def async_generator(prompts, responses, **columns):
    async def numbers():
        for r in responses: yield 1.0
    return numbers()
def big_integer(prompts, responses, **columns): return [10 ** 400] * 20
def too_large(prompts, responses, **columns): return [float(r) if int(r) % 2 else -1e19 for r in responses]
def some(prompts, responses, **columns):
    return [[None, float("nan"), float("inf"), float(r)][i % 4] for i, r in enumerate(responses)]
def sleeps(prompts, responses, **columns): time.sleep(600)
def sleeps_deaf(prompts, responses, **columns):
    signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.alarm(0); time.sleep(600)
def reads(prompts, responses, **columns): return [float(x) for x in sys.stdin.readline()]
def kills_itself(prompts, responses, **columns): os.kill(os.getpid(), signal.SIGKILL)
def crashes(prompts, responses, **columns): os.abort()
def exits(prompts, responses, **columns): sys.exit(3)
def leaves(prompts, responses, **columns): os._exit(3)
def interrupts(prompts, responses, **columns): raise KeyboardInterrupt
def recurses(prompts, responses, **columns): return recurses(prompts, responses)
class Unprintable(Exception):
    def __str__(self): raise RuntimeError("cannot be printed")
def unprintable(prompts, responses, **columns): raise Unprintable
def several_lines(prompts, responses, **columns): raise ValueError("one\\ntwo\\n" + "x" * 1000000)
def writes(prompts, responses, **columns):
    for _ in range(200):
        print("x" * 10000); os.write(1, b"y" * 10000); sys.stderr.write("z" * 10000)
    return good(prompts, responses)
def closes(prompts, responses, **columns):
    sys.stdout.close(); os.close(1)
    return good(prompts, responses)
def child_stays(prompts, responses, **columns):
    if not os.fork():
        time.sleep(600)
    return good(prompts, responses)
def child_comes_back(prompts, responses, **columns):
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return good(prompts, responses)
    return [-1.0] * 20
def child_raises(prompts, responses, **columns):
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return good(prompts, responses)
    raise ValueError("in the child")
def starts_program(prompts, responses, **columns):
    subprocess.run(["cat"], stdin=subprocess.DEVNULL); subprocess.run(["echo", '{"scores": [9]}'])
    return good(prompts, responses)
def thread_raises(prompts, responses, **columns):
    threading.Thread(target=lambda: 1 / 0).start()
    return good(prompts, responses)
"""

ALL, NONE = [float(i) for i in range(20)], [math.nan] * 20
LEFT = "its process ended with exit code "
CASES = {  # function: scores, what is said of those that are missing
    "good": (ALL, ""),
    "raises_at_17": (NONE, "ZeroDivisionError: "),
    "verl_at_17": (NONE, "KeyError: 'score'"),
    "generates": (NONE, "ValueError: the 17th"),
    "text_in_between": (NONE, "TypeError: gave a response str '17', not a number"),
    "short": (NONE, "ValueError: returned 19 scores for 20 responses"),
    "long": (NONE, "ValueError: returned 21 scores for 20 responses"),
    "table": (NONE, "TypeError: returned dict "),
    "text": (NONE, "TypeError: returned str "),
    "none": (NONE, "TypeError: returned NoneType "),
    "a_number": (NONE, "TypeError: returned int '0'"),
    "async_generator": (NONE, "TypeError: returned async_generator "),
    "big_integer": (NONE, "OverflowError: "),
    "too_large": ([math.nan if i % 2 == 0 else i for i in range(20)], ""),
    "some": ([i if i % 4 == 3 else math.nan for i in range(20)], ""),
    "sleeps": (NONE, "gave no answer within --reward_timeout 1 s"),
    "sleeps_deaf": (NONE, "gave no answer within --reward_timeout 1 s"),
    "reads": (NONE, "gave no answer within --reward_timeout 1 s"),
    "kills_itself": (NONE, f"{LEFT}-9"),
    "crashes": (NONE, f"{LEFT}-6"),
    "exits": (NONE, "SystemExit: 3"),
    "leaves": (NONE, f"{LEFT}3"),
    "interrupts": (NONE, "KeyboardInterrupt: "),
    "recurses": (NONE, "RecursionError: "),
    "unprintable": (NONE, f"{LEFT}1"),
    "several_lines": (NONE, "ValueError: one\ntwo\n"),
    "writes": (ALL, ""),
    "closes": (ALL, ""),
    "child_stays": (ALL, ""),
    "child_comes_back": (ALL, ""),
    "child_raises": (ALL, ""),
    "starts_program": (ALL, ""),
    "thread_raises": (ALL, ""),
}
ROWS = [{"prompt": "p", "query": [1], "answer": "2", "columns": {}}] * 20


def scores_of(rewards: Rewards, name: str) -> tuple[list[float], str]:
    """Return a function's scores of 20 responses, and why some are missing."""
    source = rewards.sources[name]
    source.failure = ""
    return source.score(ROWS, [str(i) for i in range(20)], [[i] for i in range(20)]), source.failure


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    """All functions in one worker process."""
    path = tmp_path_factory.mktemp("rewards") / "judge.py"
    path.write_text(FUNCTIONS)
    rewards = Rewards(tuple(f"{path}:{name}" for name in CASES), 1.0, make_tokenizer())
    yield rewards, path
    rewards.close()


@pytest.mark.parametrize("name", CASES)
def test_functions(worker, name):
    """NaN, never 0, for what has no score, and the reason; the next call gets its own answer, and not an older one."""
    rewards, path = worker
    scores, failure = scores_of(rewards, f"{path}:{name}")
    assert scores == pytest.approx(CASES[name][0], nan_ok=True)
    assert failure.startswith(CASES[name][1]) and bool(failure) == bool(CASES[name][1])
    assert scores_of(rewards, f"{path}:good") == (ALL, "")


def test_nobody_waits_for_an_answer_once_the_run_is_interrupted():
    """The process is left as it is, and is not taken for one that hangs."""
    worker, begin = Worker("-c", "import time; time.sleep(60)"), time.monotonic()
    try:
        answer = worker.receive(5.0, lambda: time.monotonic() > begin + 0.2)
        assert answer == {"error": "the run is interrupted"} and worker.process.poll() is None
        assert time.monotonic() - begin < 4
    finally:
        worker.kill()
    assert worker.receive(5.0) == {"error": "its process ended with exit code -9", "dead": True}


FILES = {  # a file: what is said of it, "" for a file that loads
    "print('x' * 1000000)\ndef score(prompts, responses): return [1.0] * 20": "",
    "import os\nos.write(1, b'{\"loaded\": false}\\n')\ndef score(prompts, responses): return [1.0] * 20": "",
    "raise RuntimeError('no judge')": "RuntimeError: no judge",
    "import no_such_judge": "ModuleNotFoundError: No module named 'no_such_judge'",
    "def score(": "SyntaxError: ",
    "raise SystemExit('gone')": "SystemExit: gone",
    "import os; os._exit(4)": f"{LEFT}4",
    "score = 3": "AttributeError: ",
    "import time; time.sleep(600)": "gave no answer within ",
}


@pytest.mark.parametrize("text", FILES)
def test_files(tmp_path, capfd, monkeypatch, text):
    """What a file does when it is imported: it loads, or one line says why it does not."""
    receive = Worker.receive
    if "sleep" in text:
        monkeypatch.setattr(Worker, "receive", lambda worker, timeout: receive(worker, min(timeout, 0.5)))
    path = tmp_path / "judge.py"
    path.write_text(text)
    name = f"{path}:score"
    if not FILES[text]:
        rewards = Rewards((name,), 5.0, make_tokenizer())
        assert scores_of(rewards, name) == ([1.0] * 20, "")
        rewards.close()
        return
    with pytest.raises(SystemExit) as end:
        Rewards((name,), 5.0, make_tokenizer())
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error:")]
    assert end.value.code == 2 and len(errors) == 1 and errors[0].startswith(f"error: --reward {name}: {FILES[text]}")
