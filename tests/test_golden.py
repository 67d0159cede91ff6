"""Small runs in float64 do what they did when tests/golden/*.json were recorded.

    python tests/test_golden.py     # records them anew, where numbers change on purpose: say which and why

(tests/golden.py of commit 6963dc3 has 79 such runs, to compare two states of the code with before
and after a move.)
"""

import functools
import json
import math
import os
import sys
import tempfile
from pathlib import Path

import conftest  # noqa: F401
import helpers
import numpy as np
import pytest
from helpers import ROOT, folder_of, metrics_of, read_lines, write_rows
from safetensors import safe_open
from torch.nn.functional import rms_norm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

FOLDER = ROOT / "tests" / "golden"
# a difference is relative to the old number, or to this where that is smaller
TOLERANCE, LEAST = 1e-9, 1e-3
RUNS = helpers.table("golden_runs.yaml")["runs"]


def prepare(folder: Path) -> None:
    """Set up the process of a run."""
    os.chdir(folder)  # names of files are metrics' names
    # transformers' rounds to float32, by which 1e-16 of another CPU becomes 1e-8.
    Qwen2RMSNorm.forward = lambda self, x: rms_norm(
        x, x.shape[-1:], self.weight, self.variance_epsilon
    )


def recording(script: str, folder: Path) -> dict:
    """Make a run; return its metrics without times, its samples, and the norm of each tensor of its
    final model.
    """
    sums = zip(range(100, 780, 17), range(101, 621, 13))
    rows = [{"prompt": f"{a}+{b}=", "answer": f"#### {a + b}"} for a, b in sums]
    pairs = [
        {
            "prompt": row["prompt"],
            "chosen": row["answer"],
            "rejected": f"#### {i}{'0' * (i % 3)}",
            "margin": i % 4 / 10,
            "subset": f"{i % 2}",
        }
        for i, row in enumerate(rows)
    ]
    write_rows(folder / "pairs.jsonl", pairs)
    (folder / "reward.py").write_text(helpers.REWARD)
    values = RUNS[script] | {"output_dir": str(folder / "runs")}
    values |= {flag: str(ROOT / values[flag]) for flag in ("model", "teacher") if flag in values}
    helpers.run(values, script=script, place=functools.partial(prepare, folder))
    norms = {}
    for path in sorted((folder_of(values) / "final").rglob("*.safetensors")):
        with safe_open(path, "np") as file:
            tensors = {key: file.get_tensor(key).astype(float) for key in sorted(file.keys())}
        norms |= {f"{path.name}: {key}": float(np.linalg.norm(x)) for key, x in tensors.items()}
    samples = [
        {key: x for key, x in row.items() if key != "length"}
        for row in read_lines(folder_of(values) / "samples.jsonl")
    ]
    return {"metrics": metrics_of(values), "samples": samples, "weights": [norms]}


def differences(old, new, where: str = "") -> list[str]:
    """List the numbers that differ by more than TOLERANCE, and all else that is not the same."""
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        return [line for key in old for line in differences(old[key], new[key], f"{where} {key}")]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [
            line
            for i, pair in enumerate(zip(old, new))
            for line in differences(*pair, f"{where}[{i}]")
        ]
    if "_diff_" in where:  # rounding of the float32 sampler, which is another one on other CPUs
        return []
    numbers = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in (old, new))
    same = (
        old == new
        or numbers
        and math.isclose(old, new, rel_tol=TOLERANCE, abs_tol=TOLERANCE * LEAST)
    )
    return [] if same else [f"{where}: {old!r} -> {new!r}"]


@pytest.mark.parametrize("script", RUNS)
def test_as_recorded(script, tmp_path):
    """Held to AVX-512, AVX2 or SSE instructions, torch gave the same within 1e-12; 1e-9 leaves room
    for other CPUs.
    """
    assert (
        differences(
            json.loads((FOLDER / f"{script}.json").read_text()), recording(script, tmp_path)
        )
        == []
    )


if __name__ == "__main__":
    for script in sys.argv[1:] or RUNS:
        with tempfile.TemporaryDirectory() as folder:
            parts = recording(script, Path(folder)).items()
        lines = [
            f'"{part}": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]" for part, rows in parts
        ]
        (FOLDER / f"{script}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
