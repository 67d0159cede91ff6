"""The reward `math`: whether the final answer of a response equals the reference, by math-verify or as words.

math-verify parses LaTeX and compares expressions. This file decides what it reads, and what it cannot know:
docs/data_and_rewards.md has the rules. Comparing a formula can last forever: the caller kills the process of a check
after LIMIT seconds.
"""

import cmath
import contextlib
import functools
import itertools
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


def read_response(response: str) -> Answer:
    """Return the final answer of a response, ("", []) without one."""
    text = final_text(response)
    box = last_box(text)
    if box is None and BOX.search(text):  # cut off inside a box
        return "", []
    stated = announced(text if box is None else box)
    if box is not None or is_formula(stated):
        return read_answer(stated)
    return tidy(stated[:LONGEST]), parse(re.sub(r"\\?%", "", text[-SEARCHED:]))


ANNOUNCED = re.compile(r"(?i:answer)(?:\W{0,8}?[:=]|[^.\n]{0,80}?\bis\b)[\s:*}]*|####\s*")


def announced(text: str) -> str:
    """Return what follows the last "answer is", "answer:" or "####" of a text, up to a reason; else the text."""
    start = max((match.end() for match in ANNOUNCED.finditer(text)), default=None)
    end = r"\n|\.(?=\s)|,? (?:because|since)\b"
    return text.strip() if start is None else re.split(end, text[start:].strip(), maxsplit=1)[0]


@functools.lru_cache(maxsize=64)  # the responses of a group have the same reference
def read_answer(text: str) -> Answer:
    """Return a text that is an answer and nothing else as it is compared."""
    tidied = tidy(text)
    value, _ = split_unit(tidied)
    if len(tidied) > LONGEST or is_words(value) or re.search(r"dots|(?:[<>≤≥]|\\[lg]eq?\b).* (?:or|and) ", value):
        return tidied, []
    return tidied, parse(f"${value}$", only_formula=True)


def parse(text: str, only_formula: bool = False) -> list:
    """Return what math-verify finds in a text: [expression, its text], [text] for what it cannot parse, or []."""
    import math_verify
    from latex2sympy2_extended import NormalizationConfig

    # Its list of units has c, d, h and t, and makes 2 of 2c.
    rules = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="none")
    options = {"extraction_config": [math_verify.LatexExtractionConfig(normalization_config=rules)]}
    # The library's time limits require signals.
    found = math_verify.parse(text, parsing_timeout=None, **(options if only_formula else {}))
    return [solutions(expression) for expression in found]


def solutions(expression):
    """Return an inequality, or chain of them, whose variable stands alone as the set of its solutions; else itself."""
    from sympy import And, Eq
    from sympy.core.relational import Relational

    if not isinstance(expression, (And, Relational)) or expression.atoms(Eq):
        return expression
    sides = [part.args for part in expression.atoms(Relational)]
    alone = all(x.is_Symbol and y.is_number or x.is_number and y.is_Symbol for x, y in sides)
    return expression.as_set() if alone else expression


# ---- the text of an answer -------------------------------------------------------------------------------------------

LARGE = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
SYMBOLS = {
    "[−–]": "-", "·": r"\cdot", "π": r"\pi", "√": r"\sqrt", "∞": r"\infty", "°": r"^\circ", "²": "^2", "³": "^3",
    "½": r"\frac12", "¼": r"\frac14", "¾": r"\frac34", r"∅|\\varnothing": r"\emptyset", r"…|\.\.\.": r"\ldots",
}  # fmt: skip
TIDY = [  # (pattern, replacement), in this order
    *[(symbol, latex.replace("\\", r"\\") + " ") for symbol, latex in SYMBOLS.items()],
    (r"\\\$(.*?)\.?$", r"\1 dollars"),
    (r"\\?\$|[€£¥₹]|(?<!\\)\\[()\[\]]|\\!\s*", ""),  # signs of money and of formulas
    (r"\\(?:displaystyle|normalsize|[lL]arge|LARGE|[hH]uge|bf|it|rm|bm|boldsymbol|underline)(?![A-Za-z])", " "),
    (r"\\(?:text)?color *\{\w+\}|(?<!\\)\\[,;:> ]|\\q?quad\b|~|\s", " "),
    (r"\\(?:text(?:normal|bf|it|rm)?|math(?:rm|bf|it)|[mh]box)\s*\{([^{}]*)\}", r" \1 "),
    (r"^\\approx\b|(?<=\\circ) *[CF]\b", ""),  # about; of a temperature
    (r"\\?%|\bpercent\b", ""),
    *[(rf"(?<=\d) *{word}s?\b", rf"\\times 10^{{{power}}} ") for word, power in LARGE.items()],
    (r"(?<![\w.])([\d.]+)[eE]([-+]?\d+)(?!\w)", r"\1\\times 10^{\2}"),  # 1.5e3
    (r"  +", " "),
    (r"(?<=\d) (?=(?:\d{3} )*\d{3}(?!\d))", ""),  # 1 234 567
    (r"(?<![\w.}])(\d+) (\d+)/(\d+)(?!\w)", r"\1\\frac{\2}{\3}"),  # 1 1/2
    (r"\\?sqrt ?(?:\(([^()]*)\)|(\d+))", r"\\sqrt{\1\2}"),
    (r"\^(-?\d+)", r"^{\1}"),
    (r"(?<![\\A-Za-z])(pi|sin|cos|tan|log|ln)(?![A-Za-z])", r"\\\1 "),
    (r" ?\\lor\b", " or"),
    (r"^ *(?:[+=]|(?:[oO]ption|[cC]hoice) (?=\(?[A-Z]\b))", ""),
]


def tidy(text: str) -> str:
    """Return an answer in plain LaTeX, without signs of formulas, money and percent, and without a final full stop."""
    for pattern, replacement in TIDY:
        text = re.sub(pattern, replacement, text)
    return text.strip(" *").rstrip(" *.,;:\\")


NUMERAL = (  # behind a number, what changes it
    r"and|or|not|is|plus|minus|times|squared|cubed|factorial|doubled|half|halves|thirds?|(?:dozen|score|pair)s?"
    r"|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand|[a-z]+illion)ths?"
)
UNIT = re.compile(
    r"(?:(?<=[\d})])|(?<=\\pi))"  # behind a formula, one of
    rf"(?: (?!(?:{NUMERAL})\b)(?:[A-Za-z]{{2,}}\.?|[mgshlL])(?:[ /-][A-Za-z]+\.?)*"
    r"|(?:[mck]m|[km]g|ml|ft|mph|km/h|m/s|st|nd|rd|th)|(?!sin|cos|tan|log)[A-Za-z]{4,})"  # 12cm, not 2xy
    r"(?: ?\^ ?\{?\d\}?)?$"
)


def split_unit(text: str) -> tuple[str, str]:
    """Return (the formula, its unit) of an answer such as 12 cm^2 or 3 hours; (text, "") without one."""
    match = UNIT.search(text)
    end = match.start() if match and ":" not in text else len(text)
    return text[:end], text[end:]


WORD = re.compile(r"(?<![^\W_])(?!(?:and|or)\b)[^\W\d_]{2,}(?![^\W_])")
PRODUCT = r"[a-df-hj-np-tv-z]{2,3}"  # xy and abc, but not no
OPERATOR = re.compile(rf"[=+*^_<>|\\]|(?<![A-Za-z])-|-(?![A-Za-z])|^{PRODUCT}$")


def is_words(text: str) -> bool:
    """Return whether an answer is words, such as Friday, (A) or 12:30 PM, and not a formula."""
    return not OPERATOR.search(text) and bool(WORD.search(text) or re.fullmatch(r"\(?[^\W\d_]\)?", text))


def is_formula(text: str) -> bool:
    """Return whether a line is a formula, perhaps with a unit, and nothing else."""
    value, _ = split_unit(tidy(text[:LONGEST]))
    rest = re.sub(rf"\\[A-Za-z]+|(?<=\d) (?:{NUMERAL})\b", " ", value)
    return bool(re.search(r"\w", value)) and "\n" not in text and not WORD.search(rest)


# ---- comparing -------------------------------------------------------------------------------------------------------


def equal(reference: Answer, stated: Answer) -> bool:
    """Return whether two answers are the same."""
    from math_verify import verify

    (text, formula), (other_text, other_formula) = reference, stated
    if plain(text, words=not formula) == plain(other_text, words=not formula):
        return True
    if not formula or not other_formula or any(x and y and x != y for x, y in zip(kind(text), kind(other_text))):
        return False
    pairs = itertools.product(numbers(formula[0]), numbers(other_formula[0]))
    if not all(cmath.isclose(number, other, rel_tol=1e-5) for number, other in pairs):
        return False
    return verify(formula, other_formula, timeout_seconds=None)


def plain(text: str, words: bool) -> str:
    """Return a text without spaces, except between digits; words also without case, parentheses and full stops."""
    text = re.sub(r"(?<!\d) | (?!\d)", "", text)
    return re.sub(r"[{}()]|\.(?!\d)", "", text).casefold() if words else text


UNITS = {"min": "minute", "sec": "second", "hr": "hour", "lb": "pound", "mph": "mile hour", "per": ""}
UNITS |= {name: name for name in ("cent", "dollar", "euro", "gallon", "month", "ounce", "pint", "ton", "week")}


def kind(text: str) -> tuple[list, list, list]:
    """Return the unit, the base and the opening bracket of an answer, [] for what it does not have or is not known."""
    from sympy.physics import units

    words = [UNITS.get(word.removesuffix("s"), word) for word in re.findall(r"[A-Za-z]+|\d", split_unit(text)[1])]
    unit = [getattr(units, word, word if word.isdigit() else UNITS.get(word)) for word in " ".join(words).split()]
    base = re.findall(r"\d\s*_\s*\{?(\d+)\}?$", text)
    bracket = re.findall(r"^(?:\\left)?\s*(?:(\\\{)|[(\[])", text)
    return [] if None in unit else unit, base, bracket


def numbers(expression) -> list[complex]:
    """Return a number, or those of an equation between numbers or with a variable, such as x = 6 * 7 = 42; else []."""
    from sympy import And, Eq

    with contextlib.suppress(Exception):  # of what is not a number, or too large
        equations = expression.atoms(Eq) if isinstance(expression, (And, Eq)) else ()
        sides = [side for equation in equations for side in equation.args] or [expression]
        return [complex(side) for side in sides if not side.is_Symbol]
    return []
