"""Functions from users' files that score responses: how one is loaded and called, and how its answer is read.

The names of its parameters say in which of three forms a function is called:

    score(prompts, responses, **columns)                          this project's; the first two by position
    score(prompts, completions, completion_ids, **columns)        TRL's reward_funcs; by name, each may be left out
    score(data_source, solution_str, ground_truth, extra_info)    verl's compute_score; called for each response

Columns are lists with an entry for each response. A function without **columns gets those that it names.

Imports nothing of this project.
"""

import importlib.util
import inspect
import os
import sys
from collections.abc import Iterable, Mapping, Set
from typing import Callable


def load_function(name: str) -> Callable:
    """Return the function of "path/to/file.py:function"."""
    path, _, function = name.rpartition(":")
    file = os.path.abspath(path)
    if file not in sys.modules:
        sys.path.insert(0, os.path.dirname(file))  # for what it imports
        spec = importlib.util.spec_from_file_location(file, file)
        sys.modules[file] = importlib.util.module_from_spec(spec)  # where dataclasses look for its names
        spec.loader.exec_module(sys.modules[file])
    if not callable(getattr(sys.modules[file], function, None)):
        raise AttributeError(f"{path} has no function {function!r}")
    return getattr(sys.modules[file], function)


def score_by(function: Callable, prompts: list, responses: list[str], ids: list, columns: dict) -> list[float | None]:
    """Return the scores that a function gives the responses, None where it gives none.

    Args:
        prompts: as the model sees them. ids: token ids of the responses. columns: {name: [value in each row]}.
    Raises:
        TypeError, ValueError: if it cannot be called so, or returns anything but a number or None for each response.
    """
    parameters = list(inspect.signature(function).parameters)
    if "solution_str" in parameters:
        return [as_number(score) for score in scores_one_by_one(function, responses, columns)]
    if "completions" in parameters or "completion_ids" in parameters:
        scores = call(function, [], trl_arguments(prompts, responses, ids, columns))
    else:
        others = {name: column for name, column in columns.items() if name not in parameters[:2]}
        scores = call(function, [prompts, responses], others)
    return as_numbers(scores, len(responses))


def call(function: Callable, positional: list, named: dict):
    """Call a function, which may be asynchronous, with those of the named arguments that it takes."""
    result = function(*positional, **taken(function, positional, named))
    if inspect.iscoroutine(result):
        import asyncio  # a quarter of the time that a worker takes to start, and few functions need it

        result = asyncio.run(result)
    return result


def taken(function: Callable, positional: list, named: dict) -> dict:
    """Return those of the named arguments that a function takes.

    Raises:
        TypeError: if it takes more than it is given.
    """
    signature = inspect.signature(function)
    takes_all = any(parameter.kind == parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    result = {name: value for name, value in named.items() if takes_all or name in signature.parameters}
    try:
        signature.bind(*positional, **result)
    except TypeError as error:
        there = ", ".join([*("prompts", "responses")[: len(positional)], *named])
        raise TypeError(f"cannot be called with {there}: {error}") from None
    return result


def trl_arguments(prompts: list, responses: list[str], ids: list, columns: dict) -> dict:
    """Return what TRL calls a reward function with.

    As there, the prompts are those of the column `prompt`, and a response to a list of messages is one, too, as is one
    of several turns. Without token ids, as on a reward server without a tokenizer, there is no `completion_ids`.
    """
    prompts = columns.get("prompt", prompts)
    completions = columns.get("turns") or [
        [{"role": "assistant", "content": response}] if isinstance(prompt, list) else response
        for prompt, response in zip(prompts, responses)
    ]
    others = {name: column for name, column in columns.items() if name != "prompt"}
    named = {**others, "prompts": prompts, "completions": completions}
    return named | {"completion_ids": ids} if any(ids) else named


def scores_one_by_one(function: Callable, responses: list[str], columns: dict) -> list:
    """Return what verl's compute_score gives each response: a number, or what a dict has under "score"."""
    scores = []
    for i, response in enumerate(responses):
        own = {name: column[i] for name, column in columns.items()}
        named = {
            "data_source": own.get("data_source"), "solution_str": response, "ground_truth": own["answer"],
            "extra_info": own.get("extra_info") or {},
        }  # fmt: skip
        result = call(function, [], named)
        scores.append(result["score"] if isinstance(result, dict) else result)
    return scores


def as_numbers(scores, count: int) -> list[float | None]:
    """Return what a function returned for `count` responses as floats and Nones."""
    if not isinstance(scores, Iterable) or isinstance(scores, (str, bytes, Mapping, Set)):
        raise TypeError(f"returned {described(scores)}, not a list of numbers")
    scores = list(scores)
    if len(scores) != count:
        raise ValueError(f"returned {len(scores)} scores for {count} responses")
    return [as_number(score) for score in scores]


def as_number(score) -> float | None:
    """Return one score as a float, None for None. (Text is no number, also if float() could read it.)"""
    if score is None:
        return None
    if not hasattr(score, "__float__"):
        raise TypeError(f"gave a response {described(score)}, not a number")
    return float(score)


def described(value) -> str:
    """Return the type of a value and how it begins, for a message."""
    return f"{type(value).__name__} {str(value)[:40]!r}"
