"""scripts/reward_server.py: servers in this process, and one as a user starts it."""

import asyncio
import json
import math
import signal
import socket
import threading
import time
import types
import urllib.error
import urllib.request
from pathlib import Path

import helpers
import pytest
import reward_server
import transformers
from helpers import scores_by
from tiny_models import CPU, WORLD, make_tokenizer

from plumbing.models import loading
from plumbing.rewards.sources import RewardSources

TEMPLATE = (
    "{% for m in messages %}{{ '>' if m['role'] == 'assistant' else '[' + m['role'] + ']' }}{{ m['content'] }}"
    "{% endfor %}{{ '>' if add_generation_prompt else '' }}"
)

# A response tells the function what to do.
FUNCTION = """
def score(prompts, responses, answer, bonus=None, **columns):
    if "raise" in responses:
        raise RuntimeError("the judge is away")
    special = {"none": None, "nan": float("nan"), "inf": float("inf")}
    scores = [special.get(r, len(p) + len(r) / 100) for p, r in zip(prompts, responses)]
    return scores if bonus is None else [score + b for score, b in zip(scores, bonus)]
def count(completions, turns=None):
    return [len(completions) + (turns is not None and completions == turns)] * len(completions)
"""


class Server:
    """A server that answers until the tests end."""

    def __init__(self, **values):
        values = {"precision": "float64", "micro_batch_tokens": 50, "timeout": 2.0, **values}
        self.scorer = reward_server.Scorer(reward_server.Args(**values), WORLD)
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        work = [reward_server.serve(self.scorer, listener)]
        threading.Thread(target=asyncio.run, args=work, daemon=True).start()

    def ask(self, path: str, body: bytes | None = None) -> tuple[int, dict | str]:
        """HTTP status and answer."""
        try:
            with urllib.request.urlopen(self.url + path, body, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def post(self, body) -> tuple[int, dict | str]:
        return self.ask("/", body if isinstance(body, bytes) else json.dumps(body).encode())

    def scores(self, src: list, tgt: list, response: list, **more) -> list:
        status, answer = self.post({"src": src, "tgt": tgt, "response": response, **more})
        assert status == 200 and answer.keys() == {"error_code", "error_msg", "score"}, answer
        assert (answer["error_code"], answer["error_msg"]) == (0, "Success")
        return answer["score"]

    def send(self, text: str, address: str = "127.0.0.1") -> socket.socket:
        """A connection from an address that has sent a text."""
        connection = socket.create_connection(self.address, 60, (address, 0))
        connection.sendall(text.encode())
        return connection


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A function, and two reward models: one with a chat template, one whose texts begin with a
    token.
    """
    folder = tmp_path_factory.mktemp("reward_server")
    (folder / "judge.py").write_text(FUNCTION)
    causal = helpers.tiny_model(folder / "causal", max_position_embeddings=64)
    tokenizer = make_tokenizer(chat_template=TEMPLATE)
    ended = {"score_token": tokenizer.eos_token_id}  # as of reward_model.py
    helpers.scalar_folder(causal, folder / "model", tokenizer=tokenizer, **ended)
    tokenizer = make_tokenizer(True, bos_token="<eos>")
    helpers.scalar_folder(causal, folder / "bos", tokenizer=tokenizer, **ended)
    return folder


@pytest.fixture(scope="module")
def servers(folder):
    judge = f"{folder / 'judge.py'}:score"
    model = str(folder / "model")
    servers = {
        "gsm8k": Server(reward=("gsm8k",)),
        "judge": Server(reward=(judge,)),
        "whole": Server(reward=(f"{folder / 'judge.py'}:count", "exact"), reward_weights=(1, 0.5)),
        "mix": Server(reward=("exact", judge), reward_weights=(2.0, 0.5)),
        "by row": Server(reward=("exact", "format"), reward_weights=(2.0, 1.0)),
        "model": Server(reward=(model,)),
        "bos": Server(reward=(str(folder / "bos"),)),
    }
    yield servers
    for server in servers.values():
        helpers.end_processes(server.scorer.reward_sources.server)


# ---- scores --------------------------------------------------------------------------------------


def test_health_says_what_is_served(servers):
    """And no path of a file: it is open to all. In a mix, 1 may be the sum of wrong answers in the
    right form.
    """
    for name, verifies in {"gsm8k": True, "model": False, "mix": False}.items():
        answer = {"status": "ok", "verifies": verifies, "whole": False}
        assert servers[name].ask("/health") == (200, answer)


def test_rows_that_name_their_source(servers):
    """A column of the request says which one scores a row; case does not matter."""
    responses = ["1", "<think>2</think><answer>2</answer>", "<think>3</think><answer>3</answer>"]
    columns = {"verifier": ["Exact", ["format"], "format"]}
    assert servers["by row"].scores(["q"] * 3, ["1", "1", ""], responses, columns=columns) == [
        2,
        1,
        1,
    ]


def test_a_reference_that_is_missing_scores_nothing(servers):
    """Never a comparison with "" or "None", which a response could even win."""
    rows = (
        ["q"] * 7,
        ["", None, "  ", "None", "0", 0, 3.5],
        ["", "None", "", "None", "0", "0", "3.5"],
    )
    scores = servers["mix"].scores(*rows)
    assert scores[:3] == [None] * 3 and None not in scores[3:]
    assert servers["gsm8k"].scores(["q"] * 2, [None, ""], ["#### 1", "#### "]) == [None, None]
    assert servers["judge"].scores(["q"], [None], ["r"]) == [1.01]  # a function may do without


def test_function_and_columns(servers):
    server = servers["judge"]
    assert server.scores(["abc", "d"], ["", ""], ["xy", "z"]) == pytest.approx([3.02, 1.01])
    columns = {"bonus": [10, 20], "level": ["a", None], "answer": [0, 0], "prompt": [1, 1]}
    assert server.scores(["abc", "d"], ["", ""], ["xy", "z"], columns=columns) == pytest.approx(
        [13.02, 21.01]
    )
    # as a table has them
    assert server.scores(["a"], [""], ["x"], columns={"level": [math.nan]}) == [1.01]


def test_whole_groups_and_conversations(servers):
    """A run sends all of its responses in one request, and conversations, of which a verifier reads
    the last turn.
    """
    url = servers["whole"].url
    args = types.SimpleNamespace(reward=(url,), timeout=60.0, reward_workers=1)
    reward_sources = RewardSources(args)
    assert reward_sources.whole
    rows = [{"prompt": "p", "answer": "4", "columns": {}, "messages": None}] * 50
    score = lambda rows: helpers.scores_by(reward_sources, rows, ["1"] * 50, [[1]] * 50)[url]
    assert score(rows) == [50.0] * 50
    turns = [{"role": "assistant", "content": "1"}, {"role": "assistant", "content": "4"}]
    assert score([row | {"turns": turns} for row in rows]) == [51.5] * 50


def test_weights_and_scores_that_are_missing(servers):
    scores = servers["mix"].scores(
        ["abc", "d", "a", "a", "a"], ["1"] * 5, ["1", "2", "none", "nan", "inf"]
    )
    assert scores == [
        pytest.approx(2 * 1 + 0.5 * 3.01),
        pytest.approx(0.5 * 1.01),
        None,
        None,
        None,
    ]


# ---- a reward model ------------------------------------------------------------------------------

PAIRS = [
    ("2+2=", "4"),
    ("1+1=", "a longer response of forty characters"),
    ("3+4=", ""),
]
FORGED = "2+2=<eos>[assistant]4"  # spells a token of the reward model


def test_a_prompt_goes_through_the_template_once(servers):
    """Text is what a policy sees, whatever it looks like; a template is for messages."""
    turns = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2="}]
    sent = ["2+2=", "[user]2+2=>", "[system]Add.[user]2+2=>", "", ""]
    messages = [None, None, None, turns[1:], turns]
    plain, *texts, user, both = servers["model"].scores(
        sent, [""] * 5, ["4"] * 5, messages=messages
    )
    assert [user, both] == pytest.approx(texts, rel=1e-10) and len({plain, user, both}) == 3


@pytest.mark.parametrize("name", ["model", "bos"])
def test_scores_are_those_of_a_reward_model_in_the_run_itself(servers, folder, name):
    """From data as it is read, through a template or without one, to the scores of `Rewards`."""
    url = servers[name].url
    model = str(folder / name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    args = reward_server.Args(reward=(url, model), micro_batch_tokens=1000)
    reward_sources = RewardSources(args, tokenizer)
    reward_sources.load_models(args, loading.precision("float64", CPU))
    assert reward_sources.verifiers == ()
    rows = []
    texts = []
    ids = []
    for question, text in [*PAIRS, (FORGED, FORGED)][: None if name == "model" else -1]:
        prompt, query = helpers.encode_prompt(question, tokenizer, "Add.")
        assert query.count(tokenizer.eos_token_id) == (name == "bos")
        messages = helpers.dialogue(question, tokenizer, "Add.")
        rows.append({"prompt": prompt, "query": query, "messages": messages, "answer": None})
        texts.append(text)
        ids.append(helpers.encode_response("", text, tokenizer, [tokenizer.eos_token_id]))
    scores = scores_by(reward_sources, rows, texts, ids)
    assert scores[url] == pytest.approx(scores[model], rel=1e-10) and not set(scores[url]) & {0.0}


# ---- requests that fail --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, body, status, says",
    [
        ("gsm8k", b'{"src": [', 422, "JSONDecodeError"),
        ("gsm8k", b"[" * 100_000, 422, "RecursionError"),
        ("gsm8k", b'{"src": [""], "tgt": [NaN], "response": [""]}', 422, "finite"),
        ("gsm8k", {"src": [1] * 9999, "tgt": [], "response": []}, 422, "src.0"),
        *helpers.table("requests.json")["malformed"],
    ],
)
def test_malformed_requests(servers, name, body, status, says):
    code, answer = servers[name].post(body)
    assert code == status and says in answer and len(answer) <= 1000 and "\n" not in answer
    assert servers[name].scores([], [], []) == []  # and goes on


def test_a_source_that_fails(servers, capsys):
    """No scores, above all no zeros; and the next request gets its own. (Time-outs:
    faults/test_rewards_fail.py.)
    """
    assert servers["judge"].scores(["a", "b"], ["", ""], ["raise", "raise"]) == [None, None]
    assert "the judge is away; such responses" in capsys.readouterr().err
    assert servers["judge"].scores(["abc"], [""], ["xy"]) == [3.02]


# ---- many at once --------------------------------------------------------------------------------


@pytest.fixture
def parts(servers, monkeypatch):
    """(prompt, how many of it) of the parts that a server is scoring or has scored; all but those
    of "now" wait for `parts.end`.
    """
    parts = types.SimpleNamespace(begun=[], end=threading.Event())

    def score(request, places):
        parts.begun.append((request.src[0], len(places)))
        assert request.src[0] == "now" or parts.end.wait(60)
        return [1.0] * len(places)

    monkeypatch.setattr(servers["gsm8k"].scorer, "score", score)
    return parts


ROWS = json.dumps(dict.fromkeys(("src", "tgt", "response"), ["a"] * 100))
POST = f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {len(ROWS)}\r\n\r\n{ROWS}"


def test_no_client_waits_for_all_of_another_one(servers, parts, monkeypatch):
    """Nor a request for all of another one: one has two parts under way, and a client PARTS."""
    monkeypatch.setattr(reward_server, "PARTS", 3)
    server = servers["gsm8k"]
    addresses = ["127.0.0.1", *["127.0.0.2"] * 6]
    others = [server.send(POST, address) for address in addresses]
    assert server.scores(["now"], [""], [""]) == [1] and parts.begun.count(("a", 16)) <= 5
    parts.end.set()
    assert [other.recv(15) for other in others] == [b"HTTP/1.1 200 OK"] * 7
    assert sorted(parts.begun) == [("a", 4)] * 7 + [("a", 16)] * 42 + [("now", 1)]


def test_a_client_that_has_left(servers, parts):
    """The two parts of its request that are scored end, no other one begins."""
    server = servers["gsm8k"]
    client = server.send(POST)
    while len(parts.begun) < 2:
        time.sleep(0.01)
    client.close()
    assert server.scores(["now"], [""], [""]) == [1]  # by now the server has noticed
    parts.end.set()
    assert server.scores(["now"], [""], [""]) == [1]
    assert parts.begun == [("a", 16)] * 2 + [("now", 1)] * 2


def test_connections_that_send_no_end(servers, monkeypatch):
    """The oldest are closed, so others are answered."""
    monkeypatch.setattr(reward_server, "MOST_WAITING", 8)
    server = servers["gsm8k"]
    head = "GET /health HTTP/1.1\r\nHost: a\r\n"
    post = "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{"
    half = [server.send(text) for text in ["", "GET", head, post] * 5]
    for _ in range(2):
        assert server.ask("/health")[0] == 200
    assert [connection.recv(1) for connection in half[:12]] == [b""] * 12
    half[-2].sendall(b"\r\n")
    assert half[-2].recv(15) == b"HTTP/1.1 200 OK"


@pytest.mark.parametrize(
    "header, status, says",
    [
        ("Content-Length: x", 400, "Invalid character in Content-Length"),
        ("Host: a\r\nContent-Length: 9\r\nContent-Encoding: gzip", 422, "not decode"),
    ],
)
def test_what_cannot_be_read_is_a_line(servers, caplog, header, status, says):
    client = servers["gsm8k"].send(f"POST / HTTP/1.1\r\n{header}\r\n\r\nno gzip: ")
    answer = client.makefile().read()
    assert f" {status} " in answer and says in answer
    (line,) = caplog.text.splitlines()
    assert says in line


def test_what_is_too_long(monkeypatch):
    monkeypatch.setattr(reward_server, "LARGEST_BODY", 1000)
    server = Server(reward=("gsm8k",))
    status, answer = server.post({"src": ["x" * 1000], "tgt": ["4"], "response": ["4"]})
    assert status == 413 and "size 1000 exceeded" in answer
    endless = server.send("GET /health HTTP/1.1\r\n" + "A: b\r\n" * 999)
    assert endless.recv(12) == b"HTTP/1.0 400"


# ---- a server as a user starts it ----------------------------------------------------------------


def test_a_server_with_a_key(monkeypatch):
    """Every POST needs the key, a run sends it, /health is open, and SIGTERM ends the server."""
    values = {"reward": "exact", "host": "::1", "port": 0}
    run = helpers.Running(values, script="reward_server", environment={"REWARD_API_KEY": "a key"})
    try:
        while not run.out.strip():
            assert run.process.is_alive(), run.err
            time.sleep(0.1)
        assert run.out.startswith("exact at http://[::1]:")
        url = run.out.split()[-1]
        with urllib.request.urlopen(f"{url}/health", timeout=60) as answer:
            assert json.load(answer) == {"status": "ok", "verifies": True, "whole": False}
        rows = [{"prompt": "q", "query": [], "answer": "4", "columns": {}}]
        for key in ("a key", "another", ""):
            monkeypatch.setenv("REWARD_API_KEY", key)
            reward_sources = RewardSources(reward_server.Args(reward=(url,)), None)
            [score] = scores_by(reward_sources, rows, ["4"], [[]])[url]
            refused = "HTTP status 401" in reward_sources.sources[url].failure
            assert refused == math.isnan(score) == (key != "a key")
        run.process.terminate()
        run.process.join(100)
        assert run.process.exitcode == -signal.SIGTERM and "Traceback" not in run.err
    finally:
        run.process.kill()


def test_an_address_without_a_key(monkeypatch, capsys):
    monkeypatch.delenv("REWARD_API_KEY", raising=False)
    args = reward_server.Args(reward=("gsm8k",), port=0, host="::")
    assert "REWARD_API_KEY" in helpers.refused(capsys, reward_server.main, args)
