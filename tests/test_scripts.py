"""What test_run.py holds of grpo.py, held of rloo.py, ppo.py and reward_model.py: signals, resuming, failing rewards,
gradients that are not finite, and what a run leaves."""

import math

import helpers
import pytest
import torch
import transformers
from helpers import all_finite, folder_of, metrics_of, read_lines, run_here, same_weights, steps_of, variant, weights_of
from test_run import METRICS, MOVING, SCHEDULE, stop_again_and_again

SCRIPTS = ("rloo", "ppo", "reward_model")
ONE_CHECKER = {"LOCAL_WORLD_SIZE": "4"}  # one process that scores instead of four

# A file beside the reward function says which call of it fails.
REWARD = """
import os

calls = 0

def score(prompts, responses, **columns):
    global calls
    calls += 1
    if os.path.exists(f"{__file__}.fails") and calls == int(open(f"{__file__}.fails").read()):
        raise RuntimeError("the judge is away")
    return [sum(map(ord, prompt + response)) % 7 / 7 for prompt, response in zip(prompts, responses)]
"""

# With MOVING all that a step of ppo can depend on: moments of the scores, supervised rows, steps of the critic alone.
OF_PPO = dict(
    reward_normalization=True, critic_learning_rate=1e-3, critic_lr_schedule="cosine", critic_warmup_steps=1,
    ptx_coef=0.1, ptx_batch_size=3,
)  # fmt: skip


def write_pairs(path, rows: list[dict], count: int) -> str:
    rows = [(i, rows[i % len(rows)]) for i in range(count)]
    side = lambda i, row: {"chosen": row["answer"], "rejected": f"{i * i}{'?' * (i % 3)}", "margin": i % 2 / 4}
    return helpers.write_rows(path, [{"prompt": row["prompt"], **side(i, row)} for i, row in rows])


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict[str, dict]:
    """Flags of four steps of each script."""
    folder = tmp_path_factory.mktemp("scripts")
    common = helpers.workspace(folder)
    (folder / "reward.py").write_text(REWARD)
    kept = ("model", "system_prompt", "output_dir", "learning_rate", "eval_every", "save_every", "micro_batch_tokens")
    pairs = write_pairs(folder / "pairs.jsonl", helpers.ROWS, 13)  # a pass ends in the middle of a batch
    held_out = write_pairs(folder / "held_out_pairs.jsonl", helpers.HELD_OUT, 3)
    of_pairs = {"dataset": pairs, "eval_dataset": held_out, "batch_size": 6, "passes": 2, "centre_coef": 0.01}
    return {
        "grpo": {**common, **MOVING},
        "rloo": {**common, **MOVING, "advantage": "remax"},
        "ppo": {**common, **MOVING, **OF_PPO, "ptx_dataset": common["dataset"]},
        "reward_model": {**{name: common[name] for name in kept}, **SCHEDULE, **of_pairs},
    }


# ---- signals and resuming -------------------------------------------------------------------------------------------

# As in test_run.py. (rloo: test_shard.py)
STOPS = {
    "ppo": [
        ("critic's warm-up", "utils.Optimizer.step:2:SIGTERM", 1),
        ("update", "utils.Optimizer.step:6:SIGTERM", 2),
        ("log-probs", "ppo.forward_batch:2:SIGTERM", 3),
        ("values", "ppo.forward_batch:3:SIGTERM", 4),
    ],
    "ppo killed": [
        ("save", "checkpoints.save_checkpoint:1:SIGTERM", 2),
        ("update", "utils.Optimizer.step:3:SIGKILL", 2),
        ("save", "transformers.PreTrainedModel.save_pretrained:2:SIGKILL", 2),  # the critic, after the policy
    ],
    "reward_model": [
        ("evaluation", "reward_model.score_pairs:2:SIGTERM", 2),
        ("update", "utils.Optimizer.step:1:SIGTERM", 3),
        ("last evaluation", "reward_model.score_pairs:1:SIGTERM", 4),
    ],
}
MOVES = {  # metrics of the straight runs that differ from step to step, else equality says little
    "rloo": "lr objective/kl objective/kl_coef objective/scores loss/policy_avg",
    "ppo": "lr objective/kl objective/kl_coef val/values loss/value_avg critic_lr loss/ptx val/explained_variance",
    "reward_model": "lr train/loss",
}


@pytest.fixture(scope="module")
def straight(base) -> dict[str, dict]:
    """Four steps of each script in one go."""
    runs = {script: {**base[script], "run_name": f"straight {script}"} for script in SCRIPTS}
    started = [helpers.Running(runs[script], script=script, environment=ONE_CHECKER) for script in SCRIPTS]
    assert [each.wait().code for each in started] == [0, 0, 0], [each.err for each in started]
    for script, names in MOVES.items():
        rows = metrics_of(runs[script])[1:]
        assert all(len({row.get(name) for row in rows}) >= 2 for name in names.split()), script
    return runs


@pytest.mark.parametrize("name", STOPS)
def test_a_stopped_run_goes_on_without_a_trace(straight, tmp_path, name):
    script, save_every = name.split()[0], 2 if "killed" in name else 0
    options = {"script": script, "environment": ONE_CHECKER}
    stop_again_and_again(straight[script], tmp_path, STOPS[name], save_every, **options)


# ---- rewards that fail ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script, call", [("rloo", 11), ("ppo", 8)])  # of the greedy responses; of the sampled ones
def test_a_step_without_scores_stops(base, straight, tmp_path, script, call):
    """With step 2 saved, from which the run goes on, once the reward works again, as if nothing had been."""
    values = {**straight[script], "output_dir": str(tmp_path), "save_every": 0}
    options = {"script": script, "environment": ONE_CHECKER}
    fails = helpers.Path(base[script]["reward"].replace(":score", ".fails"))
    fails.write_text(str(call))
    (line,) = helpers.run(values, 2, **options).errors
    assert all(word in line for word in ("--reward", "step 3", base[script]["reward"], "the judge is away")), line
    fails.unlink()
    assert steps_of(values) == ["step_2"]
    assert "after step 2" in helpers.run({**values, "resume": True}, **options).out
    assert metrics_of(values) == metrics_of(straight[script])


# ---- gradients that are not finite ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script, loss",
    [
        ("grpo", "policy_loss"), ("rloo", "clipped_loss"), ("ppo", "clipped_loss"), ("ppo", "value_loss"),
        ("reward_model", "preference_loss"),
    ],
)  # fmt: skip
def test_a_gradient_that_is_not_finite_is_skipped(base, tmp_path, monkeypatch, script, loss):
    """In the first of two steps, of one update each; in ppo the other model's update is taken."""
    changes = dict(total_episodes=16, mini_batch_size=8, num_epochs=1)
    changes |= dict(critic_warmup_steps=0, ptx_coef=0.0, ptx_dataset="") if script == "ppo" else {}
    changes = dict(batch_size=12) if script == "reward_model" else changes
    values = variant(base[script], tmp_path, save_every=1, eval_every=0, **changes)
    module, calls = __import__(script), []
    original = getattr(module, loss)

    def infinite_at_first(*args):
        calls.append(1)
        result, factor = original(*args), math.inf if len(calls) == 1 else 1.0
        return (result[0] * factor, result[1]) if isinstance(result, tuple) else result * factor

    monkeypatch.setattr(module, loss, infinite_at_first)
    run_here(values, script)
    rows, begin = metrics_of(values), weights_of(values["model"])
    first, last = (folder_of(values) / "checkpoints" / name for name in ("step_1", "step_2"))
    moved = lambda folder: any(not torch.equal(x, begin.get(key, x)) for key, x in weights_of(folder).items())
    spoilt = "critic_" if loss == "value_loss" else ""
    assert [row[f"val/{spoilt}skipped_updates"] for row in rows] == [1, 0]
    assert [row[f"loss/{spoilt}grad_norm"] is None for row in rows] == [True, False]
    assert moved(first) == bool(spoilt) and moved(last) and all_finite(last)
    if script == "ppo":
        other = "" if spoilt else "critic_"
        assert [row[f"val/{other}skipped_updates"] for row in rows] == [0, 0]
        heads = [weights_of(folder / "critic")["score.weight"] for folder in (first, last)]  # zeros before an update
        assert [bool(head.any()) for head in heads] == [not spoilt, True] and all_finite(last / "critic")


@pytest.mark.parametrize("script", ["ppo", "reward_model"])
def test_gradient_checkpointing(base, tmp_path, monkeypatch, script):
    """Every layer that is trained runs twice, in ppo those of the critic too. (Same numbers: test_invariance.py.)"""
    layer, trained = transformers.models.qwen2.modeling_qwen2.Qwen2DecoderLayer, {False: [], True: []}
    forward = layer.forward
    for recompute, calls in trained.items():

        def counted(self, *args, calls=calls, **options):
            calls.extend([1] * torch.is_grad_enabled())
            return forward(self, *args, **options)

        monkeypatch.setattr(layer, "forward", counted)
        values = variant(base[script], tmp_path / str(recompute), eval_every=0, save_every=0)
        run_here({**values, "gradient_checkpointing": recompute}, script)
    assert len(trained[True]) == 2 * len(trained[False]) > 0


# ---- what a run leaves ----------------------------------------------------------------------------------------------

OWN_METRICS = {
    "rloo": {*METRICS},
    "ppo": {*METRICS, "loss/value_avg", "val/clipfrac_avg", "val/explained_variance"},
    "reward_model": {"epoch", "lr", "train/loss", "time/from_scratch", "time/training", "perf/tokens_per_second"},
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_a_run_leaves(straight, script):
    """What is in the files that test_run.py names."""
    values = straight[script]
    folder = folder_of(values)
    rows = read_lines(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert all(OWN_METRICS[script] <= row.keys() for row in rows[1:])
    accuracy = "eval/pair_accuracy" if script == "reward_model" else "eval/accuracy"
    assert [accuracy in row for row in rows] == [True, False, True, False, True]
    a_step = 6 if script == "reward_model" else 8
    assert [row["step"] for row in read_lines(folder / "samples.jsonl")] == sorted([1, 2, 3, 4] * a_step)
    assert steps_of(values) == ["step_2", "step_4"]
    causal, scalar = transformers.AutoModelForCausalLM, transformers.AutoModelForSequenceClassification
    models = {"final": scalar if script == "reward_model" else causal}
    models |= {"checkpoints/step_4/critic": scalar} if script == "ppo" else {}
    for name, auto in models.items():
        model, report = auto.from_pretrained(folder / name, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"] and all_finite(folder / name)
        assert auto is causal or model.config.num_labels == 1 and model.score.weight.any()
    assert hasattr(model.config, "score_mean") == (script == "reward_model")
    equal = [same_weights(folder / "final", folder / "checkpoints" / name) for name in ("step_2", "step_4")]
    assert equal == [False, True]
