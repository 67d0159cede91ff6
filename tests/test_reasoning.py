"""The rewards `reasoning_gym` and `ifeval`: tables of responses and what no response can gain
by.
"""

import importlib.util
import json

import pytest

from assets import tasks
from extras.verifiers import ifeval, reasoning_gym
from plumbing.data.prompts import prompt_and_answer

# ---- reasoning_gym -------------------------------------------------------------------------------

gym = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="needs the package reasoning-gym"
)


@gym
def test_the_score_is_that_of_the_task():
    """Other answers than the row's are right where the task's scorer says so, and some get a
    part.
    """
    for task in ("leg_counting", "countdown"):
        row = tasks.reasoning_gym(task, "test", 3)[1]
        source = json.loads(json.dumps(row["reasoning_gym"]))  # as it reaches the worker
        assert reasoning_gym.reasoning_gym(f"<answer>{row['answer']}</answer>", source) == 1
        assert (
            reasoning_gym.reasoning_gym(
                f"<answer>{row['answer']}</answer><answer>I give up</answer>", source
            )
            < 0.5
        )
        assert (
            reasoning_gym.reasoning_gym(row["answer"], [*source[:3], 0]) < 1
        )  # of another problem
    for text, score in (("({})", 1), ("({}) + 0*1", 0.05)):  # the same value, with other numbers
        assert reasoning_gym.reasoning_gym(text.format(row["answer"]), source) == score


@gym
def test_an_answer_that_the_scorer_cannot_read_is_wrong(monkeypatch):
    """prime_factorization's scorer raises on words: 0. A scorer that cannot read its own answer: no
    score.
    """
    assert (
        reasoning_gym.reasoning_gym(
            "<answer>I do not know</answer>", ["prime_factorization", 3, 1, 0]
        )
        == 0
    )

    class Broken(dict):
        def score_answer(self, answer, entry):
            raise ZeroDivisionError

    monkeypatch.setattr(
        reasoning_gym, "reasoning_gym_dataset", lambda *source: Broken({0: {"answer": "1"}})
    )
    with pytest.raises(ZeroDivisionError):
        reasoning_gym.reasoning_gym("1", ["any", 1, 1, 0])


# ---- ifeval --------------------------------------------------------------------------------------


BOTH = {
    "instruction_id": ["punctuation:no_comma", "length_constraints:number_words"],
    "kwargs": [None, {"num_words": 4, "relation": "at least", "keyword": None}],
}
EXPECTED = [
    ("punctuation:no_comma", {}),
    ("length_constraints:number_words", {"num_words": 4, "relation": "at least"}),
]


@pytest.mark.parametrize(
    "form", [lambda x: x, lambda x: [x], json.dumps, lambda x: str([x]), lambda x: [json.dumps(x)]]
)
def test_forms_of_rows(form):
    """As open-instruct's ground_truth, which is Python's text of a list of one, and others that
    stand for the same.
    """
    assert ifeval.constraints_of(form(BOTH)) == EXPECTED


def test_rows_of_ifeval_itself():
    row = {
        "key": 1,
        "prompt": "p",
        "instruction_id_list": BOTH["instruction_id"],
        "kwargs": [{}, BOTH["kwargs"][1]],
    }
    prompt, answer = prompt_and_answer("row", row, "prompt", None)
    assert prompt == "p" and ifeval.constraints_of(answer) == EXPECTED


@pytest.mark.parametrize(
    "answer", [None, [BOTH, BOTH], {"instruction_id": ["a:b"]}, {**BOTH, "kwargs": [None]}]
)
def test_references_without_constraints_have_no_score(answer):
    with pytest.raises((ValueError, TypeError, KeyError, SyntaxError)):
        ifeval.constraints_of(answer)


def tulu(name: str, **arguments) -> str:
    """The column ground_truth of a row of Tulu 3."""
    return json.dumps(
        {"func_name": name, "N": 3, "quantifier": None, "language": None, **arguments}
    )


AT_MOST_THREE = tulu("validate_word_constraint", quantifier="at most")
GERMAN = {"instruction_id": ["language:response_language"], "kwargs": [{"language": "de"}]}


@pytest.mark.parametrize(
    "answer, response, score",
    [
        (BOTH, "one two three four", 1.0),
        (BOTH, "one, two, three, four", 0.5),
        (BOTH, "one two", 0.5),
        (BOTH, "one, two", 0.0),
        (BOTH, "", 0.0),
        # the thought is not part of the response
        (BOTH, "<think>one, two</think>one two three four", 1.0),
        (BOTH, "<think>one two three four", 0.0),
        (GERMAN, "Das ist ein ganz gewöhnlicher deutscher Satz.", 1),
        (GERMAN, "This is an ordinary English sentence.", 0),
        (tulu("validate_no_commas"), "one, two", 0),
        (AT_MOST_THREE, "one two three", 1),
        (AT_MOST_THREE, "one two three four", 0),
        (tulu("validate_paragraphs", i=2, first_word="Dogs"), "a\n\nDogs b\n\nc", 1),
        (tulu("verify_keywords", keyword_list=["two", "six"]), "one two", 0),
    ],
)
def test_the_share_that_is_followed(answer, response, score):
    pytest.importorskip("if_verifiable")
    assert ifeval.ifeval(response, answer) == score
