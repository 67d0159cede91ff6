"""What test_run.py holds of grpo.py, held of rloo.py, ppo.py and reward_model.py: signals, resuming
and failing rewards.
"""

import itertools

import helpers
import pytest
import torch
import transformers
from helpers import MOVING, OF_PPO, SCHEDULE, flags_of, metrics_of, run_here, steps_of, variant
from test_run import stop_again_and_again

SCRIPTS = ("rloo", "ppo", "reward_model")
ONE_CHECKER = {"LOCAL_WORLD_SIZE": "4"}  # one process that scores, and not one for each core

# A file beside the reward function says from which response on it fails.
REWARD = """
import os

seen = 0

def score(prompts, responses, **columns):
    global seen
    if os.path.exists(f"{__file__}.fails") and seen >= int(open(f"{__file__}.fails").read()):
        raise RuntimeError("the judge is away")
    seen += len(responses)
    return [sum(map(ord, prompt + response)) % 7 / 7 for prompt, response in zip(prompts, responses)]
"""


def write_pairs(path, rows: list[dict], count: int) -> str:
    pairs = [
        {
            "prompt": row["prompt"],
            "chosen": row["answer"],
            "rejected": f"{i * i}{'?' * (i % 3)}",
            "margin": i % 2 / 4,
        }
        for i, row in zip(range(count), itertools.cycle(rows))
    ]
    return helpers.write_rows(path, pairs)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict[str, dict]:
    """Flags of four steps of each script."""
    folder = tmp_path_factory.mktemp("scripts")
    common = helpers.workspace(folder)
    (folder / "reward.py").write_text(REWARD)
    # a pass ends in the middle of a batch
    pairs = write_pairs(folder / "pairs.jsonl", helpers.ROWS, 13)
    held_out = write_pairs(folder / "held_out_pairs.jsonl", helpers.HELD_OUT, 3)
    of_pairs = {
        "dataset": pairs,
        "eval_dataset": held_out,
        "batch_size": 6,
        "passes": 2,
        "centre_coef": 0.01,
    }
    return {
        "rloo": {**common, **MOVING, "advantage": "remax"},
        "ppo": {**common, **MOVING, **OF_PPO, "ptx_dataset": common["dataset"]},
        "reward_model": {**flags_of("reward_model", common), **SCHEDULE, **of_pairs},
    }


# ---- signals and resuming ------------------------------------------------------------------------

STOPS = helpers.table("stops.yaml")["others"]
MOVES = {  # metrics of the straight runs that differ from step to step, else equality says little
    "rloo": "lr objective/kl objective/kl_coef objective/scores loss/policy_avg",
    "ppo": "lr objective/kl objective/kl_coef val/values loss/value_avg critic_lr loss/ptx val/explained_variance",
    "reward_model": "lr train/loss",
}


@pytest.fixture(scope="module")
def straight(base) -> dict[str, dict]:
    """Four steps of each script in one go."""
    runs = {script: {**base[script], "run_name": f"straight {script}"} for script in SCRIPTS}
    started = [
        helpers.Running(runs[script], script=script, environment=ONE_CHECKER) for script in SCRIPTS
    ]
    assert [each.wait().code for each in started] == [0, 0, 0], [each.err for each in started]
    for script, names in MOVES.items():
        rows = metrics_of(runs[script])[1:]
        assert all(len({row.get(name) for row in rows}) >= 2 for name in names.split()), script
    return runs


@pytest.mark.parametrize("name", STOPS)
def test_a_stopped_run_goes_on_without_a_trace(straight, tmp_path, name):
    script = name.split()[0]
    save_every = 2 if "killed" in name else 0
    options = {"script": script, "environment": ONE_CHECKER}
    stop_again_and_again(straight[script], tmp_path, STOPS[name], save_every, **options)


# ---- rewards that fail ---------------------------------------------------------------------------


def test_a_step_without_scores_stops(base, straight, tmp_path):
    """With step 2 saved, from which the run goes on, once the reward works again, as if nothing had
    been.
    """
    values = variant(straight["rloo"], tmp_path, save_every=0)
    options = {"script": "rloo", "environment": ONE_CHECKER}
    fails = helpers.Path(values["reward"].replace(":score", ".fails"))
    # 4 responses in the two trial calls, 3 greedy and 6 sampled in an evaluation at steps 0 and 2,
    # and 8 sampled and 2 greedy a step
    fails.write_text("42")
    (line,) = helpers.run(values, 2, **options).errors
    assert all(
        word in line for word in ("--reward", "step 3", values["reward"], "the judge is away")
    ), line
    fails.unlink()
    assert steps_of(values) == ["step_2"]
    assert "after step 2" in helpers.run({**values, "resume": True}, **options).out
    assert metrics_of(values) == metrics_of(straight["rloo"])


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["ppo", "reward_model"])
def test_gradient_checkpointing(base, tmp_path, monkeypatch, script):
    """Every layer that is trained runs twice, in ppo those of the critic too. (Same numbers:
    test_invariance.py.)

    Besides, the two layers of policy and reference are tried once at the start.
    """
    layer = transformers.models.qwen2.modeling_qwen2.Qwen2DecoderLayer
    trained = {False: [], True: []}
    forward = layer.forward
    for recompute, calls in trained.items():

        def counted(self, *args, calls=calls, **options):
            calls.extend([1] * torch.is_grad_enabled())
            return forward(self, *args, **options)

        monkeypatch.setattr(layer, "forward", counted)
        values = variant(base[script], tmp_path / str(recompute), eval_every=0, save_every=0)
        run_here({**values, "gradient_checkpointing": recompute}, script)
    tried = 4 * (script == "ppo")
    assert len(trained[True]) - tried == 2 * (len(trained[False]) - tried) > 0
