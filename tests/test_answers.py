"""The built-in rewards against human judgement, and files of data that somebody else wrote (or broke)."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from plumbing.rewards import verifiers as verifier

# The same examples every time: a formula that takes math-verify minutes is killed in a run, but would hang a test.
FIXED = settings(derandomize=True, database=None, deadline=None)


@pytest.fixture(scope="module", autouse=True)
def quiet():
    """math-verify warns at the first call that its time limits are off."""
    import logging

    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def score(checker, response: str, answer) -> int | None:
    """What a checker says, None where it refuses the reference (which gives no score, and not a score of 0)."""
    try:
        value = checker(response, answer)
    except ValueError:
        return None
    assert type(value) is float and value in (0.0, 1.0)
    return int(value)


def compare(name: str, checker, table: dict[str, list[tuple]]) -> float:
    """Hold a checker against a table, print a report, and return how often it agrees with the judgement.

    A row is (response, reference, judgement) or, for a known miss, (response, reference, judgement, what the checker
    says). The judgement is what a careful teacher says of the response's final answer, without regard to the checker.
    Exactly the known misses have to be missed: one that is hit now loses its mark.
    """
    total = misses = 0
    wrong = []
    for group, rows in table.items():
        for response, answer, judged, *known in rows:
            said = score(checker, response, answer)
            total, misses = total + 1, misses + (said != judged)
            if said != judged:
                print(f"{name} misses ({group}): {response!r} for {answer!r} is {judged}, it says {said}")
            if said != (known or [judged])[0]:
                wrong.append((group, response, answer, f"judged {judged}", f"says {said}", f"marked {known}"))
    print(f"{name}: {total - misses} of {total} as judged, {misses} missed")
    assert not wrong, "\n".join(map(repr, wrong))
    return (total - misses) / total


# ---- math ------------------------------------------------------------------------------------------------------------

MATH = {
    "integers": [
        ("The answer is 42.", "42", 1),
        ("42", "42", 1),
        ("So 6 * 7 = 42", "42", 1),
        ("The answer is 43.", "42", 0),
        ("The answer is 4.", "42", 0),
        ("The answer is 420.", "42", 0),
        ("The answer is **42**.", "42", 1),
        ("The answer is 042.", "42", 1),
        ("The answer is forty-two.", "42", 1, 0),
        (r"\boxed{42}", "42", 1),
        (r"$\boxed{42}$", "42", 1),
        (r"\[\boxed{42}\]", "42", 1),
        (r"\(\boxed{42}\)", "42", 1),
        (r"\fbox{42}", "42", 1),
    ],
    "negative": [
        ("The answer is -7.", "-7", 1),
        ("The answer is 7.", "-7", 0),
        ("The answer is -7.", "7", 0),
        (r"$\boxed{-7}$", "-7", 1),
        ("The answer is \u22127.", "-7", 1),
        ("The answer is minus 7.", "-7", 1, 0),
        (r"\boxed{-\frac{3}{4}}", r"\frac{-3}{4}", 1),
        ("The answer is $-0$.", "0", 1),
    ],
    "fractions": [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", 1),
        (r"\boxed{\dfrac{1}{2}}", r"\frac{1}{2}", 1),
        (r"\boxed{\tfrac{1}{2}}", r"\frac{1}{2}", 1),
        (r"\boxed{\frac12}", r"\frac{1}{2}", 1),
        (r"\boxed{1/2}", r"\frac{1}{2}", 1),
        (r"\boxed{\frac{2}{4}}", r"\frac{1}{2}", 1),
        ("The answer is 1/2.", r"\frac{1}{2}", 1),
        ("The answer is 1/2.", "1/2", 1),
        ("The answer is 2/1.", "1/2", 0),
        ("The answer is 1/3.", r"\frac{1}{2}", 0),
        ("The answer is 0.333.", r"\frac{1}{3}", 0),
        (r"\boxed{1\frac{1}{2}}", r"\frac{3}{2}", 1),
        ("The answer is 1 1/2.", r"\frac{3}{2}", 1),
        (r"\boxed{\frac{x+1}{2}}", r"\frac{1}{2}(x+1)", 1),
        (r"\boxed{\frac{\sqrt{3}}{3}}", r"\frac{1}{\sqrt{3}}", 1),
    ],
    "decimals": [
        ("The answer is 0.5.", r"\frac{1}{2}", 1),
        ("The answer is .5", "0.5", 1),
        ("The answer is 18.00.", "18", 1),
        ("The answer is 18.", "18.00", 1),
        ("The answer is 3.14.", "3.1416", 0),
        ("The answer is 3.14.", r"\pi", 0),
        ("The answer is 0.50.", "0.05", 0),
        ("The answer is 1.5.", "15", 0),
    ],
    "percent": [
        ("The answer is 25%.", "25%", 1),
        (r"\boxed{25\%}", "25%", 1),
        (r"\boxed{25\%}", r"25\%", 1),
        (r"\boxed{25}", r"25\%", 1),
        ("The answer is 25 percent.", "25", 1),
        ("The answer is 0.25.", r"25\%", 1, 0),  # the sign is dropped, as MATH's own checker does
        ("The answer is 2.5%.", r"25\%", 0),
    ],
    "units": [
        ("The answer is 5 cm.", "5", 1),
        (r"\boxed{5\text{ cm}}", "5", 1),
        (r"\boxed{5 \mathrm{~cm}}", "5", 1),
        (r"\boxed{5\text{ cm}^2}", "5", 1),
        ("The answer is 5.", r"5\text{ cm}", 1),
        ("The answer is 5 cm.", "5 cm", 1),
        ("The train needs 3 hours.", "3 hours", 1),
        (r"\boxed{50\text{ cm}}", r"5\text{ cm}", 0),
        (r"\boxed{90^\circ}", "90", 1),
        (r"\boxed{90}", r"90^\circ", 1),
        ("The angle is 90 degrees.", r"90^\circ", 1),
        ("The angle is 90\u00b0.", r"90^\circ", 1),
        (r"\boxed{9^\circ}", r"90^\circ", 0),
    ],
    "money": [
        ("The answer is $18.", "18", 1),
        ("The answer is $18.00.", "18", 1),
        (r"\boxed{\$18}", "18", 1),
        ("She makes $18 every day.", "$18", 1),
        ("The answer is 18 dollars.", "$18", 1),
        ("The answer is $18 and not $20.", "18", 1, 0),
        ("The answer is $1,800.", "$1,800", 1),
        ("The answer is $81.", "$18", 0),
    ],
    "thousands": [
        ("The answer is 1,234.", "1234", 1),
        ("The answer is 1234.", "1,234", 1),
        ("The answer is 1,234,567.", "1234567", 1),
        (r"\boxed{1,234}", "1234", 1),
        (r"\boxed{1{,}234}", "1234", 1),
        (r"\boxed{1\,234\,567}", "1234567", 1),
        ("The answer is 1 234 567.", "1234567", 1),
        ("The answer is 1,234.", "1.234", 0),
        ("The answer is 12,34.", "1234", 0),
        (r"\boxed{1,234}", "234", 0),
    ],
    "scientific": [
        (r"\boxed{1.5 \times 10^3}", "1500", 1),
        (r"\boxed{1.5 \cdot 10^{-3}}", "0.0015", 1),
        (r"\boxed{10^6}", "1000000", 1),
        ("The answer is 1.5e3.", "1500", 1),
        ("The answer is 2^10.", "1024", 1),
        (r"\boxed{1.5 \times 10^4}", "1500", 0),
        ("The answer is 1.5e4.", "1.5", 0),
    ],
    "roots and constants": [
        (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1),
        (r"\boxed{2\sqrt2}", r"2\sqrt{2}", 1),
        (r"\boxed{\sqrt{9}}", "3", 1),
        (r"\boxed{\sqrt[3]{8}}", "2", 1),
        (r"\boxed{2\sqrt{2}}", r"2\sqrt{3}", 0),
        (r"\boxed{2\pi}", r"2\pi", 1),
        (r"\boxed{\pi \cdot 2}", r"2\pi", 1),
        ("The area is 2\u03c0.", r"2\pi", 1, 0),
        ("The area is 2*pi.", r"2\pi", 1, 0),
        (r"\boxed{2}", r"2\pi", 0),
        (r"\boxed{6.28}", r"2\pi", 0),
        (r"\boxed{e^{i\pi}}", "-1", 1, 0),
        (r"\boxed{\infty}", r"\infty", 1),
        (r"\boxed{-\infty}", r"\infty", 0),
    ],
    "sets, tuples, intervals": [
        (r"\boxed{\{1, 2\}}", r"\{1,2\}", 1),
        (r"\boxed{\{2, 1\}}", r"\{1,2\}", 1),
        (r"\boxed{1, 2}", r"\{1,2\}", 1),
        (r"\boxed{\{1, 2, 3\}}", r"\{1,2\}", 0),
        (r"\boxed{\{1\}}", r"\{1,2\}", 0),
        (r"\boxed{\emptyset}", r"\emptyset", 1),
        (r"\boxed{(3, \frac{\pi}{2})}", r"\left(3, \frac{\pi}{2}\right)", 1),
        (r"\boxed{(\frac{\pi}{2}, 3)}", r"\left(3, \frac{\pi}{2}\right)", 0),
        (r"\boxed{(1, \sqrt{2}, 3)}", r"(1, \sqrt{2}, 3)", 1),
        (r"\boxed{(1, 3, \sqrt{2})}", r"(1, \sqrt{2}, 3)", 0),
        (r"\boxed{[0, \infty)}", r"[0,\infty)", 1),
        (r"\boxed{(0, \infty)}", r"[0,\infty)", 0),
        (r"\boxed{x \ge 0}", r"[0,\infty)", 1),
        (r"\boxed{(-\infty,-1)\cup(1,\infty)}", r"(-\infty,-1)\cup(1,\infty)", 1),
        (r"\boxed{(1,\infty)\cup(-\infty,-1)}", r"(-\infty,-1)\cup(1,\infty)", 1),
        (r"\boxed{(-\infty,-1]\cup(1,\infty)}", r"(-\infty,-1)\cup(1,\infty)", 0),
    ],
    "matrices": [
        (r"\boxed{\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", 1),
        (r"\boxed{\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", 1),
        (r"\boxed{\begin{pmatrix} 1/2 \\ 3 \end{pmatrix}}", r"\begin{pmatrix}0.5\\3\end{pmatrix}", 1),
        (r"\boxed{\begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", 0),
        (r"\boxed{\begin{pmatrix} 1 & 2 \end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}", 0),
    ],
    "equations and expressions": [
        (r"\boxed{x = 5}", "5", 1),
        (r"\boxed{5}", "$x = 5$", 1),
        ("So x = 5.", "5", 1),
        (r"\boxed{x = 6}", "5", 0),
        (r"\boxed{y = 2x + \frac{1}{2}}", r"y=2x+\frac{1}{2}", 1),
        (r"\boxed{2x + \frac{1}{2} = y}", r"y=2x+\frac{1}{2}", 1),
        (r"\boxed{4x - 2y + 1 = 0}", r"y=2x+\frac{1}{2}", 1),
        (r"\boxed{y = 2x - \frac{1}{2}}", r"y=2x+\frac{1}{2}", 0),
        (r"\boxed{(x+1)^2}", "$x^2+2x+1$", 1),
        (r"\boxed{(x+1)(x+2)}", "$x^2+3x+2$", 1),
        (r"\boxed{x^2+1}", "$x^2+2x+1$", 0),
        (r"\boxed{\sin^2 x}", r"1-\cos^2 x", 1),
        (r"\boxed{\binom{5}{2}}", "10", 1),
        (r"\boxed{5!}", "120", 1),
        (r"\boxed{3 + 4i}", "$3+4i$", 1),
        (r"\boxed{3 - 4i}", "$3+4i$", 0),
        (r"\boxed{x > \frac{1}{2}}", r"x>\frac{1}{2}", 1),
        (r"\boxed{\frac{1}{2} < x}", r"x>\frac{1}{2}", 1),
        (r"\boxed{x < \frac{1}{2}}", r"x>\frac{1}{2}", 0),
        (r"\boxed{11_2}", "$11_2$", 1),
        (r"\boxed{11_3}", "$11_2$", 0),
    ],
    "words": [
        (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}", 1),
        (r"\boxed{Evelyn}", r"\text{Evelyn}", 1),
        (r"\boxed{\text{Briana}}", r"\text{Evelyn}", 0),
        ("The answer is Evelyn.", r"\text{Evelyn}", 1),
        (r"\boxed{\text{(C)}}", r"\text{(C)}", 1),
        (r"\boxed{C}", r"\text{(C)}", 1),
        (r"\boxed{\text{(D)}}", r"\text{(C)}", 0),
        ("The answer is (C).", r"\text{(C)}", 1),
    ],
    "boxes": [
        (r"First $\boxed{3}$. I made a mistake. So it is $\boxed{4}$.", "4", 1),
        (r"First $\boxed{3}$. I made a mistake. So it is $\boxed{4}$.", "3", 0),
        (r"\boxed{\frac{\sqrt{\frac{1}{4}}}{\frac{1}{2}}}", "1", 1),
        (r"\boxed{\boxed{5}}", "5", 1),
        (r"\boxed{5} is the answer to all 7 questions.", "5", 1),
        (r"\boxed{5} is the answer to all 7 questions.", "7", 0),
        (r"The answer is 7. \boxed{5}", "5", 1),
        (r"\boxed{5", "5", 0),
        (r"\boxed{}", "5", 0),
        (r"\boxed{ 5 }", "5", 1),
        (r"\boxed 5", "5", 1),
    ],
    "GSM8K references": [
        ("The answer is 42.", "6 boxes of 7 make 6*7=<<6*7=42>>42.\n#### 42", 1),
        ("#### 42", "#### 42", 1),
        ("6*7=42\n#### 42", "#### 42", 1),
        ("####42", "#### 42", 1),
        ("#### 41", "#### 42", 0),
        ("The answer is 1,600.", "#### 1,600", 1),
        ("The answer is 6.", "6 boxes of 7 make 42.\n#### 42", 0),
        ("So it is 42 apples, as 6 * 7 = 42.", "#### 42", 1),
    ],
    "no answer": [
        ("", "42", 0),
        (" \n\t", "42", 0),
        ("I do not know.", "42", 0),
        ("The answer is", "42", 0),
        ("$", "42", 0),
        ("\\", "42", 0),
        ("$$", "42", 0),
        ("42 apples are too many, so I give no answer.", "42", 0, 1),
    ],
    "many answers": [
        ("The answer is 1, 2, 3, 4 or 5.", "3", 0),
        ("The answer is 1 or 2.", "2", 0),
        ("The answer is 1 or 2.", "1", 0),
        ("1 2 3 4 5 6 7 8 9 10", "7", 0),
        ("Answer: 1\nAnswer: 2\nAnswer: 3", "1", 0),
        ("Answer: 1\nAnswer: 2\nAnswer: 3", "3", 1),
        (r"\boxed{1} \boxed{2} \boxed{3}", "2", 0),
        (r"$\boxed{1}$, $\boxed{2}$, $\boxed{3}$", "2", 0),
        (r"\boxed{1, 2, 3}", "2", 0),
        (r"\boxed{2 \text{ or } 3}", "2", 0),
        ("The answer is 1, 2, 3, 4 or 5.", "1", 0),
        ("1, 2, 3", "3", 0),
    ],
    "in the midst of text": [
        ("We have 42 and then add 8 to get 50. The answer is 50.", "42", 0),
        ("We have 42 and then add 8 to get 50. The answer is 50.", "50", 1),
        ("We add 8 to 42, which gives 50, and that is all.", "50", 1),
        ("The final answer is 50. I hope it is correct.", "50", 1),
        ("The final answer is $50$. I hope it is correct. 8 minutes were spent.", "50", 1),
        ("The answer is 50, as 42 + 8 = 50.", "50", 1),
        ("The answer is 50 (not 42).", "50", 1),
        ("The answer is 50 (not 42).", "42", 0),
        ("<think>Is it 42?</think> The answer is 50.", "50", 1),
        ("<think>The answer is 42.</think>", "42", 0),
        ("Answer: 50\n\nCheck: 50 - 8 = 42.", "50", 1),
        ("Question 17: 50", "50", 1),
    ],
    "as models write": [
        (r"Adding the two, $3 + 4 = 7$, so the answer is $\boxed{7}$.", "7", 1),
        (r"Adding the two, $3 + 4 = 7$, so the answer is $\boxed{7}$.", "4", 0),
        ("Janet sells 16 - 3 - 4 = 9 eggs and makes 9 * 2 = $18 a day.\n#### 18", "18", 1),
        ("Janet sells 16 - 3 - 4 = 9 eggs and makes 9 * 2 = $18 a day.\n#### 18", "9", 0),
        ("She earns 9 * $2 = $18.\n\nThe answer is: 18", "#### 18", 1),
        ("**Final answer:** 18", "#### 18", 1),
        ("**Answer: $18**", "#### 18", 1),
        ("Thus, the total cost is \\$1,250.\n\n\\boxed{1250}", "#### 1,250", 1),
        ("Thus, the total cost is \\$1,250.\n\n\\boxed{1520}", "#### 1,250", 0),
        (r"The probability is $\frac{3}{8}$.", r"\frac{3}{8}", 1),
        (r"The probability is $\frac{3}{8}$.", r"\frac{8}{3}", 0),
        ("Therefore,\n\\[\nx = \\boxed{\\dfrac{9}{4}}.\n\\]", r"\frac{9}{4}", 1),
        (r"The final answer is $\boxed{2\sqrt{13}}$.", r"2\sqrt{13}", 1),
        (r"The final answer is $\boxed{2\sqrt{31}}$.", r"2\sqrt{13}", 0),
        ("<think>16 - 7 = 9</think>\n<answer>9</answer>", "9", 1),
        ("<think>16 - 7 = 9</think>\n<answer>\\boxed{9}</answer>", "9", 1),
        ("<think>16 - 7 = 8</think>\n<answer>8</answer>", "9", 0),
        ("Step 1: 2 * 3 = 6\nStep 2: 6 + 4 = 10\nSo the result is 10.", "10", 1),
        ("Step 1: 2 * 3 = 6\nStep 2: 6 + 4 = 10\nSo the result is 10.", "6", 0),
        (r"So $\tan x = \boxed{-\frac{4}{3}}$.", r"-\frac43", 1),
        (r"So $\tan x = \boxed{\frac{4}{-3}}$.", r"-\frac43", 1),
        (r"So $\tan x = \boxed{\frac{4}{3}}$.", r"-\frac43", 0),
        (r"The vertex is $\boxed{\left(\frac{1}{2}, -3\right)}$.", r"\left( \frac{1}{2}, -3 \right)", 1),
        (r"It happens in \boxed{12} ways.", "12", 1),
    ],
}


# Half of the references of MATH have no backslash. Read as plain text, only a number in them is seen, or nothing.
BARE = [
    (r"\boxed{3x+2}", "3x+2", 1),
    (r"\boxed{3}", "3x+2", 0),
    (r"\boxed{(1, 2)}", "(1, 2)", 1),
    ("The answer is 2.", "(1, 2)", 0),
    (r"\boxed{5, -5}", "5,-5", 1),
    (r"\boxed{5}", "5,-5", 0),
    (r"\boxed{3 + 4i}", "3 + 4i", 1),
    ("The answer is 4.", "3 + 4i", 0),
    (r"\boxed{x^2+2x+1}", "x^2+2x+1", 1),
    (r"\boxed{[0, 1]}", "[0, 1]", 1),
    (r"\boxed{1}", "[0, 1]", 0),
    (r"\boxed{x > 5}", "x > 5", 1),
    (r"\boxed{2, 3, 5}", "2,3,5", 1),
    ("The answer is 2.3.", "2,3,5", 0),
    (r"\boxed{a+b}", "a+b", 1),
    (r"\boxed{3:2}", "3:2", 1),
    ("The answer is $18.", r"\$18", 1),
    (r"\boxed{C}", "C", 1),
]

# Without dollars around them, all boxes are taken together for a set; the last one counts in MATH's own checker.
BOXES = [
    (r"First \boxed{3}, but no: \boxed{4}", "4", 1),
    (r"First \boxed{3}, but no: \boxed{4}", "3", 0),
    ("First \\boxed{3}.\n\nThen \\boxed{4}.", "4", 1),
    ("First \\boxed{3}.\n\nThen \\boxed{4}.", "3", 0),
]


def test_math_agrees_with_human_judgement():
    assert len(sum(MATH.values(), [])) >= 80
    assert compare("math", verifier.math, MATH) >= 0.9


def test_math_reads_formulas_without_dollars():
    compare("math", verifier.math, {"bare formulas": BARE})


def test_math_takes_the_last_box():
    compare("math", verifier.math, {"several boxes without dollars": BOXES})


@pytest.mark.parametrize("answer", [42, 42.0, "42", " 42\n", "work\n#### 42"])
def test_math_takes_numbers_and_text_as_reference(answer):
    assert verifier.math("The answer is 42.", answer) == 1
    assert verifier.math("The answer is 41.", answer) == 0


@pytest.mark.parametrize("answer", ["", "####", None, "$"])
def test_math_refuses_a_reference_that_holds_no_answer(answer):
    """A score of 0 for every response would say that the model is wrong."""
    with pytest.raises(ValueError):
        verifier.math("The answer is 42.", answer)


PIECES = (
    r"""
    0 1 2 10 1,000 0.5 .5 -3 + - * / = ( ) [ ] { } , ; : . $ $$ < > % ! & _ ^2 x y pi e i answer is The and or
    \ \\ \boxed{ \boxed{1} \frac{ \frac12 }{ \sqrt \sqrt[ \pi \text{ \left( \right) \[ \] \( \) \{ \} \infty \cup \in
    \begin{pmatrix} \end{pmatrix} \le \sum_ \int \log \sin ^\circ \% \$
""".split()
    + [" ", "\n", "\u2212", "\u03c0"]
)


@settings(FIXED, max_examples=300)
@given(st.lists(st.sampled_from(PIECES), max_size=14), st.sampled_from(["42", r"\frac{1}{2}", r"\{1,2\}", "$x+1$"]))
def test_math_never_raises_for_a_response_like_mathematics(pieces, answer):
    assume(pieces.count("^2") <= 2)  # a tower of powers has more digits than there is memory
    assert score(verifier.math, "".join(pieces), answer) is not None


@settings(FIXED, max_examples=100)
@given(st.text(max_size=60))
def test_math_never_raises_for_a_response_of_any_text(response):
    assert score(verifier.math, response, "42") is not None


@settings(FIXED, max_examples=150)
@given(st.lists(st.sampled_from(PIECES), max_size=6))
def test_math_refuses_a_reference_in_no_other_way_than_by_value_error(pieces):
    assume(pieces.count("^2") <= 2)
    score(verifier.math, r"\boxed{42}", "".join(pieces))


@pytest.mark.parametrize(
    "piece", ["(", r"\frac{", r"\boxed{", r"\boxed{1} ", "$", "$1$, ", "1,", "1+", "-", "answer 1"]
)
def test_math_reads_long_nonsense(piece):
    """As a model writes it that has come off the rails: repeated to the end, too deep for any parser."""
    assert score(verifier.math, piece * (3000 // len(piece)), "42") == 0


@settings(FIXED, max_examples=100)
@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9))
def test_math_compares_integers_however_they_are_written(number, other):
    plain, commas = str(number), f"{number:,}"
    for response in (
        f"The answer is {plain}.",
        rf"\boxed{{{plain}}}",
        f"#### {commas}",
        rf"So $x=\boxed{{{commas}}}$.",
    ):
        assert verifier.math(response, plain) == verifier.math(response, f"so\n#### {commas}") == 1
        assert verifier.math(response, str(other)) == (number == other)


# ---- gsm8k -----------------------------------------------------------------------------------------------------------

# Judged by the rule of the original: the number after "####", without commas, "$" and a final full stop.
GSM8K = {
    "form": [
        ("6 * 7 = 42\n#### 42", "42", 1),
        ("#### 42", "42", 1),
        ("####42", "42", 1),
        ("####   42", "42", 1),
        ("####\n42", "42", 1),
        ("#### 42 ", "42", 1),
        ("#### 42\n", "42", 1),
        ("#### 42.", "42", 1),
        ("#### 42 apples", "42", 1),
        ("The answer is #### 42", "42", 1),
        ("42", "42", 0),
        ("### 42", "42", 0),
        ("# # # # 42", "42", 0),
        ("The answer is 42.", "42", 0),
        (r"\boxed{42}", "42", 0),
        (r"#### \boxed{42}", "42", 0),
        ("#### **42**", "42", 0),
        ("#### x = 42", "42", 0),
        ("#### forty-two", "42", 0),
        ("####", "42", 0),
        ("#### ", "42", 0),
        ("", "42", 0),
        ("42 ####", "42", 0),
    ],
    "numbers": [
        ("#### 43", "42", 0),
        ("#### 4", "42", 0),
        ("#### 421", "42", 0),
        ("#### 4 2", "42", 0),
        ("#### 1,234", "1234", 1),
        ("#### 1234", "1,234", 1),
        ("#### 1,234,567", "1234567", 1),
        ("#### 1,234", "1.234", 0),
        ("#### 0.5", "0.5", 1),
        ("#### .5", ".5", 1),
        ("#### 0.5", "5", 0),
        ("#### 42.5", "42", 0),
        ("#### 42", "42.5", 0),
        ("#### 18.00", "18.00", 1),
        ("#### 18.00", "18", 1),
        ("#### 18", "18.00", 1),
        ("#### 042", "42", 1),
        ("#### 0", "0", 1),
        ("#### 1e3", "1000", 0),
        ("#### 1/2", "0.5", 0),
    ],
    "signs": [
        ("#### -7", "-7", 1),
        ("#### 7", "-7", 0),
        ("#### -7", "7", 0),
        ("#### $42", "42", 1),
        ("#### $42.", "42", 1),
        ("#### $1,234.50", "1234.50", 1),
        ("#### 42", "$42", 1),
        ("#### -$7", "-7", 1),
        ("#### $-7", "-7", 1),
        ("#### 42$", "42", 1),
        ("#### 42%", "42", 1),
    ],
    "several": [
        ("#### 41\n#### 42", "42", 1),
        ("#### 42\n#### 41", "42", 0),
        ("#### 41\nNo.\n#### 42\nI hope so.", "42", 1),
        ("#### 42\n#### none", "42", 1),
        ("#### 41 #### 42", "42", 1),
    ],
    "references": [
        ("#### 42", "6 * 7 = <<6*7=42>>42\n#### 42", 1),
        ("#### 6", "6 * 7 = <<6*7=42>>42\n#### 42", 0),
        ("#### 1234", "#### 1,234", 1),
        ("#### 42", "#### $42.", 1),
        ("#### 42", 42, 1),
        ("#### 43", 42, 0),
        ("#### 42", 42.0, 1),  # a column of floats, as pandas makes of integers with a gap
        ("#### 42", "", None),
        ("#### 42", None, None),
    ],
}


def test_gsm8k_is_strict():
    compare("gsm8k", verifier.gsm8k, GSM8K)


@settings(FIXED, max_examples=300)
@given(st.integers(), st.booleans(), st.booleans(), st.sampled_from(["", ".", "\n", " apples", " "]), st.text())
def test_gsm8k_knows_an_integer_however_it_is_written(number, commas, dollar, end, thought):
    written = f"{'-' * (number < 0)}{'$' * dollar}{abs(number):{',' * commas}}"
    for answer in (str(number), f"{number:,}", f"It is {number}.\n#### {number}", number):
        assert verifier.gsm8k(f"{thought}\n#### {written}{end}", answer) == 1
    assert verifier.gsm8k(f"{thought}\n#### {written}{end}", str(number + 1)) == 0


# ---- exact and format ------------------------------------------------------------------------------------------------

EXACT = {
    "": [
        ("42", "42", 1),
        (" 42\n", "42", 1),
        ("42", "42 ", 1),
        ("42", 42, 1),
        ("Paris", "Paris", 1),
        ("paris", "Paris", 0),
        ("Paris.", "Paris", 0),
        ("The answer is Paris", "Paris", 0),
        ("42.0", "42", 0),
        ("a  b", "a b", 0),
        ("", "42", 0),
        ("42", "6 * 7 = 42\n#### 42", 1),
        ("6 * 7 = 42\n#### 42", "6 * 7 = 42\n#### 42", 1),  # the reference itself
        ("#### Plan\nWait.", "#### Plan\nWait.", 1),  # a heading of Markdown in it
        ("e\u0301", "\u00e9", 0),
    ]
}


def test_exact_compares_text():
    compare("exact", verifier.exact, EXACT)


@settings(FIXED, max_examples=300)
@given(st.text(), st.text(), st.text(alphabet=" \t\n"))
def test_exact_holds_for_the_reference_and_nothing_else(text, other, space):
    assume("####" not in text)
    assert verifier.exact(text, text) == verifier.exact(space + text + space, text) == 1
    assert verifier.exact(other, text) == (other.strip() == text.strip())


FORMAT = {
    "right": [
        ("<think>a</think><answer>b</answer>", None, 1),
        ("<think>a</think> <answer>b</answer>", None, 1),
        ("<think>\na\n\nb\n</think>\n<answer>\nc\n</answer>\n", None, 1),
        (" \n<think>a</think>\n\n\t<answer>b</answer>\n ", None, 1),
        ("<think></think><answer></answer>", None, 1),
        ("<think>1 < 2 > 0, <b>so</b></think><answer><x></answer>", None, 1),
    ],
    "a tag is missing": [
        ("", None, 0),
        ("42", None, 0),
        ("<think>a</think>", None, 0),
        ("<answer>b</answer>", None, 0),
        ("<think>a</think><answer>b", None, 0),
        ("<think>a<answer>b</answer>", None, 0),
        ("a</think><answer>b</answer>", None, 0),
        ("<think>a</think>b</answer>", None, 0),
        ("<think>a</think> b", None, 0),
    ],
    "order": [
        ("<answer>b</answer><think>a</think>", None, 0),
        ("<think><answer>b</answer></think>", None, 0),
        ("<think>a<answer></think>b</answer>", None, 0),
        ("</think>a<think><answer>b</answer>", None, 0),
    ],
    "twice": [
        ("<think>a</think><think>a</think><answer>b</answer>", None, 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", None, 0),
        ("<think>a</think><answer>b</answer>" * 2, None, 0),
        ("<think><think>a</think><answer>b</answer>", None, 0),
        ("<think>I write <answer> then.</think><answer>b</answer>", None, 0),
        ("<think>a</think><answer>b</answer></answer>", None, 0),
    ],
    "text outside": [
        ("So: <think>a</think><answer>b</answer>", None, 0),
        ("<think>a</think>so<answer>b</answer>", None, 0),
        ("<think>a</think><answer>b</answer>.", None, 0),
    ],
    "almost": [
        ("<Think>a</Think><Answer>b</Answer>", None, 0),
        ("<think >a</think><answer>b</answer>", None, 0),
        ("<thinking>a</thinking><answer>b</answer>", None, 0),
        ("&lt;think&gt;a&lt;/think&gt;<answer>b</answer>", None, 0),
    ],
}


def test_format_is_that_of_r1():
    compare("format", verifier.format, FORMAT)


plain = st.text(max_size=30).map(lambda text: text.replace("<", "("))
spaces = st.text(alphabet=" \n\t", max_size=3)


@settings(FIXED, max_examples=200)
@given(plain, plain, st.tuples(spaces, spaces, spaces), plain, st.integers(0, 3))
def test_format_holds_for_any_thought_and_answer(thought, answer, space, outside, gone):
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    parts = [space[0], tags[0], thought, tags[1], space[1], tags[2], answer, tags[3], space[2]]
    assert verifier.format("".join(parts), None) == 1
    assert verifier.format("".join(part for part in parts if part != tags[gone]), None) == 0
    for place in (0, 4, 8):
        changed = "".join([*parts[:place], outside, *parts[place + 1 :]])
        assert verifier.format(changed, None) == (not outside.strip())


SCRAPS = ["#### ", "$", ",", ".", "-", "1", "23", " ", "\n", "<think>", "</think>", "<answer>", "</answer>"]
responses = st.text() | st.lists(st.sampled_from(SCRAPS)).map("".join)
references = st.text() | st.integers() | st.floats() | st.none() | st.booleans() | st.lists(st.text()) | st.binary()


@pytest.mark.parametrize("name", ["gsm8k", "exact", "format"])
@settings(FIXED, max_examples=200)
@given(responses, references)
def test_strict_checkers_take_any_text_and_any_reference(name, response, answer):
    """They score it, or refuse the reference by ValueError, at the start of a run as well as for a response."""
    try:
        verifier.VERIFIERS[name].reference(answer)
        refused = False
    except ValueError:
        refused = True
    assert (score(getattr(verifier, name), response, answer) is None) == refused
