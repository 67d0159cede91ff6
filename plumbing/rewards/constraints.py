"""The reward `ifeval`: the share of a row's constraints, such as "no comma" or "at least 200 words", that are followed.

The checks are IFEval's (arXiv:2311.07911), from the package if-verifiable. Imports nothing of this project.
"""

import ast
import json


def constraints_of(answer) -> list[tuple[str, dict]]:
    """Return the constraints of a row: [(name in IFEval, its arguments)].

    Args:
        answer: {"instruction_id": [names], "kwargs": [arguments or None]}, as text or in a list of one, too, as in
            open-instruct's column ground_truth.
    Raises:
        ValueError: if it is none of these.
    """
    form = f'{str(answer)[:60]!r} is not {{"instruction_id": [names], "kwargs": [arguments]}}'
    try:
        while not isinstance(answer, dict):
            if isinstance(answer, str):
                answer = json.loads(answer) if '"instruction_id"' in answer else ast.literal_eval(answer)
            else:
                (answer,) = answer
        names, arguments = answer["instruction_id"], answer["kwargs"]
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError):
        raise ValueError(form) from None
    if not (isinstance(names, list) and isinstance(arguments, list) and 0 < len(names) == len(arguments)):
        raise ValueError(form)
    given = [{name: value for name, value in (own or {}).items() if value is not None} for own in arguments]
    return list(zip(names, given))


def ifeval(response: str, answer) -> float:
    """Return the share of the row's constraints that what follows </think> in the response follows, read strictly.

    Raise an exception for a constraint that the package does not have, or not with these arguments.
    """
    import langdetect
    from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT

    langdetect.DetectorFactory.seed = 0  # else it guesses a language at random
    text, followed = response.rpartition("</think>")[2].strip(), []
    for name, arguments in constraints_of(answer):
        if name not in INSTRUCTION_DICT:
            raise ValueError(f"if-verifiable has no constraint {name!r}")
        constraint = INSTRUCTION_DICT[name](name)
        constraint.build_description(**arguments)
        followed.append(bool(text) and bool(constraint.check_following(text)))
    return sum(followed) / len(followed)
