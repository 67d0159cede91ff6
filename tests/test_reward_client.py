"""A reward server as a source (`Rewards` with an http:// address), against servers that behave as told."""

import base64
import collections
import contextlib
import json
import math
import re
import socket
import subprocess
import sys
import threading
import time
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
import urllib3
from conftest import ROOT
from tiny_models import make_tokenizer

from plumbing.rewards import client as reward_client
from plumbing.rewards.sources import Rewards


class Told(BaseHTTPRequestHandler):
    """Answers as `server.behave(question, how often it was asked this)` says: (status, body, headers)."""

    def trickle(self, begin: bytes):
        """A byte now and then, for as long as the client stays."""
        with contextlib.suppress(OSError):
            self.wfile.write(begin)
            while True:
                self.wfile.write(b"x")
                time.sleep(0.05)

    def do_GET(self):
        if self.server.health_trickles:
            self.trickle(STATUS_LINE)
        else:
            self.send_error(501)

    def do_POST(self):
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        first, server = question["src"][0], self.server
        with server.lock:
            server.asked.append(question)
            server.headers.append(self.headers)
            server.times.append(time.monotonic())
            server.counts[first] += 1
            count = server.counts[first]
        status, body, headers = server.behave(question, count)
        if not status:  # drop the line
            return
        if status == "trickle":
            self.trickle(body)
            return
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        with contextlib.suppress(OSError):  # the client has gone
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", "Content-Length": len(body), **headers}.items():
                self.send_header(name, str(value))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 64
    health_trickles = False

    def __init__(self, behave, port: int = 0):
        super().__init__(("127.0.0.1", port), Told)
        self.behave, self.lock = behave, threading.Lock()
        self.asked, self.headers, self.times, self.counts = [], [], [], collections.Counter()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def serve():
    """Starts servers, which end with the test."""
    with contextlib.ExitStack() as stack:

        def start(behave, port: int = 0) -> Server:
            server = Server(behave, port)
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            return server

        yield start


@pytest.fixture
def naps(monkeypatch) -> list:
    """Back-off takes no time here: how long it would have been, and what `naps.then` does meanwhile."""

    class Naps(list):
        then = staticmethod(lambda: None)

        def sleep(self, seconds):
            self.append(seconds)
            self.then()

    naps = Naps()
    monkeypatch.setattr(urllib3.util.retry, "time", types.SimpleNamespace(**{**vars(time), "sleep": naps.sleep}))
    return naps


def right(question: dict) -> tuple:
    """The number in each prompt."""
    scores = [float(re.findall(r"\d+", prompt)[0]) for prompt in question["src"]]
    return 200, {"error_code": 0, "error_msg": "Success", "score": scores}, {}


def says(score, **others):
    """Behaviour: this as "score"."""
    return lambda question, count: (200, {"error_code": 0, "error_msg": "Success", "score": score, **others}, {})


def only_at(start: int, behave):
    """Behaviour: this for the batch that starts with row `start`; the other batches are right."""
    return lambda question, count: (
        behave(question, count) if question["src"][0] == f"prompt {start}" else right(question)
    )


def fails(times: int, status: int, **headers):
    """Behaviour: an error so many times, then right."""
    return lambda question, count: (
        (status, {"error_code": status, "error_msg": "too busy", "score": []}, headers)
        if count <= times
        else right(question)
    )


def ask(url: str, count: int = 1, timeout: float = 5.0, rewards=None, **changes) -> tuple[list[float], str]:
    """Scores of so many rows, and what is said of those that are missing."""
    rewards = rewards or Rewards((url,), timeout, None)
    rows = [{"prompt": f"prompt {i}", "query": [i], "answer": f"answer {i}", **changes} for i in range(count)]
    scores = rewards.score(rows, [f"response {i}" for i in range(count)], [[i] for i in range(count)])
    assert scores.keys() == {url} and len(scores[url]) == count and all(type(x) is float for x in scores[url])
    return scores[url], rewards.sources[url].failure


def missing(scores: list[float]) -> list[int]:
    """Which are; the others are right."""
    assert all(math.isnan(x) or x == i for i, x in enumerate(scores))
    return [i for i, x in enumerate(scores) if math.isnan(x)]


# ---- what is sent ---------------------------------------------------------------------------------------------------


def test_questions(serve):
    server = serve(lambda question, count: right(question))
    assert ask(server.url, 100) == (list(range(100)), "")
    assert sorted(len(question["src"]) for question in server.asked) == [4, 32, 32, 32]
    for question in server.asked:
        assert list(question) == ["src", "tgt", "response"]
        numbers = [prompt.removeprefix("prompt ") for prompt in question["src"]]
        assert question["tgt"] == [f"answer {i}" for i in numbers]
        assert question["response"] == [f"response {i}" for i in numbers]


def test_no_rows_no_question(serve):
    server = serve(lambda question, count: right(question))
    assert ask(server.url, 0) == ([], "") and not server.asked


@pytest.mark.parametrize(
    "answer, tgt",
    [
        (None, ""), ("", ""), ("é\n", "é\n"), (42, "42"), (0, "0"), (3.5, "3.5"),
        (["assert f(1) == 2"], '["assert f(1) == 2"]'),  # as plumbing/rewards/code_tests.py reads it
        ({"inputs": ["1\n"], "outputs": ["2"]}, '{"inputs": ["1\\n"], "outputs": ["2"]}'),
    ],
)  # fmt: skip
def test_reference_answers(serve, answer, tgt):
    server = serve(lambda question, count: right(question))
    assert ask(server.url, answer=answer) == ([0], "")
    assert server.asked[0]["tgt"] == [tgt]


def test_other_columns(serve):
    """What reasoning_gym and functions from files read of a row."""
    server = serve(lambda question, count: right(question))
    columns = {"reasoning_gym": ["chain_sum", 10, 0, 3], "level": None, "day": types.SimpleNamespace(x=1)}
    assert ask(server.url, 2, columns=columns)[1] == ""
    sent = server.asked[0]["columns"]
    assert sent.keys() == {"reasoning_gym", "level", "day"}
    assert sent["reasoning_gym"] == [["chain_sum", 10, 0, 3]] * 2 and sent["level"] == [None] * 2
    assert sent["day"] == ["namespace(x=1)"] * 2  # what JSON has no form for


def test_a_key_of_the_environment(serve, monkeypatch):
    server = serve(lambda question, count: right(question))
    for key, sent in (("a key", "Bearer a key"), ("", None)):
        monkeypatch.setenv("REWARD_API_KEY", key)
        assert ask(server.url) == ([0], "") and server.headers[-1]["Authorization"] == sent


def test_a_password_in_the_address(serve, monkeypatch):
    monkeypatch.setenv("REWARD_API_KEY", "a key")  # of other servers
    server = serve(lambda question, count: right(question))
    assert ask(server.url.replace("http://", "http://judge:a%40b@")) == ([0], "")
    assert server.headers[0]["Authorization"] == "Basic " + base64.b64encode(b"judge:a@b").decode()
    assert server.headers[0]["Content-Type"] == "application/json"


def test_a_proxy_of_the_environment(serve, monkeypatch):
    server = serve(lambda question, count: right(question))
    monkeypatch.setenv("http_proxy", server.url)
    monkeypatch.setenv("no_proxy", "localhost")
    assert ask("http://judge.invalid:8731") == ([0], "") and server.headers[0]["Host"] == "judge.invalid:8731"


def test_batches_go_side_by_side_and_keep_their_order(serve):
    """The first batches are answered last."""
    together, order = threading.Barrier(4), []

    def behave(question, count):
        together.wait(10)  # none is answered before all have come
        batch = int(question["src"][0].split()[1]) // 32
        time.sleep(0.1 * (3 - batch))
        order.append(batch)
        return right(question)

    server = serve(behave)
    assert ask(server.url, 100) == (list(range(100)), "")
    assert order == [3, 2, 1, 0]


def test_many_batches(serve):
    """More than go side by side."""
    server = serve(lambda question, count: right(question))
    assert ask(server.url, 1000) == (list(range(1000)), "")
    assert len(server.asked) == 32


# ---- answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "behave, why",
    [
        (says([1.0] * 31), "gave 31 scores for 32 responses"),
        (says([1.0] * 33), "gave 33 scores for 32 responses"),
        (says([]), "gave 0 scores for 32 responses"),
        (says(None), "NoneType"),
        (says(1.0), "float"),
        (says([[1.0]] * 32), "list"),
        (says("0" * 32), "gave str as score, which has to be a list"),  # not 32 zeros
        (says({str(i): 1.0 for i in range(32)}), "gave dict as score"),
        (says(["good"] * 32), "good"),
        (says([10**400] * 32), "too large"),
        (says([1.0] * 32, error_code=500, error_msg="the judge is away"), "error_code 500: the judge is away"),
        (says([1.0] * 32, error_code=None), "error_code None"),
        (lambda question, count: (200, {"score": [1.0] * 32}, {}), "error_code None"),
        (lambda question, count: (200, {"error_code": 0}, {}), "score"),
        (lambda question, count: (200, [1.0] * 32, {}), "list"),
        (lambda question, count: (200, b"<html>\nhello</html>", {}), r"gave no JSON but '<html>\nhello</html>'"),
        (lambda question, count: (200, b"", {}), "gave no JSON but ''"),
        (lambda question, count: (200, b"\xff\xfe\x00", {}), ""),
        (lambda question, count: (404, b"<html>no such page</html>", {}), "404"),
        (lambda question, count: (400, {"error_code": 400, "error_msg": "entry 3 has 99 tokens"}, {}), "has 99 tokens"),
    ],
)
def test_an_answer_that_is_none(serve, naps, behave, why):
    """NaN for the batch, never 0, the reason, and no second try; the other batches keep their scores."""
    server = serve(only_at(32, behave))
    scores, said = ask(server.url, 100)
    assert missing(scores) == list(range(32, 64))
    assert re.match(r"gave up after \d+\.\d s \(", said) and why in said and "\n" not in said
    assert len(server.asked) == 4 and not naps


@pytest.mark.parametrize("word", ["null", "NaN", "Infinity", "-Infinity", "1e999", "-1e19", '"nan"', '"inf"'])
def test_a_score_that_is_none(serve, word):
    """NaN for it alone."""
    body = b'{"error_code": 0, "error_msg": "Success", "score": [0, %s, 2.0, true, "4"]}' % word.encode()
    server = serve(lambda question, count: (200, body, {}))
    rewards = Rewards((server.url,), 5.0, None)
    scores, said = ask(server.url, 5, rewards=rewards)
    assert math.isnan(scores[1]) and [scores[0], *scores[2:]] == [0, 2, 1, 4] and said == ""
    components = {server.url: torch.tensor(scores)}
    assert rewards.why_missing(components) == f"{server.url}: it returned None, NaN, infinity or over 1e+18"


def test_an_earlier_failure_is_not_told_again(serve):
    server = serve(lambda question, count: (404, {}, {}) if len(server.asked) == 1 else says([None])(question, count))
    rewards = Rewards((server.url,), 5.0, None)
    assert "404" in ask(server.url, rewards=rewards)[1]
    assert ask(server.url, rewards=rewards)[1] == ""


# ---- at the start of a run ------------------------------------------------------------------------------------------


def row(number: int) -> dict:
    return {"prompt": f"prompt {number}", "query": [number], "answer": "4", "sources": None, "columns": {}}


def test_a_trial_request(serve, capsys):
    """Two rows are sent; a server without /health counts as one that tells right from wrong, which is said."""
    server = serve(lambda question, count: right(question))
    rewards = Rewards((server.url,), 5.0, make_tokenizer(), [row(0), row(1)])
    assert [question["response"] for question in server.asked] == [["4", "4"]] and rewards.verifiers == (server.url,)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: --reward {server.url}: has no /health")


def test_a_health_that_trickles_in(serve, capsys):
    server = serve(lambda question, count: right(question))
    server.health_trickles = True
    assert reward_client.ServerSource(server.url, 0.3).verifies
    assert "has no /health" in capsys.readouterr().err


def test_a_trial_request_that_fails(serve, naps, capsys):
    server = serve(says([1.0]))
    with pytest.raises(SystemExit):
        Rewards((server.url,), 5.0, make_tokenizer(), [row(0), row(1)])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --reward {server.url}: a trial call with two responses failed: gave up after ")
    assert "gave 1 scores for 2 responses" in line


# ---- trying again ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504, 599])
def test_errors_that_pass(serve, naps, status):
    server = serve(only_at(32, fails(3, status)))
    assert ask(server.url, 100) == (list(range(100)), "")
    assert server.counts == {"prompt 0": 1, "prompt 32": 4, "prompt 64": 1, "prompt 96": 1}
    assert naps == [1, 2, 4]


def test_errors_that_do_not_pass(serve, naps):
    server = serve(only_at(32, fails(99, 503)))
    scores, said = ask(server.url, 100)
    assert missing(scores) == list(range(32, 64)) and server.counts["prompt 32"] == 5 and naps == [1, 2, 4, 8]
    assert re.match(r"gave up after 0\.\d s \(", said) and "503" in said and "too busy" in said


def test_a_server_may_say_when_to_come_back(serve, naps):
    server = serve(fails(2, 429, **{"Retry-After": "3"}))
    assert ask(server.url) == ([0], "") and naps == [3, 3]
    for past_or_unreadable in ("Wed, 21 Oct 2015 07:28:00 GMT", "1.5", "soon"):
        naps.clear()
        server = serve(fails(1, 503, **{"Retry-After": past_or_unreadable}))
        assert ask(server.url) == ([0], "") and naps == [1]


def test_but_not_that_it_is_tomorrow(serve, naps):
    server = serve(fails(1, 503, **{"Retry-After": "86400"}))
    assert ask(server.url) == ([0], "") and naps == [60]


def test_a_server_that_comes_up_late(serve, naps):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    servers = []
    naps.then = lambda: servers or servers.append(serve(lambda question, count: right(question), port))
    assert ask(f"http://127.0.0.1:{port}") == ([0], "")
    assert naps == [1] and len(servers[0].asked) == 1


def test_a_server_that_is_not_there(naps):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        scores, said = ask(f"http://127.0.0.1:{free.getsockname()[1]}", 40)
    assert missing(scores) == list(range(40)) and sorted(naps) == [1, 1, 2, 2, 4, 4, 8, 8]
    assert said.startswith("gave up after ") and "Connection refused" in said


@pytest.mark.parametrize("answer", [(0, {}, {}), (200, {"error_code": 0}, {"Content-Length": 1000})])
def test_a_server_that_drops_the_line(serve, naps, answer):
    """Before the answer, or in the middle of it."""
    server = serve(lambda question, count: answer if count < 3 else right(question))
    assert ask(server.url) == ([0], "") and naps == [1, 2]
    server = serve(only_at(0, lambda question, count: answer))
    scores, said = ask(server.url, 40)
    assert missing(scores) == list(range(32)) and server.counts["prompt 0"] == 5 and said.startswith("gave up after ")


def test_time_outs_that_pass(serve, naps):
    def behave(question, count):
        time.sleep(0.8 if count < 3 else 0)
        return right(question)

    server = serve(only_at(0, behave))
    assert ask(server.url, 40, timeout=0.2) == (list(range(40)), "")
    assert server.counts == {"prompt 0": 3, "prompt 32": 1} and naps == [1, 2]


def test_time_outs_that_do_not_pass(serve, naps):
    """Five of them: it takes as long as that, and says so."""
    end = threading.Event()
    server = serve(only_at(32, lambda question, count: end.wait(10) and right(question)))
    start = time.monotonic()
    scores, said = ask(server.url, 40, timeout=0.2)
    passed = time.monotonic() - start
    end.set()
    assert missing(scores) == list(range(32, 40)) and server.counts["prompt 32"] == 5
    assert 1.0 <= passed < 2.5 and "timed out" in said
    assert 1.0 <= float(said.removeprefix("gave up after ").split()[0]) <= passed + 0.1


STATUS_LINE, HEADERS = b"HTTP/1.1 200 OK\r\n", b"Content-Type: application/json\r\n"


@pytest.mark.parametrize("sent", [STATUS_LINE, STATUS_LINE + HEADERS + b"Content-Length: 100000\r\n\r\n"])
def test_an_answer_that_trickles_in(serve, naps, monkeypatch, sent):
    """No wait for a byte is over the time limit, in headers or body; the request is given up on all the same."""
    monkeypatch.setattr(reward_client, "LONGEST_WAIT", 0.0)
    server = serve(only_at(32, lambda question, count: ("trickle", sent, {})))
    start = time.monotonic()
    scores, said = ask(server.url, 40, timeout=0.4)
    assert missing(scores) == list(range(32, 40)) and said == "gave no complete answer within 2 s"
    assert 2 <= time.monotonic() - start < 4 and server.counts["prompt 32"] == 1


def test_a_stuck_request_does_not_keep_the_process_alive(serve):
    server = serve(lambda question, count: ("trickle", STATUS_LINE, {}))
    program = (
        "from plumbing import reward_client\nreward_client.LONGEST_WAIT = 0.0\n"
        f"source = reward_client.ServerSource({server.url!r}, 0.2)\n"
        "print(source.score([{'prompt': 'prompt 0'}], ['response'], [[1]]))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "[nan]\n", "")


def test_back_off_takes_its_time(serve):
    """Without `naps`, here alone."""
    server = serve(fails(2, 503))
    assert ask(server.url) == ([0], "")
    waits = [later - sooner for sooner, later in zip(server.times, server.times[1:])]
    assert waits == [pytest.approx(1, abs=0.4), pytest.approx(2, abs=0.4)]
