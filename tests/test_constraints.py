"""The reward ifeval: rows as open-instruct and IFEval have them, and responses that follow some constraints."""

import json
import types

import pytest
from tiny_models import make_tokenizer

from plumbing.data.prompts import prompt_and_answer
from plumbing.rewards.sources import Rewards
from plumbing.rewards.verifiers import constraints_of, ifeval

BOTH = {
    "instruction_id": ["punctuation:no_comma", "length_constraints:number_words"],
    "kwargs": [None, {"num_words": 4, "relation": "at least", "keyword": None}],
}
EXPECTED = [
    ("punctuation:no_comma", {}), ("length_constraints:number_words", {"num_words": 4, "relation": "at least"}),
]  # fmt: skip


@pytest.mark.parametrize(
    "form", [lambda x: x, lambda x: [x], json.dumps, lambda x: str([x]), lambda x: [json.dumps(x)]]
)
def test_forms_of_rows(form):
    """As open-instruct's ground_truth, which is Python's text of a list of one, and others that stand for the same."""
    assert constraints_of(form(BOTH)) == EXPECTED


def test_rows_of_ifeval_itself():
    row = {"key": 1, "prompt": "p", "instruction_id_list": BOTH["instruction_id"], "kwargs": [{}, BOTH["kwargs"][1]]}
    prompt, answer = prompt_and_answer("row", row, "prompt", None)
    assert prompt == "p" and constraints_of(answer) == EXPECTED


@pytest.mark.parametrize(
    "answer",
    [None, "42", 42, [], [BOTH, BOTH], "[", "[" * 10**5, {"instruction_id": ["a:b"]}, {**BOTH, "kwargs": [None]}],
)  # fmt: skip
def test_what_is_no_list_of_constraints(answer):
    with pytest.raises(ValueError, match="is not {.instruction_id"):
        constraints_of(answer)


@pytest.mark.parametrize(
    "response, score",
    [
        ("one two three four", 1.0),
        ("one, two, three, four", 0.5),
        ("one two", 0.5),
        ("one, two", 0.0),
        ("<think>one, two</think>one two three four", 1.0),  # the thought is not part of the response
        ("", 0.0),
    ],
)
def test_the_share_that_is_followed(response, score):
    pytest.importorskip("if_verifiable")
    assert ifeval(response, BOTH) == score


def test_in_the_worker():
    """A constraint that the package does not have gives no score: the response is not to blame."""
    pytest.importorskip("if_verifiable")
    german = {"instruction_id": ["language:response_language"], "kwargs": [{"language": "de"}]}
    unknown = {"instruction_id": ["no:such"], "kwargs": [{}]}
    rewards = Rewards(types.SimpleNamespace(reward=("ifeval",), timeout=30.0), make_tokenizer())
    rows = [{"prompt": "p", "query": [1], "answer": answer, "columns": {}} for answer in (german, german, unknown)]
    texts = ["Das ist ein ganz gewöhnlicher deutscher Satz.", "This is an ordinary English sentence.", "x"]
    found = rewards.score(rows, texts, [[]] * 3)["ifeval"]
    rewards.close()
    assert found[:2] == [1, 0] and found[2] != found[2]
    assert "if-verifiable has no constraint 'no:such'" in rewards.sources["ifeval"].failure
