"""Measures over n responses to each of P prompts: avg@n, pass@k, maj@k, and their confidence intervals.

Imports nothing of ours.
"""

import functools
import math
from collections import Counter

import numpy as np


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the unbiased pass@k, 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374, eq. 1)."""
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


@functools.lru_cache(maxsize=None)
def majority_at_k(groups: tuple[tuple[int, int], ...], samples: int, ks: tuple[int, ...]) -> list[float]:
    """Return for each k the probability that the majority vote of k responses, drawn without replacement, is correct.

    Args:
        groups: (votes, correct ones among them) of each answer.
        samples: n; those that are in no group do not vote.

    For every t, counts the draws in which t votes win: the r answers with exactly t votes share the draw. Answers that
    have fewer than t votes in all may get any number of them; the others are added one after the other.
    """
    most, wins = max(ks), dict.fromkeys(ks, 0.0)
    for t in range(1, min(most, max((votes for votes, _ in groups), default=0)) + 1):
        able = [(votes, correct / votes) for votes, correct in groups if votes >= t]
        others = samples - sum(votes for votes, _ in able)
        # table[0, r, s]: ways to draw s votes of `able` so that r answers get t and none gets more. table[1]: the same,
        # each weighted by the sum of the shares of correct votes of these r answers.
        table = np.zeros((2, 1 + min(len(able), most // t), most + 1))
        table[0, 0, 0] = 1
        for votes, share in able:
            tied = math.comb(votes, t) * table[:, :-1, : most + 1 - t]
            tied[1] += share * tied[0]
            new = np.zeros_like(table)
            for j in range(t):
                new[..., j:] += math.comb(votes, j) * table[..., : most + 1 - j]
            new[:, 1:, t:] += tied
            table = new
        won = (table[1, 1:] / np.arange(1, table.shape[1])[:, None]).sum(0)  # (most + 1,)
        for k in ks:
            wins[k] += sum(won[s] * math.comb(others, k - s) for s in range(t, k + 1))
    return [round(float(wins[k] / math.comb(samples, k)), 12) for k in ks]  # 1, where it is 1


def estimate(values: list[float], draws: float = 0) -> dict:
    """Return the mean over prompts, its standard error, and a 95% confidence interval, {"value", "se", "ci95"}.

    Args:
        values: one a prompt, NaN for a prompt that has none.
        draws: independent draws that a value rests on at most, n / k, if the values are probabilities; else 0.

    Numbers in general get value +- 1.96 se. Probabilities get Wilson's interval, with the number of independent draws
    that has this standard error, p (1 - p) / se^2, between P and P * `draws`, as its size (Dean and Pagano 2015,
    "Evaluating confidence interval methods for binomial proportions in clustered surveys"): it stays within [0, 1], and
    still has a width where all prompts are alike, where value +- 1.96 se has none.
    """
    values = [x for x in values if math.isfinite(x)]
    count, z = len(values), 1.959964
    if count < 2:
        return {"value": values[0] if values else None, "se": None, "ci95": None}
    mean = math.fsum(values) / count
    variance = math.fsum((x - mean) ** 2 for x in values) / (count - 1) / count
    middle, half = mean, z * math.sqrt(variance)
    if draws:
        spread = mean * (1 - mean)
        # all alike, up to rounding: nothing to go by
        size = min(max(count, spread / variance), count * draws) if variance > 1e-24 else count
        middle = (mean + z**2 / (2 * size)) / (1 + z**2 / size)
        half = z / (1 + z**2 / size) * math.sqrt(spread / size + z**2 / (4 * size**2))
    ci = (middle - half, middle + half)
    return {"value": mean, "se": math.sqrt(variance), "ci95": [min(max(x, 0.0), 1.0) if draws else x for x in ci]}


def measures(correct: list[list[bool]], answers: list[list[str | None]] | None, ks: tuple[int, ...]) -> dict:
    """Return {"avg@n", "pass@k" and, with answers to vote for, "maj@k" of each k: `estimate`}.

    Args:
        correct, answers: of the n responses to each prompt; an answer of None is no vote.
    """
    n = len(correct[0])
    results = {f"avg@{n}": estimate([sum(row) / n for row in correct], n)}
    for k in ks:
        results[f"pass@{k}"] = estimate([pass_at_k(n, sum(row), k) for row in correct], n / k)
    if answers is not None:
        won = [majority_at_k(count_votes(row, said), n, ks) for row, said in zip(correct, answers)]
        results |= {f"maj@{k}": estimate([row[i] for row in won], n / k) for i, k in enumerate(ks)}
    return results


def count_votes(correct: list[bool], answers: list[str | None]) -> tuple[tuple[int, int], ...]:
    """Return (votes, correct ones among them) of each answer; an answer of None is no vote."""
    votes = Counter(answers)
    right = Counter(answer for answer, is_correct in zip(answers, correct) if is_correct)
    return tuple(sorted((votes[answer], right[answer]) for answer in votes if answer is not None))
