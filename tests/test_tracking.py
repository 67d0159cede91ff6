"""--track: its words, and what is in TensorBoard's files. (tests/test_run.py has Weights & Biases offline.)"""

import sys

import pytest

import grpo
from plumbing import command_line
from plumbing.run import tracking
from plumbing.run.resume import Origin


@pytest.mark.parametrize(
    "words, expected",
    [
        ([], ""), (["--track"], "wandb"), (["--track", "--seed", "3"], "wandb"), (["--track", "wandb"], "wandb"),
        (["--track", "tensorboard", "--seed", "3"], "tensorboard"), (["--track="], ""),
    ],
)  # fmt: skip
def test_words_of_the_flag(words, expected):
    args = command_line.parse(grpo.Args, words)
    assert args.track == expected and args.seed == (3 if "--seed" in words else 1)


def test_other_words(capsys):
    with pytest.raises(SystemExit):
        command_line.parse(grpo.Args, ["--track", "elsewhere"])
    assert capsys.readouterr().err == "error: --track: has to be wandb or tensorboard, not elsewhere\n"


@pytest.mark.parametrize("name, package", [("wandb", "wandb"), ("tensorboard", "torch.utils.tensorboard")])
def test_a_package_that_is_missing(name, package, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as end:
        tracking.TRACKERS[name].check()
    line = f"error: --track {name}: the package {name} is not installed (pip install {name})\n"
    assert end.value.code == 2 and capsys.readouterr().err == line


def test_tensorboard(tmp_path):
    """A run of five steps that is resumed after its third: each step is there once."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tracking.TensorBoard.check()
    for checkpoint, steps in ((None, range(5)), (f"{tmp_path}/checkpoints/step_3", range(3, 7))):
        tracker = tracking.TensorBoard(Origin(str(tmp_path), {}, checkpoint=checkpoint), grpo.Args())
        for step in steps:
            tracker.histogram("lengths", [3, 4, 4], step)
            tracker.table([{"prompt": "1|2", "response": "a\nb", "math": 1.0}], step)
            tracker.metrics({"step": step, "objective/scores": step / 2, "perf/mfu": None})
        tracker.close(published_model="https://hub/model")
    found = accumulators.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    scores = found.Scalars("objective/scores")
    assert found.Tags()["scalars"] == ["objective/scores"] and "lengths" in found.Tags()["histograms"]
    assert [(x.step, x.value) for x in scores] == [(step, step / 2) for step in range(7)]
    texts = {name: found.Tensors(name)[-1].tensor_proto.string_val[0].decode() for name in found.Tags()["tensors"]}
    assert texts["published_model/text_summary"] == "https://hub/model"
    assert "| 1\\|2 | a<br>b | 1.0 |" in texts["samples/text_summary"] and "| seed | 1 |" in texts["args/text_summary"]
