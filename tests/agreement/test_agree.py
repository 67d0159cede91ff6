"""Our equations and the gradients of our scripts against the numbers of TRL's and verl's own code.

This folder has what they made of small inputs (agree.write_inputs draws them again), by
`python tests/agreement/agree.py --trl_python PYTHON --verl_python PYTHON --store`.
"""

from pathlib import Path

import agree
import pytest
import torch
from safetensors.torch import load_file

PEERS = {who: load_file(Path(__file__).parent / f"{who}.safetensors") for who in ("trl", "verl")}


@pytest.fixture(scope="module")
def mine(tmp_path_factory) -> dict[str, torch.Tensor]:
    folder = str(tmp_path_factory.mktemp("agree"))
    agree.write_inputs(folder, agree.SMALL)
    return agree.sketch(agree.ours(folder))


@pytest.mark.parametrize("who, name", [(who, name) for who, theirs in PEERS.items() for name in theirs])
def test_the_same_number(mine, who, name):
    tolerance = 1e-7 if who == "verl" and name in agree.COUNTS else 1e-12
    _, relative = agree.difference(mine[name], PEERS[who][name])
    if name not in agree.DELIBERATE[who]:
        assert relative < tolerance
    elif "fused head" in name:
        assert 1e-9 < relative < 1e-5
    else:  # what is said to differ does, and by nothing else
        assert relative > 1e-5
        assert agree.difference(mine[f"{name}, as {who} has it"], PEERS[who][name])[1] < tolerance


def test_every_step_is_compared(mine):
    """With one of them at least, as is each reason."""
    compared = {name for theirs in PEERS.values() for name in theirs}
    assert {f"gradient of the parameters: {step}" for step in agree.STEPS} <= compared
    assert all(set(agree.DELIBERATE[who]) <= set(theirs) for who, theirs in PEERS.items())
    assert compared >= agree.COUNTS - {f"{way}: {step}" for way in agree.WAYS for step in agree.STEPS}
    about_parameters = [mine[f"gradient of the parameters: {step}"] for step in agree.STEPS]
    assert all(x.isfinite().all() and x.abs().max() > 1e-3 for x in about_parameters)


def test_a_difference_is_seen():
    """In the table, in the column of the one who has it; what nobody here makes is an error."""
    one, other = torch.tensor([1.0, -4.0]).double(), torch.tensor([1.0, -4.0 + 2**-10]).double()
    assert agree.difference(one, other) == (2**-10, 2**-10 / (4 - 2**-10))
    assert agree.difference(one, torch.tensor([torch.nan, -4.0]))[0] == torch.inf
    with pytest.raises(ValueError, match="shapes"):
        agree.difference(one, one[:1])
    mine = {"KL: k1": one, "KL: k3": one, "KL: k3, as verl has it": other, "whitening": one}
    same, deliberate = agree.tables(mine, {"trl": {"KL: k1": one}, "verl": {"KL: k3": other, "whitening": other}})
    assert same[1:] == [["KL: k1", "0e+00", "0e+00", "", ""], ["whitening", "", "", "1e-03 *", "2e-04 *"]]
    assert deliberate[1:] == [["KL: k3", "verl", "2e-04", "0e+00", agree.CLAMP]]
    with pytest.raises(KeyError, match="KL: k9"):
        agree.tables(mine, {"trl": {"KL: k9": one}})
