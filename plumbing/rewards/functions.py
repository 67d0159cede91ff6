"""Functions from users' files that score responses: how one is loaded and called, and how its result is read.

The names of its parameters say in which of three forms a function is called:

    score(prompts, responses, **columns)                          this project's; the first two by position
    score(prompts, completions, completion_ids, **columns)        TRL's reward_funcs; by name, each may be left out
    score(data_source, solution_str, ground_truth, extra_info)    verl's compute_score; called for each response

Columns are lists with an entry for each response. A function without **columns gets those that it names.

Imports nothing of this project.
"""

import asyncio
import functools
import importlib.util
import inspect
import operator
import os
import sys
from typing import Callable


def load_function(name: str) -> Callable:
    """Return the function or class of "path/to/file.py:function", or the method of ":judge.score"."""
    path, _, function = name.rpartition(":")
    file = os.path.abspath(path)
    if file not in sys.modules:
        sys.path.insert(0, os.path.dirname(file))  # for what it imports
        spec = importlib.util.spec_from_file_location(file, file)
        sys.modules[file] = importlib.util.module_from_spec(spec)  # where dataclasses look for its names
        spec.loader.exec_module(sys.modules[file])
    return operator.attrgetter(function)(sys.modules[file])


@functools.cache
def load_scorer(name: str) -> Callable:
    """Return a function as `load_function` does; of a class an instance, the same for all calls."""
    function = load_function(name)
    return function() if inspect.isclass(function) else function


def score_by(function: Callable, prompts: list, responses: list[str], ids: list, columns: dict) -> list[float | None]:
    """Return the scores that a function gives the responses, None where it gives none.

    Args:
        prompts: as the model sees them. ids: token ids of the responses. columns: {name: [value in each row]}.
    Raises:
        TypeError, ValueError: if it cannot be called so, or returns anything but a number or None for each response.
    """
    parameters, count = list(inspect.signature(function).parameters), len(responses)  # a function may shorten the list
    if "solution_str" in parameters:
        scores = []
        for i, response in enumerate(responses):
            row = {name: column[i] for name, column in columns.items()}
            named = {"data_source": row.get("data_source"), "extra_info": row.get("extra_info") or {}}
            score = call(function, solution_str=response, ground_truth=row["answer"], **named)
            scores.append(score["score"] if isinstance(score, dict) else score)
    elif "completions" in parameters or "completion_ids" in parameters:
        scores = call(function, **trl_arguments(prompts, responses, ids, columns))
    else:
        others = {name: column for name, column in columns.items() if name not in parameters[:2]}
        scores = call(function, prompts, responses, **others)
    if isinstance(scores, (str, dict, set)):
        raise TypeError(f"returned a {type(scores).__name__}, not a list of numbers")
    scores = [None if score is None else float(score) for score in scores]
    if len(scores) != count:
        raise ValueError(f"returned {len(scores)} scores for {count} responses")
    return scores


def call(function: Callable, *positional, **named):
    """Call a function, which may be asynchronous, with those of the named arguments that it accepts."""
    result = function(*positional, **accepted(function, named))
    return asyncio.run(result) if inspect.iscoroutine(result) else result


def accepted(function: Callable, named: dict) -> dict:
    """Return those of the named arguments that a function has parameters for."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values()):
        return named
    return {name: value for name, value in named.items() if name in parameters}


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
    named = {**columns, "prompts": prompts, "completions": completions}
    named.pop("prompt", None)
    return named | {"completion_ids": ids} if any(ids) else named
