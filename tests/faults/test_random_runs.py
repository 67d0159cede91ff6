"""Whole runs with flags drawn at random: those that fit together train, the others are refused in one line.

Every flag of the four scripts is in DRAWN or in LEFT_OUT. A draw takes some of DRAWN at random values. `misfits` says
what of it does not fit together, and what to change so that it does; so whether a run has to train or to be refused is
known before it starts. A run that trains goes on once more from the checkpoint before its last one, and has to end the
same bit for bit; or it is run in float64 with its batch cut otherwise, and has to be the same up to rounding.

    python -m pytest tests/faults/test_random_runs.py                      # 20 draws; 100 with --long
    RANDOM_RUNS=300 RANDOM_RUNS_SEED=3 python -m pytest tests/faults/test_random_runs.py
"""

import collections
import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import helpers
import hypothesis
import pytest
from helpers import folder_of, metrics_of, read_lines
from hypothesis import strategies as st

import grpo
import ppo
import reward_model
import rloo
from plumbing.turns.conversations import STOP_REASONS

SCRIPTS = {"grpo": grpo.Args, "ppo": ppo.Args, "rloo": rloo.Args, "reward_model": reward_model.Args}

# ---- the files of all runs -------------------------------------------------------------------------------------------

REWARDS = f"""{helpers.REWARD}
def some(prompts, responses, **columns):
    return [None if i % 3 == 1 else len(r) / 10 for i, r in enumerate(responses)]

def trl(completions, **columns):
    return [float(len(c) % 2) for c in completions]

def equal(prompts, responses, **columns):
    return [0.5] * len(responses)
"""
PAIRS = [{"prompt": f"{a}+3=", "chosen": str(a + 3), "rejected": f"{a}{'?' * (a % 4)}"} for a in range(1, 31)]


class Judge(BaseHTTPRequestHandler):
    """A reward server: the length of a response modulo 5."""

    def do_GET(self):
        self.answer({"verifies": False})

    def do_POST(self):
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        scores = [len(response) % 5 for response in question["response"]]
        self.answer({"error_code": 0, "error_msg": "Success", "score": scores})

    def answer(self, content: dict):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    with written_files(tmp_path_factory.mktemp("random_runs")) as files:
        yield files


@contextlib.contextmanager
def written_files(folder: Path):
    """Give what the values of flags that begin with @ stand for: {"@": a folder, "@server": an address, ...}."""
    for kind in ("qwen2", "gpt_neox", "gemma2"):
        helpers.tiny_model(folder / kind, kind)
    helpers.tiny_model(folder / "chat", chat=True)
    helpers.scalar_folder(str(folder / "qwen2"), folder / "scorer", score_mean=0.5, score_std=2.0)
    helpers.scalar_folder(str(folder / "qwen2"), folder / "other_vocabulary", tokens=("ab", "12"))
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "template.jinja").write_text(helpers.CHAT_TEMPLATE)
    rows = helpers.ROWS
    helpers.write_rows(folder / "rows.jsonl", rows)
    helpers.write_rows(folder / "named.jsonl", [{**row, "verifier": "exact"} for row in rows])
    helpers.write_rows(folder / "messages.jsonl", [{**row, "prompt": as_messages(row["prompt"])} for row in rows])
    helpers.write_rows(folder / "held_out.jsonl", helpers.HELD_OUT)
    helpers.write_rows(folder / "pairs.jsonl", PAIRS)
    helpers.write_rows(folder / "margins.jsonl", [{**row, "margin": 0.5, "subset": "a"} for row in PAIRS])
    helpers.write_rows(folder / "other_pairs.jsonl", [{**row, "prompt": f"9{row['prompt']}"} for row in PAIRS[:4]])
    parts = [{"prob": 0.7, "filepath": "rows.jsonl"}, {"prob": 0.3, "filepath": "held_out.jsonl"}]
    (folder / "mixture.json").write_text(json.dumps(parts))
    (folder / "one.json").write_text(json.dumps(parts[:1]))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    game = helpers.GAME.rpartition(":")[0]
    yield {"@server": f"http://127.0.0.1:{server.server_address[1]}", "@game": game, "@": f"{folder}/"}
    server.shutdown()


def as_messages(prompt: str) -> list[dict]:
    return [{"role": "user", "content": prompt}]


# ---- what is drawn ---------------------------------------------------------------------------------------------------

LEFT_OUT = {
    "run_name", "output_dir", "resume", "resume_with_changes",  # of each run
    "total_episodes",  # three steps
    "track", "wandb_project", "config", "compile",  # test_run.py, test_config.py, test_compile.py
    "push_to_hub", "hub_model_id", "hub_private_repo",  # test_hub.py
    "stop_after_step", "report",  # test_replay.py, test_report.py
    "rollout_servers", "kv_cache_gb",  # test_vllm.py, test_vllm_server.py
    "dataset_split", "eval_split", "ptx_split",  # files have none: test_data.py
    "prompt_column", "answer_column",  # test_data.py
}  # fmt: skip

CALL = r"(?P<name>[a-m])(?P<arguments>.)?"  # which a random model does write: calls of tools that are not there

OPTIMIZER = {
    "learning_rate": (1e-6, 3e-2), "lr_schedule": ("constant", "linear", "cosine"),
    "warmup_ratio": (0.0, 0.5, 1.0), "min_learning_rate": (1e-6, 1e-4, 1.0), "weight_decay": (0.1,),
    "max_grad_norm": (1e-3, 100.0),
}  # fmt: skip
COMMON = {
    "ranks": (2,), "seed": (0, 2**40), "save_every": (2,), "keep_checkpoints": (0, 3),
    "log_samples": (0, 1), "eval_every": (0, 1, 2),
    "model": ("@gpt_neox", "@gemma2", "@chat"), "stop_token": ("+", "<eos>"),
    "pad_token": ("eos", "<eos>", "+"), "chat_template": ("none", "@template.jinja"),
    "system_prompt": ("Add:",), "precision": ("auto", "float64", "bf16", "fp16", "pure_bf16"),
    "attention": ("sdpa", "eager"), "gradient_checkpointing": (True,), "micro_batch_tokens": (0, 1, 1000),
    "lora_rank": (1, 4), "lora_alpha": (1.0,), "shard": ("none", "fsdp"),
    "shard_group_size": (1, 2), "cpu_offload": (True,), "sequence_parallel": (2,),
    "max_skipped_updates": (0,), "adam_beta1": (0.0,), "adam_beta2": (0.0, 0.9), **OPTIMIZER,
}  # fmt: skip
RL = {
    "dataset": ("@messages.jsonl", "@named.jsonl", "@mixture.json", "@one.json"),
    "max_prompt_length": (200,), "overlong_prompts": ("error",),
    "eval_dataset": ("", "@rows.jsonl", "@mixture.json"),
    "eval_prompts": (0, 1), "eval_samples": (1, 4), "ptx_dataset": ("@rows.jsonl", "@mixture.json"),
    "ptx_coef": (0.1, 3.0), "ptx_batch_size": (1, 5),
    "reward": (
        ("exact",), ("@rewards.py:score", "format"), ("@rewards.py:some",), ("@rewards.py:some", "@rewards.py:score"),
        ("@rewards.py:equal",), ("@rewards.py:trl", "gsm8k"), ("@scorer",), ("@other_vocabulary", "math"), ("@server",),
        ("@server", "@scorer"), ("environment",), ("exact", "environment"),),
    "reward_weights": ((0.5,), (-1.0,), (1.0, 0.0), (0.0, 2.0), (0.0, 0.0)),
    "verifier_column": ("none", "kind"), "reward_model_scale": ("centred", "standardized"),
    "reward_timeout": (20.0,), "generation_batch_size": (1, 3), "min_response_length": (1, 6, 11),
    "top_p": (0.5, 1e-6), "top_k": (1, 20), "repetition_penalty": (0.7, 1.3),
    "rollout_backend": ("hf",), "async_steps": (1,), "vllm_tensor_parallel": (2,),
    "logits_chunk_tokens": (0, 1, 4096), "recompute_logits": ("yes", "no"), "tools": (("@game:add",),),
    "environment": ("@game:Game", "@game:Game", "@game:Counter"), "max_turns": (1, 2),
    "max_turn_length": (1, 3), "tool_timeout": (20.0,),
    "tool_call_pattern": (CALL,), "turn_stop": (("a", "1", "+"),),
    "rewritten_turns": ("keep",),
    "rollout_batch_size": (1, 3), "group_size": (1, 2, 5), "mini_batch_size": (1, 2, 6, 8),
    "num_epochs": (1, 3), "max_response_length": (1, 2, 25), "temperature": (0.1, 0.7, 3.0),
    "clip_low": (0.0, 1.0), "clip_high": (0.0, 1.0, 20.0), "dual_clip": (1.1, 3.0),
    "entropy_coef": (0.01,), "rollout_correction": ("truncate", "mask", "sequence_mask"),
    "rollout_correction_cap": (0.5, 1.0, 3.0), "kl_coef": (0.0, 10.0), "kl_in": ("loss", "reward"),
    "kl_estimator": ("k1", "abs", "k2", "k3", "full"), "kl_controller": ("adaptive",),
    "kl_target": (1e-3,), "kl_horizon": (1, 20), "ref_model": ("@gpt_neox", "@qwen2"),
    "ref_refresh_every": (1, 2), "ref_refresh_mix": (0.0, 0.5), "non_stop_penalty": (True,),
    "penalty_reward_value": (-1.0, 1.0), "overlong_buffer": (1, 8, 11), "mask_truncated": (True,),
    "reward_normalization": (True,), "reward_clip": (0.3,), "filter_groups": ("drop", "refill"),
    "max_refills": (0, 2),
}  # fmt: skip
AGGREGATIONS = ("token", "step_token", "sequence", "sequence_sum", "constant")
DRAWN = {
    "grpo": COMMON | RL | {
        "loss": tuple(grpo.VARIANTS), "loss_aggregation": AGGREGATIONS,
        "advantage_scale": ("group", "batch", "none"), "sapo_tau_positive": (0.5,),
        "sapo_tau_negative": (2.0,),
    },
    "ppo": COMMON | RL | {f"critic_{name}": values for name, values in OPTIMIZER.items()} | {
        "gamma": (0.0, 0.9), "gae_lambda": (0.0, 0.5), "critic_gae_lambda": (0.0, 1.0),
        "length_adaptive_lambda": (0.05, 2.0), "turn_rewards": (True,), "whiten_advantages": (False,),
        "whiten_rewards": (True,), "pf_ppo": ("pow", "max_min", "max_random"), "pf_ppo_power": (0.0, 4.0),
        "loss_aggregation": AGGREGATIONS, "value_clip": (0.0, 1e-3),
        "value_model": ("@scorer", "@qwen2", "@other_vocabulary"), "fit_value_model": (False,),
        "critic_num_epochs": (1, 3), "critic_mini_batch_size": (1, 2, 6, 8),
        "critic_gradient_checkpointing": (True,), "critic_warmup_steps": (1, 2, 3),
        "critic_warmup_patience": (1,),
    },
    "rloo": COMMON | RL | {
        "advantage": ("rloo", "reinforce++", "reinforce++-baseline", "remax", "opo"),
        "ratio": ("sequence",), "gamma": (0.0, 0.9), "loss_aggregation": AGGREGATIONS,
    },
    "reward_model": COMMON | {
        "dataset": ("@margins.jsonl",), "eval_dataset": ("@other_pairs.jsonl", "@pairs.jsonl"),
        "eval_pairs": (0, 1), "max_length": (1000,), "num_epochs": (1, 2),
        "batch_size": (12, 13), "centre_coef": (0.1,),
    },
}  # fmt: skip

BASE = {
    "model": "@qwen2", "system_prompt": "", "micro_batch_tokens": 40, "learning_rate": 3e-3, "eval_every": 3,
    "save_every": 1, "ranks": 1,
}  # fmt: skip
BASE_RL = {
    "dataset": "@rows.jsonl", "eval_dataset": "@held_out.jsonl", "reward": ("@rewards.py:score",),
    "rollout_batch_size": 2, "group_size": 4, "mini_batch_size": 4, "num_epochs": 1, "max_response_length": 10,
    "non_stop_penalty": False, "kl_coef": 0.1, "logits_chunk_tokens": 8, "eval_samples": 2,
}  # fmt: skip


ELSEWHERE = {  # what never changes a result, by more than rounding
    "ranks": (1, 2), "micro_batch_tokens": (1, 1000), "logits_chunk_tokens": (1, 4096), "generation_batch_size": (1, 3),
    "recompute_logits": ("yes", "no"), "gradient_checkpointing": (True, False), "shard": ("none", "fsdp"),
    "sequence_parallel": (1, 2),
}  # fmt: skip


@st.composite
def draws(draw) -> tuple[str, dict, dict]:
    """Draw a script, the flags of a run that differ from BASE, and what differs in a run of it elsewhere, if anything.

    Of one in four, the flags need not fit together.
    """
    random = draw(st.randoms(use_true_random=True))  # drawn flag by flag, hypothesis would repeat parts of other draws
    script = random.choices(list(SCRIPTS), (3, 3, 3, 1))[0]
    names = random.sample(sorted(DRAWN[script]), random.randint(2, 12))
    changes = {name: random.choice(DRAWN[script][name]) for name in names}
    if random.randrange(4):
        while unfit := misfits(script, changes):
            changes |= unfit[0][1]
    elsewhere = {name: random.choice(values) for name, values in ELSEWHERE.items() if name in DRAWN[script]}
    exact = {"precision": "float64"}
    cut_by_rank = "@rewards.py:some" in changes.get("reward", ())  # it goes by the place of a response in the call
    if random.randrange(2) or cut_by_rank or any(misfits(script, changes | exact | x) for x in ({}, elsewhere)):
        return script, changes, {}
    return script, changes | exact, elsewhere


# ---- what fits together ----------------------------------------------------------------------------------------------


def base_of(script: str) -> dict:
    return BASE | (BASE_RL if script != "reward_model" else {"dataset": "@pairs.jsonl", "batch_size": 9})


def all_flags(script: str, changes: dict) -> SimpleNamespace:
    """Return the values of all flags of a run, and `ranks`."""
    return SimpleNamespace(**{**vars(SCRIPTS[script]()), **base_of(script), **changes})


def misfits(script: str, changes: dict) -> list[tuple[str, dict]]:
    """Return what does not fit together: how the refusal begins, and changes with which that reason is gone."""
    v = all_flags(script, changes)
    capped = "gemma2" in v.model  # it caps the scores of attention
    rules = [
        ("--shard_group_size", v.shard_group_size and v.shard != "fsdp", {"shard": "fsdp"}),
        ("--cpu_offload", v.cpu_offload and v.shard != "fsdp", {"shard": "fsdp"}),
        ("--shard_group_size", v.shard_group_size and v.ranks % v.shard_group_size, {"ranks": 2}),
        ("--sequence_parallel", v.ranks % v.sequence_parallel, {"ranks": 2}),
        ("--sequence_parallel", v.sequence_parallel > 1 and v.attention == "eager", {"attention": "sdpa"}),
        ("--sequence_parallel", v.sequence_parallel > 1 and capped, {"model": "@qwen2"}),
        ("--attention eager", v.attention == "eager" and v.precision == "float64", {"attention": "sdpa"}),
        ("--precision float64", capped and v.precision == "float64", {"model": "@qwen2"}),
        ("--attention sdpa", capped and v.attention == "sdpa", {"attention": "eager"}),
        ("--min_learning_rate", v.min_learning_rate > v.learning_rate, {"min_learning_rate": 1e-6}),
    ]
    if script == "reward_model":
        rules += [("--batch_size", v.eval_dataset == "@pairs.jsonl" and v.eval_every, {"eval_dataset": ""})]
    else:
        rules += rl_rules(script, v)
    return [(begins, changes) for begins, unfit, changes in rules if unfit]


def rl_rules(script: str, v: SimpleNamespace) -> list[tuple]:
    N = v.rollout_batch_size * v.group_size
    talks, has_tools = bool(v.tools or v.environment), bool(v.tools or v.environment == "@game:Counter")
    template = v.chat_template not in ("", "none") or v.model == "@chat"
    games, named = "environment" in v.reward, v.dataset == "@named.jsonl" and not v.verifier_column
    many_weights = v.reward_weights and len(v.reward_weights) != len(v.reward)
    evaluated = v.eval_every and v.eval_dataset != "@held_out.jsonl" and v.eval_prompts != 1
    rules = [
        ("--mini_batch_size", N % v.mini_batch_size, {"mini_batch_size": N}),
        ("--min_response_length", v.min_response_length > v.max_response_length, {"min_response_length": 1}),
        ("--overlong_buffer", v.overlong_buffer > v.max_response_length, {"overlong_buffer": 1}),
        ("--filter_groups", v.filter_groups != "none" and v.group_size < 2, {"group_size": 2}),
        ("--rollout_correction_cap", v.rollout_correction == "mask" and v.rollout_correction_cap < 1,
         {"rollout_correction_cap": 1.0}),
        ("--vllm_tensor_parallel", v.vllm_tensor_parallel > 1, {"vllm_tensor_parallel": 1}),
        ("--async_steps", v.async_steps, {"async_steps": 0}),
        ("--ptx_coef", v.ptx_coef and not v.ptx_dataset, {"ptx_dataset": "@rows.jsonl"}),
        ("--ptx_dataset", v.ptx_dataset and not v.ptx_coef, {"ptx_coef": 0.1}),
        ("--ptx_dataset", v.ptx_coef and v.ptx_dataset and v.max_response_length < 3, {"max_response_length": 10}),
        ("--ref_refresh_every", v.ref_refresh_every and v.lora_rank, {"lora_rank": 0}),
        ("--ref_refresh_every", v.ref_refresh_every and not v.kl_coef, {"kl_coef": 0.1}),
        ("--ref_model", v.ref_refresh_every and v.ref_model not in ("", v.model), {"ref_model": ""}),
        ("--reward_weights: has", many_weights, {"reward_weights": ()}),
        ("--reward_weights: are all 0", v.reward_weights and not any(v.reward_weights), {"reward_weights": ()}),
        ("--reward environment", games and not talks, {"environment": "@game:Game"}),
        ("--min_response_length", talks and v.min_response_length, {"min_response_length": 0}),
        ("--tool_call_pattern", v.tool_call_pattern and not has_tools, {"tool_call_pattern": ""}),
        ("--turn_stop", v.turn_stop and not talks, {"turn_stop": ()}),
        ("--tools", v.tools and not v.tool_call_pattern and not template, {"tool_call_pattern": CALL}),
        ("--environment", v.environment == "@game:Counter" and not v.tool_call_pattern and not template,
         {"tool_call_pattern": CALL}),
        ("--dataset", v.dataset == "@messages.jsonl" and not template, {"dataset": "@one.json"}),
        ("--dataset", named and "exact" not in v.reward, {"reward": ("exact", "format")}),
        ("--dataset", evaluated, {"eval_prompts": 1}),
        ("--reward_model_scale", v.reward_model_scale != "raw" and "@other_vocabulary" in v.reward,
         {"reward_model_scale": "raw"}),
        ("--reward", template and "@other_vocabulary" in v.reward, {"reward": ("@scorer", "math")}),
    ]  # fmt: skip
    if script == "grpo":
        clips = grpo.VARIANTS[v.loss][0] in ("ppo", "gspo")
        rules += [
            ("--group_size", v.group_size < 2, {"group_size": 2}),
            ("--dual_clip", v.dual_clip and not clips, {"dual_clip": 0.0}),
        ]
    if script == "rloo":
        own = v.advantage in ("remax", "reinforce++")
        rules += [
            ("--group_size", v.group_size < 2 and not own, {"group_size": 2}),
            ("--filter_groups", v.filter_groups != "none" and own, {"filter_groups": "none"}),
        ]
    if script == "ppo":
        size = v.critic_mini_batch_size
        rules += [
            ("--turn_rewards", v.turn_rewards and not games, {"reward": ("environment",)}),
            ("--critic_mini_batch_size", size and N % size, {"critic_mini_batch_size": 0}),
            ("--critic_warmup_steps", v.critic_warmup_steps >= 3, {"critic_warmup_steps": 1}),
            ("--critic_warmup_patience", v.critic_warmup_patience and not v.critic_warmup_steps,
             {"critic_warmup_steps": 2}),
            ("--critic_min_learning_rate", v.critic_min_learning_rate > v.critic_learning_rate,
             {"critic_min_learning_rate": 0.0}),
            ("--value_model", v.value_model == "@other_vocabulary", {"value_model": "@scorer"}),
        ]  # fmt: skip
    return rules


# ---- the tests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_is_drawn_or_left_out(script):
    flags = {field.name for field in dataclasses.fields(SCRIPTS[script])}
    drawn = DRAWN[script].keys() - {"ranks"}
    assert not flags - drawn - LEFT_OUT and not drawn & LEFT_OUT and drawn <= flags


def test_random_runs(files, tmp_path, long):
    counts = collections.Counter()

    @hypothesis.seed(int(os.environ.get("RANDOM_RUNS_SEED", "0")))
    @hypothesis.settings(
        max_examples=int(os.environ.get("RANDOM_RUNS", 100 if long else 20)), phases=[hypothesis.Phase.generate],
        database=None, deadline=None, suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.given(draws())
    def run_draw(case):
        folder = tmp_path / "draw"
        shutil.rmtree(folder, ignore_errors=True)  # of the draw before, or of this one, which hypothesis tries again
        counts[check(*case, files, folder)] += 1

    run_draw()
    assert len(counts) == 3 and counts["refused"] < counts.total() / 3


# ---- what a run has to leave -----------------------------------------------------------------------------------------


def drops_responses(v: SimpleNamespace) -> bool:
    return v.filter_groups != "none" or v.mask_truncated or "@rewards.py:some" in v.reward


def allowed_warnings(script: str, v: SimpleNamespace) -> str:
    """Return a pattern of the warnings that a run with these flags may print."""
    patterns = ["(?!)"]
    if v.precision == "pure_bf16":
        patterns.append("--precision pure_bf16: ")
    if script != "reward_model":
        patterns += ["no response of this step trains"] if drops_responses(v) else []
        patterns += ["--clip_high 20.0"] if v.clip_high == 20 else []
        patterns += ["--kl_in loss --kl_estimator k1"] if (v.kl_in, v.kl_estimator) == ("loss", "k1") else []
        biased = v.top_p < 1 or v.top_k or v.repetition_penalty != 1 or v.min_response_length
        patterns += ["--top_p, --top_k, "] if biased else []
        some = any(name.endswith(":some") for name in v.reward)
        patterns += ["--reward .*: gave .* of the evaluation no score"] if some else []
        patterns += ["--dataset .*: left out .* rows whose prompts are evaluated on"] if v.eval_every else []
        column = v.verifier_column not in ("", "none")
        patterns += [".*: has no column"] if column else []
        unused = v.environment and "environment" not in v.reward
        patterns += ["--environment .*: its rewards do not count"] if unused else []
    elif v.eval_every:
        patterns.append("--dataset .*: left out .* pairs whose prompts are evaluated on")
    return "|".join(patterns)


def may_be_null(script: str, v: SimpleNamespace, row: dict) -> str:
    """Return a pattern of the metrics that may be null in a row."""
    patterns = ["perf/mfu"]
    if script != "reward_model":
        verifiers = [name for name in v.reward if not name.startswith(("@scorer", "@other", "@server"))]
        patterns += [] if v.kl_coef else ["objective/kl", "objective/non_score_reward"]
        patterns += [] if verifiers else ["objective/verifiable_correct_rate"]
        patterns += ["val/zero_std_fraction"] if v.group_size == 1 else []
        if v.dataset == "@named.jsonl":  # no row of it names the other sources
            patterns += ["reward(_std|_correct)?/.*"]
        patterns += ["reward_std/.*"] if v.rollout_batch_size * v.group_size < 4 else []
        if "@rewards.py:some" in v.reward and v.eval_prompts == 1:  # no held-out prompt has all of its scores
            patterns += ["eval/.*"]
        if script == "ppo" and row["step"] <= v.critic_warmup_steps:
            patterns += ["(objective|loss|policy|rollout)/.*"]
        if drops_responses(v) and row.get("loss/policy_avg") is None:  # no response of the step trains
            patterns += ["(objective|loss|policy|rollout|val)/.*"]
        patterns += ["val/(critic_)?explained_variance"]  # where all returns are equal
    return "|".join(patterns)


def processes_of(running: helpers.Running) -> list[str]:
    """Return the ids of the processes that a run has started and that still are there."""
    found, mark = [], f"RUN_TEST_LOG={running.log}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            found += [path.parent.name] if mark in path.read_bytes().split(b"\0") else []
    return found


def run_once(script: str, values: dict, ranks: int) -> SimpleNamespace:
    """Run a script to its end; return code and what it said, with one or two ranks."""
    start = helpers.start_ranks(values, 2, script=script) if ranks == 2 else [helpers.start(values, script=script)]
    try:
        for running in start:
            running.wait(120)
    finally:
        for running in start:
            running.process.kill()
    end = time.monotonic() + 5
    while (left := [number for running in start for number in processes_of(running)]) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left, f"processes {left} outlive their run"
    codes = {running.code for running in start}
    assert len(codes) == 1, (codes, [running.err[-3000:] for running in start])
    lines = [line for r in start for line in re.split(r"[\r\n]+", r.err)]
    return SimpleNamespace(code=codes.pop(), errors=[x for x in lines if x.startswith("error:")], lines=lines,
                           err="\n--- rank\n".join(r.err[-6000:] for r in start), out=start[0].out)  # fmt: skip


def said_amiss(lines: list[str], allowed: str) -> list[str]:
    """Return lines of stderr that warn of what no flag asks for, or come from a library."""
    own = [x.removeprefix("warning: ") for x in lines if x.startswith("warning: ")]
    foreign = [x for x in lines if re.search(r"\w*Warning\b|Traceback|\[W\d+|\bWARN", x)]
    return [x for x in own if not re.match(allowed, x)] + foreign


def command(script: str, changes: dict, files: dict, folder: Path, name: str = "run") -> tuple[dict, int]:
    """Return the flags of a run, and its ranks."""
    values = {**base_of(script), **changes}
    ranks = values.pop("ranks")
    if script != "reward_model":
        values["total_episodes"] = 3 * values["rollout_batch_size"] * values["group_size"]
    values = {name: resolved(value, files) for name, value in values.items()}
    return values | {"output_dir": str(folder), "run_name": name}, ranks


def check(script: str, changes: dict, elsewhere: dict, files: dict, folder: Path) -> str:
    """Run a draw and check all that has to hold; return "refused" or how it trained."""
    unfit, v = misfits(script, changes), all_flags(script, changes)
    values, ranks = command(script, changes, files, folder)
    done = run_once(script, values, ranks)
    if unfit:
        assert done.code == 2, f"code {done.code} where one of {unfit} had to be refused\n{done.err}"
        assert len(done.errors) == 1, done.err
        assert any(done.errors[0].startswith(f"error: {begins}") for begins, _ in unfit), (unfit, done.errors)
        assert not folder_of(values).exists()
        return "refused"
    assert done.code == 0, f"code {done.code}\n{done.err}"
    amiss = said_amiss(done.lines, allowed_warnings(script, v))
    assert not amiss, amiss
    rows = metrics_of(values)
    steps = rows[-1]["step"]
    first = 0 if rows[0]["step"] == 0 else 1
    assert [row["step"] for row in rows] == list(range(first, steps + 1))
    for row in rows:
        null = [name for name, x in row.items() if x is None and not re.fullmatch(may_be_null(script, v, row), name)]
        assert not null, (row["step"], null)
    samples = read_lines(folder_of(values) / "samples.jsonl")
    check_samples(script, v, rows[-steps:], samples)
    final = helpers.tensors_of(folder_of(values) / "final")
    assert final and all(tensor.isfinite().all() for tensor in final.values())
    if not elsewhere:
        check_resume(script, values, ranks, steps)
        return "trained and resumed"
    other, ranks = command(script, changes | elsewhere, files, folder, "elsewhere")
    done = run_once(script, other, ranks)
    assert done.code == 0, f"code {done.code} elsewhere\n{done.err}"
    # What samples rounds its log-probabilities to float32.
    difference = helpers.largest_difference(other, values, ("final",), without="rollout/")
    assert difference[0] < 1e-4, difference
    return "trained in two places"


def resolved(value, files: dict):
    if isinstance(value, tuple):
        return tuple(resolved(x, files) for x in value)
    name = next((name for name in files if isinstance(value, str) and value.startswith(name)), None)
    return value if name is None else files[name] + value.removeprefix(name)


def check_samples(script: str, v: SimpleNamespace, rows: list[dict], samples: list[dict]) -> None:
    """What samples.jsonl shows of the responses of each step is what its metrics count."""
    for row in rows:
        own = [sample for sample in samples if sample["step"] == row["step"]]
        if script == "reward_model":
            assert len(own) == min(v.log_samples, v.batch_size)
            assert all(math.isfinite(sample[f"{side}_score"]) for sample in own for side in ("chosen", "rejected"))
            continue
        count = v.rollout_batch_size * v.group_size
        assert 1 <= row["val/sequence_lengths"] <= v.max_response_length
        for sample in own:
            # A token is a byte, so a character or less; special tokens are not shown.
            assert sample["prompt"] and len(sample["response"]) <= v.max_response_length
            assert sample["stop_reason"] in (STOP_REASONS if "turns" in sample else ("stop", "length"))
            assert math.isfinite(sample["advantage"])
        if v.filter_groups != "none":
            assert len(own) <= min(v.log_samples, count)
            continue
        assert len(own) == min(v.log_samples, count)
        if v.log_samples >= count:
            stopped = sum(sample["stop_reason"] in ("stop", "done") for sample in own)
            assert stopped == row["val/num_stop_token_ids"]
            missing = [sample for sample in own if any(sample[name] is None for name in row_sources(row))]
            assert len(missing) == row["val/missing_scores"] or v.dataset == "@named.jsonl"


def row_sources(row: dict) -> list[str]:
    return [name.removeprefix("reward/") for name in row if name.startswith("reward/")]


def check_resume(script: str, values: dict, ranks: int, steps: int) -> None:
    """Take the last checkpoint away: the run goes on from the one before, and ends the same bit for bit."""
    folder = folder_of(values)
    parts = [folder / "checkpoints" / f"step_{steps}", folder / "final"]
    before = metrics_of(values), read_lines(folder / "samples.jsonl"), [helpers.tensors_of(part) for part in parts]
    for part in parts:
        shutil.rmtree(part)
    done = run_once(script, {**values, "resume": True}, ranks)
    assert done.code == 0, f"code {done.code} of --resume\n{done.err}"
    assert "goes on after step" in done.out
    for ours, theirs in zip(metrics_of(values), before[0], strict=True):
        assert ours.keys() == theirs.keys()
        differ = {name: (ours[name], x) for name, x in theirs.items() if ours[name] != x}
        assert not differ, f"step {theirs['step']} of the resumed run: {differ}"
    assert read_lines(folder / "samples.jsonl") == before[1]
    for part, expected in zip(parts, before[2]):
        found = helpers.tensors_of(part)
        assert found.keys() == expected.keys()
        assert all(found[name].equal(expected[name]) for name in expected), part
