"""scripts/reward_server.py: real servers in processes of their own, asked over HTTP."""

import contextlib
import http.client
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import helpers
import pytest
import torch
import transformers
from make_models import make_tokenizer
from tokenizers.processors import TemplateProcessing

import reward_model
import utils
from plumbing.data import prompts
from plumbing.models import loading as models
from plumbing.rewards.sources import Rewards
from plumbing.rewards.verifiers import VERIFIERS

CPU = torch.device("cpu")
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}>"

# A response tells the function what to do; what it was called with stands in a file beside it.
FUNCTION = """
import os, time

def score(prompts, responses, answer, bonus=None, **columns):
    with open(__file__ + ".calls", "a") as calls:
        calls.write("".join(f"{prompt}|{response}\\n" for prompt, response in zip(prompts, responses)))
    for response in responses:
        if response == "raise":
            raise RuntimeError("the judge is away")
        if response.startswith("sleep "):
            time.sleep(float(response.split()[1]))
        if response == "die":
            os._exit(3)
    special = {"none": None, "nan": float("nan"), "inf": float("inf")}
    scores = [special.get(r, len(p) + len(r) / 100) for p, r in zip(prompts, responses)]
    return scores if bonus is None else [score + b for score, b in zip(scores, bonus)]
"""


class Server:
    """A server in a process of its own, with the flags that a user types."""

    def __init__(self, key: str = "", **values):
        self.run = helpers.start({"port": 0, **values}, script="reward_server", environment={"REWARD_API_KEY": key})
        self.process, self.key = self.run.process, {"Authorization": f"Bearer {key}"} if key else {}

    def wait(self, seconds: float = 60) -> "Server":
        """Until /health answers."""
        assert until(lambda: not self.process.is_alive() or self.lines, seconds), self.err
        assert self.process.is_alive(), self.err
        assert self.health()["status"] == "ok"
        return self

    @property
    def lines(self) -> list[str]:
        return self.run.out.splitlines() if os.path.exists(f"{self.run.log}.out") else []

    @property
    def err(self) -> str:
        return self.run.err

    @property
    def url(self) -> str:
        return self.lines[0].split(" at ")[1].strip()

    def health(self) -> dict:
        with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
            return json.load(answer)

    def post(self, body, path: str = "/", **headers) -> tuple[int, dict]:
        """HTTP status and answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {**self.key, **headers})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def scores(self, src: list, tgt: list, response: list, **more) -> list:
        status, answer = self.post({"src": src, "tgt": tgt, "response": response, **more})
        assert (status, answer["error_code"], answer["error_msg"]) == (200, 0, "Success"), answer
        assert answer.keys() == {"error_code", "error_msg", "score"}
        return answer["score"]

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=60)

    def peak_memory(self) -> float:
        """MB; 0 on systems that do not say."""
        path = Path(f"/proc/{self.process.pid}/status")
        return int(re.search(r"VmHWM:\s+(\d+)", path.read_text())[1]) / 1024 if path.exists() else 0.0

    def workers(self) -> list[int]:
        """Its child processes."""
        parents = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, parent = path.read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state != "Z":
                parents[int(path.parent.name)] = int(parent)
        return [pid for pid, parent in parents.items() if parent == self.process.pid]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition, seconds: float = 15) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not condition():
        time.sleep(0.02)
    return bool(condition())


def save_reward_model(source: str, folder, template: str | None, bos: bool = False, **config) -> str:
    """A tiny random reward model, far from uniform, and its tokenizer of one token a character, after one at the
    beginning with `bos`."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    if bos:
        tokenizer.bos_token, special = "<eos>", [("<eos>", tokenizer.eos_token_id)]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=special)
    return helpers.scalar_folder(source, folder, tokenizer=tokenizer, **config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("reward_server")
    (folder / "judge.py").write_text(FUNCTION)
    causal = helpers.tiny_model(folder / "causal", max_position_embeddings=64)
    save_reward_model(causal, folder / "model", TEMPLATE, score_mean=0.25, score_std=2.0)
    save_reward_model(causal, folder / "plain", None)
    save_reward_model(causal, folder / "bos", None, bos=True)
    return folder


@pytest.fixture(scope="module")
def servers(folder):
    """All configurations, started side by side."""
    judge, model = f"{folder / 'judge.py'}:score", str(folder / "model")
    exact = {"precision": "float64", "micro_batch_tokens": 50}
    started = {
        "gsm8k": Server(reward="gsm8k"),
        "math": Server(reward="math", reward_timeout=5, max_body_mb=1, body_timeout=2),
        "judge": Server(reward=judge, reward_timeout=2),
        "mix": Server(reward=("exact", judge, "format"), reward_weights=(2, 0.5, 0)),
        "by row": Server(key="one that is long", host="0.0.0.0", reward=("exact", "format"), reward_weights=(2, 1)),
        "model": Server(reward=model, **exact),
        "model mix": Server(
            reward=("exact", str(folder / "plain"), model),
            reward_weights=(1, 0, -0.5),
            reward_model_scale="raw",
            **exact,
        ),
        "bos": Server(reward=str(folder / "bos"), **exact),
        "scaled": Server(reward=model, reward_model_scale="standardized", precision="float32"),
    }
    try:
        yield {name: server.wait() for name, server in started.items()}
    finally:
        for server in started.values():
            server.process.terminate()
        for server in started.values():
            server.process.join(20)
            server.process.kill()


@pytest.fixture(scope="module")
def direct(folder):
    """A score by `models.ScalarModel` alone, one sequence at a time: prompt as the model sees it, response, stop."""
    scalar, new = models.load_scalar_model("--reward", str(folder / "model"), torch.float64, CPU)
    assert not new

    def score(text: str) -> float:
        ids = make_tokenizer().encode(text, add_special_tokens=False)
        return score_ids([*ids, make_tokenizer().eos_token_id])

    @torch.no_grad()
    def score_ids(ids: list[int]) -> float:
        return scalar(torch.tensor([ids]), torch.tensor([[False] * (len(ids) - 1) + [True]])).item()

    score.ids = score_ids
    return score


# ---- scores ---------------------------------------------------------------------------------------------------------


def test_health_says_what_is_served(servers, folder):
    assert servers["gsm8k"].health() == {"status": "ok", "reward": ["gsm8k"], "model": None, "verifies": True}
    model = str(folder / "model")
    assert servers["model"].health() == {"status": "ok", "reward": [model], "model": model, "verifies": False}
    assert not servers["mix"].health()["verifies"]  # 1 or more may be the sum of wrong answers in the right form


@pytest.mark.parametrize("name, verifies", [("gsm8k", True), ("model", False), ("model mix", False)])
def test_a_run_asks_what_is_served(servers, name, verifies):
    """A reward model's scores say nothing of right and wrong, also by way of a server."""
    assert Rewards((servers[name].url,), 30.0, None).verifiers == ((servers[name].url,) if verifies else ())


def test_rows_that_name_their_source(servers):
    """A column of the request says which one scores a row; case does not matter."""
    rows = [["q"] * 3, ["1", "1", ""], ["1", "<think></think><answer>2</answer>", "<think></think><answer>3</answer>"]]
    scores = servers["by row"].scores(*rows, columns={"verifier": ["Exact", ["format"], "format"]})
    assert scores == [2, 1, 1]
    status, answer = servers["by row"].post(
        dict(zip(("src", "tgt", "response"), rows), columns={"verifier": ["x"] * 3})
    )
    assert status == 400 and "verifier is 'x', which is not in --reward exact format" in answer["error_msg"]


def test_gsm8k(servers):
    responses = ["It is #### 42", "#### 41", "42", "", "#### 1 no: #### 1,042"]
    scores = servers["gsm8k"].scores(["q"] * 5, ["so\n#### 42"] * 4 + ["1042"], responses)
    assert scores == [1, 0, 0, 0, 1]


def test_math(servers):
    responses = [r"\boxed{\frac{1}{2}}", "The answer is 0.5", r"\boxed{3}", "", r"$x + 1$"]
    references = ["1/2", r"\frac{1}{2}", "2", "7", "$1 + x$"]
    assert servers["math"].scores(["q"] * 5, references, responses) == [1, 1, 0, 0, 1]


def test_many_rows_keep_their_order(servers):
    scores = servers["gsm8k"].scores(["q"] * 101, list(range(101)), [f"#### {i if i % 3 else -1}" for i in range(101)])
    assert scores == [float(i % 3 > 0) for i in range(101)]


def test_a_reference_that_is_missing_scores_nothing(servers):
    """Never a comparison with "" or "None", which a response could even win."""
    rows = (["q"] * 7, ["", None, "  ", "None", "0", 0, 3.5], ["", "None", "", "None", "0", "0", "3.5"])
    assert servers["mix"].scores(*rows)[:3] == [None] * 3
    assert None not in servers["mix"].scores(*rows)[3:]
    assert servers["gsm8k"].scores(["q"] * 2, [None, ""], ["#### 1", "#### "]) == [None, None]
    assert servers["judge"].scores(["q"], [None], ["r"]) == [1.01]  # a function may do without


def test_function_and_columns(servers):
    server = servers["judge"]
    assert server.scores(["abc", "d"], ["", ""], ["xy", "z"]) == pytest.approx([3.02, 1.01])
    columns = {"bonus": [10, 20], "level": ["a", None], "answer": [0, 0], "prompt": [1, 1]}
    assert server.scores(["abc", "d"], ["", ""], ["xy", "z"], columns=columns) == pytest.approx([13.02, 21.01])
    assert server.scores(["a"], [""], ["x"], columns={"level": [math.nan]}) == [1.01]  # as a table has them


def test_columns_come_from_a_run(servers):
    url = servers["judge"].url
    rows = [{"prompt": "abc", "query": [], "answer": None, "columns": {"bonus": bonus}} for bonus in range(40)]
    scores = Rewards((url,), 30.0, None).score(rows, ["xy"] * 40, [[]] * 40)[url]
    assert scores == pytest.approx([3.02 + bonus for bonus in range(40)])


def test_messages_reach_a_function_as_they_are(servers):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert servers["judge"].scores([turns], [""], ["x"]) == [2.01]


def test_weights(servers):
    scores = servers["mix"].scores(["abc", "d"], ["1", "1"], ["1", "2"])
    assert scores == pytest.approx([2 * 1 + 0.5 * 3.01, 0.5 * 1.01])


def test_a_score_that_is_missing_is_null(servers):
    assert servers["judge"].scores(["a"] * 4, [""] * 4, ["none", "nan", "inf", "ok"]) == [None, None, None, 1.02]
    assert servers["mix"].scores(["a"] * 2, ["1"] * 2, ["none", "1"]) == [None, pytest.approx(2.505)]
    # math-verify cannot parse the first reference: the second row keeps its score
    assert servers["math"].scores(["q"] * 2, ["\\", "2"], ["1", "2"]) == [None, 1]
    assert servers["math"].scores(["q"], ["\\"], ["1"]) == [None]
    assert until(lambda: any("1 without a score (math: ValueError" in line for line in servers["math"].lines))


# ---- a reward model -------------------------------------------------------------------------------------------------

PAIRS = [("2+2=", "4"), ("10+7=", "17"), ("1+1=", "a longer response of forty characters"), ("3+4=", ""), ("9", "9")]


def test_reward_model_scores(servers, direct):
    questions, responses = zip(*PAIRS)
    expected = [direct(p + r) for p, r in PAIRS]
    assert max(expected) - min(expected) > 0.1
    together = servers["model"].scores(list(questions), [None] * 5, list(responses))
    assert together == pytest.approx(expected, rel=1e-10, abs=1e-12)
    for i, (prompt, response) in enumerate(PAIRS):  # nor does it matter what stands beside it
        assert servers["model"].scores([prompt], [""], [response]) == pytest.approx([together[i]], rel=1e-10)
    backwards = servers["model"].scores(list(questions[::-1]), [None] * 5, list(responses[::-1]))
    assert backwards[::-1] == pytest.approx(together, rel=1e-10)


def test_reward_model_reads_what_reward_model_py_trains_on(servers, direct, folder):
    rows = [{"prompt": "8+5=", "chosen": "13", "rejected": "1<eos>"}]
    args = reward_model.Args(system_prompt="Sum.")
    turns = [{"role": "system", "content": "Sum."}, {"role": "user", "content": "8+5="}]
    path, tokenizer = helpers.write_rows(folder / "pairs.jsonl", rows), make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    (pair,) = reward_model.load_pairs("--dataset", path, "train", tokenizer, [tokenizer.eos_token_id], args)
    assert pair["rejected"].count(tokenizer.eos_token_id) == 1
    expected = [direct.ids(pair["chosen"]), direct.ids(pair["rejected"])]
    for prompt in (turns, "[system]Sum.[user]8+5=>"):
        scores = servers["model"].scores([prompt] * 2, ["", ""], ["13", "1<eos>"])
        assert scores == pytest.approx(expected, rel=1e-10)


def test_a_prompt_goes_through_the_template_once(servers, direct):
    """Text is what a policy sees, whatever it looks like; a template is for messages."""
    turns = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2="}]
    sent = ["[user]2+2=>", "[system]Add.[user]2+2=>", turns, turns[1:], "2+2="]
    seen = ["[user]2+2=>", "[system]Add.[user]2+2=>", "[system]Add.[user]2+2=>", "[user]2+2=>", "2+2="]
    scores = servers["model"].scores(sent, [""] * 5, ["4"] * 5)
    assert scores == pytest.approx([direct(text + "4") for text in seen], rel=1e-10)


@pytest.mark.parametrize("name", ["model", "bos"])
@pytest.mark.parametrize("system_prompt", ["", "Add."])
def test_scores_are_those_of_a_reward_model_in_the_run_itself(servers, folder, name, system_prompt):
    """From data as it is read, through a template or without one, to the scores of `Rewards`."""
    url, model = servers[name].url, str(folder / name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    rewards = Rewards((url, model), 30.0, tokenizer)
    rewards.load_models("raw", torch.float64, CPU, contextlib.nullcontext, 1000)
    rows, texts, ids = [], [], []
    for question, text in PAIRS:
        prompt, query = prompts.encode_prompt("", question, tokenizer, system_prompt)
        assert query.count(tokenizer.eos_token_id) == (name == "bos")
        rows.append({"prompt": prompt, "query": query, "answer": None})
        texts.append(text)
        ids.append([*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id])
    scores = rewards.score(rows, texts, ids)
    assert scores[url] == pytest.approx(scores[model], rel=1e-10) and not set(scores[url]) & {0.0}


def test_reward_model_beside_other_sources(servers, direct):
    """Weights, one of them 0."""
    scores = servers["model mix"].scores(["2+2=", "2+2="], ["4", "4"], ["4", "5"])
    expected = [1 - 0.5 * direct("2+2=4"), -0.5 * direct("2+2=5")]
    assert scores == pytest.approx(expected, rel=1e-10)
    assert servers["model mix"].scores(["2+2=", "2+2="], ["4", ""], ["4", "4"]) == [pytest.approx(expected[0]), None]


def test_reward_model_scale(servers, direct):
    scores = servers["scaled"].scores(["[user]2+2=>"], [""], ["4"])
    assert scores == pytest.approx([(direct("[user]2+2=>4") - 0.25) / 2], rel=1e-4)


@pytest.mark.parametrize(
    "prompt, response, says",
    [
        ("x" * 70, "4", "entry 1 has "),
        ("2+2=", "x" * 70, "over the 64 of the reward model"),
        ([{"role": "user"}], "4", "entry 1 of src: a prompt is text or a list"),
        ([], "4", "entry 1 of src: a prompt is text or a list"),
    ],
)
def test_what_a_reward_model_cannot_read(servers, prompt, response, says):
    status, answer = servers["model"].post({"src": ["1+1=", prompt], "tgt": ["", ""], "response": ["2", response]})
    assert (status, answer["error_code"], answer["score"]) == (400, 400, []) and says in answer["error_msg"]
    assert len(servers["model"].scores(["1+1="], [""], ["2"])) == 1  # and goes on


# ---- requests that cannot be read -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body, says",
    [
        (b"", "body: Invalid JSON"),
        (b'{"src": [', "body: Invalid JSON"),
        (b"\xff\xfe", "body: Invalid JSON"),
        (b'{"src": ["\\ud800"], "tgt": [""], "response": [""]}', "body: Invalid JSON"),
        (b"[" * 100_000, "body: Invalid JSON"),
        ([], "body: Input should be an object"),
        ({"src": ["a"], "tgt": ["b"]}, "response: Field required"),
        ({"tgt": ["a"], "response": ["b"]}, "src: Field required"),
        ({"src": "a", "tgt": ["b"], "response": ["c"]}, "src: Input should be a valid"),
        ({"src": ["a"], "tgt": ["b"], "response": [None]}, "response.0: Input should be a valid string"),
        ({"src": ["a"], "tgt": ["b"], "response": [1]}, "response.0: Input should be a valid string"),
        ({"src": [None], "tgt": ["b"], "response": ["c"]}, "src.0"),
        ({"src": ["a"], "tgt": [["b"]], "response": ["c"]}, "tgt.0"),
        ({"src": ["a", "a"], "tgt": ["b"], "response": ["c", "c"]}, "tgt has 1 entries, src has 2"),
        ({"src": ["a"], "tgt": ["b"], "response": []}, "response has 0 entries, src has 1"),
        ({"src": [], "tgt": [], "response": ["c"]}, "response has 1 entries, src has 0"),
        ({"src": ["a"], "tgt": ["b"], "response": ["c"], "columns": {"x": [1, 2]}}, "x has 2 entries, src has 1"),
        ({"src": ["a"], "tgt": ["b"], "response": ["c"], "columns": {"x": 1}}, "columns.x"),
    ],
)
def test_malformed_requests(servers, body, says):
    status, answer = servers["gsm8k"].post(body)
    assert (status, answer["error_code"], answer["score"]) == (400, 400, [])
    assert answer["error_msg"].startswith(says) and "\n" not in answer["error_msg"]


def test_empty_lists(servers):
    for name in ("gsm8k", "judge", "mix", "model", "model mix"):
        assert servers[name].scores([], [], []) == []


def test_the_content_type_does_not_matter(servers):
    body = {"src": ["q"], "tgt": ["4"], "response": ["#### 4"]}
    for kind in ("application/json", "text/plain", "application/x-www-form-urlencoded"):
        assert servers["gsm8k"].post(body, **{"Content-Type": kind})[1]["score"] == [1]


def test_other_addresses(servers):
    status, answer = servers["gsm8k"].post({}, "/score")
    assert (status, answer["error_code"], answer["score"]) == (404, 404, [])
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(servers["gsm8k"].url)
    assert error.value.code == 405 and json.load(error.value)["error_code"] == 405


# ---- who may ask, and how much at a time --------------------------------------------------------------------------


def test_a_key(servers, monkeypatch):
    server = servers["by row"]
    body = {"src": ["q"], "tgt": ["4"], "response": ["4"]}
    for given in (
        "",
        "Bearer",
        "Bearer ",
        "Bearer another",
        "Bearer one that is lon\xe9",
        "one that is long",
        "Basic eA==",
    ):
        status, answer = server.post(body, Authorization=given)
        assert (status, answer["error_code"], answer["score"]) == (401, 401, []), given
        assert answer["error_msg"] == "REWARD_API_KEY is not the one of the server"
    with contextlib.closing(server.connect()) as connection:  # the answer waits for no body
        connection.putrequest("POST", "/")
        connection.putheader("Content-Length", "1000")
        connection.endheaders()
        answer = connection.getresponse()
        assert answer.status == 401 and answer.headers["WWW-Authenticate"] == "Bearer"
    rows = [{"prompt": "q", "query": [], "answer": "4", "columns": {}}]
    for key, score in (("one that is long", 2.0), ("another", math.nan), ("", math.nan)):
        monkeypatch.setenv("REWARD_API_KEY", key)
        rewards = Rewards((server.url,), 30.0, None)
        assert rewards.score(rows, ["4"], [[]])[server.url] == [pytest.approx(score, nan_ok=True)]
        assert ("REWARD_API_KEY is not" in rewards.sources[server.url].failure) == math.isnan(score)


@pytest.mark.parametrize("header", [("Content-Length", str(200 * 2**20)), ("Transfer-Encoding", "chunked")])
def test_a_body_that_is_too_large(servers, header):
    """200 MB: its sender gets to the answer, it takes no memory, and the connection can be used again."""
    server, part = servers["math"], b"x" * 2**20
    before = server.peak_memory()
    right = json.dumps({"src": ["q"], "tgt": ["4"], "response": ["4"]}).encode()
    with contextlib.closing(server.connect()) as connection:
        connection.putrequest("POST", "/")
        connection.putheader(*header)
        connection.endheaders()
        chunked = header[1] == "chunked"
        for _ in range(200):
            connection.send(b"%x\r\n%s\r\n" % (len(part), part) if chunked else part)
        if chunked:
            connection.send(b"0\r\n\r\n")
        answer = connection.getresponse()
        content = json.load(answer)
        assert (answer.status, content["error_code"], content["score"]) == (413, 413, [])
        assert content["error_msg"] == "the body is over --max_body_mb 1 of the server"
        connection.request("POST", "/", right)
        assert json.load(connection.getresponse())["score"] == [1]
    assert server.peak_memory() - before < 30
    assert server.post(right.ljust(2**20))[0] == 200 and server.post(right.ljust(2**20 + 1))[0] == 413


def test_a_run_whose_batch_is_too_large(servers):
    url = servers["math"].url
    rewards = Rewards((url,), 30.0, None)
    rows = [{"prompt": "q", "query": [], "answer": "4", "columns": {}}] * 33  # 32 in the first request, 1 in the second
    scores = rewards.score(rows, ["x" * 2**20] + ["4"] * 32, [[]] * 33)[url]
    assert list(map(math.isnan, scores)) == [True] * 32 + [False] and scores[32] == 1
    assert "HTTP status 413" in rewards.sources[url].failure and "--max_body_mb" in rewards.sources[url].failure


def test_a_slow_client(servers):
    """It gets 408 after --body_timeout, and nobody waits for it."""
    server = servers["math"]
    with contextlib.closing(server.connect()) as connection:
        connection.putrequest("POST", "/")
        connection.putheader("Content-Length", "1000")
        connection.endheaders(b'{"src": [')
        start = time.monotonic()
        assert server.scores(["q"], ["4"], ["4"]) == [1]
        for _ in range(3):  # a byte now and then does not help
            time.sleep(0.4)
            connection.send(b" ")
        answer = connection.getresponse()
        assert 1.5 < time.monotonic() - start < 10
        content = json.load(answer)
    assert (answer.status, content["error_code"], content["score"]) == (408, 408, [])
    assert content["error_msg"] == "the body took longer than --body_timeout 2 s of the server"
    assert answer.headers["Connection"] == "close"


# ---- sources that fail ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "response, says",
    [
        ("raise", "RuntimeError: the judge is away"),
        ("die", "its process ended with exit code 3"),
        ("sleep 30", "gave no answer within --reward_timeout 2 s"),
    ],
)
def test_a_source_that_fails(servers, folder, response, says):
    """No scores, above all no zeros; and the next request gets its own."""
    status, answer = servers["judge"].post({"src": ["a", "b"], "tgt": ["", ""], "response": ["fine", response]})
    assert (status, answer["error_code"], answer["score"]) == (500, 500, [])
    assert answer["error_msg"] == f"{folder / 'judge.py'}:score: {says}"
    assert servers["judge"].scores(["abc"], [""], ["xy"]) == [3.02]
    assert servers["judge"].scores(["abc"], [""], ["none"]) == [None]  # the failure of before is forgotten
    assert until(lambda: any(f"error 500: {answer['error_msg']}" in line for line in servers["judge"].lines))


def test_a_line_a_request(servers):
    server = servers["gsm8k"]
    before = len(server.lines)
    server.scores(["q"] * 17, ["1"] * 17, ["r"] * 17)
    assert until(lambda: len(server.lines) > before) and len(server.lines) == before + 1
    assert " 17 rows, " in server.lines[-1] and " s, waited " in server.lines[-1]


# ---- many at a time -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gsm8k", "judge", "model"])
def test_clients_at_the_same_time_get_their_own_rows(servers, direct, name):
    rows = {}
    for i in range(64):
        rows[i] = [("x" * (i % 48 + 1), f"{j}", f"#### {j if (i + j) % 2 else 99}") for j in range(1 + i % 5)]
    own = {
        "gsm8k": lambda i, prompt, answer, response: float((i + int(answer)) % 2),
        "judge": lambda i, prompt, answer, response: len(prompt) + len(response) / 100,
        "model": lambda i, prompt, answer, response: direct(prompt + response),
    }[name]
    together = threading.Barrier(64)

    def client(i: int) -> list:
        together.wait()
        return [servers[name].scores(*map(list, zip(*rows[i]))) for _ in range(2)]

    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(client, range(64)))
    for i, answer in enumerate(answers):
        expected = [own(i, *row) for row in rows[i]]
        assert answer == [pytest.approx(expected, rel=1e-9)] * 2


def test_health_answers_while_scores_are_made(servers):
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(servers["judge"].scores, ["a"], [""], ["sleep 1.5"])
        time.sleep(0.2)
        waits = []
        while not slow.done():
            start = time.monotonic()
            assert servers["judge"].health()["status"] == "ok"
            waits.append(time.monotonic() - start)
            time.sleep(0.05)
    assert slow.result() == [1.09] and len(waits) > 5 and max(waits) < 1


def test_a_client_that_has_gone_is_not_worked_for(servers, folder):
    """One that waits too long asks again: without this, the server would get slower and slower."""
    server, calls = servers["judge"], folder / "judge.py.calls"
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(server.scores, ["a"], [""], ["sleep 1"])
        assert until(lambda: calls.exists() and calls.read_text().endswith("a|sleep 1\n"))
        body = json.dumps({"src": ["gone"], "tgt": [""], "response": ["x"]}).encode()
        address = server.url.removeprefix("http://").split(":")
        with socket.create_connection((address[0], int(address[1]))) as line:
            line.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            time.sleep(0.3)
        assert slow.result() == [1.07]
    assert server.scores(["stays"], [""], ["x"]) == [5.01]
    assert "stays|x" in calls.read_text() and "gone|x" not in calls.read_text()
    assert until(lambda: any("left out a request" in line for line in server.lines))
    assert "Exception in ASGI" not in server.err


# ---- the end --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads the processes from /proc")
@pytest.mark.parametrize("number, busy", [("SIGINT", False), ("SIGTERM", True), ("SIGKILL", False)])
def test_a_signal_ends_all_of_it(folder, number, busy):
    server = Server(reward=(f"{folder / 'judge.py'}:score", "gsm8k")).wait()
    workers = server.workers()
    assert workers
    with contextlib.ExitStack() as stack:
        asked, calls = [], folder / "judge.py.calls"
        if busy:
            calls.unlink(missing_ok=True)
            for seconds in (1, 60, 60):  # one is scored in time, one is begun, one waits for its turn
                asked.append(stack.enter_context(contextlib.closing(server.connect())))
                body = {"src": ["a"], "tgt": ["1"], "response": [f"sleep {seconds}"]}
                asked[-1].request("POST", "/", json.dumps(body))
                assert until(calls.exists)
            asked.append(stack.enter_context(contextlib.closing(server.connect())))
            asked[-1].putrequest("POST", "/")
            asked[-1].putheader("Content-Length", "1000")
            asked[-1].endheaders(b'{"src": [')  # and one is still sent
            server.health()  # they have all arrived
        os.kill(server.process.pid, getattr(signal, number))
        server.process.join(10)
        server.process.kill()
        assert server.process.exitcode == (-signal.SIGKILL if number == "SIGKILL" else 0), server.err
        assert until(lambda: not any(map(alive, workers)), 3)
        assert "Traceback" not in server.err
        answers = [connection.getresponse() for connection in asked]
        for answer, status in zip(answers, (200, 503, 503, 503)):  # which a run asks again, of the next server
            content = json.load(answer)
            assert (answer.status, content["error_code"]) == (status, 0 if status == 200 else 503)
            assert content["score"] == ([pytest.approx(1.07)] if status == 200 else [])


def test_the_command_line():
    words = [sys.executable, str(helpers.ROOT / "scripts" / "reward_server.py"), "--reward", "exact", "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline().startswith("exact at http://127.0.0.1:")
            process.send_signal(signal.SIGTERM)  # at once, before requests are answered
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_help_names_every_built_in_source():
    script = Path(helpers.ROOT, "scripts", "reward_server.py").read_text()
    said = script.partition("    reward: tuple")[2].partition("    reward_weights: tuple")[0]
    assert not set(VERIFIERS) - set(re.findall(r"\w+", said))


# ---- bad flags ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"reward": "maths"}, "--reward maths: no such reward"),
        ({"reward": "a/b.py"}, "--reward a/b.py: no such reward"),
        ({"reward": "gone.py:score"}, "--reward gone.py:score: there is no file gone.py"),
        ({"reward": "JUDGE:none"}, "has no function 'none'"),
        ({"reward": "CAUSAL"}, "is no reward model"),
        ({"reward": "EMPTY"}, "no tokenizer could be loaded from it"),
        ({"reward": ("math", "math")}, "--reward math math: names a source twice"),
        ({"reward": "environment"}, "--reward environment: its scores come with the conversations of a run"),
        ({"reward_weights": (1.0, 2.0)}, "--reward_weights: has 2 weights for 1 sources in --reward"),
        ({"reward_weights": (0.0,)}, "--reward_weights: are all 0"),
        ({"port": 70000}, "--port: has to be between 0 and 65535, not 70000"),
        ({"port": "TAKEN"}, "cannot listen there (["),
        (
            {"host": "0.0.0.0"},
            "--host 0.0.0.0: every machine that reaches this address could ask; set the variable REW",
        ),
        ({"host": "no.such.host.invalid"}, "--host no.such.host.invalid --port 0: cannot listen there"),
        ({"reward": "MODEL", "stop_token": "two"}, "--stop_token 'two': has to be exactly one token"),
        ({"reward": "PLAIN", "reward_model_scale": "centred"}, "--reward_model_scale centred: the config of"),
    ],
)
def test_bad_flags(folder, changes, says):
    names = {"JUDGE": f"{folder / 'judge.py'}", "MODEL": str(folder / "model"), "PLAIN": str(folder / "plain")}
    names |= {"CAUSAL": str(folder / "causal"), "EMPTY": str(folder / "empty")}
    (folder / "empty").mkdir(exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as other:
        names["TAKEN"] = str(other.getsockname()[1])
        values = {"reward": "gsm8k", "port": 0, **changes}
        for short, name in names.items():
            values = {k: v.replace(short, name) if isinstance(v, str) else v for k, v in values.items()}
        ended = helpers.run(values, utils.EXIT_BAD_INPUT, script="reward_server", environment={"REWARD_API_KEY": ""})
    assert len(ended.errors) == 1 and says in ended.errors[0]
    assert ended.err.strip() == ended.errors[0] and not ended.out
