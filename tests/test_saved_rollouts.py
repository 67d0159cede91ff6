"""--save_rollouts, and --rollouts_from that trains on them: a second run is the first, bit for bit."""

import json
import shutil
from types import SimpleNamespace

import helpers
import numpy as np
import pytest
import torch
from helpers import assert_same_run, flags_of, folder_of, metrics_of, read_lines, run_here
from tiny_models import CPU

from extras.saved_rollouts import FileSampler
from plumbing.rollout import engines
from plumbing.rollout.batch import Batch, Sample
from utils import UserError

# Missing scores, further numbers, and prompts of which all responses score alike.
REWARD = """
def score(prompts, responses, **columns):
    sums = [sum(map(ord, x)) % 7 for x in map("".join, zip(prompts, responses))]
    alike = [ord(prompt[0]) % 2 == 0 for prompt in prompts]
    return [0 if same else x and {"score": x / 7, "sum": x} or None for same, x in zip(alike, sums)]
"""
CASES, REFUSED = helpers.table("saved_rollouts.yaml").values()


def flags(folder, script: str = "grpo", **changes) -> dict:
    """The flags of a run of two steps that saves its rollouts."""
    values = helpers.workspace(folder) | {"total_episodes": 16, "eval_every": 0, "save_every": 1}
    values |= {"teacher": helpers.tiny_model(folder / "teacher"), "run_name": "first", **changes}
    helpers.tiny_model(values["model"], stop=8)  # responses of several lengths
    (folder / "reward.py").write_text(REWARD)
    return flags_of(script, values) | {"save_rollouts": True}


@pytest.fixture
def again(monkeypatch):
    """A function that trains on the rollouts of a run; what samples raises an error."""

    def run(values: dict, script: str = "grpo", **changes) -> dict:
        monkeypatch.setattr("plumbing.rollout.sampler.Sampler.sample", None)
        values = {
            **values,
            "rollouts_from": str(folder_of(values)),
            "run_name": "second",
            "save_rollouts": False,
            **changes,
        }
        run_here(values, script)
        return values

    return run


@pytest.mark.parametrize("script", CASES)
def test_a_second_run_is_the_first(tmp_path, again, script):
    changes, file = CASES[script]
    run_here(values := flags(tmp_path, script, **changes), script)
    assert_same_run(again(values, script), values)
    assert (folder_of(values) / "rollouts" / file).exists()
    if script == "rloo":  # the same responses, without the greedy ones
        other = metrics_of(again(values, script, run_name="other", advantage="rloo"))
        assert other[0]["objective/scores"] == metrics_of(values)[0]["objective/scores"]


def test_other_flags_train_on_them_and_a_step_is_repeated(tmp_path, monkeypatch, again):
    """Of an asynchronous run, which would sample otherwise a second time; also without its engine."""
    values = flags(tmp_path, loss="dppo", async_steps=1)
    with monkeypatch.context() as patch:
        patch.setattr(engines, "rollout_engine", lambda *_: None)  # the model itself samples
        run_here(values)
    second = again(values, async_steps=2)
    assert_same_run(second, values)
    for part in ("final", "checkpoints/step_2"):
        shutil.rmtree(folder_of(second) / part)
    assert_same_run(again(values, async_steps=2, resume=True), values)
    other = again(values, run_name="other", loss="cispo", overlong_buffer=9)
    for ours, theirs in zip(metrics_of(other), metrics_of(values), strict=True):
        assert ours["val/sequence_lengths"] == theirs["val/sequence_lengths"]
        assert ours["objective/scores"] < theirs["objective/scores"]
        assert ours["loss/grad_norm"] != theirs["loss/grad_norm"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict:
    run_here(values := flags(tmp_path_factory.mktemp("saved"), save_every=0))
    return values


@pytest.mark.parametrize("changes, message", REFUSED)
def test_what_is_refused(saved, tmp_path, capsys, again, changes, message):
    line = helpers.refused(
        capsys,
        again,
        saved,
        output_dir=str(tmp_path),
        rollouts_from=folder_of(saved),
        noisy=True,
        **changes,
    )
    assert message in line


def test_contexts_of_an_agent(tmp_path):
    row = {"prompt": "a", "query": [5], "answer": "b"}
    tokens, values = np.array([4, 5, 6], np.int32), np.array([1, 0, 1], np.float32)
    outputs = dict(rollout_logprobs=-values, response_mask=values, policy_steps=values)
    outputs |= {"turn_rewards": np.array([0.0, 0.0, 0.1]), "turns": values}
    flags = dict(turn_rewards=True, reward=("episode",), reward_weights=(2.0,))
    (tmp_path / "args.json").write_text(json.dumps({"args": flags}))
    samples = [
        Sample({**row, "prompt": "c", "query": [6, 7]}, tokens, outputs, False, starts=[2]),
        Sample(row, tokens[:1], {"rollout_logprobs": -values[:1]}, True, text="d"),
    ]
    batch = Batch.from_samples(samples, CPU)
    assert batch.tokens["policy_steps"].tolist() == [[1, 0, 1], [0, 0, 0]]
    sampler = FileSampler(
        args=SimpleNamespace(rollouts_from="", **flags),
        folder=tmp_path,
        world=SimpleNamespace(main=True),
        sampler=SimpleNamespace(rollout=lambda *_: batch),
        reward_sources=SimpleNamespace(sources={}),
        model=SimpleNamespace(device=CPU),
    )
    sampler.rollout([row], 2, ("rollout", 1, 1))
    sampler.args.rollouts_from = tmp_path
    read = sampler.rollout([row], 2, ("rollout", 1, 1))
    assert str([x.contexts for x in read.samples]) == str([x.contexts for x in samples])
    assert [x.row for x in read.samples] == [x.row for x in samples]
    assert all(torch.equal(x, batch.tokens[name]) for name, x in read.tokens.items())
    assert read_lines(tmp_path / "rollouts/rollout_1_1.jsonl")[1]["text"] == "d"
    # Turn rewards, float64, are times the weight of episode.
    sampler.args.turn_rewards = False
    assert "turn_rewards" not in sampler.rollout([row], 2, ("rollout", 1, 1)).tokens
    sampler.args.turn_rewards, sampler.args.reward_weights = True, (1.0,)
    with pytest.raises(UserError, match="--reward and --reward_weights have to be"):
        sampler.rollout([row], 2, ("rollout", 1, 1))
    with pytest.raises(UserError, match="without greedy"):
        sampler.rollout([row], 1, ("rollout", 1, 1), greedy=True)
