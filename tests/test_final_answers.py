r"""Where the final answer of a response stands, and what `math` and `gsm8k` read there: tables of right and wrong."""

import logging
import math
import re
import time
import types

import pytest

from plumbing.rewards import answers
from plumbing.rewards import verifiers as verifier
from plumbing.rewards.sources import Rewards


@pytest.fixture(scope="module", autouse=True)
def quiet():
    """math-verify warns at the first call that its time limits are off."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


# ---- one notion of a final answer ------------------------------------------------------------------------------------

R1 = "<think>{thought}</think>\n<answer>{answer}</answer>"
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
    "it is 41",
    "\\boxed{{{wrong}}}",
    "<answer>{wrong}</answer>",
    "#### {wrong}",
    "The answer is {wrong}.",
]
NO_ANSWERS = ["<think>{thought}</think>", "<think>{thought}", "<think>hm</think> so <think>{thought}"]
TWO = "Zoey is a knave, and Oliver is a knight."
SOURCES = {  # reward: (check, the reference, a right answer, a wrong one)
    "math": (verifier.math, "42", "42", "41"),
    "exact": (verifier.exact, "42", "42", "41"),
    "gsm8k": (verifier.gsm8k, "6 * 7\n#### 42", "#### 42", "#### 41"),
    "knights": (verifier.knights, TWO, TWO, "Zoey is a knight, and Oliver is a knave."),
}


@pytest.mark.parametrize("name", SOURCES)
def test_each_verifier_reads_the_same_place(name):
    check, reference, right, wrong = SOURCES[name]
    for form in FORMS:
        if name == "gsm8k" and "boxed" in form:
            continue  # strict: a box is no "####"
        for thought in THOUGHTS:
            for answer, other, score in ((right, wrong, 1), (wrong, right, 0)):
                response = form.format(thought=thought.format(wrong=other), answer=answer, wrong=other)
                assert check(response, reference) == score, response
    for form in NO_ANSWERS:
        for thought in THOUGHTS:
            assert check(form.format(thought=thought.format(wrong=right)), reference) == 0, (form, thought)


def test_a_task_of_reasoning_gym_reads_it_there_too(monkeypatch):
    class Task(dict):
        def score_answer(self, answer, entry):
            return float(answer == entry["answer"])

    monkeypatch.setattr(verifier, "reasoning_gym_dataset", lambda *source: Task({0: {"answer": "42"}}))
    for form in FORMS:
        for thought in THOUGHTS:
            response = form.format(thought=thought.format(wrong="41"), answer="42", wrong="41")
            assert verifier.reasoning_gym(response, ["task", 1, 1, 0]) == 1, response
    assert verifier.reasoning_gym("<think>\\boxed{42}</think> 41", ["task", 1, 1, 0]) == 0


def test_a_vote_is_for_the_same_place():
    for form in FORMS:
        for thought in THOUGHTS:
            response = form.format(thought=thought.format(wrong="41"), answer="42", wrong="41")
            assert answers.voted_answer("math", response) == "42"
    assert answers.voted_answer("gsm8k", "<think>#### 41</think> #### 42.0") == "42"


@pytest.mark.parametrize("text", ["<answer>" * 4000, "<answer>5</answer" * 2000, "\\boxed{" * 4000, "\\[" * 15_000])
def test_long_nonsense_is_searched_in_linear_time(text):
    assert answers.final_answer(text) is None
    assert answers.final_answer(f"{text}</think> \\boxed{{5}}") == "5"
    assert verifier.math(text, "5") == 0


# ---- math ------------------------------------------------------------------------------------------------------------

MATH = {
    "words": [
        ("Yes", "Yes", 1),
        (r"\boxed{\text{yes}}", "Yes", 1),
        (r"\boxed{Yes.}", r"\text{Yes}", 1),
        (r"\boxed{\textbf{No}}", "Yes", 0),
        ("The answer is Yes.", "Yes", 1),
        ("**Answer:** No", "Yes", 0),
        (r"\boxed{True}", "True", 1),
        (r"\boxed{False}", "True", 0),
        (r"\boxed{1}", "True", 0),
        ("<answer>even</answer>", "even", 1),
        (r"\boxed{odd}", "even", 0),
        (r"\boxed{not even}", "even", 0),
        (r"\boxed{\text{even or odd}}", "even", 0),
        (r"\boxed{friday}", "Friday", 1),
        (r"\boxed{Monday}", "Friday", 0),
        (r"\boxed{A}", "A", 1),
        ("$E$", r"$\text{e}$", 1),
        (r"\boxed{\text{(A)}}", "A", 1),
        (r"\boxed{a}", r"\text{(A)}", 1),
        ("The answer is (A).", "A", 1),
        (r"\boxed{B}", "A", 0),
        (r"\boxed{AB}", "A", 0),
        (r"\boxed{A, B}", "A", 0),
        (r"\boxed{\text{A or B}}", "A", 0),
        (r"\boxed{\text{no solution}}", "No solution", 1),
        (r"\boxed{\text{on}}", "no", 0),
        ("12:30 PM", "12:30 PM", 1),
        (r"\boxed{12:30 \text{ p.m.}}", r"12:30 \text{ PM}", 1),
        (r"\boxed{12:30 AM}", "12:30 PM", 0),
        (r"\boxed{12:03 PM}", "12:30 PM", 0),
        (r"\boxed{\frac{2}{5}}", "12:30 PM", 0),
        (r"\boxed{2 hours 30 minutes}", "2 hours 30 minutes", 1),
        (r"\boxed{30 minutes}", "2 hours 30 minutes", 0),
        (r"\boxed{42}", "forty-two", 0),
        (r"\boxed{是}", "是", 1),
        (r"\boxed{否}", "是", 0),
    ],
    "forms": [
        (r"Answer: \dfrac{1}{2}", r"\frac{1}{2}", 1),
        (r"Answer: \dfrac{1}{3}", r"\frac{1}{2}", 0),
        (r"The final answer to the problem is \sqrt{8}.", r"2\sqrt{2}", 1),
        ("Answer:\n\n2x+1", "2x + 1", 1),
        ("The answer is 42." + "\nI checked this, line by line." * 200, "42", 1),
        (r"**Final Answer**: \(x = 7\)", "7", 1),
        ("+7", "7", 1),
        (r"\boxed{+7}", "7", 1),
        (r"\boxed{-7}", "7", 0),
        (r"\fbox{9}", "9", 1),
        (r"\boxed{8} \fbox{9}", "8", 0),
        (r"\boxed {9}", "9", 1),
        (r"$\boxed 9$", "9", 1),
        (r"\boxed{42.}", "42", 1),
        (r"\boxed{$42$}", "42", 1),
        (r"\boxed{\(42\)}", "42", 1),
        ("\\boxed{\n42\n}", "42", 1),
        (r"\boxed{\text{Answer: } 42}", "42", 1),
        (r"\boxed{42", "42", 0),
        (r"\boxed{42} \boxed{4", "42", 0),
        (r"\boxed{42", r"\boxed{42", 0),
        (r"\boxed{2\,\pi}", r"2\pi", 1),
        (r"The area is $2\pi$.", r"2\pi", 1),
        ("2\u03c0", r"2\pi", 1),
        ("2*pi", r"2\pi", 1),
        (r"\boxed{sqrt(2)/2}", r"\frac{1}{\sqrt{2}}", 1),
        (r"\boxed{\sqrt(2)}", r"\sqrt{2}", 1),
        ("\\boxed{x²+1}", "x^2+1", 1),
        ("\\boxed{x ≤ 3}", r"x \le 3", 1),
        ("√2", r"\sqrt{2}", 1),
    ],
    "several": [
        ("The answer is 42, 1, 2", "42", 0),
        ("The answer is 42, 1, 2.", "2", 0),
        ("42, 1, 2", "42", 0),
        ("The answer is 41 or 42.", "42", 0),
        ("The answer is 42 or 41.", "42", 0),
        (r"\boxed{41 or 42}", "42", 0),
        (r"\boxed{42 or 41}", "42", 0),
        (r"\boxed{42 \text{ or } 41}", "42", 0),
        (r"\boxed{42 \text{ (or 41)}}", "42", 0),
        (r"\boxed{41, 42}", "42", 0),
        (r"\boxed{42; 43}", "42", 0),
        (r"\boxed{42 / 43}", "42", 0),
        (r"\boxed{42 \pm 1}", "42", 0),
        (r"\boxed{42 \ne 41}", "42", 0),
        (r"\boxed{42?}", "42", 0),
        (r"\boxed{x=41 \text{ or } x=42}", "42", 0),
        (r"\boxed{x=1 \text{ or } x=2}", "1, 2", 1),
        (r"\boxed{1 \text{ and } 2}", r"\{1, 2\}", 1),
        (r"\boxed{1}, \boxed{2}", "1, 2", 0),  # the last box counts
        (r"\boxed{\text{not } 42}", "42", 0),
        (r"\boxed{42 \text{ is wrong}, 41}", "42", 0),
    ],
    "equations": [
        ("43 = 42", "42", 0),
        (r"\boxed{43 = 42}", "42", 0),
        (r"\boxed{6 \cdot 7 = 42}", "42", 1),
        ("6*7 = 42", "42", 1),
        (r"\boxed{6 \cdot 7 = 41 = 42}", "42", 0),
        (r"\boxed{\frac{1}{3} = 0.33}", "0.33", 1),
        (r"\boxed{x = 6 \cdot 7 = 42}", "42", 1),
        (r"\boxed{n=42}", "42", 1),
        (r"\boxed{42 = n}", "42", 0),
        (r"\boxed{y=2x+1}", "y = 2x+1", 1),
        (r"\boxed{\frac{x^2}{16} + \frac{y^2}{12} = \frac{1}{4}}", r"\frac{x^2}{4} + \frac{y^2}{3} = 1", 1),
        (r"\boxed{2x+1}", "y = 2x+1", 1),
        (r"\boxed{y=2x+1}", "y=2x-1", 0),
        (r"\boxed{x > 0}", r"[0,\infty)", 0),
        (r"\boxed{x \in [0, \infty)}", r"[0,\infty)", 1),
    ],
    "units": [
        ("12 cm^2", "12", 1),
        (r"\boxed{12}", "12 cm^2", 1),
        (r"\boxed{12\text{ cm}^2}", "12 cm^2", 1),
        (r"\boxed{12 cm²}", "12 cm^2", 1),
        (r"\boxed{12cm}", "12 cm", 1),
        (r"\boxed{5.4cents}", r"5.4 \text{ cents}", 1),
        (r"\boxed{12 km}", "12 m", 0),
        (r"\boxed{12\text{ km}}", r"12\text{ m}", 0),
        (r"\boxed{12\text{ km}}", r"12\text{ kilometers}", 1),
        (r"\boxed{12 meters}", "12 m", 1),
        (r"\boxed{12 sq. units}", "12", 1),
        (r"\boxed{5°C}", r"5^\circ\text{C}", 1),
        (r"\boxed{£5.00}", "5", 1),
        (r"\boxed{7th}", "7", 1),
        (r"\boxed{\approx 5}", "5", 1),
        (r"\boxed{60 \text{ km/h}}", "60 km/h", 1),
        (r"\boxed{60 \text{ m/s}}", "60 km/h", 0),
        (r"\boxed{3 \text{ hours}}", "3 hours", 1),
        (r"\boxed{3 \text{ minutes}}", "3 hours", 0),
        (r"\boxed{18 \text{ dollars}}", r"\$18", 1),
        (r"\boxed{5 apples}", "5", 1),
        (r"\boxed{6 apples}", "5 apples", 0),
        (r"\boxed{5 \mathrm{~m}}", "5 m", 1),
        ("45°", r"45^\circ", 1),
        (r"\boxed{45°}", "45", 1),
        (r"\boxed{45}", "45°", 1),
        (r"\boxed{54°}", r"45^\circ", 0),
        (r"\boxed{2}", "2c", 0),
        (r"\boxed{2}", "2xy", 0),
        (r"\boxed{2xy}", "2yx", 1),
        (r"\boxed{x \text{ is even}}", "x", 0),
        (r"\boxed{\frac{1}{2} \text{ cup}}", r"\frac{1}{2}", 1),
        (r"\boxed{2\pi \text{ cm}}", r"2\pi", 1),
        (r"\boxed{42\%}", "42", 1),
        (r"\boxed{42\%}", "0.42", 0),
        (r"\boxed{42 \text{ percent}}", r"42\%", 1),
        (r"\boxed{42}", "42%", 1),
        (r"\boxed{4.2\%}", "42%", 0),
    ],
    "bases": [
        ("42_3", "42_5", 0),
        (r"\boxed{42_{5}}", "42_5", 1),
        (r"\boxed{42}", "42_5", 1),
        (r"\boxed{24_5}", "42_5", 0),
    ],
    "small and large numbers": [
        (r"\boxed{0.0}", r"9.11\times10^{-31}", 0),
        (r"\boxed{0}", r"9.11\times10^{-31}", 0),
        (r"\boxed{9.12\times10^{-31}}", r"9.11\times10^{-31}", 0),
        (r"\boxed{9.11 \cdot 10^{-31}}", r"9.11\times10^{-31}", 1),
        (r"\boxed{9.11e-31}", r"9.11\times10^{-31}", 1),
        (r"\boxed{9.11e-30}", r"9.11\times10^{-31}", 0),
        (r"\boxed{0.0000001}", "0.0000002", 0),
        (r"\boxed{0.000000100}", "0.0000001", 1),
        (r"\boxed{10^{-7}}", "0.0000001", 1),
        (r"\boxed{10^{-7}}", r"10^{-8}", 0),
        (r"\boxed{m = 10^{-7}}", r"10^{-8}", 0),
        (r"\boxed{0.333333}", r"\frac{1}{3}", 1),
        (r"\boxed{0.333}", r"\frac{1}{3}", 0),
        (r"\boxed{3.14159265}", r"\pi", 1),
        (r"\boxed{12345678}", "12345679", 0),
        (r"\boxed{12345678.0}", "12345679", 0),
        (r"\boxed{2^{100}}", "1267650600228229401496703205376", 1),
        (r"\boxed{2^{100}}", "1267650600228229401496703205377", 0),
        (r"\boxed{1.5e3}", "1500", 1),
        (r"\boxed{1 234 567}", "1234567", 1),
        (r"\boxed{1,\!234}", "1234", 1),
        (r"\boxed{1,2,3,4}", "1234", 0),
        (r"\boxed{4 2}", "42", 0),
        (r"\boxed{\$1.5 \text{ million}}", "1500000", 1),
        (r"\boxed{5 million}", "5", 0),
        (r"\boxed{10^{-9}}", "0", 0),
        (r"\boxed{\frac{0}{0}}", "0.5", 0),
        (r"\boxed{2^{100}+1}", "2^{100}", 0),
        ("1 1/2", r"\frac{3}{2}", 1),
        (r"\boxed{1 1/2}", "1.5", 1),
        (r"\boxed{-1 1/2}", "-1.5", 1),
    ],
    "sets, tuples, intervals, matrices": [
        (r"\boxed{(2,1)}", r"\{1,2\}", 0),
        (r"\boxed{(1,2)}", r"\{1,2\}", 0),
        (r"\boxed{[1,2]}", r"\{1,2\}", 0),
        (r"\boxed{\{1,2\}}", "(1,2)", 0),
        (r"\boxed{\left\{1,2\right\}}", r"\{2,1\}", 1),
        (r"\boxed{(1,2)}", "(2,1)", 0),
        (r"\boxed{(1,2)}", "[1,2]", 0),
        (r"\boxed{(1,2]}", "(1,2)", 0),
        (r"\boxed{(1,2),(3,4)}", "(3,4),(1,2)", 1),
        (r"\boxed{(1,2),(3,5)}", "(3,4),(1,2)", 0),
        (r"\boxed{(1,2,3)}", "(1,2,3)", 1),
        (r"\boxed{(1,3,2)}", "(1,2,3)", 0),
        (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}", 1),
        (r"\boxed{\begin{pmatrix}2\\1\end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}", 0),
        (r"\boxed{(10^{-9}, 1)}", r"(10^{-8}, 1)", 0),
    ],
}


def misses(check, rows) -> list:
    return [(*row, score) for row in rows if (score := check(*row[:2])) != row[2]]


@pytest.mark.parametrize("group", MATH)
def test_math(group):
    assert misses(verifier.math, MATH[group]) == []


GSM8K = [
    ("#### 8.0", "8", 1),
    ("#### +8", "8", 1),
    ("#### 08", "8", 1),
    ("#### 8", "8.00", 1),
    ("#### -8", "8", 0),
    ("#### -0", "0", 1),
    ("#### 8.01", "8", 0),
    ("#### 80", "8", 0),
    ("#### 1,234.50", "1234.5", 1),
    ("#### 1,2,3,4", "1234", 0),
    ("#### 12,34", "1234", 0),
    ("#### 1/2", "1", 0),
    ("#### 3:30", "3", 0),
    ("#### 42, I think", "42", 1),
    ("#### 42 or #### 41", "42", 0),
    ("<answer>42</answer>", "42", 1),
    ("<answer>$42.00</answer>", "42", 1),
    ("<answer>It is 42</answer>", "42", 0),
    ("<answer>#### 42</answer> #### 41", "42", 1),
]


def test_gsm8k_compares_numbers():
    assert misses(verifier.gsm8k, GSM8K) == []


# ---- references ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [["966"], '["966"]', [966], ["so\n#### 966"], [966.0], 966, "966"])
def test_a_list_of_one_is_its_element(answer):
    for check, response in ((verifier.math, "\\boxed{966}"), (verifier.gsm8k, "#### 966"), (verifier.exact, "966")):
        assert check(response, answer) == 1 and check(response.replace("966", "967"), answer) == 0


@pytest.mark.parametrize("answer", [["1", "2"], [], '["1", "2"]', None])
def test_other_lists_have_no_score(answer):
    for check in (verifier.math, verifier.gsm8k, verifier.exact):
        with pytest.raises(ValueError):
            check("", answer)


def test_text_that_begins_like_a_list():
    assert verifier.exact('["a', '["a') == 1


@pytest.mark.parametrize("solution", [r"Since $x=5$, we get $\boxed{10}$.", "Then 2 * 5 = 10.\nThe answer is $10$."])
def test_a_solution_as_reference_is_its_answer(solution):
    assert verifier.math(r"\boxed{10}", solution) == verifier.math(solution, "10") == 1
    assert verifier.math(r"\boxed{5}", solution) == 0


def test_a_text_that_no_response_repeats_has_no_score():
    with pytest.raises(ValueError, match="is a text of 259 characters"):
        verifier.math("\\boxed{1}", "This follows by induction " * 10)


@pytest.mark.parametrize(
    "reward, answer, reason",
    [
        ("math", ["1", "2"], "['1', '2'] is not one answer"),
        ("math", "$$", "'$$' has no answer"),
        ("math", "word " * 100, "is a text of 499 characters and not an answer"),
        ("gsm8k", "12 or 13", "'12 or 13' is not a number"),
        ("exact", None, "None is not one answer"),
        ("knights", "Zoey", 'has no "NAME is a knight"'),
    ],
)
def test_references_of_no_use_are_refused(reward, answer, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        verifier.VERIFIERS[reward].reference(answer)


# ---- the limit -------------------------------------------------------------------------------------------------------


def test_a_response_that_hangs_the_checker_is_wrong(monkeypatch):
    """If the reference hangs it, too, there is no score. The rows behind are scored by the process that replaces it."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")  # so that there is one process
    monkeypatch.setitem(verifier.VERIFIERS, "math", verifier.VERIFIERS["math"]._replace(limit=2.0))
    rewards = Rewards(types.SimpleNamespace(reward=("math",), timeout=20.0), None)
    try:
        texts = ["42", r"\boxed{9^{9^9}}", "42", "42", "41"]
        references = ["42", "42", "42", "{" * 240 + "1" + "}" * 240, "42"]
        rows = [{"prompt": "p", "query": [1], "answer": reference} for reference in references]
        found = rewards.score(rows, texts, [[]] * 5)["math"]
        assert [None if math.isnan(score) else score for score in found] == [1, 0, 1, None, 0]
        assert "alone takes over 2 s" in rewards.sources["math"].failure
    finally:
        rewards.close()


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed" + "{" * 20,
        "9^9^9",
        "\\boxed{((9^9)^9)^9}",
        "\\[" * 15_000,
        "(" * 3000,
        "answer: $" * 500,
        "$1$, " * 600,
    ],
    ids=lambda text: text[:12],
)
def test_what_once_hung_it_is_read_at_once(text):
    start = time.process_time()
    assert verifier.math(text, "42") == 0
    assert time.process_time() - start < 5
