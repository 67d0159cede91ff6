"""Where the final answer of a response is, and tables of what `math`, `gsm8k`, `exact` and `format` say of it."""

import logging
import re
import time

import pytest

from plumbing.rewards import answers, verifiers


@pytest.fixture(scope="module", autouse=True)
def quiet():
    """math-verify warns at the first call that its time limits are off."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def misses(check, rows) -> list:
    """Return the rows (response, reference, judgement) of which a verifier says something else, and what it says."""
    return [(*row, score) for row in rows if (score := check(*row[:2])) != row[2]]


# ---- one rule for the final answer -----------------------------------------------------------------------------------

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
THOUGHTS = ["hm", "\\boxed{{{wrong}}}", "<answer>{wrong}</answer>", "#### {wrong}", "The answer is {wrong}."]
NO_ANSWERS = ["<think>{thought}</think>", "<think>{thought}", "<think>hm</think> so <think>{thought}"]
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

    monkeypatch.setattr(verifiers, "reasoning_gym_dataset", lambda *source: Task({0: {"answer": "42"}}))
    check, (reference, right, wrong) = verifiers.VERIFIERS[name].check, SOURCES[name]
    for thought in THOUGHTS:
        for form in FORMS:
            if name == "gsm8k" and "boxed" in form:
                continue  # strict: a box is not "####"
            for answer, other, score in ((right, wrong, 1), (wrong, right, 0)):
                response = form.format(thought=thought.format(wrong=other), answer=answer, wrong=other)
                assert check(response, reference) == score, response
                if name in ("math", "gsm8k"):
                    assert answers.voted_answer(name, response) == answer.removeprefix("#### ")
        for form in NO_ANSWERS:
            assert check(form.format(thought=thought.format(wrong=right)), reference) == 0, (form, thought)


@pytest.mark.parametrize(
    "response, answer",
    [
        ("<answer>\n 5 \n</answer> or 6", "5"), ("$\\boxed{ 5 }$", "5"), ("\\boxed{5", None),
        ("\\boxed{4} \\boxed{5", None), ("<answer>5", None), ("</answer>5<answer>", None), ("boxed{5}", None),
        ("5", None), (r"\boxed{1} and \boxed{[2, \infty\}}", r"[2, \infty\}"),
        (r"\boxed{a \\} b}", r"a \\"),  # a line end, then the brace
    ],
)  # fmt: skip
def test_stated_text(response, answer):
    assert answers.stated_text(response) == (response if answer is None else answer)


# ---- math ------------------------------------------------------------------------------------------------------------

MATH = {  # (response, reference, whether a careful teacher would call it right)
    "numbers": [
        ("The answer is 42.", "42", 1), ("The answer is 43.", "42", 0), ("The answer is 7.", "-7", 0),
        (r"\boxed{\frac12}", r"\frac{1}{2}", 1), ("The answer is 1 1/2.", r"\frac{3}{2}", 1),
        ("The answer is 3.14.", r"\pi", 0), ("The answer is 0.50.", "0.05", 0), ("The answer is 1,234.", "1234", 1),
        (r"\boxed{1\,234\,567}", "1234567", 1), ("The answer is 1 234 567.", "1234567", 1),
    ],
    "units": [
        (r"\boxed{5\text{ cm}^2}", "5", 1), (r"\boxed{50\text{ cm}}", r"5\text{ cm}", 0), (r"\boxed{12 km}", "12 m", 0),
        (r"\boxed{12\text{ km}}", r"12\text{ kilometers}", 1), (r"\boxed{12 meters}", "12 m", 1),
        (r"\boxed{12 sq. units}", "12", 1), (r"\boxed{5°C}", r"5^\circ\text{C}", 1), (r"\boxed{£5.00}", "5", 1),
        (r"\boxed{7th}", "7", 1), (r"\boxed{\approx 5}", "5", 1), (r"\boxed{60 \text{ m/s}}", "60 km/h", 0),
        (r"\boxed{2}", "2c", 0), (r"\boxed{2}", "2xy", 0), (r"\boxed{2xy}", "2yx", 1),
        (r"\boxed{x \text{ is even}}", "x", 0), (r"\boxed{\frac{1}{2} \text{ cup}}", r"\frac{1}{2}", 1),
        (r"\boxed{2\pi \text{ cm}}", r"2\pi", 1), (r"\boxed{42\%}", "0.42", 0), (r"\boxed{5 cents}", r"\$5", 0),
        (r"\boxed{2 days}", "2 weeks", 0), (r"\boxed{5 dollars}", r"\$5", 1), (r"\boxed{10 hours}", "10 min", 0),
        (r"\boxed{50 mph}", "50 miles per hour", 1), (r"\boxed{3 \text{ meters per second}}", "3 m/s", 1),
        (r"\boxed{9.8}", r"9.8 \text{ m/s}^2", 1), (r"\boxed{7 \text{ tenths}}", "7", 0),
        ("The answer is 5 dozen.", "5", 0), (r"\boxed{3 \text{ hundred}}", "3", 0), (r"\boxed{3 dozen}", "3", 0),
        (r"\boxed{3 \text{ squared}}", "3", 0), (r"\boxed{3 \text{ billionths}}", "3", 0),
        (r"\boxed{3 \text{ plus one}}", "3", 0), (r"\boxed{42\ldots}", "42", 0), (r"\boxed{42...}", "42", 0),
        (r"\boxed{1, 2, \dots, 9}", r"1,2,\dots,9", 1), ("42_3", "42_5", 0), (r"\boxed{42}", "42_5", 1),
        (r"\boxed{24_5}", "42_5", 0),
    ],
    "small and large numbers": [
        ("The answer is 1.5e3.", "1500", 1), ("The answer is 2^10.", "1024", 1),
        (r"\boxed{0}", r"9.11\times10^{-31}", 0), (r"\boxed{10^{-7}}", "10^{-8}", 0),
        (r"\boxed{0.333}", r"\frac{1}{3}", 0), (r"\boxed{3.14159265}", r"\pi", 1), (r"\boxed{12345678}", "12345679", 0),
        (r"\boxed{2^{100}}", "1267650600228229401496703205376", 1), (r"\boxed{1.5e3}", "1500", 1),
        (r"\boxed{4 2}", "42", 0), (r"\boxed{\$1.5 \text{ million}}", "1500000", 1), (r"\boxed{5 million}", "5", 0),
        (r"\boxed{\frac{0}{0}}", "0.5", 0), ("1 1/2", r"\frac{3}{2}", 1), (r"\boxed{1 1/2}", "1.5", 1),
    ],
    "equations and expressions": [
        (r"\boxed{-\infty}", r"\infty", 0), (r"\boxed{x = 5}", "5", 1), (r"\boxed{(x+1)^2}", "$x^2+2x+1$", 1),
        (r"\boxed{\frac{1}{2} < x}", r"x>\frac{1}{2}", 1), (r"\boxed{11_3}", "$11_2$", 0), ("43 = 42", "42", 0),
        (r"\boxed{6 \cdot 7 = 42}", "42", 1), (r"\boxed{6 \cdot 7 = 41 = 42}", "42", 0),
        (r"\boxed{\frac{1}{3} = 0.33}", "0.33", 0), (r"\boxed{42 = n}", "42", 0),
        (r"\boxed{\frac{x^2}{16} + \frac{y^2}{12} = \frac{1}{4}}", r"\frac{x^2}{4} + \frac{y^2}{3} = 1", 1),
        (r"\boxed{y=2x+1}", "y=2x-1", 0), (r"\boxed{x^2-5x+6<0}", "(2,3)", 0), (r"\boxed{2x>x+3}", "x>3", 0),
        (r"\boxed{|x| < 1}", "-1<x<1", 0), (r"\boxed{1 > x > -1}", "-1<x<1", 1), (r"\boxed{y+x > 3}", "x+y>3", 1),
        (r"\boxed{x<2\text{ or }x>3}", r"x < 2 \text{ or } x > 3", 1),
        (r"\boxed{x<2 \text{ and } x>3}", r"x<2 \text{ or } x>3", 0),
        (r"\boxed{x \le 2 \text{ and } x \geq 3}", r"x \le 2 \text{ or } x \geq 3", 0), (r"\boxed{x>3}", "x<3", 0),
        (r"\boxed{\begin{vmatrix}1&2\\3&4\end{vmatrix}=5}", "5", 0),
        (r"\boxed{\int_0^1 x^2 dx = \frac12}", r"\frac12", 0), (r"\boxed{yx}", "xy", 1), (r"\boxed{x\cdot y}", "xy", 1),
        (r"\boxed{ba}", "ab", 1), (r"\boxed{x+y}", "xy", 0), (r"\boxed{-i}", "i", 0), (r"\boxed{|i|}", "i", 0),
        (r"\boxed{n!}", "n", 0), (r"\boxed{0.01}", "10^-2", 1),
    ],
    "sets, tuples, intervals, matrices": [
        (r"\boxed{\{2, 1\}}", r"\{1,2\}", 1), (r"\boxed{1, 2}", r"\{1,2\}", 1),
        (r"\boxed{(0, \infty)}", r"[0,\infty)", 0), (r"\boxed{x \ge 0}", r"[0,\infty)", 1),
        (r"\boxed{\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", 1),
        (r"\boxed{\begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", 0),
        (r"\boxed{(2,1)}", r"\{1,2\}", 0), (r"\boxed{(1,2)}", r"\{1,2\}", 0), (r"\boxed{\{1,2\}}", "(1,2)", 0),
        (r"\boxed{\left\{1,2\right\}}", r"\{2,1\}", 1), (r"\boxed{(1,2)}", "(2,1)", 0), (r"\boxed{(1,2)}", "[1,2]", 0),
        (r"\boxed{(10^{-9}, 1)}", "(10^{-8}, 1)", 0), (r"\boxed{(1,2]}", "(1,2)", 0), (r"\boxed{A, B}", "A", 0),
    ],
    "words": [
        (r"\boxed{C}", r"\text{(C)}", 1), ("**Answer:** No", "Yes", 0), (r"\boxed{not even}", "even", 0),
        (r"\boxed{\text{even or odd}}", "even", 0), ("$E$", r"$\text{e}$", 1), (r"\boxed{\text{(A)}}", "A", 1),
        (r"\boxed{a}", r"\text{(A)}", 1), ("The answer is (A).", "A", 1), (r"\boxed{\text{A or B}}", "A", 0),
        (r"\boxed{\text{on}}", "no", 0), (r"\boxed{12:30 \text{ p.m.}}", r"12:30 \text{ PM}", 1),
        (r"\boxed{12:30 AM}", "12:30 PM", 0), (r"\boxed{30 minutes}", "2 hours 30 minutes", 0),
        (r"\boxed{3.5 \text{ or less}}", r"35 \text{ or less}", 0),
        (r"\boxed{4 feet 55 inches}", "4 feet 5.5 inches", 0), ("**Answer:** Yes, because it is even.", "Yes", 1),
        ("The answer is option B.", "B", 1), (r"\boxed{\text{Option (B)}}", "B", 1), (r"\boxed{42}", "forty-two", 0),
        (r"\boxed{否}", "是", 0), (r"\boxed{Yes.}", r"\text{Yes}", 1), (r"\boxed{\text{Briana}}", r"\text{Evelyn}", 0),
        (r"\boxed{\text{no solution}}", "No solution", 1), (r"\boxed{True}", "True", 1),
    ],
    "forms": [
        (r"\boxed{5", "5", 0), (r"\boxed{}", "5", 0), (r"\boxed 5", "5", 1), ("#### 42", "#### 42", 1),
        ("So it is 42 apples, as 6 * 7 = 42.", "#### 42", 1), (r"First \boxed{3}, but no: \boxed{4}", "3", 0),
        ("The answer is 42." + "\nI checked this, line by line." * 200, "42", 1),
        (r"**Final Answer**: \(x = 7\)", "7", 1), (r"\boxed{42} \boxed{4", "42", 0), (r"\boxed{42", r"\boxed{42", 0),
        (r"\boxed{sqrt(2)/2}", r"\frac{1}{\sqrt{2}}", 1), (r"\boxed{\sqrt(2)}", r"\sqrt{2}", 1),
        *[(rf"\boxed{{{x}}}", "42", 1) for x in (
            r"\bf 42", r"\large 42", r"\color{red}{42}", r"\textcolor{red}{42}", r"\underline{42}",
            r"{\bm{42}}", "= 42")],
        (r"\boxed{3\sqrt13}", r"3\sqrt{13}", 1), (r"\boxed{1½}", "1.5", 1), (r"\boxed{6-5\mathrm{i}}", "6-5i", 1),
        (r"\boxed{6+5\mathrm{i}}", "6-5i", 0), (r"\boxed{\varnothing}", r"\emptyset", 1), (r"\boxed{x²+1}", "x^2+1", 1),
        (r"\boxed{x ≤ 3}", r"x \le 3", 1), ("√2", r"\sqrt{2}", 1),
    ],
    "in text": [
        ("", "42", 0), ("I do not know.", "42", 0), ("$$", "42", 0),
        ("We have 42 and then add 8 to get 50. The answer is 50.", "42", 0),
        ("The answer is 50, as 42 + 8 = 50.", "50", 1), ("The answer is 50 (not 42).", "50", 1),
        ("The answer is 50 (not 42).", "42", 0), ("Answer: 50\n\nCheck: 50 - 8 = 42.", "50", 1),
        ("She earns 9 * $2 = $18.\n\nThe answer is: 18", "#### 18", 1),
        ("There were 15. 21 - 15 = 6. So the answer is 6.", "6", 1),  # as exemplars of open-instruct end
        (r"So $\tan x = \boxed{-\frac{4}{3}}$.", r"-\frac43", 1),
    ],
    "several": [
        ("The answer is 1 or 2.", "2", 0), ("1, 2, 3", "3", 0), ("The answer is 42, 1, 2", "42", 0),
        ("The answer is 42 or 41.", "42", 0), (r"\boxed{42 or 41}", "42", 0), (r"\boxed{42 \text{ (or 41)}}", "42", 0),
        (r"\boxed{41, 42}", "42", 0), (r"\boxed{42?}", "42", 0), (r"\boxed{x=41 \text{ or } x=42}", "42", 0),
        (r"\boxed{x=1 \text{ or } x=2}", "1, 2", 1), (r"\boxed{1 \text{ and } 2}", r"\{1, 2\}", 1),
        (r"\boxed{1}, \boxed{2}", "1, 2", 0), (r"\boxed{\text{not } 42}", "42", 0),
        (r"\boxed{42 \text{ is wrong}, 41}", "42", 0), (r"\boxed{42 \text{ is wrong}}", "42", 0),
        (r"\boxed{5}", "5,-5", 0),
    ],
}  # fmt: skip


@pytest.mark.parametrize("group", MATH)
def test_math(group):
    assert misses(verifiers.math, MATH[group]) == []


@pytest.mark.parametrize("solution", [r"Since $x=5$, we get $\boxed{10}$.", "Then 2 * 5 = 10.\nThe answer is $10$."])
def test_a_solution_as_reference_is_its_answer(solution):
    assert verifiers.math(r"\boxed{10}", solution) == verifiers.math(solution, "10") == 1
    assert verifiers.math(r"\boxed{5}", solution) == 0


@pytest.mark.parametrize(
    "text",
    [
        "<answer>" * 4000, "<answer>5</answer" * 2000, "\\boxed{" * 4000, "\\boxed" + "{" * 20, "9^9^9",
        "\\boxed{((9^9)^9)^9}", "\\[" * 15_000, "(" * 3000, "answer: $" * 500,
        "$1$, " * 600, r"\frac{" * 500, r"\boxed{1} " * 300, "1," * 1500, "1+" * 1500, "-" * 3000, "answer 1" * 375,
    ],
    ids=lambda text: text[:12],
)  # fmt: skip
def test_long_nonsense_is_read_at_once(text):
    start = time.process_time()
    assert verifiers.math(text, "42") == 0
    assert time.process_time() - start < 5


# ---- references ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [["966"], '["966"]', [966], ["so\n#### 966"], [966.0], 966, "966", " 966\n"])
def test_a_list_of_one_is_its_element(answer):
    for check, response in ((verifiers.math, "\\boxed{966}"), (verifiers.gsm8k, "#### 966"), (verifiers.exact, "966")):
        assert check(response, answer) == 1 and check(response.replace("966", "967"), answer) == 0


@pytest.mark.parametrize(
    "reward, answer, reason",
    [
        *[(name, answer, "is not one answer") for name in ("math", "gsm8k", "exact")
          for answer in (["1", "2"], [], '["1", "2"]', None)],
        ("math", "$$", "is not an answer"), ("math", "####", "is not an answer"),
        ("gsm8k", "12 or 13", "is not a number"),
        ("math", "word " * 101, "is not an answer"),
    ],
)  # fmt: skip
def test_references_of_no_use_are_refused(reward, answer, reason):
    """A score of 0 for every response would say that the model is wrong."""
    with pytest.raises(ValueError, match=re.escape(reason)):
        verifiers.VERIFIERS[reward].check("", answer)


# ---- gsm8k, exact and format -----------------------------------------------------------------------------------------

# Judged by the rule of the original: the number after "####", without commas, "$" and a final full stop.
GSM8K = [
    ("6 * 7 = 42\n#### 42", "42", 1), ("####42", "42", 1), ("####   42", "42", 1), ("#### **42**", "42", 0),
    ("#### x = 42", "42", 0), ("#### ", "42", 0), ("#### 43", "42", 0), ("#### 4", "42", 0),
    ("#### 1,234,567", "1234567", 1), ("#### .5", ".5", 1), ("#### $42.", "42", 1), ("#### $1,234.50", "1234.50", 1),
    ("#### -$7", "-7", 1), ("#### $-7", "-7", 1), ("#### 41\n#### 42", "42", 1), ("#### 42\n#### 41", "42", 0),
    ("#### 41\nNo.\n#### 42\nI hope so.", "42", 1), ("#### 42\n#### none", "42", 1), ("#### 41 #### 42", "42", 1),
    ("#### 8", "8.00", 1), ("#### -8", "8", 0), ("#### -0", "0", 1), ("#### 1/2", "1", 0), ("#### 3:30", "3", 0),
    ("#### 42 or 43", "42", 0), ("#### 42 or 43", "43", 0), ("#### 42-43", "42", 0), ("#### 42 apples\n7", "42", 1),
    ("<answer>42</answer>", "42", 1), ("<answer>$42.00</answer>", "42", 1), ("<answer>It is 42</answer>", "42", 0),
    ("<answer>#### 42</answer> #### 41", "42", 1), ("#### " + "9" * 5000, "9", 0),
]  # fmt: skip
EXACT = [
    (" 42\n", "42", 1), ("42", 42, 1), ("paris", "Paris", 0), ("The answer is Paris", "Paris", 0), ("42.0", "42", 0),
    ("", "42", 0), ("42", "6 * 7 = 42\n#### 42", 1), ("#### Plan\nWait.", "#### Plan\nWait.", 1),
]  # fmt: skip
FORMAT = [
    ("<think>a</think><answer>b</answer>", 1), ("<think>a</think> <answer>b</answer>", 1),
    ("<think>\na\n\nb\n</think>\n<answer>\nc\n</answer>\n", 1), (" \n<think>a</think>\n\n\t<answer>b</answer>\n ", 1),
    ("<think>a</think> b", 0), ("<answer>b</answer><think>a</think>", 0), ("<think><answer>b</answer></think>", 0),
    ("<think>a</think><think>a</think><answer>b</answer>", 0),
    ("<think><think>a</think><answer>b</answer>", 0), ("<think>I write <answer> then.</think><answer>b</answer>", 0),
    ("<think></think><answer>b</answer>", 0), ("<think>a</think><answer> \n</answer>", 0),
    ("<think>a</think><answer>b</answer></answer>", 0), ("So: <think>a</think><answer>b</answer>", 0),
]  # fmt: skip


def test_strict_verifiers():
    assert misses(verifiers.gsm8k, GSM8K) == []
    assert misses(verifiers.exact, EXACT) == []
    assert [(text, right) for text, right in FORMAT if verifiers.format(text) != right] == []
