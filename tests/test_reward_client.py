"""A reward server as a source (`Rewards` with an http:// address), against servers that behave as
told.
"""

import collections
import contextlib
import json
import math
import re
import threading
import types
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from helpers import ROOT, Threads, end_processes, scores_by
from tiny_models import make_tokenizer

from extras import http
from plumbing.rewards.sources import RewardSources
from utils import UserError

JUDGE = str(ROOT / "scripts/train/group_judge.py:score")


class Told(BaseHTTPRequestHandler):
    """Answers POST as `server.behave(question, how often it was asked this)` says: (status, body,
    headers).
    """

    def do_POST(self):
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        first = question.get("src", [""])[0]
        server = self.server
        with server.lock:
            server.asked.append(question)
            server.counts[first] += 1
            count = server.counts[first]
        status, body, headers = server.behave(question, count)
        if not status:  # drop the line
            return
        if status == "trickle":
            with contextlib.suppress(OSError):
                self.wfile.write(body)
                while not server.end.wait(0.02):
                    self.wfile.write(b" " if body else b"")
            return
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        with contextlib.suppress(OSError):  # the client has gone
            self.send_response(status)
            for name, value in {
                "Content-Type": "application/json",
                "Content-Length": len(body),
                **headers,
            }.items():
                self.send_header(name, str(value))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_):
        pass


class Server(Threads, HTTPServer):
    request_queue_size = 64

    def __init__(self, behave, handler=Told):
        self.behave = behave
        self.lock = threading.Lock()
        self.end = threading.Event()
        self.asked = []
        self.counts = collections.Counter()
        super().__init__(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


@pytest.fixture
def serve():
    """Starts servers, which end with the test."""
    servers = []
    yield lambda behave: servers.append(Server(behave)) or servers[-1]
    for server in servers:
        server.end.set()
        server.shutdown()
        server.server_close()


@pytest.fixture
def naps(monkeypatch) -> list:
    """Pauses take no time here, and a batch of which each try fails has six."""
    naps = []

    async def nap(seconds: float) -> None:
        naps.append(seconds)

    now = lambda: 1.0 + len(naps) * http.SERVER_PATIENCE / 5
    monkeypatch.setattr(http, "asyncio", types.SimpleNamespace(sleep=nap))
    monkeypatch.setattr(http, "time", types.SimpleNamespace(monotonic=now))
    return naps


def success(score, **others) -> tuple:
    """An answer with this as "score"."""
    return 200, {"error_code": 0, "error_msg": "Success", "score": score, **others}, {}


def right(question: dict, count: int = 0) -> tuple:
    """Behaviour: the number in each prompt."""
    return success([float(re.findall(r"\d+", prompt)[0]) for prompt in question["src"]])


def only_at(start: int, behave):
    """Behaviour: this for the batch that starts with row `start`; the other batches are right."""
    return lambda question, count: (
        behave(question, count) if question["src"][0] == f"prompt {start}" else right(question)
    )


def rewards_of(url: str, timeout: float = 5.0, tokenizer=None, rows=()) -> RewardSources:
    args = types.SimpleNamespace(reward=(url,), timeout=timeout, reward_workers=1)
    return RewardSources(args, tokenizer, rows)


def ask(
    url: str, count: int = 1, timeout: float = 5.0, reward_sources=None, **changes
) -> tuple[list[float], str]:
    """Scores of so many rows, and what is said of those that are missing."""
    reward_sources = reward_sources or rewards_of(url, timeout)
    rows = [
        {"prompt": f"prompt {i}", "query": [i], "answer": f"answer {i}", **changes}
        for i in range(count)
    ]
    scores = scores_by(
        reward_sources, rows, [f"response {i}" for i in range(count)], [[i] for i in range(count)]
    )
    assert all(type(x) is float for x in scores[url])
    return scores[url], reward_sources.sources[url].failure


def missing(scores: list[float]) -> list[int]:
    """Which are; the others are right."""
    assert all(math.isnan(x) or x == i for i, x in enumerate(scores))
    return [i for i, x in enumerate(scores) if math.isnan(x)]


# ---- what is sent --------------------------------------------------------------------------------


def test_an_address_with_a_password(serve, monkeypatch):
    """A proxy may ask for it; no key of the server goes along."""
    monkeypatch.delenv("REWARD_API_KEY", raising=False)
    server = serve(right)
    assert ask(server.url.replace("//", "//user:word@"), 2)[0] == [0.0, 1.0]


def test_questions(serve):
    server = serve(right)
    assert ask(server.url, 0) == ([], "") and not server.asked
    assert ask(server.url, 100) == (list(range(100)), "")
    assert sorted(len(question["src"]) for question in server.asked) == [4, 32, 32, 32]
    for question in server.asked:
        assert list(question) == ["src", "tgt", "response", "messages", "columns"]
        numbers = [prompt.removeprefix("prompt ") for prompt in question["src"]]
        assert question["tgt"] == [f"answer {i}" for i in numbers]
        assert question["response"] == [f"response {i}" for i in numbers]


def test_reference_answers_and_other_columns(serve):
    """References as text, lists and objects as JSON; what JSON has no form for, as text."""
    server = serve(right)
    for answer, tgt in (
        (None, ""),
        ("é\n", "é\n"),
        (0, "0"),
        (3.5, "3.5"),
        ({"inputs": ["1"]}, '{"inputs": ["1"]}'),
    ):
        assert ask(server.url, answer=answer) == ([0], "")
        assert server.asked.pop()["tgt"] == [tgt]
    columns = {
        "reasoning_gym": ["chain_sum", 10, 0, 3],
        "level": None,
        "day": types.SimpleNamespace(x=1),
    }
    assert ask(server.url, 2, columns=columns)[1] == ""
    sent = {
        "rollout_group": [None] * 2,
        "reasoning_gym": [["chain_sum", 10, 0, 3]] * 2,
        "level": [None] * 2,
        "day": ["namespace(x=1)"] * 2,
    }
    assert server.asked[0]["columns"] == sent


# ---- answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer, why",
    [
        (success([1.0] * 31), "not 32 scores"),
        (success(None), "not 32 scores"),
        (success("0" * 32), "not 32 scores"),  # not 32 zeros
        (success(["good"] * 32), "good"),
        (success([1.0] * 32, error_code=500, error_msg="the judge is away"), "the judge is away"),
        ((200, {"score": [1.0] * 32}, {}), "error_code"),
        ((200, b"<html>\nhello</html>", {}), "hello"),
        ((307, b"", {"Location": "http://127.0.0.2:9"}), "status 307"),
        ((400, {"error_code": 400, "error_msg": "entry 3 is empty"}, {}), "entry 3 is empty"),
    ],
)
def test_an_answer_that_is_none(serve, naps, answer, why):
    """NaN for the batch, never 0, the reason, and no second try; the other batches keep their
    scores.
    """
    server = serve(only_at(32, lambda *_: answer))
    scores, failure = ask(server.url, 100)
    assert missing(scores) == list(range(32, 64))
    assert why in failure
    assert len(server.asked) == 4 and not naps


def test_scores_that_are_missing(serve):
    """NaN for each of them alone."""
    body = b'{"error_code": 0, "score": [0, null, NaN, Infinity, -Infinity, 1e999, -1e19, "nan", "inf", true, "4"]}'
    server = serve(lambda *_: (200, body, {}))
    reward_sources = rewards_of(server.url)
    scores, failure = ask(server.url, 11, reward_sources=reward_sources)
    assert scores == pytest.approx([0, *[math.nan] * 8, 1, 4], nan_ok=True) and not failure
    assert (
        reward_sources.why_missing(server.url)
        == f"{server.url}: it returned None, NaN, infinity or over 1e+18"
    )


def test_a_trial_request(serve, capsys):
    """Two rows are sent, twice; a server without /health counts as one that tells right from wrong, which
    is said.
    """
    server = serve(right)
    row = {"prompt": "prompt 0", "query": [0], "answer": "4", "sources": None, "columns": {}}
    reward_sources = rewards_of(server.url, 5.0, make_tokenizer(), [row, row])
    assert [question["response"] for question in server.asked] == [
        ["4", "4"]
    ] * 2 and reward_sources.verifiers == (server.url,)
    assert f"--reward {server.url}: has no `verifies` at /health" in capsys.readouterr().err


@pytest.mark.parametrize("status", [404, 405, 501, 500, 200, 403])
def test_a_server_is_asked_what_it_is(serve, naps, monkeypatch, status):
    """Again after an error that may pass, until it has said that, or that it has no such page."""
    asked = []

    def do_GET(told):
        asked.append(told.path)
        body = b'{"verifies": false, "whole": true}' if len(asked) == 3 else b""
        told.send_response(200 if body else status)
        told.send_header("Content-Length", str(len(body)))
        told.end_headers()
        told.wfile.write(body)

    monkeypatch.setattr(Told, "do_GET", do_GET, raising=False)
    url = serve(right).url
    if status == 403:
        with pytest.raises(UserError, match=f"--reward {url}/health failed .HTTP status 403"):
            rewards_of(url)
        return
    (source,) = rewards_of(url).sources.values()
    is_told = status == 500
    assert (source.verifies, source.whole) == (not is_told, is_told)
    assert asked == ["/health"] * (3 if is_told else 1)


# ---- trying again --------------------------------------------------------------------------------


DROPPED = (0, {}, {})
FAILURES = [(408, b"", {}), (429, b"", {}), (503, b"", {}), DROPPED]
# the connection breaks within the answer
FAILURES += [(200, {"error_code": 0}, {"Content-Length": 1000})]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: str(failure[0]))
def test_errors_that_pass_and_that_do_not(serve, naps, failure):
    """Five more tries, for the batch alone."""
    server = serve(only_at(32, lambda question, count: failure if count < 6 else right(question)))
    assert ask(server.url, 100) == (list(range(100)), "") and naps == [2.0] * 5
    assert server.counts == {"prompt 0": 1, "prompt 32": 6, "prompt 64": 1, "prompt 96": 1}
    server = serve(only_at(32, lambda *_: failure))
    scores, why = ask(server.url, 100)
    assert missing(scores) == list(range(32, 64)) and server.counts["prompt 32"] == 6 and why


@pytest.mark.parametrize(
    "text", [b"", b"HTTP/1.1 200 OK\r\nA:", b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n{"]
)
def test_time_outs(serve, naps, text):
    """A request has its time, however slowly its answer comes."""
    server = serve(only_at(32, lambda *_: ("trickle", text, {})))
    scores, failure = ask(server.url, 40, timeout=0.3)
    # a busy server may let the other batch wait, too
    assert missing(scores) == list(range(32, 40)) and len(naps) >= 5
    assert failure.endswith(" failed for 120 s (no answer within 0.3 s)")


def test_the_judge_that_ranks_a_group(serve, monkeypatch):
    """By the share of the others that a response beats, also where two groups have one prompt; a
    group without a ranking, or whose request failed, has no scores.
    """
    asked = []
    said = {"a": "3 is odd. Ranking: 1, 2, 0", "b": "Ranking: 1, 1", "c": "Ranking: 1 > 0"}

    def judge(question, count):
        asked.append(question["messages"][0]["content"].partition("Question: ")[2])
        content = said.get(prompt := asked[-1][0])
        return 500 if prompt == "e" else 200, {"choices": [{"message": {"content": content}}]}, {}

    monkeypatch.setenv("JUDGE_URL", serve(judge).url)
    monkeypatch.setenv("JUDGE_MODEL", "a judge")
    reward_sources = rewards_of(JUDGE, 30.0)
    row = {"answer": None, "columns": {}, "messages": None}
    groups = ["aaa", "bb", "cc", "cc", "d", "e"]
    rows = [row | {"prompt": x, "rollout_group": i} for i, y in enumerate(groups) for x in y]
    scores = scores_by(reward_sources, rows, "12345678901", [[1]] * 11)[JUDGE]
    end_processes(reward_sources.server)
    assert reward_sources.whole and not reward_sources.verifiers
    nan = math.nan
    assert scores == pytest.approx([0, 1, 0.5, nan, nan, 0, 1, 0, 1, nan, nan], nan_ok=True)
    assert "a\n\nAnswer 0: 1\n\nAnswer 1: 2\n\nAnswer 2: 3" in asked
