r"""The functions that check an answer: each takes a response and a column of its row, and returns a score.

They run in the worker processes of plumbing/reward_worker.py, which are killed when a check hangs or crashes. A check
that raises an exception gives no score, a wrong answer gives 0. Packages, and plumbing/code_tests.py for the reward
`code`, are imported by the check that needs them: the trainer imports this module too, for the names in VERIFIERS.
Imports plumbing/constraints.py.
"""

import contextlib
import functools
import re
from typing import Callable, NamedTuple

from plumbing.constraints import ifeval


def gold_answer(answer) -> str:
    """Return the reference answer of a row: what follows the last "####" of a GSM8K solution, else the text itself."""
    # A column of integers with gaps in it is read as floats.
    answer = int(answer) if isinstance(answer, float) and answer.is_integer() else answer
    return str(answer).rsplit("####", 1)[-1].strip()


def plain_number(text: str) -> str:
    """Return a number without thousands separators, dollar signs and a final full stop."""
    return text.replace(",", "").replace("$", "").strip().rstrip(".")


def last_box(text: str) -> str | None:
    r"""Return the content of the last \boxed{} of a text, None without one or if its brace is not closed."""
    _, box, after = text.rpartition("\\boxed{")
    if not box:
        return None
    depth, escaped = 1, False
    for end, character in enumerate(after):
        if not escaped:
            depth += (character == "{") - (character == "}")
        escaped = character == "\\" and not escaped
        if depth == 0:
            return after[:end].strip()
    return None


def final_answer(response: str) -> str | None:
    r"""Return what stands in the last <answer>...</answer> of a response, or in the last \boxed{} within it.

    Without the tag, return the content of the response's last \boxed{}; without that too, None.
    """
    answers = re.findall(r"<answer>(.*?)</answer>", response, re.DOTALL)
    box = last_box(answers[-1] if answers else response)
    return answers[-1].strip() if answers and box is None else box


# ---- numbers and formulas --------------------------------------------------------------------------------------------


def gsm8k(response: str, answer) -> float:
    """Return 1 if the last "#### number" of the response is the reference number (strict GSM8K)."""
    return float(marked_number(response) == plain_number(gold_answer(answer)))


def marked_number(response: str) -> str | None:
    """Return the last "#### number" of a response as `plain_number`, None without one."""
    found = re.findall(r"####\s*(-?[$]?-?[\d,]*\.?\d+)", response)
    return plain_number(found[-1]) if found else None


def harness_answer(response: str, flexible: bool) -> str | None:
    """Return the answer of a response to GSM8K as lm-evaluation-harness reads it, as `harness_text`; None without one.

    Its strict-match is the first "#### number", its flexible-extract the last number (lm_eval/tasks/gsm8k, version 3).
    """
    if flexible:
        found = ["".join(match) for match in re.findall(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", response)[-1:]]
    else:
        found = re.findall(r"#### (\-?[0-9\.\,]+)", response)[:1]
    return harness_text(found[0]) or None if found else None


def harness_text(text: str) -> str:
    """Return an answer, or a reference solution, as lm-evaluation-harness compares them."""
    for ignored in (",", r"\$", r"(?s).*#### ", r"\.$"):
        text = re.sub(ignored, "", text)
    return text.strip().lower()


# A reference that math-verify reads as text: a number, perhaps with a unit in words ("1,234 apples"), words, or text
# with $...$. Of other text it would take any one number, 2 for "(1, 2)", so everything else is read as a formula.
IS_TEXT = re.compile(
    r"[-+]?[$]?(\d{1,3}(,\d{3})+|\d+)?(\.\d+)?\s*(%|(?!(and|or)\b)[A-Za-z]{2,}( [A-Za-z]+)*)?\.?$"
    r"|(?s:.*)(?<!\\)[$]"
)


def math(response: str, answer) -> float:
    """Return 1 if the response's final answer (its last box, if it has one) equals the reference as mathematics.

    math-verify parses and compares. Raise ValueError if it cannot parse the reference.
    """
    from math_verify import parse, verify

    gold = gold_answer(answer)
    # The library's own time limits need signals; the caller kills this process instead.
    reference = parse(gold if IS_TEXT.match(gold) else f"${gold}$", parsing_timeout=None)
    if not reference:
        raise ValueError(f"math-verify cannot parse the reference answer {gold!r}")
    return float(verify(reference, parse_response(response), timeout_seconds=None))


def parse_response(response: str) -> list:
    """Return the final answer of a response as math-verify reads it: [expression, text], or [] for none."""
    from math_verify import parse

    box = last_box(response)  # the library would join several boxes into a set
    return parse(response if box is None else f"$\\boxed{{{box}}}$", parsing_timeout=None)


def equal_answers(responses: list[str]) -> list[str | None]:
    """Return the final answer of each response as math-verify reads it, equal ones in the words of the first of them.

    None for a response without one, or with one that math-verify cannot read.
    """
    from math_verify import verify

    first_equal: dict[str, str] = {}  # answer: the first answer that is equal to it
    distinct: list[tuple[str, list]] = []  # (answer, as math-verify parsed it), no two of them equal
    answers = []
    for response in responses:
        answer = None
        with contextlib.suppress(Exception):
            parsed = parse_response(response)
            answer = str(parsed[-1]) if parsed else None
        if answer is not None and answer not in first_equal:
            for other, parsed_other in distinct:
                with contextlib.suppress(Exception):  # what cannot be compared is not equal
                    if verify(parsed_other, parsed, timeout_seconds=None):
                        first_equal[answer] = other
                        break
            else:
                distinct.append((answer, parsed))
                first_equal[answer] = answer
        answers.append(first_equal.get(answer))
    return answers


# ---- text ------------------------------------------------------------------------------------------------------------


def stated_answer(reward: str, response: str) -> str | None:
    """Return the final answer of a response as text, for a vote among responses; None without one.

    With the reward gsm8k, return its `marked_number`; with exact, all of it; else its `plain_answer`.
    """
    if reward == "gsm8k":
        return marked_number(response)
    return response.strip() or None if reward == "exact" else plain_answer(response)


def plain_answer(response: str) -> str | None:
    """Return the `final_answer` of a response, else its last line behind "####", else all that follows </think>.

    Dollar signs, a final full stop, thousands separators, case and the length of white space are dropped.
    """
    answer = final_answer(response)
    if answer is None:
        marked = re.findall(r"####[ \t]*(\S.*)", response)
        answer = marked[-1] if marked else response.rpartition("</think>")[2]
    answer = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", " ".join(answer.replace("$", " ").split()).rstrip(". "))
    return answer.casefold() or None


def exact(response: str, answer) -> float:
    """Return 1 if the response is the reference answer, leading and trailing white space aside."""
    return float(response.strip() in (gold_answer(answer), str(answer).strip()))


def format(response: str, _=None) -> float:
    """Return 1 for the form of DeepSeek-R1: <think> ... </think> <answer> ... </answer>, each tag once."""
    has_form = re.fullmatch(r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*", response, re.DOTALL)
    once = all(response.count(tag) == 1 for tag in ("<think>", "</think>", "<answer>", "</answer>"))
    return float(bool(has_form) and once)


# ---- puzzles ---------------------------------------------------------------------------------------------------------


def knights(response: str, answer) -> float:
    """Return 1 if the response says of each person of the reference, and of no one else, who is a knight or a knave.

    Reference: "Zoey is a knave, and Oliver is a knight." (the column solution_text of K-and-K/knights-and-knaves).
    Of the response, the `final_answer` counts; without one, what follows the last "conclusion" after </think>; without
    that too, the last paragraph. Each "knight" or "knave" there has to be part of a statement such as "Zoey is a
    knave", "Zoey: knave" or "Zoey = knave" about a person of the reference. So a second role for a person, a choice
    ("Zoey is a knave or a knight"), a person who is not in the reference and a missing person all give 0.

    Raise ValueError if the reference names no one.
    """
    known = dict(re.findall(r"([^\W\d_][\w'’-]*) is an? (knight|knave)\b", str(answer).lower()))
    if not known:
        raise ValueError(f'the reference {answer!r} has no "NAME is a knight" or "NAME is a knave"')
    text = final_answer(response)
    if text is None:
        *others, text = re.split("conclusion", response.rpartition("</think>")[2].strip(), flags=re.IGNORECASE)
        text = text if others else re.split(r"\n\s*\n", text)[-1]
    text = re.sub(r"\\[a-z]+|_", " ", text.lower())  # LaTeX commands; an underscore would count as part of a word
    gap = r"[^\w.,;!?\n]+"
    people = "|".join(re.escape(name) for name in sorted(known, key=len, reverse=True))
    person = rf"(?<!\w)(?<!\w['’-])({people})(?!['’-]?\w)"  # a complete name: not the Ann of Mary-Ann
    statements = re.findall(rf"{person}{gap}(?:is{gap})?(?:an?{gap}|the{gap})?(knight|knave)\b", text)
    roles = re.findall(r"knight|knave", text)
    return float(len(statements) == len(roles) and set(statements) == set(known.items()))


def reasoning_gym(response: str, source) -> float:
    """Return the score of the reasoning_gym task itself, often between 0 and 1 for an answer that is partly right.

    The task's scorer gets the `final_answer`, or without one all that follows </think>. Most tasks give little to a
    text that only contains the right answer, so --system_prompt should ask for the tag. An answer that the scorer
    cannot read (some raise an exception) gives 0, if it can read the right answer.

    Args:
        source: [task, size, seed, index], from which the problem is made again: the row's column "reasoning_gym".
    """
    if not (isinstance(source, list) and len(source) == 4):
        raise ValueError('the row has no column "reasoning_gym": it is not from --dataset reasoning_gym:TASK')
    task, size, seed, index = source
    dataset = reasoning_gym_dataset(task, size, seed)
    entry, answer = dataset[index], final_answer(response)
    if answer is None:
        answer = response.rpartition("</think>")[2].strip()
    try:
        return float(dataset.score_answer(answer, entry=entry))
    except Exception:
        dataset.score_answer(entry["answer"], entry=entry)
        return 0.0


@functools.cache
def reasoning_gym_dataset(task: str, size: int, seed: int):
    import reasoning_gym

    return reasoning_gym.create_dataset(task, size=size, seed=seed)


# ---- programs --------------------------------------------------------------------------------------------------------


def code(response: str, answer, seconds: float = 24.0) -> float:
    """Return 1 if the program of the response passes all tests of the row, 0 if not, be it by a crash or at a limit.

    All tests together have so many seconds. What tests look like: see plumbing/code_tests.py.
    """
    from plumbing.code_tests import passes

    return float(passes(response, answer, seconds))


class Verifier(NamedTuple):
    """A built-in reward."""

    check: Callable[..., float]
    column: str  # of the row, whose value `check` gets as second argument; "" if it reads the response only
    package: str = ""  # that has to be installed


VERIFIERS = {
    "math": Verifier(math, "answer", "math-verify"),
    "gsm8k": Verifier(gsm8k, "answer"),
    "exact": Verifier(exact, "answer"),
    "code": Verifier(code, "answer"),
    "knights": Verifier(knights, "answer"),
    "format": Verifier(format, ""),
    "ifeval": Verifier(ifeval, "answer", "if-verifiable"),
    "reasoning_gym": Verifier(reasoning_gym, "reasoning_gym", "reasoning-gym"),
}
ANSWER_REWARDS = tuple(name for name, verifier in VERIFIERS.items() if verifier.column == "answer")
