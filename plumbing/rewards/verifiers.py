r"""The functions that check an answer: from a response and a column of its row to a score.

They run in worker processes, which are killed when a check hangs. A check that raises an exception gives no score, a
wrong answer gives 0. plumbing/rewards/answers.py defines the final answer. Packages are imported by the check that
needs them: the trainer imports this module as well.
"""

import ast
import json
import re
from typing import Callable, NamedTuple

from assets.tasks import reasoning_gym_dataset
from plumbing.rewards.answers import (
    after_thought,
    gold_answer,
    marked_number,
    plain_number,
    stated_text,
)
from plumbing.rewards.code_tests import code, read_tests
from plumbing.rewards.math_verifier import LIMIT, math, reference_text


def gsm8k(response: str, answer) -> float:
    """Return 1 if the last "#### number" of the response is the reference number (strict GSM8K)."""
    return float(marked_number(response) == reference_number(answer))


def reference_number(answer):
    """Return the number of a reference; raise ValueError if it is not one."""
    number = plain_number(gold_answer(answer))
    if number is None:
        raise ValueError(f"{answer!r:.60} is not a number")
    return number


def exact(response: str, answer) -> float:
    """Return 1 if the final answer of the response, or all of it, is the reference, without space
    around it.
    """
    return float(
        not {stated_text(response), response.strip()}.isdisjoint(
            {gold_answer(answer), str(answer).strip()}
        )
    )


def format(response: str, _=None) -> float:
    """Return 1 for the form of DeepSeek-R1: <think> ... </think> <answer> ... </answer>, each tag
    once, none empty.
    """
    form = r"\s*<think>\s*\S.*?</think>\s*<answer>\s*\S.*?</answer>\s*"
    once = all(response.count(tag) == 1 for tag in ("<think>", "</think>", "<answer>", "</answer>"))
    return float(once and bool(re.fullmatch(form, response, re.DOTALL)))


def reasoning_gym(response: str, source) -> float:
    """Return the score of the reasoning_gym task itself, between 0 and 1 for an answer that is
    partly right.

    An answer that its scorer cannot read (some raise an exception) gives 0, if it can read the
    right answer.

    Args:
        source: [task, size, seed, index], from which the problem is made again: the row's column
            "reasoning_gym".
    """
    task, size, seed, index = source
    dataset = reasoning_gym_dataset(task, size, seed)
    entry = dataset[index]
    try:
        return float(dataset.score_answer(stated_text(response), entry=entry))
    except Exception:
        dataset.score_answer(entry["answer"], entry=entry)
        return 0.0


# IFEval's names for the constraints of Tulu 3's rows (`func_name`, open-instruct's
# if_functions.py), each with what it calls their arguments. It has no exact counts of words or
# letters, and other choices and dividers of paragraphs.
NAMES = """
validate_json_format detectable_format:json_format
validate_lowercase change_case:english_lowercase
validate_uppercase change_case:english_capital
validate_no_commas punctuation:no_comma
validate_quotation startend:quotation
validate_title detectable_format:title
validate_two_responses combination:two_responses
validate_end startend:end_checker end_phrase
verify_keywords keywords:existence keywords=keyword_list
validate_forbidden_words keywords:forbidden_words forbidden_words
validate_frequency_capital_words change_case:capital_word_frequency capital_frequency=N capital_relation=quantifier
validate_highlighted_sections detectable_format:number_highlighted_sections num_highlights=N
validate_paragraphs length_constraints:nth_paragraph_first_word num_paragraphs=N nth_paragraph=i first_word
validate_placeholders detectable_content:number_placeholders num_placeholders=N
validate_repeat_prompt combination:repeat_prompt prompt_to_repeat=original_prompt
validate_response_language language:response_language language
validate_sections detectable_format:multiple_sections num_sections=N section_spliter=section_splitter
validate_word_constraint length_constraints:number_words num_words=N relation=quantifier
verify_bullet_points detectable_format:number_bullet_lists num_bullets=N
verify_postscript detectable_content:postscript postscript_marker
verify_sentence_constraint length_constraints:number_sentences num_sentences=N relation=quantifier
"""
FUNCTIONS = dict(line.split(" ", 1) for line in NAMES.strip().splitlines())


def ifeval(response: str, answer) -> float:
    """Return the share of the row's constraints that the text behind a thought follows, read
    strictly (arXiv:2311.07911).

    Raise an exception for an answer that `constraints_of` or the package if-verifiable does not
    know.
    """
    import langdetect

    langdetect.DetectorFactory.seed = 0  # else it guesses a language at random
    text = after_thought(response)
    followed = [
        bool(text) and bool(constraint.check_following(text)) for constraint in checkers(answer)
    ]
    return sum(followed) / len(followed)


def constraints_of(answer) -> list[tuple[str, dict]]:
    """Return the constraints of a row: [(name in IFEval, its arguments)].

    An answer is {"instruction_id": [names], "kwargs": [arguments or None]} or {"func_name": one of
    FUNCTIONS, ...}; as text or in a list of one, too, as in open-instruct's column ground_truth.
    """
    while not isinstance(answer, dict):
        if isinstance(answer, str):
            answer = (
                json.loads(answer) if answer.lstrip().startswith('{"') else ast.literal_eval(answer)
            )
        else:
            (answer,) = answer
    if "func_name" in answer:
        name, *arguments = FUNCTIONS[answer["func_name"]].split()
        if answer.get("quantifier") == "at most":
            answer = {**answer, "quantifier": "less than", "N": answer["N"] + 1}
        return [(name, {x.partition("=")[0]: answer[x.rpartition("=")[2]] for x in arguments})]
    named = [
        {name: value for name, value in (given or {}).items() if value is not None}
        for given in answer["kwargs"]
    ]
    return list(zip(answer["instruction_id"], named, strict=True))


def checkers(answer) -> list:
    """Return what checks each constraint of a row; raise ValueError or TypeError for one that there
    is not.
    """
    from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT

    constraints = constraints_of(answer)
    if unknown := [name for name, _ in constraints if name not in INSTRUCTION_DICT]:
        raise ValueError(f"if-verifiable has no constraint {unknown[0]!r}")
    found = [INSTRUCTION_DICT[name](name) for name, _ in constraints]
    for constraint, (_, arguments) in zip(found, constraints):
        constraint.build_description(**arguments)
    return found


class Verifier(NamedTuple):
    """A built-in reward."""

    check: Callable[..., float]
    # Of the row, whose value `check` gets as second argument; "" if it reads the response only.
    column: str
    package: str = "re"  # that it imports
    # Seconds of a call, after which the response is wrong if the reference is not to blame.
    limit: float = float("inf")
    read: Callable = str  # that column; raises an exception where nothing can be compared with it
    calls_a_job: int = 1  # more where a job of a worker process takes longer than the check


VERIFIERS = {
    "math": Verifier(math, "answer", "math_verify", limit=LIMIT, read=reference_text),
    "gsm8k": Verifier(gsm8k, "answer", read=reference_number, calls_a_job=64),
    "exact": Verifier(exact, "answer", read=gold_answer, calls_a_job=64),
    "code": Verifier(code, "answer", read=read_tests),
    "format": Verifier(format, "", calls_a_job=64),
    "ifeval": Verifier(ifeval, "answer", "if_verifiable", read=checkers),
    "reasoning_gym": Verifier(reasoning_gym, "reasoning_gym", "reasoning_gym", read=tuple),
}
