"""The reward `math`: whether the final answer of a response equals the reference, by math-verify or
as words.

math-verify parses LaTeX and compares expressions. This file decides what it reads, and what it
cannot know: docs/data_and_rewards.md has the rules. Comparing a formula can last forever: the
caller kills the process of a check after LIMIT seconds.
"""

import functools
import re
from contextlib import suppress
from typing import Any, NamedTuple

from plumbing.rewards.answers import BOX, final_text, gold_answer, last_box
from plumbing.rewards.verifiers import Verifier

LIMIT = 5.0  # seconds
LONGEST = 500  # characters of an answer that is read as a formula


class Answer(NamedTuple):
    """An answer in the parts that are compared."""

    text: str = ""
    formula: str = ""  # without its unit; "" for words
    unit: str = ""
    base: str = ""  # of a number such as 101_2


def math(response: str, answer: Any) -> float:
    """Return 1 if the final answer of a response equals the reference."""
    return float(equal(read_answer(reference_text(answer)), read_response(response)))


def reference_text(answer: Any) -> str:
    """Return the box of a reference, or what it announces; raise ValueError if there is nothing to
    repeat.
    """
    gold = gold_answer(answer)
    box = last_box(gold)
    reference = announced(gold) if box is None else box
    if not re.search(r"\w", reference) or len(reference) > LONGEST:
        raise ValueError(f"{gold!r:.60} is not an answer that a response can repeat")
    return reference


def read_response(response: str) -> Answer:
    """Return the final answer of a response, Answer() without one."""
    text = final_text(response)
    box = last_box(text)
    if box is None and BOX.search(text):  # cut off inside a box
        return Answer()
    return read_answer(announced(text) if box is None else box, in_sentence=True)


ANNOUNCED = re.compile(r"(?i:answer)(?:\W{0,8}?:|[^.\n]{0,80}?\bis\b|\**\n)[\s:]*|####")


def announced(text: str) -> str:
    """Return the line or sentence behind the last "answer is", "answer:" or "####", else the last
    with a formula.
    """
    start = max((match.end() for match in ANNOUNCED.finditer(text)), default=None)
    sentences = re.split(r"\n|\.(?=\s)", text[start:].strip())
    if start is not None:
        return sentences[0]
    formulas = [sentence for sentence in sentences if re.search(r"[\d\\$=]", sentence)]
    return (formulas or [text])[-1].strip()


# ---- the text of an answer -----------------------------------------------------------------------


MONEY = r"(?:\\\$|[€£¥₹]|Rs\.?)"
# Patterns and what replaces them, nothing if there is nothing, in this order; ␣ is a space. First
# what is not shown, then symbols, signs of formulas and fonts, spaces, text, units, number words,
# and forms of numbers such as 1.5e3, 0.\overline{3}, 1 234 567 and 1 1/2; last a set of points.
SPELLINGS = r"""
(?<!\\)%(?=\w).*|^\s*%.*|\\(?:[hv]?phantom|label|tag|hspace|footnote)\s*\{[^{}]*\}
[−–]                                           -␣
·                                              \\cdot␣
π                                              \\pi␣
√                                              \\sqrt␣
∞                                              \\infty␣
°|\\degree\b                                   ^\\circ␣
²                                              ^2␣
³                                              ^3␣
½                                              \\frac12␣
¼                                              \\frac14␣
¾                                              \\frac34␣
∅|\\varnothing                                 \\emptyset␣
…|\.\.\.                                       \\ldots␣
\\lbrace\b                                     \\{␣
\\rbrace\b                                     \\}␣
\\langle\b                                     (␣
\\rangle\b                                     )␣
\{:\}                                          :␣
\\leq(?!\w)|≤                                  \\le␣
\\geq(?!\w)|≥                                  \\ge␣
\\lor\b                                        or␣
\\equiv\b|≡                                    =␣
\\checkmark                                    ␣
(?<!\\)\$|(?<!\\)\\[()\[\]]|\\!\s*
\\(?:displaystyle|normalsize|[lL]arge|LARGE|[hH]uge|bf|it|rm|bm|boldsymbol|underline|left|right)(?![A-Za-z]) ␣
\\(?:text)?color␣*\{\w+\}|(?<!\\)\\[,;:>␣]|\\q?quad\b|~|\s ␣
\\(?:text(?:normal|bf|it|rm)?|math(?:rm|bf|it)|[mh]box)\s*\{((?:[^{}]|\{[^{}]*\})*)\} ␣\1␣
\\frac␣?\{␣([A-Za-z]+)␣\}\{␣([A-Za-z]+␣(?:\^\d)?)␣?\} ␣\1/\2
\\mu␣*(?=[mgsACFLVW]\b)                        μ
(?:\(?\\[bp]?|\()mod␣*\{?␣*(\d+)␣*\}?\)?       ␣mod\1␣
\\?%|\bper␣?cent\b                             ␣%␣
(?<=[\d}])␣%␣(?=.*\d)                          ␣
␣␣+                                            ␣
(?<=[\d}])␣?dozens?\b␣?                        \\times␣12␣
(?<=[\d}])␣?hundreds?\b␣?                      \\times␣10^{2}␣
(?<=[\d}])␣?thousands?\b␣?                     \\times␣10^{3}␣
(?<=[\d}])␣?lakhs?\b␣?                         \\times␣10^{5}␣
(?<=[\d}])␣?millions?\b␣?                      \\times␣10^{6}␣
(?<=[\d}])␣?crores?\b␣?                        \\times␣10^{7}␣
(?<=[\d}])␣?(?:billion|bn)s?\b␣?               \\times␣10^{9}␣
(?<=[\d}])␣?trillions?\b␣?                     \\times␣10^{12}␣
^␣?(-?)␣?(MONEY)␣?(.*?)(␣per␣.*)?$             \1\3␣\2\4
(?<![\w.])([\d.]+)[eE]([-+]?\d+)(?!\w)         \1\\times␣10^{\2}
(\.\d*)\\overline␣?\{(\d+)\}                   \1\2\2\2\2\2\2\2\2
(?<=\d)␣(?=(?:\d{3}␣)*\d{3}(?!\d))
(?<![\w.}])(\d+)␣(\d+)/(\d+)(?!\w)             \1\\frac{\2}{\3}
\\?sqrt␣?(?:\(([^()]*)\)|(\d+))                \\sqrt{\1\2}
(?<=\d)␣(?:square|sq\.?)␣([a-z]+)|(?<=[a-z]{2})␣squared ␣\1^2
(?<=\d)␣cubic␣([a-z]+)                         ␣\1^3
\^(-?\d+)                                      ^{\1}
(?<![\\A-Za-z])(pi|sin|cos|tan|log|ln)(?![A-Za-z]) \\\1␣
^\\\{␣*(\(.*\))␣*\\\}$                         \1
^␣?(?:\\approx\b|[+=]|(?:[oO]ption|[cC]hoice)␣(?=\(?[A-Z]\b))
"""
TIDY = [
    [part.strip().replace("␣", " ") for part in line.partition(" ")[::2]]
    for line in SPELLINGS.replace("MONEY", MONEY).strip().splitlines()
]


def tidy(text: str) -> str:
    """Return an answer in plain LaTeX, without signs of formulas and without a final full stop."""
    for pattern, replacement in TIDY:
        text = re.sub(pattern, replacement, text)
    return text.strip(" *").rstrip(" *.,;:\\")


REASON = re.compile(r",? \(?(?:because|since|not)\b|[,(] ?(?:as|by)\b")
NEGATION = r"not|\w+n't|never|no|neither|cannot"
COUNTS = (
    r"one|two|three|four|five|six|seven|eight|nine|eleven|twelve|\w+teen|(?:twen|thir|for|fif|six|seven|eigh|nine)ty"
    r"|plus|minus|negative|squared|cubed|factorial|doubled|tripled|half|halves|halved|thirds?|quarters?|score|gross"
    r"|(?:four|fif|six|seven|eigh|nin|twelf)ths?|(?:ten|dozen|hundred|[a-z]+sand|[a-z]+illion)(?:s|ths?)?"
)
# Of a formula: words up to "is", then words, but not the product ab of ab(c+d)
INTRODUCTION = re.compile(
    r"(?:[^\d,;]*\b(?:is|are|equals?(?: to)?|be)\b[\s:]*)?"
    r"(?:(?=(?:[aA] )?\S*[eiou])(?:(?!and\b|or\b)[^\W\d_]{2,}[.,:]? +|[aA] +)+(?=-?[\d.\\($\[]|\w ?=))?"
)
# What makes another answer of a formula, in its introduction and behind it.
BEFORE = re.compile(
    rf"\b(?:{NEGATION})\b|\b(?:twice|thrice|double|triple|times|over|under|above|below|by|root|as|from|up to|but|except"
    rf"|than|least|most|{COUNTS})(?: of| the)*\W*$"
)
BEHIND = re.compile(
    rf"\b(?:{NEGATION}|if|when|where|unless|except|but|than|at least|at most)\b|% (?:more|less|fewer|of|off)\b"
)

UNITS = """
meter=m metre=m gram=g second=s sec=s minute=min hour=h hr=h day=day year=year yr=year liter=L litre=L l=L ml=mL joule=J
newton=N watt=W volt=V ampere=A amp=A coulomb=C celsiu=C fahrenheit=F kelvin=K farad=F tesla=T ohm=Ω omega=Ω hertz=Hz
pascal=Pa mole=mol byte=B kb=kB bit=bit calorie=cal foot=ft feet=ft inch=in inche=in yard=yd mile=mi mph=mi/h kph=km/h
pound=£ lb=£ gbp=£ ounce=oz gallon=gal radian=rad degree=° circ=° dollar=$ usd=$ euro=€ eur=€ yen=¥ rupee=₹ rs=₹ cent=¢
per=/ pt=point unit=
"""
PREFIXES = "kilo=k mega=M giga=G tera=T centi=c milli=m micro=μ nano=n ="
NAMES = {
    prefix + name: symbol + unit
    for prefix, symbol in (pair.split("=") for pair in PREFIXES.split())
    for name, unit in (pair.split("=") for pair in UNITS.split())
}
KNOWN = {symbol for unit in NAMES.values() for symbol in unit.split("/")}
POWER = r"(?: ?\^ ?\{? ?-?(\d) ?\}?)?"
ATOM = rf"(?:[A-Za-z]{{2,}}\d*\.?|μ?[mghslLJNWVACKFTMΩB]|\\Omega){POWER}"
SIGN = rf"(?:{MONEY}|[%¢']+)"
UNIT = re.compile(
    rf"(?:(?<=[\d}})])|(?<=\\pi))(?!.* (?:and|or|is|are|{COUNTS})\b)"  # behind a formula, one of
    rf"(?: ?\^ ?\{{? ?\\circ ?\}}? ?[CF]?| ?{SIGN}| {ATOM}"
    # 12cm, not 2xy
    r"|(?:[mck]m|[km]g|ml|ft|mph|km/h|m/s|st|nd|rd|th)|(?!sin|cos|tan|log)[A-Za-z]{4,})"
    rf"(?:(?:[ /(]|- ?|\\cdot ?)+(?:{ATOM}|{SIGN}))*\)?$"
)


@functools.lru_cache(maxsize=64)  # the responses of a group have the same reference
def read_answer(stated: str, in_sentence: bool = False) -> Answer:
    """Return an answer, in a sentence perhaps such as "The area is 12 cm^2", in the parts that are
    compared.
    """
    if len(stated) > LONGEST:
        return Answer()
    text = REASON.split(tidy(stated), maxsplit=1)[0]
    match = INTRODUCTION.match(text)
    introduction = match[0] if match and in_sentence else ""
    rest = text[len(introduction) :]
    unit = UNIT.search(rest)
    formula = rest[: unit.start()] if unit else rest
    if BEFORE.search(introduction) or BEHIND.search(rest) or is_words(formula):
        return Answer(text)
    in_base = re.fullmatch(r"(-?\d[\dA-F]*) ?_(.+)", formula)
    formula, base = in_base.groups() if in_base else (formula, "")
    return Answer(text, formula, unit[0] if unit else "", base.strip("{} "))


WORD = re.compile(r"\b(?!(?:and|or)\b)[^\W\d_]{2,}\b")
PRODUCT = r"[a-df-hj-np-tv-z]{2,3}"  # xy and abc, but not no
OPERATOR = re.compile(rf"[=+^<>\\]|^{PRODUCT}$")


def is_words(text: str) -> bool:
    """Return whether an answer is words, such as Friday, (A) or 12:30 PM, or what math-verify would
    misread.
    """
    misread = re.search(r"\d:\d|dots|(?:[<>]|\\[lg]e\b).* (?:or|and) ", text)
    words = WORD.search(text) or re.fullmatch(r"\(?[^\W\d_]\)?", text)
    return bool(misread or words and not OPERATOR.search(text))


# ---- comparing -----------------------------------------------------------------------------------


# Of a set, and of a tuple or interval.
SET_AND_TUPLE = re.compile(r" *\\\{.*\n *[(\[]| *[(\[].*\n *\\\{")


def equal(reference: Answer, stated: Answer) -> bool:
    """Return whether a response states the reference."""
    from math_verify import verify

    words = not reference.formula
    if plain(reference.text, words) == plain(stated.text, words):
        return True
    if SET_AND_TUPLE.match(f"{reference.formula}\n{stated.formula}") or stated.base not in (
        "",
        reference.base,
    ):
        return False
    one = parse(reference.formula)
    other = parse(value(stated.formula, "=" in reference.formula))
    return (
        same_unit(reference.unit, stated.unit)
        and close(one[0], other[0])
        and verify(one, other, timeout_seconds=None)
    )


def plain(text: str, words: bool) -> str:
    """Return a text without spaces, except between digits; words also without case, article and
    parentheses.
    """
    if words:
        text = re.sub(r"^ *(?:an?|the) (?=\w\w)|[{}()]|\.(?!\d)", "", text.casefold())
    return re.sub(r"(?<!\d) | (?!\d)", "", text)


def same_unit(*texts: str) -> bool:
    """Return whether two units may be the same: none in one of them, or the same known ones and a
    word in both.
    """
    one, other = map(unit_of, texts)
    differs = any(unit in KNOWN for unit, _ in one ^ other)
    return not one or not other or not differs and not one.isdisjoint(other)


def unit_of(text: str) -> set[tuple[str, str]]:
    """Return the units, and other words, of a text such as kg m/s^2 or dollars per day, each with
    its power.
    """
    text = re.sub(r"(?<=[^\W\d_]{2})s\b", "", text)
    text = re.sub(r"[^\W\d_]+", lambda word: NAMES.get(word[0].lower(), word[0]), text)
    return {
        (unit, power or "1")
        for unit, power in re.findall(r"([^\W\d_][^\W_]*|[°%€£¥₹¢$'])" + POWER, text)
    }


def value(text: str, equation: bool) -> str:
    """Return the last side of "name = value", or all of it if the reference is an equation, too.

    Return "" if another side is another number, or, as in 2x = 6, is to be solved for a variable.
    """
    *names, last = re.split(r"(?<![<>!])=(?![^{]*\})", text)
    if not names or any(re.search(r"[,;]|\b(?:or|and)\b", name) for name in names[1:]):
        return text
    name = re.sub(r"_(?:\{[^{}]*\}|.)|\([^()]*\)|\\(?:[A-Za-z]+|.)", "", names[0])
    unsolved = not equation and re.fullmatch(r"(?=.*[\d|])[^A-Za-z]*[a-z][^A-Za-z]*", name)
    if unsolved or not all(close(parse(name)[0], parse(last)[0]) for name in names):
        return ""
    return text if equation else last


@functools.lru_cache(maxsize=64)
def parse(text: str) -> list:
    """Return [the expression that math-verify makes of a formula, its text], or [its text] if it
    cannot parse it.
    """
    from latex2sympy2_extended.math_normalization import NormalizationConfig, normalize_latex
    from math_verify.parser import parse_latex_cached
    from sympy import I

    # Its list of units has c, d, h and t, and makes 2 of 2c.
    latex = normalize_latex(text, NormalizationConfig(malformed_operators=True))
    with suppress(Exception):  # of several libraries
        expression = solutions(parse_latex_cached(latex))
        return [
            expression.xreplace({x: I for x in expression.free_symbols if x.name == "i"}),
            latex,
        ]
    return [latex]


def solutions(expression: Any):
    """Return an inequality, or chain of them, whose variable stands alone as the set of its
    solutions; else itself.
    """
    from sympy import And, Eq
    from sympy.core.relational import Relational

    if not isinstance(expression, (And, Relational)) or expression.atoms(Eq):
        return expression
    sides = [part.args for part in expression.atoms(Relational)]
    alone = all(x.is_Symbol and y.is_number or x.is_number and y.is_Symbol for x, y in sides)
    return expression.as_set() if alone else expression


def close(one: Any, other: Any) -> bool:
    """Return whether two numbers differ by less than 1e-5 of their size; True for what is not two
    numbers.
    """
    with suppress(Exception):  # such as of what has no such attribute
        if one.is_number and other.is_number:
            one = one.evalf()
            other = other.evalf()
            return bool(abs(one - other) <= 1e-5 * max(abs(one), abs(other)))
    return True


VERIFIER = Verifier(math, "answer", "math_verify", limit=LIMIT, read=reference_text)
