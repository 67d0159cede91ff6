"""Mixtures of data sets, and the order in which a run reads its rows."""

import functools
import math
from typing import Any

import numpy as np

from plumbing.data.rows import Row
from utils import UserError, generator


def mix(parts: list[tuple], seed: int, shuffle: bool = True):
    """Return the rows of a single data set as they are; of several, as many rows as all have, drawn
    by weight.

    Each data set gives its rows in passes, shuffled or not, so that one with a large weight and few
    rows repeats them.
    """
    import datasets

    if len(parts) == 1:
        return parts[0][0]
    rows = datasets.concatenate_datasets([part for part, _ in parts])
    weights = np.array([x for _, x in parts])
    drawn = generator("mixture", seed).choice(len(parts), len(rows), p=weights / weights.sum())
    order = np.empty(len(rows), int)
    start = 0
    for i, (part, _) in enumerate(parts):
        of_part = drawn == i
        order[of_part] = start + stream(len(part), 0, of_part.sum(), (seed, i), shuffle)
        start += len(part)
    return rows.select(order)


def first_prompts(parts: list[tuple], count: int):
    """Return the first `count` prompts, 0 for all; of several data sets the first of each in
    proportion to its weight, rounded up.
    """
    import datasets

    total = sum(weight for _, weight in parts)
    return datasets.concatenate_datasets(
        [
            rows.select(range(len(rows))[: math.ceil(count * weight / total) or None])
            for rows, weight in parts
        ]
    )


def take_prompts(rows: Any, position: int, count: int, seed: Any, shuffle: bool = True):
    """Return the prompts `position ... position + count - 1` of an endless stream of passes, each
    shuffled anew or all in the order of the rows.
    """
    return [rows[i] for i in stream(len(rows), position, count, seed, shuffle)]


def next_prompts(rows: Any, step: int, state: dict, taken: int, count: int, args: Any) -> list[Row]:
    """Return the next `count` prompts of a step: those of `take_prompts`, or with --pass_rates
    those that the step draws, each with its "place" among the rows.

    Args:
        state: `Experience.state` of the rollout before: the "position" of the first prompt of the
            step, and with --pass_rates the "pass_rates".
        taken: prompts that the step has taken already.
    """
    if not args.pass_rates:
        position = state.get("position", 0) + taken
        return take_prompts(rows, position, count, args.seed, args.shuffle)
    low, high = args.pass_rates
    rates = state.get("pass_rates", {})
    outside = [place for place, rate in rates.items() if not low <= rate <= high]
    # Rows in the order of exponential times are rows drawn one after the other (Efraimidis and
    # Spirakis 2006): those with ten times the time by a tenth of the weight; not 0, as rates age.
    times = generator("pass rates", args.seed, step).exponential(size=len(rows))
    times[outside] *= 10
    places = np.resize(times.argsort(), taken + count)[taken:]  # again, once all are taken
    return [{**rows[i], "place": i} for i in places.tolist()]


def stream(size: int, position: int, count: int, seed: Any, shuffle: bool = True):
    """Return the places of the rows that `take_prompts` takes of `size` rows (count,)."""
    orders = [
        pass_order(seed, number, size) if shuffle else np.arange(size)
        for number in range(position // size, (position + count) // size + 1)
    ]
    return np.concatenate(orders)[position % size :][:count]


def count_steps(passes: float, rows: Any, size: int) -> int:
    """Return how many steps of `size` rows --passes over the rows make; raise a UserError if they
    make none.
    """
    steps = round(passes * len(rows)) // size
    if not steps:
        raise UserError(
            f"--passes {passes}: a step takes {size} rows, and there are {len(rows)} to train on"
        )
    return steps


@functools.lru_cache(maxsize=4)
def pass_order(seed: Any, number: int, size: int):
    """Return the order of the rows in a pass over `size` of them."""
    return generator("prompts", seed, number).permutation(size)
