"""Whole runs on a pretend accelerator, pretend_device.py: no operation mixes devices, and the numbers are the CPU's."""

import json
import math
from pathlib import Path

import helpers
import pytest
from test_shard import exact_runs

import grpo
import utils

SMALL = dict(
    max_response_length=6, num_epochs=1, mini_batch_size=8, micro_batch_tokens=400, eval_every=0,
    save_every=0,
)  # fmt: skip
GAME = dict(environment=helpers.GAME, reward="environment")
RUNS = {  # (script, flags on top of test_shard.exact_runs)
    "grpo": ("grpo", dict(SMALL, filter_groups="refill", entropy_coef=0.01)),
    "ppo": ("ppo", dict(SMALL, gradient_checkpointing=True)),
    "reward model": ("reward_model", dict(eval_every=0, save_every=0)),
    "distill": ("distill", dict(SMALL, divergence="jsd", on_policy_share=0.5, gradient_checkpointing=True)),
    "LoRA": ("grpo", dict(SMALL, lora_rank=2, ref_refresh_every=0)),
    "rloo, conversations": (
        "rloo",
        dict(SMALL, kl_in="loss", rollout_correction="truncate", max_response_length=20, **GAME),
    ),
    "resume": ("grpo", dict(SMALL, save_every=1, resume=True)),
}
MISSING = "uniforms = torch.tensor(stop_ids, device=device), None if uniforms is None else uniforms.to(device)"


def train(script: str, flags: dict, folder: Path) -> list[dict]:
    """Return the metrics of a run; one that resumes stops after half of its steps before that."""
    folder.mkdir()
    values = {**exact_runs(folder)[script], "run_name": "run", **flags}
    if values.pop("resume", False):
        helpers.run_here(values, script)
        values |= dict(total_episodes=2 * values["total_episodes"], resume=True)
    helpers.run_here(values, script)
    return json.loads(json.dumps(helpers.metrics_of(values)).replace(str(folder), ""))  # names of rewards are paths


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    """Of each run: metrics on the CPU, metrics on the pretend device, waits in an update; and the error of a fork."""
    folder = tmp_path_factory.mktemp("pretend")
    process = helpers._server().Process(target=main, args=(folder,))  # torch has one such device a process
    process.start()
    process.join()
    assert process.exitcode == 0
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_another_device(results, name):
    expected, rows, _ = results[name]
    assert len(rows) == len(expected) > 1
    if "bf16" in name:  # autocast casts nothing on the pretend device
        return
    for row, cpu in zip(rows, expected):
        assert row.keys() == cpu.keys()
        for key, x in cpu.items():
            close = x is None or isinstance(x, str) or math.isclose(row[key], x, rel_tol=1e-6, abs_tol=1e-6)
            assert close or row[key] == x, (key, row[key], x)


def test_how_often_an_update_waits_for_the_device(results):
    """Read: the tokens of the update, whether the gradient is finite, and what transformers asks of positions. A mask
    in a micro-batch: where the response tokens are."""
    assert results["grpo"][2] == results["rloo, conversations"][2] == {"item": 3, "mask": 1}


def test_a_tensor_that_is_left_on_the_cpu_is_found(results):
    assert "expected all tensors to be on the same device" in results["fork"]


def main(folder: Path) -> None:
    import pretend_device as device  # before the first backward pass, which makes a queue for each device

    results = {name: [train(*run, folder / f"{name} cpu")] for name, run in RUNS.items()}
    begin, waits = utils.Clock.begin, []

    def counted(clock, phase: str):
        if clock.phase == "training":
            waits[-1] = device.WAITS - waits[-1]
        if phase == "training":
            waits.append(device.WAITS.copy())
        begin(clock, phase)

    utils.setup_processes = lambda: utils.World(0, 1, device.DEVICE)
    utils.Clock.begin = counted
    with device.Functions(), device.Operations():
        for name, run in RUNS.items():
            waits.clear()
            results[name] += [train(*run, folder / name), waits[0]]
        source = Path(grpo.__file__).read_text()
        assert MISSING in source
        code = source.replace(MISSING, MISSING.replace(".to(device)", ""))
        exec(compile(code, grpo.__file__, "exec"), vars(grpo))
        try:
            train(*RUNS["grpo"], folder / "fork")
        except RuntimeError as error:
            results["fork"] = str(error)
    (folder / "results.json").write_text(json.dumps(results))
