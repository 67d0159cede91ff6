"""How many of the tokens that ranks compute are padding, or stand for waiting for the rank with the longest rows.

    python scripts/benchmark_padding.py --output results/padding.md

Lengths are drawn; nothing is computed but the cuts of `utils.micro_batches`.
"""

import os
import sys
from dataclasses import dataclass

import numpy as np
import torch
import tyro

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import utils

LENGTHS = {  # name: mean, standard deviation, least and most tokens of a log-normal distribution
    "like GSM8K: mean 300, deviation 100": (300, 100, 40, 1500),
    "long tail: mean 2,000, deviation 2,000, up to 8,192": (2000, 2000, 100, 8192),
}


@dataclass
class Args:
    rows: int = 512
    """Sequences of an update, over all ranks."""
    ranks: tuple[int, ...] = (1, 8)
    """Numbers of ranks."""
    budgets: tuple[int, ...] = (4096, 8192, 16_384, 32_768)
    """Values of --micro_batch_tokens."""
    draws: int = 20
    """Draws of which the mean is shown."""
    output: str = ""
    """Markdown file to write the table to; default: to the console only."""


def draw(numbers: np.random.Generator, name: str, rows: int) -> list[int]:
    mean, deviation, least, most = LENGTHS[name]
    variance = np.log(1 + (deviation / mean) ** 2)
    lengths = numbers.lognormal(np.log(mean) - variance / 2, np.sqrt(variance), rows)
    return lengths.clip(least, most).astype(int).tolist()


def waste(lengths: list[int], budget: int, ranks: int) -> tuple[float, int]:
    """The share of tokens that are padding or waiting, and the number of micro-batches on each rank."""
    worlds = [utils.World(rank, ranks, torch.device("cpu")) for rank in range(ranks)]
    cuts = [utils.micro_batches(lengths, budget, world) for world in worlds]
    cost = lambda rows: len(rows) * max((lengths[i] for i in rows), default=0)
    slowest = sum(max(cost(rows) for rows in passes) for passes in zip(*cuts))
    return 1 - sum(lengths) / ranks / slowest, len(cuts[0])


def main(args: Args) -> None:
    lines = [
        f"# Padding and waiting of {args.rows} rows, mean of {args.draws} draws (micro-batches a rank)\n",
        f"`python scripts/benchmark_padding.py {' '.join(sys.argv[1:])}`\n",
        f"| lengths | ranks | {' | '.join(f'{budget:,} tokens at once' for budget in args.budgets)} |",
        "|---" * (2 + len(args.budgets)) + "|",
    ]
    for name in LENGTHS:
        for ranks in args.ranks:
            numbers, cells = utils.generator("padding", name, ranks), []
            batches = [draw(numbers, name, args.rows) for _ in range(args.draws)]
            for budget in args.budgets:
                share, passes = np.mean([waste(lengths, budget, ranks) for lengths in batches], axis=0)
                cells.append(f"{share:.1%} ({passes:.1f})")
            lines.append(f"| {name} | {ranks} | {' | '.join(cells)} |")
    print("\n".join(lines))
    if args.output:
        with open(args.output, "w") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args))
