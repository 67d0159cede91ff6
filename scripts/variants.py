"""Which choices of a loss, an advantage or a correction matter: the held-out accuracy of runs that
differ in them, by `bash scripts/evidence.sh variants`.

    python scripts/variants.py results/variants.json --picture assets/variants.png > results/variants.md

A number is the interquartile mean over seeds, in brackets the 95 % interval of its bootstrap
(rliable, arXiv:2108.13264).
"""

import json
from pathlib import Path

import numpy as np
import pandas
import repository  # noqa: F401
import tyro
from matplotlib.figure import Figure
from tyro.conf import Positional

from plumbing.run.command import report_errors
from utils import as_user_error

DRAWS = 10_000  # of the bootstrap
METRIC = "eval/accuracy"


def interquartile_mean(x: np.ndarray) -> np.ndarray:
    """Return the mean of the middle half of each row: (draws, seeds) -> (draws,).

    Where a quarter of the seeds is no whole number, the outermost that remain count in part.
    """
    x = np.sort(x, axis=1)
    seeds = x.shape[1]
    edges = np.clip(np.arange(seeds + 1), seeds / 4, 3 * seeds / 4)
    return x @ np.diff(edges) / (seeds / 2)


def estimate(x: list[float]) -> tuple[float, float, float]:
    """Return the interquartile mean over the seeds, and the ends of its bootstrap interval."""
    drawn = np.random.default_rng(0).choice(x, (DRAWS, len(x)))
    low, high = np.quantile(interquartile_mean(drawn), (0.025, 0.975))
    return interquartile_mean(np.array([x]))[0], low, high


def accuracies(path: Path) -> pandas.DataFrame:
    """Return a row per run: its variant, and its held-out accuracy, as a mean over the evaluations
    of training (how fast it learns) and at the end.
    """
    rows = []
    for name, run in json.loads(path.read_text()).items():
        values = list(run["by_step"][METRIC].values())
        variant = name.removeprefix("variants-").rpartition("-")[0]
        rows.append({"variant": variant, "mean": np.mean(values[1:]), "end": values[-1]})
    return pandas.DataFrame(rows)


def main(results: Positional[Path], picture: Path) -> None:
    """
    Args:
        results: JSON file of scripts/summarize.py; its runs are called variants-NAME-SEED.
        picture: PNG file to write.
    """
    with as_user_error(f"RESULTS {results}"):
        groups = accuracies(results).groupby("variant", sort=False)
    table = groups.agg(lambda x: estimate(list(x)))
    shown = table.map(lambda x: "{:.3f} [{:.3f}, {:.3f}]".format(*x))
    shown["seeds"] = groups.size()
    print(f"# {results}: held-out accuracy, interquartile mean over seeds [95 % interval]\n")
    print("| variant |", " | ".join(shown.columns), "|\n|---|---|---|---|")
    for variant, row in shown.iterrows():
        print(f"| {variant} |", " | ".join(map(str, row)), "|")
    figure = Figure((8, 1 + 0.3 * len(table)), layout="constrained")
    for axes, column in zip(figure.subplots(1, 2, sharey=True), table):
        middle, low, high = zip(*table[column])
        axes.hlines(table.index, low, high)
        axes.plot(middle, table.index, "o")
        axes.set_title(f"held-out accuracy, {column}", loc="left", fontsize=10)
        axes.grid(color="#ecebe6")
    axes.invert_yaxis()
    figure.savefig(picture, dpi=130)


if __name__ == "__main__":
    with report_errors():
        tyro.cli(main)
