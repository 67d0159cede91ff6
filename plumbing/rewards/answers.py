r"""What counts as the final answer of a response and as the reference of a row: one notion for every verifier.

Of a response, what follows the last </think> counts; in it the last <answer>...</answer>, if there is one; in that, or
else in the text, the last \boxed{} (for gsm8k the last "#### number"). Without any of these, a verifier says what else
it reads. Nothing within <think> counts.

Imports the standard library only: it runs in the worker processes and in the trainer.
"""

import contextlib
import json
import re


def gold_answer(answer) -> str:
    """Return the reference answer of a row: what follows the last "####" of a GSM8K solution, else the text itself.

    A list of one answer, or its JSON text, is that answer. Raise ValueError for other lists, objects and None.
    """
    answer = only_element(answer)
    if answer is None or isinstance(answer, (list, dict)):
        kind = "a list" if isinstance(answer, list) else "an object"
        raise ValueError("there is no answer" if answer is None else f"{answer!r:.60} is {kind}, not one answer")
    # A column of integers with gaps in it is read as floats.
    answer = int(answer) if isinstance(answer, float) and answer.is_integer() else answer
    return str(answer).rsplit("####", 1)[-1].strip()


def only_element(answer):
    """Return the element of a list of one, such as ["966"], or of its JSON text; any other answer as it is."""
    if isinstance(answer, str) and answer.lstrip().startswith('["'):
        with contextlib.suppress(ValueError):
            answer = json.loads(answer)
    return answer[0] if isinstance(answer, list) and len(answer) == 1 else answer


# ---- the part of a response that counts ------------------------------------------------------------------------------


def after_thought(response: str) -> str:
    """Return what follows the last </think> of a response, without a thought that is begun there and not closed."""
    return response.rpartition("</think>")[2].partition("<think>")[0].strip()


def last_tagged(text: str) -> str | None:
    """Return what stands in the last <answer>...</answer> of a text, None without one."""
    content, start = None, text.find("<answer>")
    while start >= 0 and (end := text.find("</answer>", start)) >= 0:
        content, start = text[start + len("<answer>") : end].strip(), text.find("<answer>", end)
    return content


BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")


def last_box(text: str) -> str | None:
    r"""Return the content of the last \boxed{} or \fbox{} of a text; without braces, as in \boxed 5, the next word.

    Return None without a box, or if its brace is not closed.
    """
    start = max((match.end() for match in BOX.finditer(text)), default=None)
    if start is None:
        return None
    if text[start : start + 1] != "{":
        word = re.compile(r"[^\s${}]+").match(text, start)
        return word[0] if word else None
    depth, escaped = 0, False
    for end in range(start, len(text)):
        if not escaped:
            depth += (text[end] == "{") - (text[end] == "}")
        escaped = text[end] == "\\" and not escaped
        if depth == 0:
            return text[start + 1 : end].strip()
    return None


def final_text(response: str) -> str:
    """Return the text in which the final answer stands: the last <answer>...</answer>, else all that counts."""
    text = after_thought(response)
    tagged = last_tagged(text)
    return text if tagged is None else tagged


def final_answer(response: str) -> str | None:
    r"""Return the last \boxed{} of `final_text`, else the last <answer>...</answer>; None without both."""
    box = last_box(final_text(response))
    return last_tagged(after_thought(response)) if box is None else box


def stated_text(response: str) -> str:
    """Return the `final_answer` of a response, or without one all that counts of it."""
    answer = final_answer(response)
    return after_thought(response) if answer is None else answer


# ---- numbers of GSM8K ------------------------------------------------------------------------------------------------

NUMBER = re.compile(r"(?P<sign>[-+]?)(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)(?:\.(?P<fraction>[0-9]+))?")


def plain_number(text: str) -> str | None:
    """Return a number in its one shortest form, 8 for "08", "+8.0" and "$8."; None for what is no number."""
    text = text.replace("$", "").strip().rstrip(".")
    match = NUMBER.fullmatch(text)
    if not match or not text.strip("+-"):
        return None
    whole, fraction = match["whole"].replace(",", "").lstrip("0") or "0", (match["fraction"] or "").rstrip("0")
    number = f"{whole}.{fraction}" if fraction else whole
    return f"-{number}" if match["sign"] == "-" and number != "0" else number


def gold_number(answer) -> str:
    """Return the `gold_answer` of a row as `plain_number`. Raise ValueError if it is no number."""
    number = plain_number(gold_answer(answer))
    if number is None:
        raise ValueError(f"{gold_answer(answer)!r:.60} is no number")
    return number


def marked_number(response: str) -> str | None:
    """Return the last "#### number" of a response's `final_text`, as `plain_number`; None without one.

    A tag needs no "####": <answer>8</answer>.
    """
    text = final_text(response)
    found = re.findall(r"####\s*([-+$]*[.,]?[0-9][-+0-9.,/:^]*)", text)
    if not found and last_tagged(after_thought(response)) is not None:
        found = [text]
    return plain_number(found[-1].rstrip(",")) if found else None


def harness_answer(response: str, flexible: bool) -> str | None:
    """Return the answer of a response to GSM8K as lm-evaluation-harness reads it, as `harness_text`; None without one.

    Its strict-match is the first "#### number", its flexible-extract the last number (lm_eval/tasks/gsm8k, version 3).
    They read all of the response, the thought included.
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


# ---- answers as text, for a vote ------------------------------------------------------------------------------------


def voted_answer(reward: str, response: str) -> str | None:
    """Return the final answer of a response as text, for a vote among responses; None without one.

    With the reward gsm8k, return its `marked_number`; with exact, its `stated_text`; else its `plain_answer`.
    """
    if reward == "gsm8k":
        return marked_number(response)
    return stated_text(response) or None if reward == "exact" else plain_answer(response)


def plain_answer(response: str) -> str | None:
    """Return the `final_answer` of a response, else its last line behind "####", else all that counts.

    Dollar signs, a final full stop, thousands separators, case and the length of white space are dropped.
    """
    answer = final_answer(response)
    if answer is None:
        text = after_thought(response)
        answer = (re.findall(r"####[ \t]*(\S.*)", text) or [text])[-1]
    answer = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", " ".join(answer.replace("$", " ").split()).rstrip(". "))
    return answer.casefold() or None
