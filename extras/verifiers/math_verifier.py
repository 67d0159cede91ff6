"""The reward `math`: whether the final answer of a response equals the reference, by math-verify or
as words.

math-verify parses LaTeX and compares expressions. This file decides what it reads: an answer
becomes a value, a unit and words. docs/data_and_rewards.md has the rules. Comparing a formula can
last forever: the caller kills the process of a check after LIMIT seconds.
"""

import functools
import re
from contextlib import suppress
from typing import Any, NamedTuple

from plumbing.rewards.answers import final_text, gold_answer, last_boxes
from plumbing.rewards.verifiers import Verifier

LIMIT = 5.0  # seconds
LONGEST = 500  # characters of an answer that is compared


class Answer(NamedTuple):
    """An answer in the parts that are compared."""

    spellings: set  # all of it, and the letter of a choice such as (C) 7
    value: str = ""  # a formula
    unit: tuple = ()  # units with their powers
    words: tuple = ()  # further ones


def math(response: str, answer: Any) -> float:
    """Return 1 if the final answer of a response equals the reference."""
    reference = read_answer(reference_text(answer))
    return float(equal(reference, read_answer(stated_answer(final_text(response)))))


def reference_text(answer: Any) -> str:
    """Return what a response has to repeat of a reference; raise ValueError if that is nothing."""
    reference = stated_answer(gold_answer(answer))
    if not re.search(r"\w", reference) or len(reference) > LONGEST:
        raise ValueError(f"{answer!r:.60} is not an answer that a response can repeat")
    return reference


# ---- where the answer stands ---------------------------------------------------------------------


# "answer" up to the next "is" or ":", or a line end or formula behind it; then markup.
ANNOUNCED = re.compile(
    r"(?:(?i:answer|réponse|respuesta|antwort|risposta|resposta|ответ)"
    r"(?:[^.\n:]{0,80}?(?::|=|\b(?:is|are|be|est|es|ist|é|è)\b)|\W{0,9}?(?=\n|\\\[|\\\(|\$))"
    r"|(?:答案|答え|正解|정답)\W?[是为はは은]?|####)(?:[\s*_`#>:：]{0,9}\n\s*[-•*]\s)?[\s*_`#>:：]*"
)
SENTENCE = re.compile(r"(?:\\\[.{0,500}?\\\]|\$\$.{0,500}?\$\$|[^\n.。]|\.(?![\s*]|$))+", re.DOTALL)
# Bold, a formula or a number.
PIECE = re.compile(
    r"(?:\*\*|`|\$).{1,200}?(?:\*\*|`|\$)|\\\(.{1,200}?\\\)|\\\[.{1,200}?\\\]|-?\d[\d.,/]*%?",
    re.DOTALL,
)


def stated_answer(text: str) -> str:
    """Return the boxes of the last sentence with one, else the sentence after the last announcement,
    else the last sentence with a formula, or of a sentence with further words the last formula.
    """
    boxes = last_boxes(text)
    if boxes is not None:
        return ", ".join(dict.fromkeys(boxes))
    *before, rest = ANNOUNCED.split(text)
    sentences = SENTENCE.findall(rest) or [""]
    if before:
        return sentences[0]
    sentence = ([x for x in sentences if re.search(r"[\d\\$=*`_]", x)] or sentences)[-1]
    pieces = PIECE.findall(sentence)
    return pieces[-1] if pieces and read_answer(sentence).words else sentence


# ---- the text of an answer -----------------------------------------------------------------------


# Patterns and what replaces them, nothing if there is nothing, in this order; ␣ is a space. First
# what is not shown, then symbols, signs of formulas and fonts, spaces, text, units, number words,
# and forms of numbers such as 1.5e3, 0.\overline{3}, 1 234 567 and 1 1/2; last a set of points.
SPELLINGS = r"""
(?<!\\)%(?=\w).*|^\s*%.*|\\(?:[hv]?phantom|label|tag|hspace|footnote)\s*\{[^{}]*\}
[−–]                                           -
[·⋅]                                           \\cdot␣
√                                              \\sqrt␣
∞                                              \\infty␣
²                                              ^2
³                                              ^3
½                                              \\frac12
¼                                              \\frac14
¾                                              \\frac34
\\varnothing                                   \\emptyset␣
…|\.\.\.                                       \\ldots␣
\\lbrace\b                                     \\{
\\rbrace\b                                     \\}
\\langle\b                                     (
\\rangle\b                                     )
\\equiv\b|≡                                    =
\{([:,])\}                                     \1
(?<!\\)\$|(?<!\\)\\[()\[\]]|\\!\s*|`
\\(?:checkmark|left|right|displaystyle|normalsize|[lL]arge|LARGE|[hH]uge|bf|it|rm|bm|boldsymbol|underline)(?![A-Za-z]) ␣
\\(?:text)?color␣*\{\w+\}|(?<!\\)\\[,;:>␣]|\\q?quad\b|~|\s ␣
\\(?:text(?:normal|bf|it|rm)?|math(?:rm|bf|it|sf)|[mh]box|operatorname)\*?\s*\{((?:[^{}]|\{[^{}]*\})*)\} ␣\1␣
\\frac␣?\{␣([A-Za-z]+)␣\}\{␣([A-Za-z]+␣(?:\^\d)?)␣?\} ␣\1/\2
\\mu␣*(?=[mgsACFLVW]\b)|μ                      micro
\\Omega\b                                      Ω
␣␣+                                            ␣
(?:\(?\\[bp]?|\()mod␣*\{?␣*(\d+)␣*\}?\)?       ␣mod\1␣
\\?%|\bper␣?cent(?:age)?\b|\bpct\b             ␣%␣
(?<=[\d}])␣%␣(?=.*\d)                          ␣
(?<=[\d}])␣?dozens?\b                          \\times␣12␣
(?<=[\d}])␣?hundreds?\b                        \\times␣10^{2}␣
(?<=[\d}])␣?thousands?\b                       \\times␣10^{3}␣
(?<=[\d}])␣?millions?\b                        \\times␣10^{6}␣
(?<=[\d}])␣?(?:billion|bn)s?\b                 \\times␣10^{9}␣
(?<=[\d}])␣?trillions?\b                       \\times␣10^{12}␣
(?<=[\d}])␣?hal(?:f|ves)\b                     /2␣
(?<=[\d}])␣?thirds?\b                          /3␣
(?<=[\d}])␣?quarters?\b                        /4␣
^␣?(-?)␣?(\\\$|[€£¥₹]|Rs\.?)␣?(.*?)(␣per␣.*)?$ \1\3␣\2\4
\\\$                                           $
(?<![\w.])([\d.]+)[eE]([-+]?\d+)(?!\w)         \1\\times␣10^{\2}
(\.\d*)\\overline␣?\{(\d+)\}                   \1\2\2\2\2\2\2\2\2
(?<=\d)␣(?=(?:\d{3}␣)*\d{3}(?!\d))
(?<![\w.}])(\d+)␣(\d+)/(\d+)(?!\w)             \1\\frac{\2}{\3}
\\?sqrt␣?(?:\(([^()]*)\)|(\d+))                \\sqrt{\1\2}
\^?␣?\{?␣?(?:\\circ|\\?degrees?\b|°)␣?\}?␣?([CF]?)(?:elsius|ahrenheit)?(?![A-Za-z]) ␣deg\1␣
\^(-?\d+)                                      ^{\1}
(?<![\\A-Za-z])(pi|sin|cos|tan|log|ln)(?![A-Za-z]) \\\1␣
^\\\{␣*(\(.*\))␣*\\\}$                         \1
(?<=\d)␣(?:square|sq\.?)␣([a-z]+)|(?<=[a-z]{2})␣squared ␣\1^2
(?<=\d)␣cubic␣([a-z]+)                         ␣\1^3
(\d␣[a-z]{3,})␣of␣[a-z␣]+$                     \1
^␣?(?:\\approx\b|[+=])
"""
TIDY = [
    [part.strip().replace("␣", " ") for part in line.partition(" ")[::2]]
    for line in SPELLINGS.strip().splitlines()
]
REASON = re.compile(r",? \(?(?:because|since|not)\b|[,(] ?(?:as|by|attained|achieved)\b")
CHOICE = re.compile(r"(?i:option |choice )?\(?([A-Z])(?:\)|[.:]) +(?!\(?[A-Z]\b)(?=.)")
# Words up to the first "is", "must be" or ":".
INTRODUCTION = re.compile(
    r"^[^\d,;=\\]*?(?:\b(?:is|are|was|has|have|equals?|gives?|gets?|(?:must|will|would|should|to) be)\b"
    r"(?: equal)?(?: to)?|[:：])[\s:]*",
    re.IGNORECASE,
)
HARMLESS = re.compile(
    r"\b(?:the|an|of|it|so|we|there|total|result|answer|option|choice|exactly|approximately|all|any|each|left|old"
    r"|long|find|thus|hence|therefore|a(?= \w\w))\b *",
    re.IGNORECASE,
)
WORD = re.compile(r"(?<![\\A-Za-z_{])[^\W\d_]{4,}")
NAME = re.compile(r"[^,;=<>]*(?<![<>!])=")
# Of units and things, what sympy.physics.units does not have.
UNITS = dict(
    pair.split("=")
    for pair in """metre=meter litre=liter sec=second min=minute hr=hour yr=year mph=mile/hour kph=kilometer/hour
    lb=pound cal=calorie calorie=calorie amp=ampere dollar=$ usd=$ $=$ euro=€ eur=€ €=€ pound=£ gbp=£ £=£ yen=¥ ¥=¥
    rupee=₹ rs=₹ ₹=₹ cent=¢ point=pt in=inch C=coulomb F=farad Ω=ohm K=kelvin B=byte gal=gallon gallon=gallon ounce=oz
    oz=oz unit= people=people degC=degC degF=degF st=th nd=th rd=th th=th month=month bpm=bpm %=% '='""".split()
)
FACTOR = r"([^\W\d_]{2,}|mod\d+|(?<![\d}\\])[mghslLJNWVACKFTMΩB]|[a-z](?=/)|[$€£¥₹¢%'])(?:(?: ?\^ ?\{? ?)?(-?\d) ?\}?)?"
LAST_FACTOR = re.compile(rf"(?:[ (/-]|\\cdot|\b(?:per|a)\b)*(?<![A-Za-z\\]){FACTOR}[ .)]*$")
VALUE = re.compile(r"(?:\d|\\pi)[^=]*(?<=[\w})!%'$])$")


@functools.lru_cache(maxsize=64)  # the responses of a group have the same reference
def read_answer(stated: str) -> Answer:
    """Return the parts of an answer, in a sentence perhaps such as "The area is 12 cm^2"."""
    if len(stated) > LONGEST:
        return Answer(set(), words=("too", "long"))
    text = stated
    for pattern, replacement in TIDY:
        text = re.sub(pattern, replacement, text)
    text = REASON.split(text, maxsplit=1)[0].strip(" *_").rstrip(" *_.,;:\\。")
    value = HARMLESS.sub("", INTRODUCTION.sub("", CHOICE.sub("", text, 1))).strip()
    end = len(value)
    while match := LAST_FACTOR.search(value, 0, end):
        adjective = end < len(value) and value[match.start() - 1].isdigit()
        if not (unit_of(match[1]) is not None or adjective) or not VALUE.search(
            value, 0, match.start()
        ):
            break
        end = match.start()
    over, _, under = re.sub(r"\b(?:per|a)\b", "/", value[end:]).partition("/")
    factors = [
        (unit_of(word), sign * int(power or 1))
        for sign, part in ((1, over), (-1, under))
        for word, power in re.findall(FACTOR, part)
    ]
    return Answer(
        {plain(text), plain(CHOICE.sub(r"\1@", text, 1).split("@")[0])} - {""},
        WORD.sub("", value[:end]),
        tuple(sorted(factor for factor in factors if factor[0])),
        tuple(WORD.findall(NAME.sub("", value[:end]).casefold())),
    )


def plain(text: str) -> str:
    """Return a text without case, article, full stops and spaces, except between digits."""
    text = re.sub(r"^ *(?:an?|the) (?=\w\w)|\.(?!\d)", "", text.casefold())
    return re.sub(r"(?<!\d) | (?!\d)", "", text)


@functools.cache
def unit_names() -> dict[str, str]:
    """Return the unit of each name and symbol, with prefixes such as kilo and k."""
    from sympy.physics import units
    from sympy.physics.units.prefixes import PREFIXES

    names = {
        name: str(unit.name)
        for name, unit in vars(units).items()
        if isinstance(unit, units.Quantity) and not unit.is_physical_constant
    } | UNITS
    starts = {
        start: str(prefix.name)
        for key, prefix in PREFIXES.items()
        for start in (key, str(prefix.name))
    }
    return {
        start + name: starts[start] + unit for start in starts for name, unit in names.items()
    } | names


def unit_of(word: str) -> str | None:
    """Return the unit of a name, the plural of a thing itself, and None for another word."""
    names = unit_names()
    name = next((name for name in (word, word.lower().removesuffix("s")) if name in names), None)
    if name is not None:
        return names[name]
    return word if re.fullmatch(r"mod\d+|[^\x00-\x7f]+|[a-z]+(?:[^\Wsh]|[^t]h)s", word) else None


# ---- comparing -----------------------------------------------------------------------------------


# Of a set, and of a tuple or interval.
SET_AND_TUPLE = re.compile(r" *\\\{.*\n *[(\[]| *[(\[].*\n *\\\{")
BASE = re.compile(r"\d ?_ ?\{? ?(\w+)")
UNSOLVED = re.compile(r"(?=.*[\d|])[^A-Za-z_\\(]*[a-z][^A-Za-z_\\(]*")  # 2x of 2x = 6


def equal(reference: Answer, stated: Answer) -> bool:
    """Return whether a response states the reference."""
    from math_verify import verify

    if reference.spellings & stated.spellings:
        return True
    if (
        reference.words != stated.words
        or (reference.unit and stated.unit and reference.unit != stated.unit)
        or BASE.findall(stated.value) not in ([], BASE.findall(reference.value))
        or SET_AND_TUPLE.match(f"{reference.value}\n{stated.value}")
    ):
        return False
    value = stated.value
    *names, last = re.split(r"(?<![<>!])=(?![^{]*\})", value)
    if "=" not in reference.value and not re.search(r"[,;]|\b(?:or|and)\b", " ".join(names[1:])):
        if (
            names
            and UNSOLVED.fullmatch(names[0])
            or not all(close(parse(name), parse(last)) for name in names)
        ):
            return False
        value = last
    if stated.unit == (("%", 1),) and not reference.unit:
        value += r"\%"
    one, other = parse(reference.value), parse(value)
    return close(one, other) and verify(one, other, timeout_seconds=None)


@functools.lru_cache(maxsize=64)
def parse(text: str) -> Any:
    """Return the expression that math-verify makes of a formula, of an inequality whose variable
    stands alone the set of its solutions; the text if it cannot parse it.
    """
    from latex2sympy2_extended.math_normalization import NormalizationConfig, normalize_latex
    from math_verify.parser import parse_latex_cached
    from sympy import Eq, I
    from sympy.core.relational import Relational

    # Its list of units has c, d, h and t, and makes 2 of 2c.
    latex = normalize_latex(text, NormalizationConfig(malformed_operators=True))
    try:
        expression = parse_latex_cached(latex)
        expression = expression.xreplace({x: I for x in expression.free_symbols if x.name == "i"})
    except Exception:  # of several libraries
        return latex
    sides = [side for part in expression.atoms(Relational) for side in part.args]
    if sides and not expression.atoms(Eq) and all(x.is_Symbol or x.is_number for x in sides):
        with suppress(Exception):
            return expression.as_set()
    return expression


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
