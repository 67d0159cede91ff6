"""The reward `math`: whether the final answer of a response equals the reference, by math-verify or
as words.

math-verify parses LaTeX and compares expressions. This file decides what it reads: an answer
becomes a value, a unit and words. docs/data_and_rewards.md has the rules. Comparing a formula can
last forever: the caller kills the process of a check after LIMIT seconds
of CPU time.
"""

import re
from typing import Any, NamedTuple

from plumbing.rewards.answers import final_text, gold_answer, last_boxes, plain_number
from plumbing.rewards.verifiers import Verifier

LIMIT = 5.0  # seconds of CPU time
LONGEST = 500  # characters of an answer that is compared


class Answer(NamedTuple):
    """An answer in the parts that are compared."""

    spellings: set  # all of it, and the letter of a choice such as (C) 7
    formula: str
    unit: list  # its factors with their powers
    words: list  # further ones


def math(response: str, answer: Any) -> float:
    """Return 1 if the final answer of a response equals the reference."""
    reference = read_answer(reference_text(answer))
    return float(equal(reference, read_answer(stated_answer(final_text(response)))))


def reference_text(answer: Any) -> str:
    """Return what a response has to repeat of a reference; raise ValueError if that is nothing."""
    # The announcement keeps all of a reference of several sentences or formulas' words.
    reference = stated_answer("answer:" + gold_answer(answer))
    if not re.search(r"\w", reference) or len(reference) > LONGEST:
        raise ValueError(f"{answer!r:.60} is not an answer that a response can repeat")
    return reference


# ---- where the answer stands ---------------------------------------------------------------------


# "answer" up to the next "is" or ":", or a line end or formula behind it; or "####" if its line is
# the last or a number, as others are headings. Then markup.
ANNOUNCED = re.compile(
    r"(?:(?i:answer|réponse|respuesta|antwort|risposta|resposta|ответ)"
    r"(?:[^.\n:]{0,80}?(?::|=|\b(?:is|are|(?:should|must|would|will) be|est|es|ist|é|è)\b)|\W{0,9}?(?=\n|\\\[|\\\(|\$))"
    r"|(?:答案|故选|答え|正解|정답)\W?[是为はは은]?|####(?=[^\n]{0,500}\s*$|\W{0,9}\d\S{0,99}\s{0,9}\n))(?:[\s*_`#>:：]{0,9}\n\s*[-•*]\s)?[\s*_`#>:：]*"
)
SENTENCE = re.compile(
    r"(?s)(?:\\\[.{0,500}?\\\]|\$\$.{0,500}?\$\$|\\begin.{0,500}?\\end"
    r"|[^\n.。।]|(?<=\b[A-Z])[.。](?! [A-Z])|\.(?![\s*]|$))+"
)
# Bold, a formula or a number such as 2 1/4.
PIECE = re.compile(
    r"(?s)(\*\*|`|\$).{1,200}?\1|\\[(\[].{1,200}?\\[)\]]|[^\s=\\]{0,9}[=\\]\S*"
    r"|[-−√.]{0,2}\d(?:[\d.,/:^√π]| (?=\d+/\d|\d{3}\b))*%?"
)
# As in "Donc, l'aire est"; not a function such as sqrt(2).
LEADING_WORDS = re.compile(
    r"(?s)^[^\w*$]*(?:(?:[^\W\d_]['’])?[^\W\d_]{2,}+(?![(_])[\s,:，]*)+(?=.*\w)"
)


def stated_answer(text: str) -> str:
    """Return the boxes of the last sentence with one, else the sentence after the last announcement,
    else a part of the last sentence with a formula: all of it, or, if that has further words, what
    follows its leading words, or, if that has further words too, its last formula.
    """
    boxes = last_boxes(text)
    if boxes is not None:
        return ", ".join(dict.fromkeys(boxes))
    *before, rest = ANNOUNCED.split(text)
    sentences = SENTENCE.findall(rest) or [""]
    if before:
        return sentences[0]
    parts = sentences[-1:]
    for sentence in sentences:
        if pieces := list(PIECE.finditer(sentence)):
            parts = [sentence, LEADING_WORDS.sub("", sentence), pieces[-1][0]]
    for part in parts:
        if not read_answer(part).words:
            break
    return part


# ---- the text of an answer -----------------------------------------------------------------------


# Patterns and what replaces them, from top to bottom; ␣ is a space. A line without → is a heading.
SPELLINGS = r"""
What is not shown
(?<!\\)%(?=\w).*|^\s*%.*|\\(?:[hv]?phantom|label|tag|hspace|footnote)\s*\{[^{}]*\} →
Symbols
[−–]                                           →-
[·⋅]                                           →\\cdot␣
√                                              →\\sqrt␣
≈                                              →\\approx␣
∞|\binfinity\b                                              →\\infty␣
²                                              →^2
³                                              →^3
½                                              →\\frac12
¼                                              →\\frac14
¾                                              →\\frac34
\\varnothing                                   →\\emptyset␣
…|\.\.\.                                       →\\ldots␣
\\lbrace\b                                     →\\{
\\rbrace\b                                     →\\}
\\langle\b                                     →(
\\rangle\b                                     →)
\\\\␣*\[\d+\w+\] →\\\\
\{([:,])\}                                     →\1
Signs of formulas, fonts, spaces, text
(?<!\\)\$|(?<!\\)\\[()\[\]]|\\!\s*|`           →
\\(?:displaystyle|normalsize|[lL]arge|LARGE|[hH]uge|bf|it|rm|bm|boldsymbol|underline)(?![A-Za-z]) →␣
^.*\\(?:Rightarrow|implies|therefore)(?![A-Za-z]) →
\\(?:checkmark|left|right)(?![A-Za-z]) →␣
\\(?:text)?color␣*\{\w+\}|(?<!\\)\\[,;:>␣]|\\q?quad\b|~|\s →␣
\\(?:text(?:normal|bf|it|rm)?|math(?:rm|bf|it|sf)|[mh]box|operatorname)\*?\s*\{((?:[^{}]|\{[^{}]*\})*)\} →␣\1␣
Units, percent
\\frac␣?\{␣([A-Za-z]+)␣\}\{␣([A-Za-z]+␣(?:\^\d)?)␣?\} →␣\1/\2
\\mu␣*(?=[mgsACFLVW]\b)                        →μ
\\Omega\b                                      →Ω
␣␣+                                            →␣
(?:\(?\\[bp]?|\()mod␣*\{?␣*(\d+)␣*\}?\)?       →␣mod\1␣
\\?%|\bper␣?cent(?:age)?\b|\bpct\b             →␣%␣
(?<=[\d}])␣%␣(?=.*\d)                          →␣
Number words
(?<=[\d}])␣?dozens?\b                          →\\times␣12␣
(?<=[\d}])␣?hundreds?\b                        →\\times␣10^{2}␣
(?<=[\d}])␣?thousands?\b                       →\\times␣10^{3}␣
(?<=[\d}])␣?lakhs?\b                           →\\times␣10^{5}␣
(?<=[\d}])␣?crores?\b                          →\\times␣10^{7}␣
(?<=[\d}])␣?millions?\b                        →\\times␣10^{6}␣
(?<=[\d}])␣?(?:billion|bn)s?\b                 →\\times␣10^{9}␣
(?<=[\d}])␣?trillions?\b                       →\\times␣10^{12}␣
(?<=[\d}])␣?hal(?:f|ves)\b                     →/2␣
(?<=[\d}])␣?thirds?\b                          →/3␣
(?<=[\d}])␣?quarters?\b                        →/4␣
What a number counts, currencies, units with a slash
(?:(?<=[\d})%])␣of␣(?:the|an?|all|his|her|its|their)|(?<=[a-z]s)␣(?:of|in))\b[^\d\\]*$ →
\bRs\b\.?                                      →₹
(^␣?|[a-z:：]␣)(-?)␣?(\\\$|[€£¥₹])␣?(.*?)(␣per␣.*)?$ →\1\2\4␣\3\5
\\\$                                           →$
(?<![a-z])mph\b                                →mi/h
(?<![a-z])km?ph\b                              →km/h
(\d.*[a-z$€£¥₹])␣(?:per|a)␣(?=[a-z])                →\1/
/␣?\(([^()\d]*)\)                              →/\1
(?<=[A-Za-z])␣([a-z]{1,3})␣?\^␣?\{?␣?-(\d)␣?\}? →/\1^\2
Forms of numbers and formulas: 1.5e3, 0.\overline{3}, 1 234 567, 1 1/2, x**2, 60°, C(n, k)
(?<![\w.])([\d.]+)[eE]([-+]?\d+)(?!\w)         →\1\\times␣10^{\2}
(\.\d*)\\overline␣?\{(\d+)\}                   →\1\2\2\2\2\2\2\2\2
(?<=\d)␣(?=(?:\d{3}␣)*\d{3}(?!\d))             →
(?<![\w.}])(\d+)␣(\d+)/(\d+)(?!\w)             →\1\\frac{\2}{\3}
\\?sqrt␣?(?:\(([^()]*)\)|(\d+))                →\\sqrt{\1\2}
(?<![A-Za-z\d)])\*\*(?=\S)(.+?)\*\*(?![\d{-])     →␣\1␣
(?<=[A-Za-z\d)])\*\*(?=[A-Za-z\d({-])          →^
\*\*|__                                        →␣
\^?␣?\{?␣?(?:\\circ|\\?degrees?\b|°)␣?\}?␣?([CF]?)(?:elsius|ahrenheit)?(?![A-Za-z]) →␣deg\1␣
(?<=[a-z])\^␣?(?:\{1\}|1(?!\d))                →
\^(-?\d+)                                      →^{\1}
\bC_\{?(\d+)\}?\^\{?(\d+)\}?|\{\}_\{?(\d+)\}?␣?C_\{?(\d+)\}? →\\binom{\1\3}{\2\4}
\\(max|min|gcd|lcm)\\\{(.*?)\\\}               →\\\1(\2)
^(-?\d+),(\d\d)(?=[^\d,]*$)                     →\1.\2
(?<![\\A-Za-z])(pi|sin|cos|tan|log|ln)(?![A-Za-z]) →\\\1␣
(?<=\d)␣?_␣?\{?␣?(\w+)(?:␣?\})?                →_\1
^\\\{␣*(\(.*\))␣*\\\}$                         →\1
(?<=\d)␣(?:square|sq\.?)␣([a-z]+)|(?<=[a-z]{2})␣squared →␣\1^2
(?<=\d)␣cubic␣([a-z]+)                         →␣\1^3
Several answers, reasons, introductions up to "is", words that change nothing
(?:\b(?:and|or)\b|\\lor\b|\\vee\b)(?!.*(?:[<>]|\\[lg][et]))(?=.*[\d=])    →,
␣(?:is|as)␣(?:the|our|my)␣(?:final␣)?answer\b    →
,?␣\(?(?:because|since|which|not|non)\b.*|,␣it\b.*|不是.*|[,(]␣?(?:as|by|attained|achieved)\b.* →
,?␣for␣(?:any|all|every|some)\b.*|(?<=[a-z}]),?␣where\b.* →
(?i)\b(?:must|will|would|should|to)␣be\b|\bequals\b|\bis␣equal␣to\b →is
^([^,]*[\d})])␣is␣(?=[^A-Za-z]*\d) →\1=
(?i)^[^\d;=\\]*?(?:\b(?:is|are|was|has|have|gives?|gets?)\b|[:：])[\s:]* →
(?i)\b(?:the|an|a(?=␣\w\w)|of|it(?:'s)?|so|us|we|there|any|all|each|at|exactly|approximately|find)\b[␣,]* →
(?i)\b(?:total|result|answer|option|choice|left|old|long|thus|hence|therefore)\b[␣,]* →
(?i)\b(?:later|away|remaining|altogether|indeed|simply|clearly|for sure)\b[␣,]* →
^[␣*_#]*(?:\\approx\b|(?:is|are)\b|[+=])?␣*|[␣*_.,;:\\。]+$|(?<=[a-z]{3})!$ →
^\(([A-Z]|[^,()]*=[^,()]*)\)$ →\1
"""
TIDY = [re.split(" *→", line) for line in SPELLINGS.replace("␣", " ").splitlines() if "→" in line]
# Such as (C) 42.
CHOICE = re.compile(r"^\(?([A-Z])(?:\)|[.:]) +(?!\(?[A-Z]\b)(.+)")
# Words, which make another answer: four letters, other scripts, "or", dots, and a base as in 12_3.
WORD = re.compile(
    r"(?<![\\A-Za-z_{])[^\W\d_]{4,}|(?:(?!\d)[\u0590-\u1fff\u3040-\ud7ff])+|\b(?:or|and)\b|\\[lc]?dots|(?<=\d)_\w+"
)
# What stands before an "=", such as x or P(A).
NAME = re.compile(r"(?>\([^()=]*\)|[^,;=<>])*+(?<![<>!])=(?![^{]*\})")

UNITS = """
meter=m metre=m gram=g second=s sec=s minute=min hour=h hr=h day=day month=month week=week year=yr yr=yr liter=L litre=L
l=L joule=J newton=N watt=W volt=V ampere=A amp=A coulomb=C kelvin=K farad=F tesla=T ohm=Ω hertz=Hz pascal=Pa mole=mol
byte=B bit=bit calorie=cal foot=ft feet=ft inch=in inche=in yard=yd mile=mi pound=£ lb=£ gbp=£ ounce=oz gallon=gal
radian=rad deg=° dollar=$ usd=$ euro=€ eur=€ yen=¥ rupee=₹ cent=¢ point=pt pt=pt unit=1 people=people men=men
women=women cup=cup eV=eV ml=mL
degC=°C degF=°F st=th nd=th rd=th bpm=bpm children=children %=% '=' /=/
"""
NAMES = {
    prefix + name: symbol + unit
    for prefix, symbol in re.findall(
        r"(\S*)=(\S*)", "kilo=k mega=M giga=G tera=T centi=c milli=m micro=μ nano=n ="
    )
    for name, unit in re.findall(r"(\S+)=(\S+)", UNITS)
}
# A unit with its power, or a slash.
FACTOR = (
    r"((?<![A-Za-z\\])(?:mod\d+|[^\W\d_]{2,}+|[\u3040-\ud7ff]|(?<![\d}])[mghslLJNWVACKFTMΩB]|[a-z](?=/)|[$€£¥₹¢%'])"
    r"|/(?! ?\d))(?:(?: ?\^ ?\{? ?)?(\d) ?\}?)?"
)
UNIT = re.compile(rf"(?:\d|\\pi)[^=]*?(?<=[\w}})!%'$])((?:(?:[ -]|\\cdot)*+{FACTOR})++)[ .]*$")


def unit_of(word: str) -> str:
    """Return the symbol of a unit, the plural of a thing itself, and "" for another word."""
    symbol = NAMES.get(word, NAMES.get(word.lower().removesuffix("s"), word))
    plural = re.fullmatch(r"mod\d+|[^\x00-\x7f]+|[a-z]+(?:[^\Wsh]|[^t]h)s", word)
    return symbol if plural or symbol in NAMES.values() else ""


def read_answer(stated: str) -> Answer:
    """Return the parts of an answer, in a sentence perhaps such as "The area is 12 cm^2"."""
    text = stated[:LONGEST] + "…" * (len(stated) > LONGEST)
    for pattern, replacement in TIDY:
        text = re.sub(pattern, replacement, text)
    formula = CHOICE.sub(r"\2", text)
    unit = []
    if match := UNIT.search(formula):
        factors = [(unit_of(word), power) for word, power in re.findall(FACTOR, match[1])]
        if all(name for name, _ in factors[1:] or factors):  # the first may be an adjective
            unit = [factor for factor in factors if factor[0] not in ("", "1")]
            formula = formula[: match.start(1)]
    spellings = {
        re.sub(r"(?<!\d) | (?!\d)|\.(?!\d)", "", spelling.casefold())
        for spelling in (text, CHOICE.sub(r"\1", text))
    } - {""}
    words = WORD.findall(NAME.sub("", formula).casefold())
    return Answer(spellings, WORD.sub("", formula), unit, words)


# ---- comparing -----------------------------------------------------------------------------------


# Of a set, and of a tuple or interval.
SET_AND_TUPLE = re.compile(r" *\\\{.*\n *[(\[]| *[(\[].*\n *\\\{")
# Such as 2x = 6, which is not 6, and an inequality that has a variable twice.
UNSOLVED = re.compile(
    r"(?=[^=]*[\d|])[^A-Za-z_\\(=]*[a-z][^A-Za-z_\\(=]*="
    r"|(?!.*(?:[<>]|\\[lg]e).*(?:[<>]|\\[lg]e))(?=.*(?:[<>]|\\[lg]e))"
    r".*?(?<![A-Za-z\\])([a-z])(?![A-Za-z]).*(?<![A-Za-z\\])\1(?![A-Za-z])"
)


def equal(reference: Answer, stated: Answer) -> bool:
    """Return whether a response states the reference."""
    from math_verify import verify

    spellings, formula, unit, words = stated
    if reference.spellings & spellings:
        return True
    gold = reference.formula
    # A percent of a reference from 1 on may also be the number itself.
    if unit == [("%", "")] and not (
        reference.unit or 1 <= (plain_number(gold) or 0) == plain_number(formula)
    ):
        formula += r"\%"
    sides = re.split("=(?![^{]*})", formula)
    if (
        words != reference.words
        or (unit and reference.unit and unit != reference.unit)
        or SET_AND_TUPLE.match(f"{gold}\n{formula}")
        or not all(close(parse(side), parse(sides[-1])) for side in (gold, *sides))
    ):
        return False
    if "=" not in gold:
        formula = "" if UNSOLVED.match(formula) else NAME.sub("", formula)
    return verify(parse(gold), parse(formula), allow_set_relation_comp=True, timeout_seconds=None)


def parse(text: str) -> Any:
    """Return the expression that math-verify makes of a formula, in which i is the imaginary unit,
    or the text that it cannot parse.
    """
    from math_verify.parser import NormalizationConfig, normalize_latex, parse_latex_cached
    from sympy import I, Symbol

    i = Symbol("i", real=False)
    # Its list of units has c, d, h and t, and makes 2 of 2c.
    latex = normalize_latex(text, NormalizationConfig(malformed_operators=True))
    try:
        value = parse_latex_cached(latex)
        return value.subs(i, I) if i in value.free_symbols else value
    except Exception:  # of several libraries
        return latex


def close(one: Any, other: Any) -> bool:
    """Return whether two numbers differ by less than 1e-5 of their size; True for what is not two
    real numbers.
    """
    try:
        one, other = one.evalf(), other.evalf()
        return one.is_imaginary or bool(abs(one - other) <= 1e-5 * abs(other))
    except Exception:  # a relation, a set or text
        return True


VERIFIER = Verifier(math, "answer", "math_verify", limit=LIMIT, read=reference_text)
