r"""The reward `math`: whether the final answer of a response equals the reference, by math-verify or as words.

math-verify parses LaTeX and compares expressions. This file decides what it reads, and what it cannot know:
  1. It reads the last box; without one, what follows the last "answer is" or "answer:", or the only line, if that is a
     formula and nothing else; else what math-verify's search returns.
  2. A reference in words (Yes, Friday, A, 12:30 PM) is compared as text.
  3. A percent sign is dropped: 42\% is 42, not 0.42. A unit may be left out; another unit that sympy knows is wrong.
  4. Numbers that differ by more than 1e-5 of their size are not equal; math-verify rounds to 6 decimals.
  5. (2, 1) is not \{1, 2\}, 42_3 is not 42_5, and an equation between numbers has to hold: 43 = 42 is not 42.

Comparing a formula can last forever: the caller kills the process of a check after LIMIT seconds.
"""

import contextlib
import functools
import re

from plumbing.rewards.answers import BOX, final_text, gold_answer, last_box

LIMIT = 5.0  # seconds
LONGEST = 500  # characters of an answer that is read as a formula
SEARCHED = 2000  # characters, at the end of a response, that math-verify searches: its time grows with their square

Answer = tuple[str, list]  # its text, and the formula as math-verify parsed it, [] for words


def math(response: str, answer) -> float:
    """Return 1 if the final answer of a response equals the reference."""
    return float(equal(read_answer(reference_text(answer)), read_response(response)))


def reference_text(answer) -> str:
    """Return the box of a reference, or what it announces; raise ValueError if there is nothing to repeat."""
    gold = gold_answer(answer)
    box = last_box(gold)
    reference = announced(gold) if box is None else box
    if not re.search(r"\w", reference) or len(reference) > LONGEST:
        raise ValueError(f"{gold!r:.60} is not an answer that a response can repeat")
    return reference


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_response(response: str) -> Answer:
    """Return the final answer of a response, ("", []) without one."""
    text = final_text(response)
    box = last_box(text)
    if box is not None:
        return read_answer(announced(box))
    if BOX.search(text):  # cut off inside a box
        return "", []
    stated = announced(text)
    stated = "" if len(stated) > LONGEST or "\n" in stated else tidy(stated)
    if re.search(r"\w", stated) and not WORD.search(re.sub(r"\\[A-Za-z]+", " ", split_unit(stated)[0])):
        return read_answer(stated)
    return stated, parse(text[-SEARCHED:])


ANNOUNCED = re.compile(r"(?i:answer)(?:[^.\n]{0,80}?\bis\b|\W{0,8}?[:=])[\s:*}]*|####\s*")


def announced(text: str) -> str:
    """Return the rest of the sentence behind the last "answer is", "answer:" or "####" of a text, else the text."""
    start = max((match.end() for match in ANNOUNCED.finditer(text)), default=None)
    return text.strip() if start is None else re.split(r"\n|\.(?=\s)", text[start:].strip(), maxsplit=1)[0]


@functools.lru_cache(maxsize=64)  # the responses of a group have the same reference
def read_answer(text: str) -> Answer:
    """Return a text that is an answer and nothing else as it is compared."""
    tidied = tidy(text)
    value, _ = split_unit(tidied)
    is_text = len(tidied) > LONGEST or is_words(value)
    return tidied, [] if is_text else parse(f"${value}$", only_formula=True)


def parse(text: str, only_formula: bool = False) -> list:
    """Return what math-verify finds in a text: [expression, its text], [text] for what it cannot parse, or []."""
    import math_verify
    from latex2sympy2_extended import NormalizationConfig

    # Its list of units has c, d, h and t, and makes 2 of 2c.
    rules = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="none")
    options = {"extraction_config": [math_verify.LatexExtractionConfig(normalization_config=rules)]}
    # The library's time limits require signals.
    return math_verify.parse(text, parsing_timeout=None, **(options if only_formula else {}))


# ---- the text of an answer -------------------------------------------------------------------------------------------

LARGE = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
SYMBOLS = {
    "[−–]": "-", "×": r"\times", "·": r"\cdot", "÷": "/", "π": r"\pi", "√": r"\sqrt", "°": r"^\circ", "²": "^2",
    "³": "^3", "≤": r"\le", "≥": r"\ge", "≠": r"\ne", "∞": r"\infty", "∪": r"\cup", "∩": r"\cap",
}  # fmt: skip
TIDY = [  # (pattern, replacement), in this order
    *[(symbol, latex.replace("\\", r"\\") + " ") for symbol, latex in SYMBOLS.items()],
    (r"\\?\$|[€£¥₹]|(?<!\\)\\[()\[\]]|\\!\s*", ""),  # signs of money and of formulas
    (r"(?<!\\)\\[,;:> ]|\\q?quad\b|\\displaystyle\b|~|\s", " "),
    (r"\\(?:text(?:normal|bf|it|rm)?|math(?:rm|bf|it)|[mh]box)\s*\{([^{}]*)\}", r" \1 "),
    (r"^\\approx\b|(?<=\\circ) *[CF]\b", ""),  # about; of a temperature
    (r"\\?%|\bpercent\b", ""),
    *[(rf"(?<=\d) *{word}\b", rf"\\times 10^{{{power}}} ") for word, power in LARGE.items()],
    (r"(?<![\w.])([\d.]+)[eE]([-+]?\d+)(?!\w)", r"\1\\times 10^{\2}"),  # 1.5e3
    (r"  +", " "),
    (r"(?<=\d) (?=(?:\d{3} )*\d{3}(?!\d))", ""),  # 1 234 567
    (r"(?<![\w.}])(\d+) (\d+)/(\d+)(?!\w)", r"\1\\frac{\2}{\3}"),  # 1 1/2
    (r"\\?sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(?<![\\A-Za-z])(pi|sin|cos|tan|log|ln)(?![A-Za-z])", r"\\\1 "),
]


def tidy(text: str) -> str:
    """Return an answer in plain LaTeX, without signs of formulas, money and percent, and without a final full stop."""
    for pattern, replacement in TIDY:
        text = re.sub(pattern, replacement, text)
    return text.strip(" *").rstrip(" *.,;:\\").removeprefix("+").lstrip()


UNIT = re.compile(
    r"(?:(?<=[\d})])|(?<=\\pi))"  # behind a formula, one of
    r"(?: (?!(?:and|or|not)\b)(?:[A-Za-z]{2,}\.?(?:[ /-][A-Za-z]+\.?)*|[mgshlL])"
    r"|(?:[mck]m|[km]g|ml|ft|mph|km/h|m/s|st|nd|rd|th)|(?!sin|cos|tan|log)[A-Za-z]{4,})"  # 12cm, not 2xy
    r"(?: ?\^ ?\{?\d\}?)?$"
)


def split_unit(text: str) -> tuple[str, str]:
    """Return (the formula, its unit) of an answer such as 12 cm^2 or 3 hours; (text, "") without one."""
    match = UNIT.search(text)
    end = match.start() if match and ":" not in text else len(text)
    return text[:end], text[end:]


WORD = re.compile(r"(?<![^\W_])(?!(?:and|or)\b)[^\W\d_]{2,}(?![^\W_])")
OPERATOR = re.compile(r"[=+*^_<>|\\]|(?<![A-Za-z])-|-(?![A-Za-z])")


def is_words(text: str) -> bool:
    """Return whether an answer is words, such as Friday, (A) or 12:30 PM, and not a formula."""
    return not OPERATOR.search(text) and bool(WORD.search(text) or re.fullmatch(r"\(?[^\W\d_]\)?", text))


# ---- comparing -------------------------------------------------------------------------------------------------------


def equal(reference: Answer, stated: Answer) -> bool:
    """Return whether two answers are the same."""
    from math_verify import verify

    (text, formula), (other_text, other_formula) = reference, stated
    if plain(text, words=not formula) == plain(other_text, words=not formula):
        return True
    if not formula or not other_formula or differ_in_kind(text, other_text):
        return False
    same = verify(formula, other_formula, allow_set_relation_comp=True, timeout_seconds=None)
    return same and holds(other_formula[0]) and not far_apart(formula[0], other_formula[0])


def plain(text: str, words: bool) -> str:
    """Return a text without spaces, except between digits; words also without case, parentheses and full stops."""
    text = re.sub(r"(?<!\d) | (?!\d)", "", text)
    return re.sub(r"[{}()]|\.(?!\d)", "", text).casefold() if words else text


def differ_in_kind(*texts: str) -> bool:
    """Return whether two answers are in other units or bases, or one is a set and the other a tuple or interval."""
    units = [known_unit(split_unit(text)[1]) for text in texts]
    bases = [re.findall(r"\d\s*_\s*\{?(\d+)\}?$", text) for text in texts]
    brackets = [re.findall(r"^(?:\\left)?\s*(?:(\\\{)|[(\[])", text) for text in texts]
    return any(all(pair) and pair[0] != pair[1] for pair in (units, bases, brackets))


def known_unit(unit: str) -> list:
    """Return the parts of a unit, [kilometer, hour] for km/h, [] if one of them is not a unit of sympy's."""
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
