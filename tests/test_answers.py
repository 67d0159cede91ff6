"""Where the final answer of a response is, and what `math`, `gsm8k`, `exact` and `format` say of
it.

tests/data/answers.jsonl has the cases. `gsm8k` is judged by the rule of the original: the number
after "####", without commas, "$" and a final full stop.
"""

import importlib
import json
import logging
import re
import time
from pathlib import Path

import helpers  # noqa: F401
import pytest

from extras.verifiers import math_verifier, reasoning_gym
from plumbing.rewards import answers, verifiers

# in scripts/, which helpers has put on the path
voted_answer = importlib.import_module("evaluate").voted_answer


@pytest.fixture(scope="module", autouse=True)
def quiet():
    """math-verify warns at the first call that its time limits are off."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


CASES = [
    json.loads(line)
    for line in (Path(__file__).parent / "data" / "answers.jsonl").read_text().splitlines()
]


@pytest.mark.parametrize(
    "verifier, kind", dict.fromkeys((case["verifier"], case["kind"]) for case in CASES)
)
def test_cases(verifier, kind):
    """Each response gets 1 if a careful teacher would call it right, else 0; those marked `known`
    get the other.
    """
    check = verifiers.verifier(verifier).check
    cases = [case for case in CASES if (case["verifier"], case["kind"]) == (verifier, kind)]
    scores = [check(case["response"], case["reference"]) for case in cases]
    judged = [case["right"] != case.get("known", 0) for case in cases]
    assert not [
        (case, score) for case, score, right in zip(cases, scores, judged) if score != right
    ]


DOCS = (
    (Path(__file__).parents[1] / "docs" / "data_and_rewards.md").read_text().split("How `math`")[1]
)


def test_shares_of_what_math_judges_otherwise():
    """The docs have the counts of each half and of the cases added later."""
    for half in (1, 2, None):
        counts = []
        for right in (1, 0):
            accepted = [
                case.get("known", 0) != right
                for case in CASES
                if (case["verifier"], case["right"], case.get("half")) == ("math", right, half)
            ]
            counts += [sum(accepted), len(accepted)]
        assert "{} of {} right and {} of {} wrong".format(*counts) in " ".join(DOCS.split())


@pytest.mark.parametrize("row", re.findall(r"\n\| ([^`\n]+ \| `.+`.+`.+) \|", DOCS))
def test_rules_of_the_docs(row):
    _, reference, *cells = [re.findall("`([^`]+)`", cell) for cell in row.split(" | ")]
    for score, cell in zip((1, 0), cells):
        assert {math_verifier.math(f"\\boxed{{{x}}}", reference) for x in cell} == {score}


# ---- one rule for the final answer ---------------------------------------------------------------

FORMS = [  # the thought never counts, whatever it holds
    "<think>{thought}</think> <answer>{answer}</answer>",
    "<think>{thought}</think>\n\n<answer>\n{answer}\n</answer>",
    "{thought}</think><answer>{answer}</answer>",  # the template has opened the thought
    "<think>{thought}</think><answer>{wrong}</answer> No: <answer>{answer}</answer>",
    "<think>{thought}</think><think>{thought}</think><answer>{answer}</answer>",
    "<think>{thought}</think><answer>{answer}</answer><think>{thought}",
    "<think>{thought}</think>{answer}",
    "<think>{thought}</think>\n\\boxed{{{answer}}}",
    "<think>{thought}</think><answer>so \\boxed{{{answer}}}</answer>\\boxed{{{wrong}}}",
]
THOUGHTS = [
    "hm",
    "\\boxed{{{wrong}}}",
    "<answer>{wrong}</answer>",
    "#### {wrong}",
    "The answer is {wrong}.",
]
NO_ANSWERS = [
    "<think>{thought}</think>",
    "<think>{thought}",
    "<think>hm</think> so <think>{thought}",
]
SOURCES = {  # reward: (the reference, a right answer, a wrong one)
    "math": ("42", "42", "41"),
    "exact": ("42", "42", "41"),
    "gsm8k": ("6 * 7\n#### 42", "#### 42", "#### 41"),
    "reasoning_gym": (["task", 1, 1, 0], "42", "41"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_each_verifier_reads_the_same_place(name, monkeypatch):
    class Task(dict):
        def score_answer(self, answer, entry):
            return float(answer == entry["answer"])

    monkeypatch.setattr(
        reasoning_gym, "reasoning_gym_dataset", lambda *source: Task({0: {"answer": "42"}})
    )
    check = verifiers.verifier(name).check
    (reference, right, wrong) = SOURCES[name]
    for thought in THOUGHTS:
        for form in FORMS:
            if name == "gsm8k" and "boxed" in form:
                continue  # strict: a box is not "####"
            for answer, other, score in ((right, wrong, 1), (wrong, right, 0)):
                response = form.format(
                    thought=thought.format(wrong=other), answer=answer, wrong=other
                )
                assert check(response, reference) == score, response
                if name in ("math", "gsm8k"):
                    assert voted_answer(response) == answer.removeprefix("#### ")
        for form in NO_ANSWERS:
            assert check(form.format(thought=thought.format(wrong=right)), reference) == 0, (
                form,
                thought,
            )


@pytest.mark.parametrize(
    "response, answer",
    [
        ("<answer>\n 5 \n</answer> or 6", "5"),
        ("$\\boxed{ 5 }$", "5"),
        ("\\boxed{5", None),
        ("\\boxed{4} \\boxed{5", None),
        ("<answer>5", None),
        ("</answer>5<answer>", None),
        ("boxed{5}", None),
        ("5", None),
        (r"\boxed{1} and \boxed{[2, \infty\}}", r"[2, \infty\}"),
        (r"\boxed{a \\} b}", r"a \\"),  # a line end, then the brace
    ],
)
def test_stated_text(response, answer):
    assert answers.stated_text(response) == (response if answer is None else answer)


# ---- math ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "<answer>" * 4000,
        "<answer>5</answer" * 2000,
        "\\boxed{" * 4000,
        "9^9^9",
        "\\boxed{((9^9)^9)^9}",
        "\\[" * 15_000,
        "answer: $" * 500,
        "$1$, " * 600,
        r"\frac{" * 500,
        r"\boxed{1} " * 300,
        "answer 1" * 375,
        "5 km" + "- " * 26,
        "#### \n" * 6000,
    ],
    ids=lambda text: text[:12],
)
def test_long_nonsense_is_read_at_once(text):
    start = time.process_time()
    assert math_verifier.math(text, "42") == 0
    assert time.process_time() - start < 5


# ---- references ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer", [["966"], '["966"]', [966], ["so\n#### 966"], [966.0], 966, "966", " 966\n"]
)
def test_a_list_of_one_is_its_element(answer):
    for check, response in (
        (math_verifier.math, "\\boxed{966}"),
        (verifiers.gsm8k, "#### 966"),
        (verifiers.exact, "966"),
    ):
        assert check(response, answer) == 1 and check(response.replace("966", "967"), answer) == 0


@pytest.mark.parametrize(
    "reward, answer, reason",
    [
        *[
            (name, answer, "is not one answer")
            for name in ("math", "gsm8k", "exact")
            for answer in (["1", "2"], [], '["1", "2"]', None)
        ],
        ("math", "$$", "is not an answer"),
        ("math", "####", "is not an answer"),
        ("gsm8k", "12 or 13", "is not a number"),
        ("math", "word " * 101, "is not an answer"),
    ],
)
def test_references_of_no_use_are_refused(reward, answer, reason):
    """A score of 0 for every response would say that the model is wrong."""
    with pytest.raises(ValueError, match=re.escape(reason)):
        verifiers.verifier(reward).check("", answer)
