"""Numbers that are not finite, in whole runs: none reaches the weights, each update that is skipped
is counted.

Scores and gradients that are not finite are in tests/test_run.py, single equations in
tests/test_equations.py, overflows of --precision fp16 in tests/test_shard.py.
"""

import math
from pathlib import Path

import helpers
import pytest
import torch
from helpers import folder_of, metrics_of, same_weights, steps_of, tensors_of, variant
from safetensors.torch import load_file, save_file

from plumbing.models import loading


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict:
    values = helpers.workspace(tmp_path_factory.mktemp("numbers"))
    return {**values, "eval_every": 0, "save_every": 1, "num_epochs": 1, "total_episodes": 24}


def change_weights(folder: str, part: str, value: float, entries: slice) -> None:
    """Set entries of the first weights with `part` in their name to a value."""
    path = Path(folder) / "model.safetensors"
    weights = load_file(path)
    tensor = next(tensor for name, tensor in weights.items() if part in name)
    tensor.view(-1)[entries] = value
    save_file(weights, path, {"format": "pt"})


# ---- weights that were NaN or infinite before the run --------------------------------------------


@pytest.mark.parametrize("flag, value", [("model", math.nan), ("ref_model", math.inf)])
def test_a_model_that_is_not_finite_is_refused(base, tmp_path, capsys, flag, value):
    model = helpers.tiny_model(tmp_path / "model")
    change_weights(model, "down_proj", value, slice(5, 6))
    values = variant(base, tmp_path, **{flag: model})
    error = helpers.refused(capsys, helpers.run_here, values)
    assert error.startswith(f"error: --{flag} {model}: its logits are not finite")
    assert not folder_of(values).exists()


# ---- what goes wrong in a step -------------------------------------------------------------------


@pytest.mark.parametrize(
    "script, place, estimator",
    [
        ("grpo", "loss", "k3"),
        ("grpo", "reward", "k1"),
        ("ppo", "reward", "k1"),
        ("rloo", "loss", "k2"),
        ("rloo", "reward", "k1"),
    ],
)
def test_a_reference_that_becomes_nan(
    base, tmp_path, capsys, monkeypatch, script, place, estimator
):
    """torch.clamp has a gradient of 0 for NaN, and advantages are 0 without a score: all the same
    nothing is trained on as if there were no KL.
    """
    load = loading.load_reference

    def poisoned(*args):
        reference, is_saved = load(*args)
        reference.model.model.norm.weight.data[3] = math.nan
        return reference, is_saved

    monkeypatch.setattr(loading, "load_reference", poisoned)
    values = variant(base, tmp_path, kl_in=place, kl_estimator=estimator, total_episodes=48)
    assert " was not finite in 6 updates in a row" in helpers.refused(
        capsys, helpers.run_here, values, script
    )
    for row in metrics_of(values):
        assert row["val/skipped_updates"] == 2 and row["objective/kl"] is None
    for step in steps_of(values):
        assert same_weights(folder_of(values) / "checkpoints" / step, values["model"])


# ---- tokens that a model masks -------------------------------------------------------------------


@pytest.mark.parametrize(
    "script, changes",
    [
        ("grpo", {"entropy_coef": 0.01, "weight_decay": 0.1}),
        ("rloo", {"kl_in": "loss", "lora_rank": 2}),
    ],
)
def test_logits_of_minus_infinity(base, tmp_path, script, changes):
    """A head whose bias masks tokens: they are never sampled, and all numbers are finite."""
    model = helpers.tiny_model(tmp_path / "phi", "phi")
    change_weights(model, "lm_head.bias", -math.inf, slice(100, 200))
    values = variant(base, tmp_path, model=model, total_episodes=16, num_epochs=2, **changes)
    helpers.run_here(values, script)
    rows = metrics_of(values)
    assert [row["val/skipped_updates"] for row in rows] == [0, 0]
    assert None not in rows[-1].values()
    weights = tensors_of(folder_of(values) / "final")
    bias = next(tensor for name, tensor in weights.items() if name.endswith("lm_head.bias"))
    assert (bias[100:200] == -torch.inf).all() and bias.isfinite().sum() == len(bias) - 100
    assert not any(tensor.isnan().any() for tensor in weights.values())
