"""Functions from users' files that score responses: how one is called, and how its result is read.

The names of its parameters say in which of three forms a function is called. Arguments are passed
by name, and one for which it has no parameter is left out:

    score(prompts, responses, **columns)                          this project's
    score(prompts, completions, completion_ids, trainer_state, log_metric, **columns)        TRL's reward_funcs
    score(data_source, solution_str, ground_truth, extra_info)    verl's compute_score; called for each response

Columns are lists with an entry for each response.
"""

import asyncio
import functools
import inspect
import math
from collections.abc import Callable
from numbers import Real
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from plumbing.user_code import accepted, load_function


@functools.cache
def load_reward_function(name: str) -> Any:
    """Return a function as `load_function` does; of a class an instance, the same for all calls."""
    function = load_function(name)
    return function() if inspect.isclass(function) else function


def score_by(
    function: Callable,
    prompts: list,
    responses: list[str],
    ids: list,
    columns: dict,
    step: int | None = None,
) -> list[dict[str, float]]:
    """Return the numbers that a function gives each response: "score", NaN for None; of an object,
    such as verl's, its other numbers; and the mean of what it gives TRL's `log_metric` by a name.

    Args:
        prompts: as the model sees them. ids: token ids of the responses. columns: {name: [value in
            each row]}, with "answer". step: number of steps that the run has made; None on a reward
            server.
    Raises:
        TypeError, ValueError, KeyError: if it cannot be called so, or returns anything but a number
            or None for each response.
    """
    count = len(responses)  # a function may shorten the list
    parameters = inspect.signature(function).parameters
    logged: dict[str, list[float]] = {}
    if "solution_str" in parameters:
        rows = [dict(zip(columns, values)) for values in zip(*columns.values())]
        results = [
            call(
                function,
                solution_str=response,
                ground_truth=row["answer"],
                data_source=row.get("data_source"),
                extra_info=row.get("extra_info") or {},
            )
            for response, row in zip(responses, rows)
        ]
    elif "completions" in parameters or "completion_ids" in parameters:
        named = trl_arguments(prompts, responses, ids, columns)
        named["log_metric"] = lambda name, x: logged.setdefault(name, []).append(float(x))
        if step is not None:
            named["trainer_state"] = SimpleNamespace(global_step=step)
        results = call(function, **named)
    else:
        named = {**columns, "prompts": prompts, "responses": responses}
        if "responses" not in accepted(function, named):
            raise TypeError(f"no parameter gets the responses: {', '.join(parameters)}")
        results = call(function, **named)
    if isinstance(results, (str, dict, set)):
        raise TypeError(f"returned a {type(results).__name__}, not a list of numbers")
    results = list(results)
    if len(results) != count:
        raise ValueError(f"returned {len(results)} scores for {count} responses")
    means = {name: fmean(values) for name, values in logged.items()}
    return [means | numbers_of(result) for result in results]


def call(function: Callable, /, **named):
    """Call a function, which may be asynchronous, with those of the named arguments that it
    accepts.
    """
    result = function(**accepted(function, named))
    return asyncio.run(result) if inspect.iscoroutine(result) else result


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


def numbers_of(result) -> dict[str, float]:
    """Return the numbers of what a function returned for a response."""
    named = result if isinstance(result, dict) else {"score": result}
    score = math.nan if named["score"] is None else float(named["score"])
    return {**{name: float(x) for name, x in named.items() if isinstance(x, Real)}, "score": score}
