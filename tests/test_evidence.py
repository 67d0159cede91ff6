"""What makes the figures of README.md and docs/ (`bash scripts/evidence.sh`), and whether these pages
have the figures that results/ has.
"""

import fnmatch
import json
import re
import shlex
import shutil
import subprocess
from itertools import groupby
from operator import itemgetter

import numpy as np
import pytest
import tyro
import variants
from conftest import ROOT
from helpers import table

import grpo

EVIDENCE = ROOT / "scripts/evidence.sh"


def test_a_part_that_does_not_exist():
    done = subprocess.run(["bash", EVIDENCE, "demos"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: no part called 'demos'; there are demo environment ")


def test_a_demo_without_vllm_says_what_installs_it(tmp_path):
    """On a machine where setup.sh has nothing to do and Python finds no module."""
    for name, text in (("scripts/setup.sh", ""), (".venv/bin/python", "#!/bin/sh\nexit 1")):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    demo = shutil.copy(ROOT / "scripts/demo.sh", tmp_path / "scripts")
    done = subprocess.run(["bash", demo, "agent"], capture_output=True, text=True)
    assert done.returncode == 2 and "`bash scripts/test.sh` installs it" in done.stderr


def test_parts_have_a_function_each():
    text = EVIDENCE.read_text()
    parts = re.search(r'^all="(.*)"$', text, re.MULTILINE)[1].split()
    assert parts == re.findall(r"^part_(\w+)\(\)", text, re.MULTILINE)


def test_variants_are_flags_of_grpo():
    """Each row of the table differs from the first one in what its name says."""
    table = re.search(r'^variants="\n(.*?)^"$', EVIDENCE.read_text(), re.MULTILINE | re.DOTALL)[1]
    found = {}
    for line in table.splitlines():
        name, *flags = shlex.split(line)
        assert name not in found
        found[name] = tyro.cli(grpo.Args, args=[*flags, "--rollout_backend", "vllm"])
    assert len(found) >= 12
    assert len({str(args) for args in found.values()}) == len(found)


def test_interquartile_mean():
    """Of 8 numbers the mean of the middle 4; of 5 the outer two of the middle 3 count three quarters."""
    x = np.random.default_rng(0).random((2, 8))
    assert np.allclose(variants.interquartile_mean(x), np.sort(x)[:, 2:6].mean(1))
    x = np.array([[5.0, 1.0, 2.0, 3.0, 100.0]])
    assert np.allclose(variants.interquartile_mean(x), (0.75 * 2 + 3 + 0.75 * 5) / 2.5)


def test_the_interval_of_variants(tmp_path, capsys):
    """It holds the mean, its ends meet where the seeds agree, and the picture is drawn."""
    accuracy = {"a": [0.5, 0.5, 0.5], "b": [0.2, 0.4, 0.9]}
    runs = {
        f"variants-{name}-{seed}": {"by_step": {"eval/accuracy": {"0": 0.0, "1": 0.5, "2": value}}}
        for name, values in accuracy.items()
        for seed, value in enumerate(values)
    }
    path = tmp_path / "variants.json"
    path.write_text(json.dumps(runs))
    variants.main(path, tmp_path / "picture.png")
    rows = capsys.readouterr().out.splitlines()
    assert rows[-2] == "| a | 0.500 [0.500, 0.500] | 0.500 [0.500, 0.500] | 3 |"
    middle, low, high = variants.estimate(accuracy["b"])
    assert low < middle < high and 0.199 < low and high < 0.901
    assert (tmp_path / "picture.png").stat().st_size > 1000


# ---- figures of the pages ------------------------------------------------------------------------

DIGITS = {"minutes": 1, "eval/sequence_lengths": 0}  # of others 2


def value(run: dict, metric: str, step: int) -> float:
    return run["seconds"] / 60 if metric == "minutes" else run["by_step"][metric][str(step)]


def figures_of_runs():
    """Yield a page, and a text that it has to contain."""
    for how, rows in table("figures.yaml").items():
        for page, text, file, *gaps in rows:
            results = json.loads((ROOT / "results" / file).read_text())
            found = []
            for runs, metric, *steps in gaps:
                digits = DIGITS.get(metric, 2)
                for step in steps:
                    x = [value(results[run], metric, step) for run in fnmatch.filter(results, runs)]
                    x = [min(x), max(x)] if how == "ranges" else x
                    shown = [f"{each + 1e-9:.{digits}f}" for each in x]  # 0.625 is 0.63
                    joined = (
                        " to ".join(dict.fromkeys(shown)) if how == "ranges" else "; ".join(shown)
                    )
                    found.append(joined)
            yield page, text.format(*found)


def figures_of_variants():
    """As `figures_of_runs`."""
    corrections = "async4 async4_truncate async4_mask async4_sequence async4_geometric".split()
    names = [*corrections, "async4_dppo", "async4_dppo_kl"]
    of_variants = variants.accuracies(ROOT / "results/variants.json").groupby("variant")
    of_both = of_variants.agg(lambda x: variants.estimate(list(x))[0])
    mean = of_both["mean"]
    is_async = mean.index.str.startswith("async")
    ends = [f"{x:.2f}" for of in (mean[names], mean[~is_async]) for x in (of.min(), of.max())]
    text = "is {} to {} with K = 4, {:.2f} with K = 2, and {} to {} without"
    yield "docs/evidence.md", text.format(*ends[:2], mean["async2"], *ends[2:])
    best = mean[["async4_sequence", "async4_geometric", "async4"]]
    text = "{:.2f} by `sequence_mask` and {:.2f} by `geometric`, {:.2f} without a correction"
    yield "docs/evidence.md", text.format(*best)
    yield "docs/evidence.md", f"`--loss dppo` did not ({mean['async4_dppo']:.2f})"
    text = "`dr_grpo` ({:.2f}) was above `gspo` ({:.2f})"
    yield "docs/evidence.md", text.format(*mean[["dr_grpo", "gspo"]])
    for title, column in (("mean of the evaluations", "mean"), ("last evaluation", "end")):
        cells = [title, *(f"{x:.3f}" for x in of_both.loc[names, column])]
        yield "docs/rollouts.md", f"| {' | '.join(cells)} |"


def figures_of_memory():
    """As `figures_of_runs`: the rows of a table. What scripts/memory.py does not follow is empty."""
    lines = (ROOT / "results/memory.md").read_text()
    found = re.findall(r"^- (.*), \S+:(?:.* needed)? ?([\d.]*)", lines, re.MULTILINE)
    for _, cells in groupby(found, itemgetter(0)):
        row = f"| {' | '.join(gb for _, gb in cells)} |"
        yield "docs/models_and_memory.md", " ".join(row.split())


@pytest.mark.parametrize(
    "page, text", [*figures_of_runs(), *figures_of_variants(), *figures_of_memory()]
)
def test_a_page_has_the_figures_of_results(page, text):
    assert text in " ".join((ROOT / page).read_text().split())
