"""--reward ifeval: instructions whose fulfilment a program checks, by the package if-verifiable."""

import ast
import json
from typing import Any

from plumbing.rewards.answers import after_thought
from plumbing.rewards.verifiers import Verifier

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


def ifeval(response: str, answer: Any) -> float:
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


def constraints_of(answer: Any) -> list[tuple[str, dict]]:
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


def checkers(answer: Any) -> list:
    """Return what checks each constraint of a row; raise ValueError or TypeError for one that there
    is not.
    """
    from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT

    found = []
    for name, arguments in constraints_of(answer):
        if name not in INSTRUCTION_DICT:
            raise ValueError(f"if-verifiable has no constraint {name!r}")
        found.append(INSTRUCTION_DICT[name](name))
        found[-1].build_description(**arguments)
    return found


VERIFIER = Verifier(ifeval, "answer", "if_verifiable", read=checkers)
