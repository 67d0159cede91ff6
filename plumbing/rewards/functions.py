"""Functions from users' files that score responses: how one is called, and how its result is read.

The names of its parameters say in which of three forms a function is called. Arguments are passed
by name, and one for which it has no parameter is left out:

    score(prompts, responses, **columns)                          this project's
    score(prompts, completions, completion_ids, trainer_state, log_metric, **columns)        TRL's reward_funcs
    score(data_source, solution_str, ground_truth, extra_info)    verl's compute_score; called for each response

Columns are lists with an entry for each response. Conversations bring `turns` along, a list of
messages each.
"""

import asyncio
import contextlib
import functools
import inspect
import math
import traceback
from collections.abc import Callable, Sequence
from numbers import Real
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from plumbing.processes import accepted, load_function

TRL = {"completions", "completion_ids"}  # a parameter of TRL's form
runner = asyncio.Runner()  # one event loop for all calls: clients and locks of a file belong to it


@functools.cache
def load_reward_function(name: str) -> Any:
    """Return a function as `load_function` does; of a class an instance, the same for all calls."""
    function = load_function(name)
    return function() if inspect.isclass(function) else function


@contextlib.contextmanager
def traceback_printed():
    try:
        yield
    except BaseException:
        traceback.print_exc()
        raise


class Functions:
    """What a process of users' functions does."""

    @traceback_printed()
    def attributes(self, name: str) -> tuple[bool, bool]:
        """Return whether a function tells right from wrong, and whether it gets whole groups, as
        one in TRL's form does. Import its file, unless it is there.
        """
        function = load_reward_function(name)
        trl = TRL & inspect.signature(function).parameters.keys()
        return getattr(function, "verifies", True), getattr(function, "whole", bool(trl))

    @traceback_printed()
    def score(self, name: str, *arguments) -> list[dict[str, float]]:
        """Return what `score_by` does."""
        return score_by(load_reward_function(name), *arguments)


def score_by(
    function: Callable,
    prompts: list,
    responses: list[str],
    ids: list,
    columns: dict,
    step: int | None = None,
    turns: Sequence = (),
) -> list[dict[str, float]]:
    """Return the numbers that a function gives each response: "score", NaN for None; of an object,
    such as verl's, its other numbers; and the mean of what it gives TRL's `log_metric` by a name.

    Args:
        prompts: as the model sees them. ids: token ids of the responses. columns: {name: [value in
            each row]}, with "answer". step: number of steps that the run has made; None on a reward
            server. turns: messages of each response, if these are conversations.
    Raises:
        TypeError, ValueError, KeyError: if it cannot be called so, as a column has the name of
            another argument, too, or if it returns anything but a number or None for each response.
    """
    count = len(responses)  # a function may shorten the list
    parameters = inspect.signature(function).parameters
    logged: dict[str, list[float]] = {}
    given: dict[str, Any] = {"turns": turns} if turns else {}
    if "solution_str" in parameters:
        rows = [dict(zip(columns, values)) for values in zip(*columns.values())]
        results: Any = at_once(
            [
                call(
                    function,
                    {},
                    solution_str=response,
                    ground_truth=row["answer"],
                    data_source=row.get("data_source"),
                    extra_info=row.get("extra_info") or {},
                )
                for response, row in zip(responses, rows)
            ]
        )
    elif TRL & parameters.keys():
        # As there, the response to a list of messages is one, too, as is one of several turns.
        columns = dict(columns)
        prompts = columns.pop("prompt", prompts)
        given["completions"] = turns or [
            [{"role": "assistant", "content": response}] if isinstance(prompt, list) else response
            for prompt, response in zip(prompts, responses)
        ]
        if any(ids):  # there are none on a reward server, which has no tokenizer
            given["completion_ids"] = ids
        if step is not None:
            given["trainer_state"] = SimpleNamespace(global_step=step)
        log_metric = lambda name, x: logged.setdefault(name, []).append(float(x))
        results = call(function, columns, prompts=prompts, log_metric=log_metric, **given)
    else:
        given["responses"] = responses
        if "responses" not in accepted(function, given):
            raise TypeError(f"no parameter gets the responses: {', '.join(parameters)}")
        results = call(function, columns, prompts=prompts, **given)
    if inspect.iscoroutine(results):
        results = runner.run(results)
    if isinstance(results, (str, bytes, dict, set)) or not hasattr(results, "__iter__"):
        raise TypeError(f"returned a {type(results).__name__}, not a list of numbers")
    results = list(results)
    if len(results) != count:
        raise ValueError(f"returned {len(results)} scores for {count} responses")
    means = {name: fmean(values) for name, values in logged.items()}
    return [means | numbers_of(result) for result in results]


def call(function: Callable, columns: dict, /, **given):
    """Call a function with those columns and named arguments that it accepts."""
    named = accepted(function, columns | given)
    for name in columns.keys() & given.keys() & named.keys():
        raise TypeError(f"the rows have a column {name!r}, the name of another argument: rename it")
    return function(**named)


async def at_once(results: list) -> list:
    """Return results, after those that are coroutines have run side by side."""

    async def end(result):
        return await result if inspect.iscoroutine(result) else result

    return await asyncio.gather(*map(end, results))


def numbers_of(result) -> dict[str, float]:
    """Return the numbers of what a function returned for a response."""
    named = result if isinstance(result, dict) else {"score": result}
    if "score" not in named:
        raise ValueError(f"returned an object without 'score': {result!r:.80}")
    score = math.nan if named["score"] is None else float(named["score"])
    numbers = {}
    for name, x in named.items():
        if math.prod(getattr(x, "shape", (0,))) == 1:  # a tensor of one number is one
            x = x.item()
        if isinstance(x, Real):
            numbers[name] = float(x)
    return numbers | {"score": score}
