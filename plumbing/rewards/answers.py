"""What counts as the final answer of a response (docs/data_and_rewards.md has the rule) and as the
reference of a row.

Imports the standard library only, since it runs in the worker processes.
"""

import contextlib
import json
import re
from fractions import Fraction


def gold_answer(answer) -> str:
    """Return the reference answer of a row: what follows the last "####" of a GSM8K solution, else
    the text itself.

    A list of one answer, or its JSON text, is that answer. Raise ValueError for other lists,
    objects, blank texts, which a response without an answer would equal, and None.
    """
    if isinstance(answer, str) and answer.lstrip().startswith('["'):
        with contextlib.suppress(ValueError):
            answer = json.loads(answer)
    if isinstance(answer, list) and len(answer) == 1:
        (answer,) = answer
    if answer is None or isinstance(answer, (list, dict)) or not str(answer).strip():
        raise ValueError(f"{answer!r:.60} is not one answer")
    # A column of integers with gaps in it is read as floats.
    answer = int(answer) if isinstance(answer, float) and answer.is_integer() else answer
    return str(answer).rsplit("####", 1)[-1].strip()


def after_thought(response: str) -> str:
    """Return what follows the last </think> of a response, without a thought that begins there and
    is not closed.
    """
    return response.rpartition("</think>")[2].partition("<think>")[0].strip()


# "*+" never gives back what it has matched, so that the time is linear.
CONTENT = r"(?:\\.|[^{}\\])*+"
for _ in range(8):  # braces in each other
    CONTENT = rf"(?:\\.|[^{{}}\\]|\{{{CONTENT}\}})*+"
BOX = re.compile(rf"(?s)\\boxed\s*(?:\{{({CONTENT})\}}|([^\s${{}}]+))")


def last_boxes(text: str) -> list[str] | None:
    r"""Return the contents of \boxed{} and \fbox{} in the last sentence that has one; of a box in a
    box, the outer one without the inner command; without braces, as in \boxed 5, the next word.

    Return None without a box, and [] if the last one is not closed.
    """
    before, box, rest = text.replace(r"\fbox", r"\boxed").rpartition(r"\boxed")
    if not box:
        return None
    sentence = re.split(r"\n|\. ", before)[-1] + box + rest
    if not BOX.match(box + rest):
        return []
    return [BOX.sub(r"\1\2", "".join(content)).strip() for content in BOX.findall(sentence)]


def final_text(response: str) -> str:
    """Return the text that holds the final answer: the last <answer>...</answer>, else all that
    counts.
    """
    text = after_thought(response)
    for part in reversed(text.split("</answer>")[:-1]):
        if "<answer>" in part:
            return part.partition("<answer>")[2].strip()
    return text


def stated_text(response: str) -> str:
    r"""Return the last \boxed{} of the `final_text` of a response, or without one all of it."""
    text = final_text(response)
    return (last_boxes(text) or [text])[-1]


NUMBER = re.compile(
    r"(?=.{1,300}$)[-+]?(?=\.?[0-9])(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)(?:\.[0-9]+)?"
)


def plain_number(text: str) -> Fraction | None:
    """Return a decimal number, 8 for "08", "+8.0" and "$8."; None for other text and for over 300
    characters.
    """
    text = re.sub(r"\\?\$", "", text).strip().rstrip(".")
    return Fraction(text.replace(",", "")) if NUMBER.fullmatch(text) else None


def marked_number(response: str) -> Fraction | None:
    """Return the only number behind the last "####" with one in a response's `final_text`; None
    without it.

    A tag needs no "####": <answer>8</answer>.
    """
    text = final_text(response)
    numbers = re.findall(r"####[\s*]*((?:[-+]|\\?\$)*[.,]?[0-9](?:[^\n#]*[0-9])?)", text)
    if not numbers and text != after_thought(response):  # it is in a tag
        numbers = [text]
    return plain_number(numbers[-1]) if numbers else None
