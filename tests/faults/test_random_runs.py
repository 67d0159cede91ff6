"""Whole runs with flags drawn at random: what is not refused trains, and resumes bit for bit.

Every flag of the scripts is in DRAWN or in LEFT_OUT. A draw takes some of DRAWN at random values,
until the rules of the flags let it pass. A run may still refuse its files, in one line. One that
trains goes on once more from the checkpoint before its last one, and has to end the same bit for
bit.

    RANDOM_RUNS=300 RANDOM_RUNS_SEED=3 python -m pytest tests/faults/test_random_runs.py
"""

import collections
import contextlib
import dataclasses
import json
import os
import random
import shutil
from pathlib import Path

import helpers
import pytest
from helpers import folder_of, metrics_of, read_lines

import distill
import grpo
import ppo
import reward_model
import rloo
from plumbing import cli

SCRIPTS = {"grpo": grpo.Args, "ppo": ppo.Args, "rloo": rloo.Args}
SCRIPTS |= {"reward_model": reward_model.Args, "distill": distill.Args}

# ---- the files of all runs -----------------------------------------------------------------------

REWARDS = f"""{helpers.REWARD}
def some(prompts, responses, **columns):
    return [None if i % 3 == 1 else len(r) / 10 for i, r in enumerate(responses)]

def trl(completions, **columns):
    return [float(len(c) % 2) for c in completions]

def equal(prompts, responses, **columns):
    return [0.5] * len(responses)
"""
PAIRS = [
    {"prompt": f"{a}+3=", "chosen": str(a + 3), "rejected": f"{a}{'?' * (a % 4)}"}
    for a in range(1, 31)
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """What the values of flags that begin with @ stand for."""
    folder = tmp_path_factory.mktemp("random_runs")
    for kind in ("qwen2", "llama", "gemma2", "gpt_neox"):
        helpers.tiny_model(folder / kind, kind)
    helpers.tiny_model(folder / "qwen2_other", hidden_size=48)
    helpers.tiny_model(folder / "chat", chat=True)
    helpers.scalar_folder(str(folder / "qwen2"), folder / "scorer")
    helpers.scalar_folder(str(folder / "qwen2"), folder / "other_vocabulary", tokens=("ab", "12"))
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "template.jinja").write_text(helpers.CHAT_TEMPLATE)
    rows = helpers.ROWS
    helpers.write_rows(folder / "rows.jsonl", rows)
    helpers.write_rows(folder / "named.jsonl", [{**row, "verifier": "exact"} for row in rows])
    as_messages = lambda prompt: [{"role": "user", "content": prompt}]
    helpers.write_rows(
        folder / "messages.jsonl", [{**row, "prompt": as_messages(row["prompt"])} for row in rows]
    )
    helpers.write_rows(folder / "held_out.jsonl", helpers.HELD_OUT)
    helpers.write_rows(folder / "pairs.jsonl", PAIRS)
    helpers.write_rows(
        folder / "margins.jsonl", [{**row, "margin": 0.5, "subset": "a"} for row in PAIRS]
    )
    helpers.write_rows(
        folder / "other_pairs.jsonl", [{**row, "prompt": f"9{row['prompt']}"} for row in PAIRS[:4]]
    )
    parts = [{"prob": 0.7, "filepath": "rows.jsonl"}, {"prob": 0.3, "filepath": "held_out.jsonl"}]
    (folder / "mixture.json").write_text(json.dumps(parts))
    (folder / "one.json").write_text(json.dumps(parts[:1]))
    return {"@game": helpers.GAME.rpartition(":")[0], "@": f"{folder}/"}


# ---- what is drawn -------------------------------------------------------------------------------

# Of each run; then what test_run.py, test_cli.py, test_hub.py, test_vllm.py, test_vllm_server.py,
# test_data.py, test_models.py and test_compile.py check.
LEFT_OUT = set(
    "run_name output_dir resume total_episodes passes "
    "track config push_to_hub rollout_servers kv_cache_gb async_steps vllm_tensor_parallel "
    "prompt_column answer_column response_column chat_template_kwargs compile".split()
)

# which a random model does write: calls of tools that do not exist
CALL = r"(?P<name>[a-m])(?P<arguments>.)?"

COMMON = {
    "ranks": (2,),
    "seed": (0, 2**40),
    "save_every": (1,),
    "keep_checkpoints": (0, 3),
    "log_samples": (0, 1),
    "eval_every": (0, 1, 2),
    "keep_best": ("eval/accuracy",),
    "model": ("@llama", "@gemma2", "@gpt_neox", "@chat"),
    "stop_token": ("+", "<eos>"),
    "chat_template": ("none", "@template.jinja"),
    "system_prompt": ("Add:",),
    "precision": ("auto", "float64", "bf16", "fp16", "pure_bf16"),
    "attention": ("sdpa", "eager"),
    "gradient_checkpointing": (False,),
    "micro_batch_tokens": (1, 1000),
    "lora_rank": (1, 4),
    "shard": ("none", "fsdp", "fsdp_offload"),
    "adam_betas": ((0.0, 0.9), (0.9, 0.0)),
    "learning_rate": (1e-6, 3e-2),
    "lr_schedule": ("constant", "linear", "cosine"),
    "warmup_ratio": (0.0, 0.5, 1.0),
    "min_learning_rate": (1e-6, 1e-4),
    "weight_decay": (0.1,),
    "max_grad_norm": (1e-3, 100.0),
}
RL = {
    "dataset": ("@messages.jsonl", "@named.jsonl", "@mixture.json", "@one.json"),
    "max_prompt_length": (200,),
    "eval_dataset": ("", "@rows.jsonl", "@mixture.json"),
    "eval_share": (0.3,),
    "eval_prompts": (0, 1),
    "eval_samples": (1, 4),
    "reward": (
        ("exact",),
        ("@rewards.py:score", "format"),
        ("@rewards.py:some",),
        ("@rewards.py:some", "@rewards.py:score"),
        ("@rewards.py:equal",),
        ("@rewards.py:trl", "gsm8k"),
        ("@scorer",),
        ("@other_vocabulary", "math"),
        ("environment",),
        ("exact", "environment"),
    ),
    "reward_weights": ((0.5,), (-1.0,), (1.0, 0.0), (0.0, 2.0)),
    "timeout": (20.0,),
    "reward_workers": (1,),
    "generation_batch_size": (1, 3),
    "min_response_length": (1, 6),
    "top_p": (0.5, 1e-6),
    "repetition_penalty": (0.7, 1.3),
    "rollout_backend": ("hf",),
    "tools": (("@game:add",),),
    "environment": ("@game:Game", "@game:Game", "@game:Counter"),
    "max_turns": (1, 2),
    "tool_call_pattern": (CALL,),
    "turn_stop": (("a", "1", "+"),),
    "rollout_batch_size": (1, 3),
    "group_size": (2, 5),
    "mini_batch_size": (0, 1, 3, 8),
    "num_epochs": (1, 3),
    "max_response_length": (2, 25),
    "temperature": (0.1, 0.7, 3.0),
    "clip_low": (0.0, 1.0),
    "clip_high": (0.0, 1.0, 20.0),
    "dual_clip": (1.1, 3.0),
    "entropy_coef": (0.01,),
    "rollout_correction": ("truncate", "mask", "sequence_mask"),
    "rollout_correction_cap": (1.0, 3.0),
    "kl_coef": (0.0, 10.0),
    "kl_in": ("loss", "reward"),
    "kl_estimator": ("k1", "abs", "k2", "k3"),
    "kl_target": (1e-3,),
    "kl_horizon": (4, 20),
    "ref_model": ("@llama", "@qwen2"),
    "ref_refresh_every": (1, 2),
    "non_stop_penalty": (True,),
    "penalty_reward_value": (-1.0, 1.0),
    "overlong_buffer": (1, 8),
    "mask_truncated": (True,),
    "filter_groups": ("drop", "refill"),
    "loss_aggregation": ("token", "step_token", "sequence", "sequence_sum", "constant"),
}
DRAWN = {
    "grpo": COMMON
    | RL
    | {
        "loss": tuple(grpo.VARIANTS),
        "advantage_scale": ("group", "batch", "none", "gdpo"),
        "kl_weighting": ("ratio",),
    },
    "ppo": COMMON
    | RL
    | {
        "critic_learning_rate": (1e-6, 3e-2),
        "critic_lr_schedule": ("constant", "cosine"),
        "critic_warmup_ratio": (0.5,),
        "critic_weight_decay": (0.1,),
        "gamma": (0.0, 0.9),
        "gae_lambda": (0.0, 0.5),
        "critic_gae_lambda": (0.0, 1.0),
        "whiten_advantages": (False,),
        "pf_ppo": ("pow", "max_min", "max_random"),
        "value_clip": (0.0, 1e-3),
        "value_model": ("@scorer", "@qwen2"),
        "critic_num_epochs": (1, 3),
        "critic_mini_batch_size": (1, 2, 8),
        "critic_warmup_steps": (1, 2),
        "reward_normalization": (True,),
        "reward_clip": (0.3,),
        "ptx_dataset": ("@rows.jsonl", "@mixture.json"),
        "ptx_coef": (0.1, 3.0),
        "ptx_batch_size": (1, 5),
        "turn_rewards": (True,),
    },
    "rloo": COMMON
    | RL
    | {
        "advantage": ("rloo", "reinforce++", "reinforce++-baseline", "remax", "opo"),
        "ratio": ("sequence",),
        "gamma": (0.0, 0.9),
        "turn_rewards": (True,),
    },
    "distill": {name: x for name, x in (COMMON | RL).items() if name in vars(distill.Args())}
    | {
        "teacher": ("", "@llama"),
        "on_policy_share": (0.0, 0.4, 1.0),
        "estimator": ("sampled",),
        "divergence": ("reverse_kl", "forward_kl", "jsd"),
        "jsd_beta": (0.1, 0.5),
        "teacher_temperature": (0.5, 2.0),
    },
    "reward_model": COMMON
    | {
        "dataset": ("@margins.jsonl",),
        "eval_dataset": ("@other_pairs.jsonl",),
        "eval_pairs": (0, 1),
        "max_length": (1000,),
        "batch_size": (12, 13),
        "centre_coef": (0.1,),
    },
}

BASE = {
    "model": "@qwen2",
    "system_prompt": "",
    "micro_batch_tokens": 40,
    "learning_rate": 3e-3,
    "eval_every": 3,
    "save_every": 1,
    "ranks": 1,
}
BASE_RL = {
    "dataset": "@rows.jsonl",
    "eval_dataset": "@held_out.jsonl",
    "reward": ("@rewards.py:score",),
    "rollout_batch_size": 2,
    "group_size": 4,
    "mini_batch_size": 4,
    "num_epochs": 1,
    "max_response_length": 10,
    "non_stop_penalty": False,
    "kl_coef": 0.1,
    "eval_samples": 2,
}


def resolved(value, files: dict):
    if isinstance(value, tuple):
        return tuple(resolved(x, files) for x in value)
    name = next((name for name in files if isinstance(value, str) and value.startswith(name)), None)
    return value if name is None else files[name] + value.removeprefix(name)


def command(script: str, changes: dict, files: dict, folder: Path) -> tuple[dict, int]:
    """Return the flags of a run, and its ranks."""
    values = BASE | (
        BASE_RL if script != "reward_model" else {"dataset": "@pairs.jsonl", "batch_size": 9}
    )
    if script == "distill":
        values = {
            name: x for name, x in values.items() if name in vars(distill.Args()) or name == "ranks"
        }
        values |= {"teacher": "@qwen2_other", "rollout_batch_size": 8}
    values |= changes
    if values.get("teacher") == "":
        values["on_policy_share"] = 0
    ranks = values.pop("ranks")
    if script in ("reward_model", "distill"):
        # of 13 rows
        values["passes"] = 2 if script == "reward_model" else values["rollout_batch_size"] / 4
    else:
        values["total_episodes"] = 3 * values["rollout_batch_size"] * values["group_size"]
    values = {name: resolved(value, files) for name, value in values.items()}
    return values | {"output_dir": str(folder), "run_name": "run"}, ranks


def passes(script: str, changes: dict, files: dict) -> bool:
    """Return whether the flags pass their ranges and rules, without a run."""
    values, _ = command(script, changes, files, Path("."))
    try:
        with contextlib.redirect_stderr(open(os.devnull, "w")):
            args = cli.parse(SCRIPTS[script], helpers.words(values))
            getattr(__import__(script), "check_args", lambda args: None)(args)
    except SystemExit:
        return False
    return True


def draw(choose: random.Random, files: dict) -> tuple[str, dict]:
    """Draw a script, and the flags of a run that differ from BASE."""
    while True:
        script = choose.choices(list(SCRIPTS), (3, 3, 3, 1, 2))[0]
        names = choose.sample(sorted(DRAWN[script]), choose.randint(2, 10))
        changes = {name: choose.choice(DRAWN[script][name]) for name in names}
        if passes(script, changes, files):
            return script, changes


# ---- the tests -----------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_is_drawn_or_left_out(script):
    flags = {field.name for field in dataclasses.fields(SCRIPTS[script])}
    drawn = DRAWN[script].keys() - {"ranks"}
    assert not flags - drawn - LEFT_OUT and not drawn & LEFT_OUT and drawn <= flags


def test_random_runs(files, tmp_path, long):
    counts = collections.Counter()
    choose = random.Random(int(os.environ.get("RANDOM_RUNS_SEED", "0")))
    for _ in range(int(os.environ.get("RANDOM_RUNS", 100 if long else 5))):
        case = draw(choose, files)
        shutil.rmtree(tmp_path / "draw", ignore_errors=True)
        print(case)
        counts[check(*case, files, tmp_path / "draw")] += 1
    print(counts)
    assert counts["refused"] < counts.total() / 2


def run_once(script: str, values: dict, ranks: int) -> tuple[int, list[str]]:
    """Run a script to its end, with one or two ranks; return its exit code and the lines of its
    errors.
    """
    start = (
        helpers.start_ranks(values, 2, script=script)
        if ranks == 2
        else [helpers.Running(values, script=script)]
    )
    try:
        codes = {running.wait(120).code for running in start}
    finally:
        for running in start:
            running.process.kill()
    said = "\n--- rank\n".join(running.err for running in start)
    assert codes <= {0} or codes == {2} and "Traceback" not in said, (codes, values, said)
    return codes.pop(), [line for running in start for line in running.errors]


def check(script: str, changes: dict, files: dict, folder: Path) -> str:
    """Run a draw and check all that has to hold; return "refused" or "resumed"."""
    values, ranks = command(script, changes, files, folder)
    code, errors = run_once(script, values, ranks)
    if code:
        assert len(errors) == 1 and errors[0].startswith("error: --"), errors
        return "refused"
    rows = metrics_of(values)
    steps = rows[-1]["step"]
    assert [row["step"] for row in rows] == list(range(rows[0]["step"], steps + 1)) and rows[0][
        "step"
    ] <= 1
    final = helpers.tensors_of(folder_of(values) / "final")
    assert final and all(tensor.isfinite().all() for tensor in final.values())
    check_resume(script, values, ranks, steps)
    return "resumed"


def check_resume(script: str, values: dict, ranks: int, steps: int) -> None:
    """Take the last checkpoint away: the run goes on from the one before, and ends the same bit for
    bit.
    """
    whole = {**values, "run_name": "whole"}
    parts = (f"checkpoints/step_{steps}", "final")
    shutil.copytree(folder_of(values), folder_of(whole))
    for part in parts:
        shutil.rmtree(folder_of(values) / part)
    assert run_once(script, {**values, "resume": True}, ranks)[0] == 0
    ours, theirs = (read_lines(folder_of(each) / "samples.jsonl") for each in (values, whole))
    assert ours == theirs
    difference, where = helpers.largest_difference(values, whole, parts)
    assert difference == 0, where
