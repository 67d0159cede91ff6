"""scripts/reward_server.py: its application in this process, and a server as a user starts it."""

import json
import math
import signal
import threading
import time
import types
import urllib.request
from pathlib import Path

import helpers
import pytest
import reward_server
import transformers
import uvicorn
from fastapi.testclient import TestClient
from helpers import scores_by
from tiny_models import CPU, make_tokenizer
from tokenizers.processors import TemplateProcessing

import utils
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
    """The application of a server."""

    def __init__(self, **values):
        values = {"precision": "float64", "micro_batch_tokens": 50, "timeout": 2.0, **values}
        self.args = reward_server.Args(**values)
        self.scorer = reward_server.Scorer(self.args, utils.World(0, 1, CPU))
        self.app = reward_server.make_app(self.scorer)
        self.client = TestClient(self.app)

    def post(self, body, **headers) -> tuple[int, dict]:
        """HTTP status and answer."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = self.client.post(
            "/", content=content, headers={"Content-Type": "application/json", **headers}
        )
        return answer.status_code, answer.json()

    def scores(self, src: list, tgt: list, response: list, **more) -> list:
        status, answer = self.post({"src": src, "tgt": tgt, "response": response, **more})
        assert (status, answer["error_code"], answer["error_msg"]) == (200, 0, "Success"), answer
        assert answer.keys() == {"error_code", "error_msg", "score"}
        return answer["score"]


@pytest.fixture
def listen():
    """Returns the address of an application that answers until the test ends."""
    servers = []

    def listen(app) -> str:
        config = uvicorn.Config(app, port=0, log_level="error")
        servers.append(uvicorn.Server(config))
        threading.Thread(target=servers[-1].run, daemon=True).start()
        end = time.monotonic() + 60
        while not servers[-1].started:
            assert time.monotonic() < end, "the server does not start"
            time.sleep(0.01)
        return "http://127.0.0.1:{}".format(servers[-1].servers[0].sockets[0].getsockname()[1])

    yield listen
    for server in servers:
        server.should_exit = True


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
    tokenizer = make_tokenizer(bos_token="<eos>")
    special = [("<eos>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A", special_tokens=special
    )
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


def test_health_says_what_is_served(servers, folder):
    health = lambda name: servers[name].client.get("/health").json()
    assert health("gsm8k") == {
        "status": "ok",
        "reward": ["gsm8k"],
        "verifies": True,
        "whole": False,
    }
    assert health("model")["reward"] == [str(folder / "model")]
    assert not health("model")["verifies"]
    # 1 or more may be the sum of wrong answers in the right form
    assert not health("mix")["verifies"]


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
    assert servers["mix"].scores(*rows)[:3] == [None] * 3
    assert None not in servers["mix"].scores(*rows)[3:]
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


def test_whole_groups_and_conversations(servers, listen):
    """A run sends all of its responses in one request, and conversations, of which a verifier reads
    the last turn.
    """
    url = listen(servers["whole"].app)
    args = types.SimpleNamespace(reward=(url,), timeout=60.0, reward_workers=1)
    reward_sources = RewardSources(args)
    assert reward_sources.whole and servers["whole"].client.get("/health").json()["whole"]
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


def test_programs_run_on_the_server():
    """As a run sends the tests of a row, text or JSON."""
    server = Server(reward=("code",), timeout=20.0)
    tests = ["assert add(1, 2) == 3", json.dumps({"inputs": ["1"], "outputs": ["1"]})]
    programs = ["def add(a, b): return a + b", "print(input())"]
    assert server.scores(["q"] * 2, tests, programs) == [1, 1]
    assert server.scores(["q"] * 2, tests, programs[::-1]) == [0, 0]
    helpers.end_processes(server.scorer.reward_sources.server)


# ---- a reward model ------------------------------------------------------------------------------

PAIRS = [
    ("2+2=", "4"),
    ("10+7=", "17"),
    ("1+1=", "a longer response of forty characters"),
    ("3+4=", ""),
    ("9", "9"),
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
def test_scores_are_those_of_a_reward_model_in_the_run_itself(servers, listen, folder, name):
    """From data as it is read, through a template or without one, to the scores of `Rewards`."""
    url = listen(servers[name].app)
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
        prompt, query = helpers.encode_prompt("", question, tokenizer, "Add.")
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
        ("gsm8k", b'{"src": [', 422, "JSON decode error"),
        ("gsm8k", {"src": ["a"], "tgt": ["b"]}, 422, "Field required"),
        (
            "gsm8k",
            {"src": ["a", "a"], "tgt": ["b"], "response": ["c", "c"]},
            422,
            "tgt has 1 entries, src has 2",
        ),
        (
            "gsm8k",
            {"src": ["a"], "tgt": ["b"], "response": ["c"], "columns": {"x": [1, 2]}},
            422,
            "x has 2 entries",
        ),
        (
            "by row",
            {"src": ["a"], "tgt": ["b"], "response": ["c"], "columns": {"verifier": ["x"]}},
            400,
            "which is not in --reward",
        ),
        (
            "model",
            {"src": ["a"], "tgt": [""], "response": ["4"], "messages": [[{"role": "user"}]]},
            400,
            "content: Field required",
        ),
    ],
)
def test_malformed_requests(servers, name, body, status, says):
    code, answer = servers[name].post(body)
    assert code == status and says in str(answer["detail"]) and "score" not in answer
    assert servers[name].scores([], [], []) == []  # and goes on


def test_a_source_that_fails(servers, capsys):
    """No scores, above all no zeros; and the next request gets its own. (Time-outs:
    faults/test_rewards_fail.py.)
    """
    assert servers["judge"].scores(["a", "b"], ["", ""], ["raise", "raise"]) == [None, None]
    assert "the judge is away; such responses" in capsys.readouterr().err
    assert servers["judge"].scores(["abc"], [""], ["xy"]) == [3.02]


# ---- many at once --------------------------------------------------------------------------------


def test_rows_that_hang_do_not_hold_up_other_requests():
    server = Server(reward=("math",), reward_workers=9, timeout=4.0)
    body = lambda *responses: {
        "src": ["q"] * len(responses),
        "tgt": ["42"] * len(responses),
        "response": responses,
    }
    hanging = threading.Thread(target=server.post, args=[body(*[r"\boxed{9^{9^{9^9}}}"] * 8)])
    hanging.start()
    time.sleep(0.5)
    assert server.post(body("42", "41"))[1]["score"] == [1, 0] and hanging.is_alive()
    hanging.join(120)
    assert not hanging.is_alive(), "the rows that hang do not end"
    helpers.end_processes(server.scorer.reward_sources.server)


# ---- a server as a user starts it ----------------------------------------------------------------


def test_a_server_with_a_key(monkeypatch):
    """Every POST needs the key, a run sends it, /health is open, and SIGTERM ends the server."""
    values = {"reward": "exact", "host": "::1", "port": 0}
    run = helpers.Running(values, script="reward_server", environment={"REWARD_API_KEY": "a key"})
    try:
        end = time.monotonic() + 120
        while not run.out.strip():
            assert run.process.is_alive() and time.monotonic() < end, run.err
            time.sleep(0.1)
        assert run.out.startswith("exact at http://[::1]:")
        url = run.out.split()[-1]
        with urllib.request.urlopen(f"{url}/health", timeout=60) as answer:
            assert json.load(answer)["verifies"]
        rows = [{"prompt": "q", "query": [], "answer": "4", "columns": {}}]
        for key, score in (("a key", 1.0), ("another", math.nan), ("", math.nan)):
            monkeypatch.setenv("REWARD_API_KEY", key)
            reward_sources = RewardSources(reward_server.Args(reward=(url,)), None)
            assert scores_by(reward_sources, rows, ["4"], [[]])[url] == [
                pytest.approx(score, nan_ok=True)
            ]
            assert ("HTTP status 401" in reward_sources.sources[url].failure) == math.isnan(score)
        run.process.terminate()
        run.process.join(20)
        assert run.process.exitcode == -signal.SIGTERM and "Traceback" not in run.err
    finally:
        run.process.kill()


def test_an_address_without_a_key(monkeypatch, capsys):
    monkeypatch.delenv("REWARD_API_KEY", raising=False)
    for host in ("0.0.0.0", "::"):
        args = reward_server.Args(reward=("gsm8k",), port=0, host=host)
        assert "REWARD_API_KEY" in helpers.refused(capsys, reward_server.main, args)
