"""--compile changes speed, never a result; the decode loop and vLLM's CPU build stay as they
are.
"""

import asyncio
import types

import helpers
import torch
from helpers import variant
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

from extras.vllm.engine import Engine


def test_a_compiled_run_is_the_same(tmp_path):
    """Metrics and weights of three steps of different shapes. (gpt_neox is exact in float64, see
    test_policy.py.)
    """
    base = helpers.workspace(tmp_path) | dict(
        precision="float64", kl_coef=0, num_epochs=1, mini_batch_size=8
    )
    base |= dict(
        micro_batch_tokens=400,
        max_response_length=20,
        gradient_checkpointing=True,
        total_episodes=24,
    )
    base |= dict(
        model=helpers.tiny_model(tmp_path / "neox", "gpt_neox"), eval_every=0, save_every=0
    )
    counters.clear()
    runs = [variant(base, tmp_path / str(compiled), compile=compiled) for compiled in (False, True)]
    for values in runs:
        helpers.run_here(values)
    # One graph tells whether there is a compiler, one is of all blocks, one of the statistics; each
    # with its gradient.
    assert counters["stats"]["unique_graphs"] == 3 and not counters["graph_break"]
    # also the names are the same
    assert helpers.largest_difference(*runs, parts=("final",))[0] < 1e-9


def test_vllm_on_a_cpu_compiles_nothing():
    """Nor does it keep the trainer from it."""
    counter = CompileCounter()
    double = torch.compile(lambda x: x + x, backend=counter)
    engine = Engine.__new__(Engine)
    engine.stance = "force_eager"
    engine.waiting = {"a request": None}
    step = lambda: [double(torch.ones(3)), engine.waiting.clear()][2:]
    engine.llm = types.SimpleNamespace(llm_engine=types.SimpleNamespace(step=step))
    asyncio.run(engine._step())
    assert counter.frame_count == 0 and not engine.failure
    double(torch.ones(3))
    assert counter.frame_count == 1
