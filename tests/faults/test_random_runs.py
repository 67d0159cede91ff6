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
from helpers import ROWS, folder_of, metrics_of, read_lines

import distill
import grpo
import ppo
import reward_model
import rloo
from plumbing.run.command import parse
from utils import UserError

SCRIPTS = {"grpo": grpo.Args, "ppo": ppo.Args, "rloo": rloo.Args}
SCRIPTS |= {"reward_model": reward_model.Args, "distill": distill.Args}

# ---- the files of all runs -----------------------------------------------------------------------

REWARDS = f"""{helpers.REWARD}
def some(prompts, responses, **columns):
    return [None if len(p + r) % 3 == 1 else len(r) / 10 for p, r in zip(prompts, responses)]

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
    parts = [{"prob": 0.7, "filepath": "rows.jsonl"}, {"prob": 0.3, "filepath": "held_out.jsonl"}]
    as_messages = lambda prompt: [{"role": "user", "content": prompt}]
    files = {
        "rewards.py": REWARDS,
        "template.jinja": helpers.CHAT_TEMPLATE,
        "rows.jsonl": ROWS,
        "named.jsonl": [{**row, "verifier": "exact"} for row in ROWS],
        "messages.jsonl": [{**row, "prompt": as_messages(row["prompt"])} for row in ROWS],
        "held_out.jsonl": helpers.HELD_OUT,
        "pairs.jsonl": PAIRS,
        "margins.jsonl": [{**row, "margin": 0.5, "subset": "a"} for row in PAIRS],
        "other_pairs.jsonl": [{**row, "prompt": f"9{row['prompt']}"} for row in PAIRS[:4]],
        "mixture.json": json.dumps(parts),
        "one.json": json.dumps(parts[:1]),
    }
    helpers.write_files(folder, files)
    return {"@game": helpers.GAME.rpartition(":")[0], "@": f"{folder}/"}


# ---- what is drawn -------------------------------------------------------------------------------

# Of each run; then what test_run.py, test_cli.py, test_vllm.py, test_vllm_server.py,
# test_data.py, test_models.py, test_compile.py and test_saved_rollouts.py check.
LEFT_OUT = set(
    "run_name output_dir resume total_episodes passes stop_at "
    "track config collective_timeout agent agent_timeout rollout_servers kv_cache_gb async_steps "
    "prompt_column answer_column response_column chat_template_kwargs compile rollouts_from "
    "vllm_tensor_parallel teacher_top_k vllm_lora quantize".split()
)

TABLES = helpers.table("random_runs.yaml")
FLAGS = {
    script: {field.name for field in dataclasses.fields(args)} for script, args in SCRIPTS.items()
}


def of_script(table: str, script: str) -> dict:
    """Return the entries of a table for flags that a script has; `ranks` is no flag."""
    entries = TABLES[table].items()
    return {name: value for name, value in entries if name in FLAGS[script] | {"ranks"}}


DRAWN = {script: of_script("drawn", script) | TABLES[script] for script in SCRIPTS}
DRAWN["grpo"]["loss"] = list(grpo.VARIANTS)


def resolved(value, files: dict):
    if isinstance(value, list):
        return [resolved(x, files) for x in value]
    name = next((name for name in files if isinstance(value, str) and value.startswith(name)), None)
    return value if name is None else files[name] + value.removeprefix(name)


def command(script: str, changes: dict, files: dict, folder: Path) -> tuple[dict, int]:
    """Return the flags of a run, and its ranks."""
    values = of_script("base", script) | TABLES["base_of"].get(script, {}) | changes
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
            args = parse(SCRIPTS[script], helpers.words(values))
            getattr(__import__(script), "check_args", lambda args: None)(args)
    except (SystemExit, UserError):
        return False
    return True


def draw(choose: random.Random, files: dict) -> tuple[str, dict]:
    """Draw a script, and the flags of a run that differ from those of its base."""
    while True:
        script = choose.choices(list(SCRIPTS), (3, 3, 3, 1, 2))[0]
        names = choose.sample(sorted(DRAWN[script]), choose.randint(2, 10))
        changes = {name: choose.choice(DRAWN[script][name]) for name in names}
        if passes(script, changes, files):
            return script, changes


# ---- the tests -----------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_is_drawn_or_left_out(script):
    drawn = DRAWN[script].keys() - {"ranks"}
    assert FLAGS[script] - LEFT_OUT == drawn


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
        codes = {running.wait().code for running in start}
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
