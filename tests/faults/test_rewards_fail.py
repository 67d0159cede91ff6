"""Reward functions and servers that misbehave: each has its stated end, and none becomes a zero.

What a function that fails in its trial call says is in tests/test_rewards.py, what a server may
answer in tests/test_reward_client.py, and runs whose rewards fail in tests/test_run.py.
"""

import math
import time
import types

import pytest
from helpers import end_processes, refused
from tiny_models import make_tokenizer

from plumbing.rewards import sources
from plumbing.rewards.sources import RewardSources, Scoring, finite_or_nan

# A call with 20 responses, of which the text is the row's number.
FUNCTIONS = """
import os, signal, sys, time
print("imported", file=sys.stdout)

def good(prompts, responses, **columns): return [float(r) for r in responses]
def raises_at_17(prompts, responses, **columns): return [float(r) if r != "17" else 1 / 0 for r in responses]
def some(prompts, responses, **columns):
    return [[None, float("nan"), float("inf"), float(r)][i % 4] for i, r in enumerate(responses)]
def sleeps(prompts, responses, **columns): time.sleep(600)
def sleeps_deaf(prompts, responses, **columns):
    signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.alarm(0); time.sleep(600)
def kills_itself(prompts, responses, **columns): os.kill(os.getpid(), signal.SIGKILL)
def leaves(prompts, responses, **columns): os._exit(3)
def writes(prompts, responses, **columns):
    for _ in range(200):
        print("x" * 10000); os.write(1, b"y" * 10000); sys.stderr.write("z" * 10000)
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
"""

DIED = "the process of the call has ended"
ALL = [float(i) for i in range(20)]
NONE = [math.nan] * 20
CASES = {  # function: scores, what is said of those that are missing
    "good": (ALL, ""),
    "raises_at_17": (NONE, "ZeroDivisionError ("),
    "some": ([i if i % 4 == 3 else math.nan for i in range(20)], ""),
    "sleeps": (NONE, "TimeoutError: no result within --timeout 1 s"),
    "sleeps_deaf": (NONE, "TimeoutError: no result within --timeout 1 s"),
    "kills_itself": (NONE, DIED),
    "leaves": (NONE, DIED),
    "writes": (ALL, ""),
    "child_stays": (ALL, ""),
    "child_comes_back": (ALL, ""),
}
ROW = {"prompt": "p", "query": [1], "answer": "2", "columns": {}}
SAMPLES = [types.SimpleNamespace(row=ROW, text=str(i), response=[i], step=0) for i in range(20)]


def rewards_of(*names: str) -> RewardSources:
    return RewardSources(
        types.SimpleNamespace(reward=names, timeout=60.0, reward_workers=2), make_tokenizer()
    )


def scores_of(reward_sources: RewardSources, name: str) -> tuple[list[float], str]:
    """Return a function's scores of 20 responses, and why some are missing."""
    source = reward_sources.sources[name]
    source.failure = ""
    source.timeout = 1.0 if "sleeps" in name else 60.0
    results = reward_sources.loop.run(source.score(SAMPLES))
    scores = [result["score"] if result else None for result in results]
    return list(map(finite_or_nan, scores)), source.failure


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    """All functions in one worker process."""
    path = tmp_path_factory.mktemp("rewards") / "judge.py"
    path.write_text(FUNCTIONS)
    reward_sources = rewards_of(*(f"{path}:{name}" for name in CASES))
    yield reward_sources, path
    end_processes(reward_sources.server)


@pytest.mark.parametrize("name", CASES)
def test_functions(worker, name):
    """NaN, never 0, for what has no score, and the reason; the next call gets its own answer, and
    not an older one.
    """
    reward_sources, path = worker
    scores, failure = scores_of(reward_sources, f"{path}:{name}")
    assert scores == pytest.approx(CASES[name][0], nan_ok=True)
    assert failure.startswith(CASES[name][1]) and bool(failure) == bool(CASES[name][1])
    assert scores_of(reward_sources, f"{path}:good") == (ALL, "")


def test_nobody_waits_for_an_answer_once_the_run_is_interrupted(worker):
    reward_sources, path = worker
    source = reward_sources.sources[f"{path}:sleeps"]
    begin = time.monotonic()
    source.timeout = 300.0
    scoring = Scoring(reward_sources, lambda: time.monotonic() > begin + 0.2)
    sample = types.SimpleNamespace(row={**ROW, "sources": [source.name]}, text="1", response=[1])
    scoring.add(0, sample)
    assert scoring.finish() == [sample] and math.isnan(sample.scores[source.name])
    assert time.monotonic() - begin < 100
    assert scores_of(reward_sources, f"{path}:good") == (ALL, "")


FILES = {  # a file: what is said of it, "" for a file that loads
    "print('x' * 1000000)\ndef score(prompts, responses): return [1.0] * 20": "",
    "raise RuntimeError('no judge')": "RuntimeError (",
    "import os; os._exit(4)": DIED,
    "import time; time.sleep(600)": "TimeoutError: ",
}


@pytest.mark.parametrize("text", FILES)
def test_files(tmp_path, capfd, monkeypatch, text):
    """When it is imported, a file loads, or one line says why it does not."""
    monkeypatch.setattr(sources, "SECONDS_TO_LOAD", 3.0 if "sleep" in text else 20.0)
    path = tmp_path / "judge.py"
    path.write_text(text)
    name = f"{path}:score"
    if not FILES[text]:
        reward_sources = rewards_of(name)
        assert scores_of(reward_sources, name) == ([1.0] * 20, "")
        end_processes(reward_sources.server)
        return
    line = refused(capfd, rewards_of, name, noisy=True)
    assert line.removeprefix(f"error: --reward {name}: ").startswith(FILES[text])
