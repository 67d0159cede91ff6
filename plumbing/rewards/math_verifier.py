r"""The reward `math`: whether the final answer of a response equals the reference, by math-verify or as words.

math-verify parses LaTeX and compares expressions. This file decides what it gets to read, and what it cannot know:
  1. The text to read is the last box (plumbing/rewards/answers.py); without one, what follows the last "answer is" or
     "answer:", or the only line there is, if that is nothing but a formula; else math-verify's own search.
  2. A reference in words (Yes, Friday, A, 12:30 PM) is compared as text, case, spaces and \text{} aside.
  3. A percent sign is dropped: 42\% is 42, not 0.42. A unit may be left out. One that is known to be another is wrong.
  4. Numbers that differ by more than 1e-5 of their size are not equal; math-verify rounds to 6 decimals.
  5. (2, 1) is not \{1, 2\}, 42_3 is not 42_5, and an equation between numbers has to hold: 43 = 42 is no 42.

A formula can take for ever, so the caller gives a check few seconds (LIMIT) and kills its process. The response is
wrong, then, if the reference alone can be read in that time.

Rooms: plumbing/rewards/answers.py.
"""

import contextlib
import functools
import re
from typing import NamedTuple

from plumbing.rewards.answers import BOX, final_text, gold_answer, last_box

LIMIT = 5.0  # seconds
LONGEST = 500  # characters of an answer that is read as a formula
LONGEST_WORDS = 200  # characters of a reference in words
SEARCHED = 2000  # characters, at the end of a response, that math-verify searches: its time grows with their square


class Answer(NamedTuple):
    """An answer as it is compared."""

    text: str
    formula: list  # as math-verify parsed it; [] for words
    unit: str  # that followed it


def math(response: str, answer) -> float:
    """Return 1 if the final answer of a response equals the reference. Raise ValueError for a reference of nothing."""
    reference = read_reference(reference_text(answer))
    stated = read_response(response)
    return float(stated is not None and equal(reference, stated))


# ---- reading ---------------------------------------------------------------------------------------------------------


def reference_text(answer) -> str:
    """Return the reference answer of a row as text, of a solution its box or what it announces.

    Raise ValueError for a list, for nothing, and for words that are too many for a response to repeat.
    """
    gold = gold_answer(answer)
    box = last_box(gold)
    text = announced(gold) if box is None else box
    if not re.search(r"\w", text):
        raise ValueError(f"{gold!r:.60} holds no answer")
    if len(text) > LONGEST_WORDS and is_words(tidy(text)):
        raise ValueError(f"{text!r:.60} is a text of {len(text)} characters and no answer")
    return text


@functools.lru_cache(maxsize=64)  # the responses of a group have the same one
def read_reference(text: str) -> Answer:
    """Return a `reference_text` as it is compared."""
    answer = read_answer(text)
    # Words around a formula, as in "The radius is $5$": math-verify finds the formula.
    return answer._replace(formula=search(text)) if not answer.formula and "$" in text.strip(" $") else answer


def read_response(response: str) -> Answer | None:
    """Return the final answer of a response, None without one."""
    text = final_text(response)
    box = last_box(text)
    if box is not None:
        return read_answer(announced(box))
    if not text or BOX.search(text):  # nothing, or cut off within a box
        return None
    stated = announced(text)
    stated = tidy(stated) if len(stated) <= LONGEST and "\n" not in stated else ""
    if is_formula(stated):
        return read_answer(stated)
    answer = Answer(stated, search(text), "")
    return answer if answer.text or answer.formula else None


ANNOUNCED = re.compile(r"(?i:answer)(?:[^.\n]{0,80}?\bis\b|\W{0,8}?[:=])[\s:*}]*|####\s*")


def announced(text: str) -> str:
    """Return the rest of the sentence behind the last "answer is", "answer:" or "####" of a text, else the text."""
    start = max((match.end() for match in ANNOUNCED.finditer(text)), default=None)
    return text.strip() if start is None else re.split(r"\n|\.(?=\s)", text[start:].strip(), maxsplit=1)[0]


def search(text: str) -> list:
    """Return what math-verify finds in a text: [expression, text], or [] for nothing."""
    from math_verify import parse

    # The library's own time limits need signals; the caller kills this process instead.
    return parse(text[-SEARCHED:], parsing_timeout=None)


def read_answer(text: str) -> Answer:
    """Return a text that is nothing but an answer as it is compared."""
    text = tidy(text)
    if len(text) > LONGEST:
        return Answer(text, [], "")
    value, unit = split_unit(text)
    return Answer(text, [] if is_words(value) else parse_formula(number_form(value)), unit)


def parse_formula(latex: str) -> list:
    """Return LaTeX as math-verify parses it: [expression, text], or [text] for what it cannot parse."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    # Its list of units has c, d, h and t, and makes 2 of 2c.
    normalization = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="none")
    return parse(f"${latex}$", [LatexExtractionConfig(normalization_config=normalization)], parsing_timeout=None)


# ---- the text of an answer -------------------------------------------------------------------------------------------

SYMBOLS = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "√": r"\sqrt ", "°": r"^\circ ",
    "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "²": "^2", "³": "^3",
}  # fmt: skip
LARGE = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
TIDY = [  # (pattern, replacement), in this order
    (r"\\?\$|[€£¥₹]|(?<!\\)\\[()\[\]]|\\!\s*", ""),  # signs of money and of formulas
    (r"(?<!\\)\\[,;:> ]|\\q?quad\b|\\displaystyle\b|~|\s", " "),
    (r"\\(?:text(?:normal|bf|it|rm)|math(?:rm|bf|it)|[mh]box)\s*(?=\{)", r"\\text"),
    (r"^\\approx\b|(?<=\\circ) ?(?:\\text ?\{ ?)?[CF]\b ?\}?", ""),  # about; of a temperature
    (r"\\?%|\\text ?\{ ?percent ?\}|\bpercent\b", ""),
    *[(rf"(?<=\d) ?(?:\\text ?\{{ ?)?{word}\b ?\}}?", rf"\\times 10^{{{power}}} ") for word, power in LARGE.items()],
    (r"\\?sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(?<![\\A-Za-z])(pi|sin|cos|tan|log|ln)(?![A-Za-z])", r"\\\1 "),
    (r"  +", " "),
]


def tidy(text: str) -> str:
    """Return an answer in plain LaTeX, without signs of formulas, money and percent, and without a final full stop."""
    text = text.translate(str.maketrans(SYMBOLS))
    for pattern, replacement in TIDY:
        text = re.sub(pattern, replacement, text)
    return text.lstrip(" *").rstrip(" *.,;:\\").removeprefix("+").lstrip()


NO_UNIT = r"(?! ?(?:and|or|not)\b)"
UNIT = re.compile(
    r"(?P<value>[^:]*?(?:\d|\\pi|[})]))"  # a formula, then one of
    rf"(?: ?\\text ?\{{{NO_UNIT}(?P<text>[^{{}}\d]*)\}}"  # what LaTeX writes as text
    rf"| {NO_UNIT}(?P<words>[A-Za-z]{{2,}}\.?(?:[ /-][A-Za-z]+\.?)*|[mgshlL])"  # words, or a letter that is a unit
    r"|(?P<joined>(?:[mck]m|[km]g|ml|ft|mph|km/h|m/s|st|nd|rd|th)|(?!sin|cos|tan|log)[A-Za-z]{4,}))"  # 12cm, no 2xy
    r"(?P<power> ?\^ ?\{?\d\}?)?"
)


def split_unit(text: str) -> tuple[str, str]:
    r"""Return (the formula, its unit) of an answer such as 12 cm^2, 5\text{ m} or 3 hours; (text, "") without one."""
    match = UNIT.fullmatch(text)
    if not match:
        return text, ""
    unit = match["text"] or match["words"] or match["joined"] or ""
    return match["value"], unit.strip() + re.sub(r"[^\d]", "", match["power"] or "")


def number_form(text: str) -> str:
    """Return a number written as 1 234 567, 1.5e3 or 1 1/2 in the LaTeX that math-verify reads; other text as it is."""
    if re.fullmatch(r"-?\d{1,3}( \d{3})+(\.\d+)?", text):
        return text.replace(" ", "")
    text = re.sub(r"^(-?[\d.]+)[eE]([-+]?\d+)$", r"\1\\times 10^{\2}", text)
    return re.sub(r"^(-?)(\d+) (\d+)/(\d+)$", r"\1\2\\frac{\3}{\4}", text)


COMMAND = re.compile(r"\\[A-Za-z]+")
WORD = re.compile(r"(?<![^\W_])(?!(?:and|or)\b)[^\W\d_]{2,}(?![^\W_])")
OPERATOR = re.compile(r"[=+*^_<>|\\]|(?<![A-Za-z])-|-(?![A-Za-z])")


def is_words(text: str) -> bool:
    """Return whether an answer is words, such as Friday, (A) or 12:30 PM, and no formula."""
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text).strip()
    return not OPERATOR.search(text) and bool(WORD.search(text) or re.fullmatch(r"\(?[^\W\d_]\)?", text))


def is_formula(text: str) -> bool:
    """Return whether a text is nothing but a formula, perhaps with a unit."""
    if len(text) > LONGEST or not re.search(r"\w", text):
        return False
    return not WORD.search(COMMAND.sub(" ", split_unit(text)[0]))


# ---- comparing -------------------------------------------------------------------------------------------------------


def equal(reference: Answer, stated: Answer) -> bool:
    """Return whether two answers are the same."""
    from math_verify import verify

    if words_of(reference.text) == words_of(stated.text) and not reference.formula:
        return True
    if without_spaces(reference.text) == without_spaces(stated.text):
        return True
    if not reference.formula or not stated.formula or differ_in_kind(reference, stated):
        return False
    # The library's own time limits need signals; the caller kills this process instead.
    same = verify(reference.formula, stated.formula, allow_set_relation_comp=True, timeout_seconds=None)
    return same and holds(stated.formula[0]) and not far_apart(reference.formula[0], stated.formula[0])


def without_spaces(text: str) -> str:
    """Return a text without its spaces, but for those between digits."""
    return re.sub(r"(?<!\d) | (?!\d)", "", text)


def words_of(text: str) -> str:
    r"""Return the letters and digits of an answer in words, without \text, spaces, punctuation and case."""
    return re.sub(r"\\text\b|[^\w:/]", "", text).casefold()


def differ_in_kind(one: Answer, other: Answer) -> bool:
    """Return whether two answers are in other units or bases, or one is a set and the other a tuple or interval."""
    units = [known_unit(answer.unit) for answer in (one, other)]
    bases = [re.findall(r"\d\s*_\s*\{?(\d+)\}?$", answer.text) for answer in (one, other)]
    brackets = [re.match(r"(?:\\left)?\s*(\\\{|[(\[])", answer.text) for answer in (one, other)]
    is_set = [match[1] == r"\{" for match in brackets if match]
    return any(all(pair) and pair[0] != pair[1] for pair in (units, bases)) or len(set(is_set)) == 2


def known_unit(unit: str) -> list:
    """Return the parts of a unit, [kilometer, hour] for km/h, [] if one of them is no unit of sympy's."""
    from sympy.physics import units

    parts = [part if part.isdigit() else getattr(units, part, None) for part in re.findall(r"[A-Za-z]+|\d", unit)]
    return [] if None in parts else parts


def holds(expression) -> bool:
    """Return False for an equation between numbers that is wrong, such as 43 = 42; a rounded side may be 1% off."""
    from sympy import Eq, Float

    sides = [(part.lhs, part.rhs) for part in getattr(expression, "_unsorted_args", [expression]) if type(part) is Eq]
    return not any(far_apart(*pair, ratio=1e-2 if any(x.has(Float) for x in pair) else 1e-15) for pair in sides)


def far_apart(one, other, ratio: float = 1e-5) -> bool:
    """Return whether both are numbers, perhaps as x = 5, that differ by more than a share of the larger."""
    from sympy import Eq

    one, other = (x.rhs if type(x) is Eq and x.lhs.is_Symbol else x for x in (one, other))
    if one == other or not all(getattr(x, "is_number", False) for x in (one, other)):
        return False
    with contextlib.suppress(Exception):  # infinite, or more than it can evaluate
        one, other = one.evalf(20), other.evalf(20)
        return bool(abs(one - other) > ratio * max(abs(one), abs(other)))
    return False


def equal_answers(responses: list[str]) -> list[str | None]:
    """Return the final answer of each response, equal ones in the words of the first of them.

    None for a response without one, or with one that math-verify cannot read.
    """
    distinct: list[tuple[str, Answer]] = []  # no two of them equal
    answers: list[str | None] = []
    for response in responses:
        stated = None
        with contextlib.suppress(Exception):
            stated = read_response(response)
        if stated is None:
            answers.append(None)
            continue
        first = next((text for text, other in distinct if equal(other, stated)), None)
        if first is None:
            first = str(stated.formula[-1]) if stated.formula else stated.text
            distinct.append((first, stated))
        answers.append(first)
    return answers
