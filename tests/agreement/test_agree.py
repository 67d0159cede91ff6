"""Our equations and the gradients of our scripts against the numbers of TRL's and verl's own code,
which agree.py stored in this folder (`agree.write_inputs` draws their inputs again).
"""

import os

import agree
import pytest
import torch
from safetensors.torch import load_file

PEERS = {
    who: load_file(os.path.join(agree.FOLDER, f"{who}.safetensors")) for who in ("trl", "verl")
}


@pytest.fixture(scope="module")
def mine(tmp_path_factory) -> dict[str, torch.Tensor]:
    folder = str(tmp_path_factory.mktemp("agree"))
    agree.write_inputs(folder)
    return agree.sketch(agree.ours(folder))


def difference(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest difference of an entry over the largest entry of theirs; inf for NaN."""
    assert mine.shape == theirs.shape
    return (
        (mine - theirs).abs().nan_to_num(nan=torch.inf).max() / theirs.abs().max().clamp(min=1e-300)
    ).item()


@pytest.mark.parametrize(
    "who, name", [(who, name) for who, theirs in PEERS.items() for name in theirs]
)
def test_the_same_number(mine, who, name):
    tolerance = 1e-7 if who == "verl" and name in agree.COUNTS else 1e-12
    relative = difference(mine[name], PEERS[who][name])
    if name not in agree.DELIBERATE[who]:
        assert relative < tolerance
    else:  # what is said to differ does, and by nothing else
        assert relative > 1e-5
        assert difference(mine[f"{name}, as {who} has it"], PEERS[who][name]) < tolerance


def test_every_step_is_compared(mine):
    """With one of them at least, as is each reason."""
    compared = {name for theirs in PEERS.values() for name in theirs}
    assert {f"gradient of the parameters: {step}" for step in agree.STEPS} <= compared
    assert all(set(agree.DELIBERATE[who]) <= set(theirs) for who, theirs in PEERS.items())
    of_parameters = [mine[f"gradient of the parameters: {step}"] for step in agree.STEPS]
    assert all(x.isfinite().all() and x.abs().max() > 1e-3 for x in of_parameters)
