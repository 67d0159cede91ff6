"""Functions from users' files that score responses: how one is loaded and called, and how its
result is read.

The names of its parameters say in which of three forms a function is called:

    score(prompts, responses, **columns)                          this project's; by name, each may be left out
    score(prompts, completions, completion_ids, **columns)        TRL's reward_funcs; by name, each may be left out
    score(data_source, solution_str, ground_truth, extra_info)    verl's compute_score; called for each response

Columns are lists with an entry for each response. A function without **columns gets those that it
names. In this project's form, a first or second parameter that is no column gets prompts or
responses whatever its name is, as long as no other parameter has that name; a function that would
get no responses is refused.

Imports nothing of this project.
"""

import asyncio
import functools
import importlib.util
import inspect
import operator
import os
import sys
from collections.abc import Callable
from numbers import Real


def load_function(name: str) -> Callable:
    """Return the function or class of "path/to/file.py:function", or the method of
    ":judge.score".
    """
    path, _, function = name.rpartition(":")
    file = os.path.abspath(path)
    if file not in sys.modules:
        sys.path.insert(0, os.path.dirname(file))  # for what it imports
        spec = importlib.util.spec_from_file_location(file, file)
        # where dataclasses look for its names
        sys.modules[file] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[file])
    return operator.attrgetter(function)(sys.modules[file])


@functools.cache
def load_scorer(name: str) -> Callable:
    """Return a function as `load_function` does; of a class an instance, the same for all calls."""
    function = load_function(name)
    return function() if inspect.isclass(function) else function


def score_by(
    function: Callable, prompts: list, responses: list[str], ids: list, columns: dict
) -> list[dict]:
    """Return the score that a function gives each response, None for none, as {"score": score}.

    Where a function returns an object for a response, as verl's may, its other numbers are there,
    too.

    Args:
        prompts: as the model sees them. ids: token ids of the responses. columns: {name: [value in
            each row]}.
    Raises:
        TypeError, ValueError: if it cannot be called so, or returns anything but a number or None
            for each response.
    """
    # a function may shorten the list
    parameters, count = inspect.signature(function).parameters, len(responses)
    if "solution_str" in parameters:
        results = []
        for i, response in enumerate(responses):
            row = {name: column[i] for name, column in columns.items()}
            named = {
                "data_source": row.get("data_source"),
                "extra_info": row.get("extra_info") or {},
            }
            results.append(
                call(function, solution_str=response, ground_truth=row["answer"], **named)
            )
    elif "completions" in parameters or "completion_ids" in parameters:
        results = call(function, **trl_arguments(prompts, responses, ids, columns))
    else:
        results = call(function, **own_arguments(parameters, prompts, responses, columns))
    if isinstance(results, (str, dict, set)):
        raise TypeError(f"returned a {type(results).__name__}, not a list of numbers")
    if len(results := list(results)) != count:
        raise ValueError(f"returned {len(results)} scores for {count} responses")
    results = [result if isinstance(result, dict) else {"score": result} for result in results]
    numbers = [
        {name: float(x) for name, x in result.items() if isinstance(x, Real)} for result in results
    ]
    scores = [None if result["score"] is None else float(result["score"]) for result in results]
    return [{**others, "score": score} for others, score in zip(numbers, scores)]


def call(function: Callable, /, **named):
    """Call a function, which may be asynchronous, with those of the named arguments that it
    accepts.
    """
    result = function(**accepted(function, named))
    return asyncio.run(result) if inspect.iscoroutine(result) else result


def accepted(function: Callable, named: dict) -> dict:
    """Return those of the named arguments that a function has parameters for."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values()):
        return named
    return {name: value for name, value in named.items() if name in parameters}


def own_arguments(parameters, prompts: list, responses: list[str], columns: dict) -> dict:
    """Return what a function of this project's form is called with; raise TypeError if it gets no
    responses.
    """
    named = {**columns, "prompts": prompts, "responses": responses}
    required = [
        x.name
        for x in parameters.values()
        if x.default is x.empty and x.kind == x.POSITIONAL_OR_KEYWORD
    ]
    for name, word in zip(required, ("prompts", "responses")):
        if name not in named and word not in parameters:
            named[name] = named.pop(word)
    if "responses" in named and "responses" not in parameters:
        raise TypeError(
            f"none of its parameters ({', '.join(parameters)}) gets the responses; name one `responses`"
        )
    return named


def trl_arguments(prompts: list, responses: list[str], ids: list, columns: dict) -> dict:
    """Return what TRL calls a reward function with.

    As there, the prompts are those of the column `prompt`, and a response to a list of messages is
    one, too, as is one of several turns. Without token ids, as on a reward server without a
    tokenizer, there is no `completion_ids`.
    """
    prompts = columns.get("prompt", prompts)
    completions = columns.get("turns") or [
        [{"role": "assistant", "content": response}] if isinstance(prompt, list) else response
        for prompt, response in zip(prompts, responses)
    ]
    named = {**columns, "prompts": prompts, "completions": completions}
    named.pop("prompt", None)
    return named | {"completion_ids": ids} if any(ids) else named
