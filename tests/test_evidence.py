"""What makes the figures of README.md and docs/ (`bash scripts/evidence.sh`), and whether these pages
have the figures that results/ has.
"""

import json
import re
import shlex
import subprocess

import numpy as np
import pytest
import tyro
import variants
from conftest import ROOT

import grpo

EVIDENCE = ROOT / "scripts/evidence.sh"


def test_a_part_that_does_not_exist():
    done = subprocess.run(["bash", EVIDENCE, "demos"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: no part called 'demos'; there are demo environment ")


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

SMOLLM2 = "smollm2.json", [f"grpo-seed-{seed}" for seed in (1, 2, 3)]
KINDS = "eval/accuracy/instructions:"


def values(file: str, runs: list[str], metric: str, step: int) -> list[float]:
    """Return what some runs of a file of results/ had of a metric after a step."""
    results = json.loads((ROOT / "results" / file).read_text())
    return [results[run]["by_step"][metric][str(step)] for run in runs]


def each(file: str, runs: list[str], metric: str, step: int) -> str:
    """Return the values of all runs, as a cell of a table; 0.625 is 0.63."""
    return "; ".join(f"{x + 1e-9:.2f}" for x in values(file, runs, metric, step))


def span(file: str, runs: list[str], metric: str, step: int) -> str:
    """Return the lowest and the highest value, as in a sentence."""
    x = values(file, runs, metric, step)
    return " to ".join(dict.fromkeys((f"{min(x):.2f}", f"{max(x):.2f}")))


def seeds(name: str) -> list[str]:
    """Return the names of the three runs of a kind."""
    return [f"{name}-{seed}" for seed in (1, 2, 3)]


def cells(*found: str) -> str:
    return "| " + " | ".join(found) + " |"


def figures_of_the_tiny_model():
    """Yield a page, and a text that it has to contain."""
    for algorithm in ("grpo", "rloo", "ppo"):
        runs = seeds(algorithm)
        found = [span("demo.json", runs, "eval/accuracy", x) for x in (0, 20, 60, 120)]
        results = json.loads((ROOT / "results/demo.json").read_text())
        minutes = sorted(f"{results[run]['seconds'] / 60:.1f}" for run in runs)
        yield "README.md", cells(algorithm, *found, f"{minutes[0]} to {minutes[-1]}")
    of_sevens = lambda kind, metric: span("sevens.json", seeds(f"sevens-{kind}"), metric, 20)
    text = "after 20 steps it explains {}, and the score is {}, against {} with a frozen critic and {} by RLOO"
    scores = [of_sevens(kind, "objective/scores") for kind in ("ppo", "frozen", "rloo")]
    yield "docs/evidence.md", text.format(of_sevens("ppo", "val/explained_variance"), *scores)
    of_games = lambda algorithm, step: span(
        "environment.json", seeds(f"environment-{algorithm}"), "eval/accuracy", step
    )
    won = [of_games(algorithm, 60) for algorithm in ("grpo", "rloo", "ppo")]
    text = "wins {} of 186 held-out games before, and after 60 steps {} by GRPO, {} by RLOO and {} by PPO"
    yield "docs/evidence.md", text.format(of_games("grpo", 0), *won)
    file, runs = "reward_model.json", seeds("reward_model")
    ranked = [span(file, runs, "eval/pair_accuracy", x) for x in (0, 937)]
    yield (
        "docs/evidence.md",
        "it ranks {} of 500 held-out pairs right before, and {} after".format(*ranked),
    )
    of_run = lambda run, step: span(file, [run], "eval/accuracy", step)
    yield "docs/evidence.md", f"an accuracy of {of_run('ppo-on-reward_model', 120)} at step 120"
    exploits = [of_run("ppo-exploits-reward_model", x) for x in (40, 120)]
    yield "docs/evidence.md", "falls from {} at step 40 to {} at step 120".format(*exploits)


def figures_of_smollm2():
    """As `figures_of_the_tiny_model`."""
    for name, metric in (
        ("accuracy", "eval/accuracy"),
        ("kind `frequency`, in no training prompt", f"{KINDS}frequency"),
        ("kind `json`", f"{KINDS}json"),
    ):
        yield "docs/evidence.md", cells(name, *(each(*SMOLLM2, metric, x) for x in (0, 24, 48)))
    of_all = [span(*SMOLLM2, "eval/accuracy", x) for x in (0, 48)]
    yield "README.md", "it gets {} of the held-out prompts right before".format(of_all[0])
    yield "README.md", "and {} after 48 steps".format(of_all[1])
    of_new = [span(*SMOLLM2, f"{KINDS}frequency", x) for x in (0, 48)]
    yield "README.md", "it gets {} right before, and {} after".format(*of_new)
    brief = [values("smollm2.json", ["brief"], "eval/sequence_lengths", x)[0] for x in (0, 12)]
    text = "held-out answers have {:.0f} tokens before and {:.0f} after 12 steps"
    yield "docs/distillation.md", text.format(*brief)
    short = [span("smollm2.json", ["brief"], "eval/accuracy", x) for x in (0, 12)]
    yield "docs/distillation.md", "{} and {} of them at most 30 words".format(*short)
    corrections = "async4 async4_truncate async4_mask async4_sequence async4_geometric".split()
    names = [*corrections, "async4_dppo", "async4_dppo_kl"]
    of_variants = variants.accuracies(ROOT / "results/variants.json").groupby("variant")
    table = of_variants.agg(lambda x: variants.estimate(list(x))[0])
    mean = table["mean"]
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
        yield "docs/rollouts.md", cells(title, *(f"{x:.3f}" for x in table.loc[names, column]))


@pytest.mark.parametrize("page, text", [*figures_of_the_tiny_model(), *figures_of_smollm2()])
def test_a_page_has_the_figures_of_results(page, text):
    assert text in " ".join((ROOT / page).read_text().split())
