"""How much of what ranks compute is padding or waiting, by drawn lengths. `scripts/benchmark.py padding` calls it."""

import math
import statistics

import torch

import utils

COUNT = 512  # sequences of an update, over all ranks
BUDGETS = 4096, 8192, 16_384, 32_768  # --micro_batch_tokens
LENGTHS = {  # mean, standard deviation, least and most tokens of a log-normal distribution
    "like GSM8K: mean 300, deviation 100": (300, 100, 40, 1500),
    "long tail: mean 2,000, deviation 2,000, up to 8,192": (2000, 2000, 100, 8192),
}


def wasted(lengths: list[int], budget: int, ranks: int) -> tuple[float, int]:
    """Return the share of tokens that are padding or waiting, and the number of micro-batches on each rank."""
    worlds = [utils.World(rank, ranks, torch.device("cpu")) for rank in range(ranks)]
    cuts = [utils.micro_batches(lengths, budget, world) for world in worlds]
    cost = lambda rows: len(rows) * max((lengths[i] for i in rows), default=0)
    slowest = sum(max(cost(rows) for rows in passes) for passes in zip(*cuts))
    return 1 - sum(lengths) / ranks / slowest, len(cuts[0])


def table(draws: int) -> list[list[str]]:
    """Return the rows of a table, the header first: means over so many draws of the lengths."""
    rows = [["lengths", "ranks", *(f"{budget:,} tokens at once" for budget in BUDGETS)]]
    for name, (mean, deviation, least, most) in LENGTHS.items():
        variance = math.log(1 + (deviation / mean) ** 2)
        for size in (1, 8):
            numbers = utils.generator("padding", name, size)
            drawn = numbers.lognormal(math.log(mean) - variance / 2, math.sqrt(variance), (draws, COUNT))
            batches = drawn.clip(least, most).astype(int).tolist()
            found = [zip(*(wasted(lengths, budget, size) for lengths in batches)) for budget in BUDGETS]
            cells = [f"{statistics.mean(share):.1%} ({statistics.mean(passes):.1f})" for share, passes in found]
            rows.append([name, str(size), *cells])
    return rows
