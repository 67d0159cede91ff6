"""Whole runs on a pretend accelerator, pretend_device.py: no operation mixes devices, and the
numbers are the CPU's.
"""

import faulthandler
import json
import math
from pathlib import Path

import helpers
import pytest
from test_shard import exact_runs

import grpo
import utils

RUNS = helpers.table("pretend_runs.yaml")
SMALL = dict(
    total_episodes=16,
    max_response_length=6,
    num_epochs=1,
    mini_batch_size=8,
    micro_batch_tokens=400,
    eval_every=0,
    save_every=0,
)
GAME = dict(environment=helpers.GAME, reward="episode")
MISSING = "uniforms = uniforms.to(device)"


def train(base: dict, name: str, run_name: str) -> list[dict]:
    """Return the metrics of a run; one that resumes stops after half of its steps before that."""
    script, flags = RUNS[name]
    values = {flag: SMALL.get(flag, value) for flag, value in base[script].items()}
    values |= flags | {"run_name": run_name}
    if "conversations" in name:
        values |= GAME
    if "ptx_coef" in flags:
        values["ptx_dataset"] = values["dataset"]
    if "resume" in flags:
        half = dict(passes=values["passes"] / 2) if script == "distill" else dict(total_episodes=8)
        helpers.run_here(values | half | {"resume": False}, script)
    helpers.run_here(values, script)
    return helpers.metrics_of(values)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    """Of each run: metrics on the CPU, metrics on the pretend device, waits in an update; and the
    error of a fork.
    """
    folder = tmp_path_factory.mktemp("pretend")
    # torch has one such device a process
    process = helpers._server().Process(target=main, args=(folder,))
    process.start()
    process.join(550)
    assert process.exitcode == 0
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_another_device(results, name):
    expected, rows, _ = results[name]
    assert len(rows) == len(expected) > 1
    for row, cpu in zip(rows, expected):
        assert row.keys() == cpu.keys()
        for key, x in cpu.items():
            close = (
                x is None
                or isinstance(x, str)
                or math.isclose(row[key], x, rel_tol=1e-6, abs_tol=1e-6)
            )
            assert close or row[key] == x, (key, row[key], x)


def test_how_often_an_update_waits_for_the_device(results):
    """Read: whether the gradient is finite, what transformers asks of positions, and for the mean
    over tokens how many the update has. A mask in a micro-batch: where the response tokens are.
    """
    assert results["grpo"][2] == {"item": 2, "mask": 1}
    assert results["rloo, conversations"][2] == {"item": 3, "mask": 1}


def test_a_tensor_that_is_left_on_the_cpu_is_found(results):
    assert "expected all tensors to be on the same device" in results["fork"]


def main(folder: Path) -> None:
    faulthandler.dump_traceback_later(540, exit=True)
    # before the first backward pass, which makes a queue for each device
    import pretend_device as device

    base = exact_runs(folder)
    results = {name: [train(base, name, f"{name} cpu")] for name in RUNS}
    begin = utils.Clock.begin_phase
    waits = []

    def counted(clock, phase: str):
        if clock.phase == "training":
            waits[-1] = device.WAITS - waits[-1]
        if phase == "training":
            waits.append(device.WAITS.copy())
        begin(clock, phase)

    utils.setup_processes = lambda minutes: utils.World(0, 1, device.DEVICE)
    utils.Clock.begin_phase = counted
    with device.Functions(), device.Operations():
        for name in RUNS:
            waits.clear()
            results[name] += [train(base, name, name), waits[0]]
        source = Path(grpo.__file__).read_text()
        assert MISSING in source
        code = source.replace(MISSING, MISSING.replace(".to(device)", ""))
        exec(compile(code, grpo.__file__, "exec"), vars(grpo))
        try:
            train(base, "grpo", "fork")
        except RuntimeError as error:
            results["fork"] = str(error)
    (folder / "results.json").write_text(json.dumps(results))
