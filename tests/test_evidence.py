"""What makes the figures of README.md and docs/ (`bash scripts/evidence.sh`), and whether these pages
have the figures that results/ has.
"""

import json
import re
import shlex
import subprocess

import numpy as np
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
