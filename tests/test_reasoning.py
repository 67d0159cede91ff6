"""The rewards `reasoning_gym`, `knights` and `ifeval`: tables of responses and what no response can gain by."""

import importlib.util
import json

import pytest

from plumbing.data.prompts import prompt_and_answer
from plumbing.data.rows import reasoning_gym_rows
from plumbing.rewards import verifiers as verifier

# ---- reasoning_gym ---------------------------------------------------------------------------------------------------

TASKS = ("leg_counting", "countdown", "basic_arithmetic")
gym = pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="needs the package reasoning-gym")


@pytest.fixture(scope="module")
def rows():
    """Three rows of each task, as utils makes them."""
    return {task: reasoning_gym_rows(task, "test", 3) for task in TASKS}


@gym
@pytest.mark.parametrize("task", TASKS)
def test_right_answers_and_no_answers(rows, task):
    for row in rows[task]:
        source = json.loads(json.dumps(row["reasoning_gym"]))  # as it reaches the worker
        for form in ("<answer>{}</answer>", "<think>Hm, <answer>7</answer>.</think>\n<answer>\n{}\n</answer>", "{}"):
            assert verifier.reasoning_gym(form.format(row["answer"]), source) == 1
        assert verifier.reasoning_gym(f"<think>7, or 8?</think>\n{row['answer']}", source) == 1
        assert verifier.reasoning_gym(f"<answer>{row['answer']}</answer><answer>I give up</answer>", source) < 0.5
        for empty in ("", "<answer></answer>", "I do not know", "<answer>no</answer>"):
            assert verifier.reasoning_gym(empty, source) < 0.5


@gym
def test_the_score_is_that_of_the_task(rows):
    """Other answers than the row's are right where the task's scorer says so, and some get a part."""
    row = rows["countdown"][0]
    for text, score in (("({})", 1), ("({}) + 0*1", 0.05)):  # the same value, with other numbers
        assert verifier.reasoning_gym(f"<answer>{text.format(row['answer'])}</answer>", row["reasoning_gym"]) == score
    assert verifier.reasoning_gym(rows["leg_counting"][1]["answer"], ["leg_counting", 3, 2, 0]) < 1


@gym
def test_an_answer_that_the_scorer_cannot_read_is_wrong(monkeypatch):
    """prime_factorization's scorer raises on words: 0. A scorer that cannot read its own answer: no score."""
    assert verifier.reasoning_gym("<answer>I do not know</answer>", ["prime_factorization", 3, 1, 0]) == 0

    class Broken(dict):
        def score_answer(self, answer, entry):
            raise ZeroDivisionError

    monkeypatch.setattr(verifier, "reasoning_gym_dataset", lambda *source: Broken({0: {"answer": "1"}}))
    with pytest.raises(ZeroDivisionError):
        verifier.reasoning_gym("1", ["any", 1, 1, 0])


# ---- knights and knaves ----------------------------------------------------------------------------------------------

TWO = "Zoey is a knave, and Oliver is a knight."
RIGHT = [
    TWO, "Oliver is a knight, and Zoey is a knave.", "(1) Zoey is a knave\n(2) Oliver is a knight", TWO.upper(),
    "Zoey: knave, Oliver: knight", "Zoey is a knave. So Zoey is a knave. Oliver is a knight.",
    "| Zoey | knave |\n| Oliver | knight |", "- **Zoey** is a **knave**\n- _Oliver_ is a _knight_",
    "{'Zoey': 'knave', 'Oliver': 'knight'}", "Zoey is the knave and Oliver is the knight",
    "Zoey (knave), Oliver (knight)", "\\text{Zoey is a knave, and Oliver is a knight}",
    "\\text{Zoey} = \\text{knave}, \\quad \\text{Oliver} = \\text{knight}",
    "$\\text{Zoey}$ is a $\\mathbf{knave}$, $\\text{Oliver}$ is a $\\mathbf{knight}$",
]  # fmt: skip
WRONG = [
    "", "knight", "Zoey", "Zoey is a knave", "Zoey is a knight, and Oliver is a knave.",
    TWO + " Zoey is a knight.", "Zoey is a knight. " + TWO, TWO + " Or the other way.\nZoey: knight",
    "Zoey is a knave or a knight, and Oliver is a knight.", "Zoey is a knave/knight, Oliver is a knight/knave",
    "Zoey is not a knight, and Oliver is not a knave.", "Zoey isn't a knight, Oliver isn't a knave",
    TWO + " Bob is a knight.", "Zoe is a knave, and Oliver is a knight.", "Zoeys is a knave, and Oliver is a knight.",
    "Zoey and Oliver are knights.", "Zoey is a knavel, and Oliver is a knightly man.", "knave: Zoey, knight: Oliver",
]  # fmt: skip


FORMS = [
    "{}", "<answer>{}</answer>", "So:\n\n{}", "<think>Zoey is a knight?</think>\n{}",
    "If Zoey is a knight, so is Oliver.\nCONCLUSION:\n{}", "### Conclusion\n\n{}",
    "Zoey is a knight.\n<answer>{}</answer>\nZoey is a knight.", "Zoey is a knight.\n\\boxed{{{}}}\nZoey is a knight.",
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_knights_forms(form):
    for text in RIGHT:
        assert verifier.knights(form.format(text), TWO) == 1, text
    for text in WRONG:
        assert verifier.knights(form.format(text), TWO) == 0, text


@pytest.mark.parametrize(
    "response, score",
    [
        ("\\boxed{" + TWO + "} Conclusion: Zoey: knight", 1), (TWO + "\n\nI hope that this helps.", 0),
        ("Conclusion: Zoey is a knight.\n\nConclusion: " + TWO, 1),
        ("Conclusion: " + TWO + "\n\nConclusion: Zoey is a knight.", 0), ("<answer>" + TWO, 1), ("<think>" + TWO, 0),
        ("Zoey is a knight.\n" + TWO, 0), ("Suppose that Zoey is a knight.\n\n" + TWO, 1), (TWO + "</think>", 0),
        ("<answer>Zoey is a knave</answer><answer>Oliver is a knight</answer>", 0), ("Conclusion: </think>" + TWO, 1),
    ],
)  # fmt: skip
def test_knights_what_counts_of_a_response(response, score):
    assert verifier.knights(response, TWO) == score


@pytest.mark.parametrize("answer", [None, "", "Zoey", [True, False], "(True, False)", "Zoey is a spy."])
def test_a_reference_without_roles_has_no_score(answer):
    with pytest.raises(ValueError, match="NAME is a knight"):
        verifier.knights(TWO, answer)


@pytest.mark.parametrize(
    "response, score",
    [
        ("{}", 1), ("Mary-Ann is a knave, Zoë is a knight, Ann is a knight", 1), ("{} Anna is a knave.", 0),
        ("Mary-Ann is a knave, Zoë is a knight", 0), ("Ann is a knight, Mary-Ann is a knight, Zoë is a knight", 0),
    ],
)  # fmt: skip
def test_names_within_other_names(response, score):
    truth = "Ann is a knight, Mary-Ann is a knave, and Zoë is a knight."
    assert verifier.knights(response.format(truth), truth) == score


# ---- ifeval ---------------------------------------------------------------------------------------------------------


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
    assert verifier.constraints_of(form(BOTH)) == EXPECTED


def test_rows_of_ifeval_itself():
    row = {"key": 1, "prompt": "p", "instruction_id_list": BOTH["instruction_id"], "kwargs": [{}, BOTH["kwargs"][1]]}
    prompt, answer = prompt_and_answer("row", row, "prompt", None)
    assert prompt == "p" and verifier.constraints_of(answer) == EXPECTED


@pytest.mark.parametrize(
    "answer", [None, "42", [], [BOTH, BOTH], "[", {"instruction_id": ["a:b"]}, {**BOTH, "kwargs": [None]}]
)
def test_references_without_constraints_have_no_score(answer):
    with pytest.raises((ValueError, TypeError, KeyError, SyntaxError)):
        verifier.constraints_of(answer)


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
    assert verifier.ifeval(response, BOTH) == score


def test_languages_and_unknown_constraints():
    """A constraint that the package does not have gives no score: the response is not to blame."""
    pytest.importorskip("if_verifiable")
    german = {"instruction_id": ["language:response_language"], "kwargs": [{"language": "de"}]}
    assert verifier.ifeval("Das ist ein ganz gewöhnlicher deutscher Satz.", german) == 1
    assert verifier.ifeval("This is an ordinary English sentence.", german) == 0
    with pytest.raises(ValueError, match="no:such"):
        verifier.ifeval("x", {"instruction_id": ["no:such"], "kwargs": [{}]})
