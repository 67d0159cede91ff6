"""Whole runs of grpo.py, in processes of their own: what they leave, two ranks, resuming, signals, failing rewards."""

import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import types

import forked_python
import helpers
import pytest
import safetensors.torch
import torch
from helpers import (
    ROOT,
    all_finite,
    finite_or_null,
    folder_of,
    metrics_of,
    read_lines,
    run,
    run_here,
    run_ranks,
    same_weights,
    steps_of,
    weights_of,
)
from make_models import make_tokenizer

import grpo
import utils
from plumbing import flags
from plumbing.models import loading as models
from plumbing.rewards.sources import Rewards
from plumbing.run import checkpoints


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict:
    return helpers.workspace(tmp_path_factory.mktemp("run"))


def variant(base: dict, tmp_path, **changes) -> dict:
    """The small run with other flags, in a folder of its own."""
    return {**base, "output_dir": str(tmp_path / "runs"), "run_name": "run", **changes}


# ---- what a run leaves ---------------------------------------------------------------------------------------------

METRICS = """
    episode epoch lr objective/kl objective/scores objective/rlhf_reward objective/non_score_reward
    objective/entropy objective/loss objective/verifiable_correct_rate loss/policy_avg policy/approxkl_avg
    policy/clipfrac_avg policy/entropy_avg time/from_scratch time/training time/rollout val/sequence_lengths
    val/num_stop_token_ids val/zero_std_fraction rollout/logprob_diff_mean perf/tokens_per_second perf/mfu
    perf/peak_memory_gb
""".split()


def test_what_a_run_leaves(base, tmp_path):
    """The command as a user types it, from another folder, and every file that the design promises."""
    from matplotlib.image import imread
    from transformers import AutoModelForCausalLM, AutoTokenizer

    values = variant(base, tmp_path, total_episodes=16, save_every=1, output_dir="here")
    words = [sys.executable, str(ROOT / "grpo.py"), *helpers.words(values)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not re.search(r"\b(nan|inf)\b", done.stdout + done.stderr, re.IGNORECASE)
    folder = tmp_path / "here" / "run"
    assert sorted(path.name for path in folder.iterdir()) == [
        ".lock", "args.json", "checkpoints", "curves.png", "final", "held_out.jsonl", "metrics.jsonl", "samples.jsonl",
    ]  # fmt: skip

    facts = json.loads((folder / "args.json").read_text())
    assert facts["args"].keys() == {field.name for field in dataclasses.fields(grpo.Args)}
    assert all(facts["args"][name] in (value, [value]) for name, value in values.items())
    assert facts["versions"]["torch"] == torch.__version__ and {"python", "transformers"} <= facts["versions"].keys()
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    assert (facts["git_commit"] or "").rstrip("+") == head.stdout.strip()

    rows = read_lines(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2] and [row["episode"] for row in rows] == [0, 8, 16]
    assert all(set(METRICS) <= row.keys() for row in rows[1:])
    assert all("eval/accuracy" in rows[i] for i in (0, 2)) and "eval/accuracy" not in rows[1]
    assert finite_or_null(rows)
    assert all(row["rollout/correction_mean"] == pytest.approx(1) for row in rows[1:])  # each token counts once
    assert [name for name, value in rows[2].items() if value is None] == (
        [] if torch.cuda.is_available() else ["perf/mfu"]
    )

    samples = read_lines(folder / "samples.jsonl")
    assert [row["step"] for row in samples] == [1] * 8 + [2] * 8
    prompts = {row["prompt"] for row in helpers.ROWS}
    for row in samples:
        assert row["prompt"] in prompts and row["stop_reason"] in ("stop", "length")
        assert math.isfinite(row["advantage"])
        assert row[base["reward"]] == pytest.approx(sum(map(ord, row["prompt"] + row["response"])) % 7 / 7)
    assert rows[2]["objective/scores"] == pytest.approx(sum(row[base["reward"]] for row in samples[8:]) / 8)

    picture = imread(folder / "curves.png")
    assert min(picture.shape[:2]) > 200 and picture.std() > 0.01

    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step_1", "step_2"]
    start = weights_of(base["model"])
    for name in ("checkpoints/step_1", "checkpoints/step_2", "final"):
        model = AutoModelForCausalLM.from_pretrained(folder / name)
        tokenizer = AutoTokenizer.from_pretrained(folder / name)
        assert tokenizer.decode(tokenizer.encode("12+34=")) == "12+34="
        output = model.generate(**tokenizer(["12+34="], return_tensors="pt"), max_new_tokens=3)
        assert output.shape == (1, 9)
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id
        weights = weights_of(folder / name)
        assert all_finite(folder / name) and any(not torch.equal(weights[key], start[key]) for key in start)
    assert same_weights(folder / "checkpoints/step_2", folder / "final")


def test_track_offline(base, tmp_path):
    pytest.importorskip("wandb")
    values = variant(base, tmp_path, total_episodes=8, track=True)
    quiet = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    run(values, environment=quiet)
    assert list(folder_of(values).glob("wandb/offline-run-*/*.wandb"))


# ---- the same numbers for any cut of the batch -----------------------------------------------------------------------

EXACT = dict(precision="float64", total_episodes=24, save_every=3, eval_every=3, entropy_coef=0.01)


def assert_close(values: dict, reference: dict, step: int) -> None:
    """Metrics and the weights after `step` equal within 1e-9 relative."""
    ours, theirs = metrics_of(values), metrics_of(reference)
    assert len(ours) == len(theirs)
    for row, expected in zip(ours, theirs):
        assert row == pytest.approx(expected, rel=1e-9, abs=1e-11)
    name = f"checkpoints/step_{step}"
    weights, start = weights_of(folder_of(values) / name), weights_of(values["model"])
    for key, expected in weights_of(folder_of(reference) / name).items():
        assert expected.dtype == torch.float64
        torch.testing.assert_close(weights[key], expected, rtol=1e-9, atol=1e-11)
        assert not torch.allclose(expected, start[key].double(), atol=1e-4)  # else there is nothing to compare


def test_ranks_and_micro_batches_change_nothing(base, tmp_path):
    """torchrun with two ranks, and another --micro_batch_tokens: mini-batches, epochs, KL in the loss, entropy."""
    one = variant(base, tmp_path, run_name="one", **EXACT)
    run(one)
    cut = variant(base, tmp_path, run_name="cut", **EXACT)
    cut.update(micro_batch_tokens=1000, logits_chunk_tokens=1000, generation_batch_size=3)
    run(cut)
    assert_close(cut, one, 3)
    two = variant(base, tmp_path, run_name="two", **EXACT)
    with forked_python.python() as python:  # the ranks are none
        torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        words = [*torchrun, str(ROOT / "grpo.py"), *helpers.words(two)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, capture_output=True, text=True, timeout=180, env=environment)
    assert done.returncode == 0, done.stderr
    assert_close(two, one, 3)
    assert json.loads((folder_of(two) / "args.json").read_text())["ranks"] == 2
    for ours, theirs in zip(*(read_lines(folder_of(each) / "samples.jsonl") for each in (two, one)), strict=True):
        assert ours.pop("advantage") == pytest.approx(theirs.pop("advantage")) and ours == theirs


def test_more_ranks_than_responses_of_a_mini_batch(base, tmp_path):
    """Ranks with nothing to do take part with empty batches: mini-batches of two, one prompt evaluated.

    Four ranks, not three: DDP wants the loss times the number of ranks, and transformers' norms round gradients to
    float32, which only a power of two leaves as it is.
    """
    small = dict(EXACT, mini_batch_size=2, eval_prompts=1, eval_samples=1)
    one = variant(base, tmp_path, run_name="one", **small)
    run(one)
    four = variant(base, tmp_path, run_name="four", **small)
    run_ranks(four, 4, (0, 0, 0, 0))
    assert_close(four, one, 3)


# ---- resume ----------------------------------------------------------------------------------------------------------

# All that a step can depend on: schedule, Adam's moments, KL controller, a reference that moves, passes over the data.
MOVING = dict(
    kl_controller="adaptive", kl_horizon=20, kl_target=0.05, ref_refresh_every=2, ref_refresh_mix=0.5,
    lr_schedule="linear", warmup_ratio=0.3, seed=3,
)  # fmt: skip


@pytest.fixture(scope="module")
def straight(base) -> dict:
    """Four steps in one go."""
    values = {**base, **MOVING, "run_name": "straight"}
    run(values)
    return values


def resume(values: dict, straight: dict, after: int, **options) -> None:
    """Resume a stopped run, which has to go on after step `after` and end like the uninterrupted one, bit for bit."""
    done = run({**values, "resume": True}, **options)
    assert re.findall(r"goes on after step (\d+)", done.out) == [str(after)]
    assert metrics_of(values) == metrics_of(straight)
    ours, theirs = (read_lines(folder_of(each) / "samples.jsonl") for each in (values, straight))
    assert ours == theirs
    assert same_weights(folder_of(values) / "final", folder_of(straight) / "final")
    assert not list((folder_of(values) / "checkpoints").glob(".*"))


def test_the_straight_run_moves(straight):
    """What the comparisons below compare does change from step to step."""
    rows = metrics_of(straight)[1:]
    for name in (
        "objective/kl",
        "objective/kl_coef",
        "lr",
        "objective/scores",
        "loss/policy_avg",
        "policy/entropy_avg",
    ):
        assert len({row[name] for row in rows}) >= 3, name


def test_resume_after_a_stop(straight, tmp_path):
    values = {**straight, "output_dir": str(tmp_path)}
    shutil.copytree(folder_of(straight), folder_of(values))
    shutil.rmtree(folder_of(values) / "final")
    shutil.rmtree(folder_of(values) / "checkpoints" / "step_4")
    half_written = folder_of(values) / "checkpoints" / ".step_4.tmp"
    half_written.mkdir()
    (half_written / "config.json").write_text('{"half": ')
    resume(values, straight, after=2)


def test_resume_of_a_finished_run_changes_nothing(straight, tmp_path):
    values = {**straight, "output_dir": str(tmp_path)}
    shutil.copytree(folder_of(straight), folder_of(values))
    resume(values, straight, after=4)


def test_resume_with_fewer_episodes_ends(straight, tmp_path):
    """A run that is already past --total_episodes must not train on for ever."""
    values = {**straight, "output_dir": str(tmp_path)}
    shutil.copytree(folder_of(straight), folder_of(values))
    before = metrics_of(values)
    running = helpers.start({**values, "resume": True, "total_episodes": 16}).wait(20)
    assert running.code in (0, 2) and metrics_of(values) == before


@pytest.mark.parametrize("padding", [0, 8, 24])
def test_loaded_weights_are_aligned(base, tmp_path, padding):
    """However long the header of their file is: by the address of their operands some matrix products round."""
    shutil.copytree(base["model"], tmp_path / "model")
    metadata = {"format": "pt", "more": "x" * padding}
    safetensors.torch.save_file(weights_of(base["model"]), tmp_path / "model" / "model.safetensors", metadata)
    model = models.load_model("--model", str(tmp_path / "model"), torch.float32, torch.device("cpu"))
    assert {parameter.data_ptr() % 64 for parameter in model.parameters()} == {0}


# Where a run that saves steps 2 and 4 is killed, and the step that the next one goes on after: in the middle of step 3,
# in the saving of step 4, and after it. There are four updates a step; the first run has trained two steps by then.
KILLS = {
    "update": ("utils.Optimizer.step:10", 2),
    "rollout": ("grpo.generate:1", 2),
    "samples": ("run_log.RunLog.samples:1", 2),
    "log": ("run_log.RunLog.log:2", 2),
    "save, before writing": ("checkpoints.save_folder:1", 2),
    "save, before the second model": ("checkpoints.save_model:2", 2),
    "save, before the optimizer": ("torch.distributed.checkpoint.save:1", 2),
    "save, before the rename": ("checkpoints.save_folder>os.rename:2", 2),
    "log, after the save": ("run_log.RunLog.log:3", 4),
    "final": ("checkpoints.save_final:1", 4),
}


def goes_on_after(done) -> list[int]:
    """Return the step that a run said it goes on after, in a list; none for one that began."""
    return [int(step) for step in re.findall(r"goes on after step (\d+)", done.out)]


def test_a_run_that_is_killed_again_and_again(straight, tmp_path):
    """Each time where the resumed run got to. No row is lost or there twice; it ends like the straight run."""
    values, after = {**straight, "output_dir": str(tmp_path)}, []
    for phase, (where, step) in KILLS.items():
        done = run({**values, "resume": bool(after)}, code=-9, place=f"{where}:SIGKILL")
        assert goes_on_after(done) == after, phase
        for part in ("metrics", "samples"):
            ours, theirs = (read_lines(folder_of(each) / f"{part}.jsonl") for each in (values, straight))
            assert [row["step"] for row in ours] == [row["step"] for row in theirs][: len(ours)], (phase, part)
        assert not (folder_of(values) / "final").exists()
        after = [step]
    resume(values, straight, after=step)


@pytest.mark.parametrize("number", [3, 5])  # a save has two renames, torch's and that of the folder; or a third before
def test_a_kill_while_a_checkpoint_is_saved_again(straight, tmp_path, number):
    """SIGTERM in step 3 saves step 2, which --save_every has saved; SIGKILL, as a scheduler sends after its grace time,
    in the middle of that, before any further rename, must leave a complete checkpoint of step 2."""
    values = {**straight, "output_dir": str(tmp_path)}
    done = helpers.start(values, place=f"grpo.generate:7:SIGTERM;os.rename:{number}:SIGKILL").wait()
    assert done.code in (-9, 75)  # 75 if there was nothing to rename
    resume(values, straight, after=2)


def test_every_row_once_if_killed_after_a_resume(straight, tmp_path):
    """Interrupted in the evaluation of step 2, resumed, killed in step 3, resumed: no line of metrics.jsonl twice."""
    values = {**straight, "output_dir": str(tmp_path), "save_every": 4}
    run(values, code=75, place="grpo.generate:5:SIGTERM")
    run({**values, "resume": True}, code=-9, place="utils.Optimizer.step:2:SIGKILL")
    resume(values, straight, after=2)


def test_a_kill_while_a_resume_rewrites_the_logs(straight, tmp_path):
    """The lines of steps that the checkpoint does not know go, and those of earlier steps stay, at whatever instant."""
    values = {**straight, "output_dir": str(tmp_path)}
    run(values, code=-9, place="utils.Optimizer.step:13:SIGKILL")  # in step 4: step 3 is logged, step 2 saved
    for number in (2, 8):  # of the lines written: three of metrics.jsonl, sixteen of samples.jsonl
        run({**values, "resume": True}, code=-9, place=f"resume.open_folder>json.dumps:{number}:SIGKILL")
    resume(values, straight, after=2)


# ---- signals ---------------------------------------------------------------------------------------------------------

# Runs that are stopped several times, each time where the resumed one got to: the phase, where the signal comes, the
# phase that is shown, and the step that is saved. `generate` is called twice in an evaluation (before the first step,
# after the second and the fourth) and once in a step, `torch.searchsorted` once a token, `forward_batch` twice a step.
STOPS = {
    "SIGTERM": [
        ("first evaluation", "grpo.generate:1", "evaluate", 0),
        ("rollout", "torch.searchsorted:13", "rollout", 0),  # ten tokens in the first evaluation
        ("update", "utils.Optimizer.step:2", "training", 1),
        ("evaluation", "grpo.generate:3", "evaluate", 2),
        ("scoring", "rewards.Rewards.score:3", "rollout", 2),
        ("log-probs", "grpo.forward_batch:1", "logprobs", 3),
    ],
    "SIGTERM, saving": [
        ("save", "checkpoints.save_checkpoint:1", "save", 2),
        ("last update", "utils.Optimizer.step:8", "training", 4),
    ],
    "SIGINT": [
        ("rollout", "torch.searchsorted:13", "rollout", 0),
        ("update", "utils.Optimizer.step:2", "training", 1),
        ("evaluation", "grpo.generate:3", "evaluate", 2),
    ],
}


@pytest.mark.parametrize("name", STOPS)
def test_signals(straight, tmp_path, name):
    """Exit code 75, a complete checkpoint of the newest step, and nothing of it to be seen in the run that went on."""
    number = name.split(",")[0]
    values, after = {**straight, "output_dir": str(tmp_path), "save_every": 2 if "saving" in name else 0}, []
    for phase, where, shown, step in STOPS[name]:
        done = run({**values, "resume": bool(after)}, code=75, place=f"{where}:{number}")
        assert goes_on_after(done) == after[-1:], phase
        phases = re.findall(r"(evaluate|rollout|logprobs|training|save)(?=:)", done.err)
        phases = [each for each, following in zip(phases, [*phases[1:], None]) if each != following]
        if phase not in ("log-probs", "last update", "save"):  # these finish the step
            assert phases[-2] == shown, (phase, phases)
        assert shown in phases and "Traceback" not in done.err, phase
        after.append(step)
        assert steps_of(values) == [f"step_{each}" for each in sorted(set(after))[-2:]], phase
        assert f"step {step} is saved" in done.out, phase
        assert f"{number}: the run ends as soon as it can save a checkpoint" in done.err, phase
        assert not (folder_of(values) / "final").exists(), phase
    resume(values, straight, after=step)


def test_signal_from_a_reward_function(base, tmp_path):
    """The same from outside: the reward process sends SIGTERM to its parent in the middle of scoring, when it is called
    with more than the two responses of the trial call."""
    (tmp_path / "reward.py").write_text(
        "import os, signal, time\n"
        "def score(prompts, responses, **columns):\n"
        f"    if len(responses) > 2 and not os.path.exists({str(tmp_path / 'sent')!r}):\n"
        f"        open({str(tmp_path / 'sent')!r}, 'w').close()\n"
        "        os.kill(os.getppid(), signal.SIGTERM)\n"
        "        time.sleep(0.5)\n"
        "    return [len(response) for response in responses]\n"
    )
    values = variant(base, tmp_path, reward=f"{tmp_path / 'reward.py'}:score", eval_every=0, save_every=0)
    run(values, code=75)
    assert steps_of(values) == ["step_0"]
    run({**values, "resume": True})
    whole = {**values, "run_name": "whole"}
    run(whole)
    assert metrics_of(values) == metrics_of(whole)


def test_a_second_sigint_ends_at_once(base, tmp_path):
    values = variant(base, tmp_path)
    done = helpers.start(values, place="utils.Optimizer.step:1:SIGINT;utils.Optimizer.step:2:SIGINT").wait()
    assert done.code == 130 and "Traceback" not in done.err


def test_signals_to_one_of_two_ranks(base, two_ranks, tmp_path):
    values, after = {**two_ranks, "output_dir": str(tmp_path), "save_every": 0}, []
    for (_, where, _, step), rank in zip(STOPS["SIGINT"], (1, 1, 0)):
        ranks = run_ranks({**values, "resume": bool(after)}, 2, (75, 75), {rank: f"{where}:SIGTERM"})
        assert goes_on_after(ranks[0]) == after[-1:]
        after.append(step)
        assert steps_of(values) == [f"step_{each}" for each in after[-2:]]
    run_ranks({**values, "resume": True}, 2, (0, 0))
    assert metrics_of(values) == metrics_of(two_ranks)
    assert same_weights(folder_of(values) / "final", folder_of(two_ranks) / "final")


@pytest.fixture(scope="module")
def two_ranks(base) -> dict:
    values = {**base, **MOVING, "run_name": "two_ranks"}
    run_ranks(values, 2, (0, 0))
    return values


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def test_keep_checkpoints_keeps_the_newest(base, tmp_path):
    """By number, not by name: step_11 is newer than step_9."""
    values = variant(base, tmp_path, total_episodes=22, save_every=1, keep_checkpoints=2, eval_every=0, num_epochs=1)
    values |= {"rollout_batch_size": 1, "group_size": 2, "mini_batch_size": 2}
    run_here(values)
    assert steps_of(values) == ["step_10", "step_11"]
    assert checkpoints.checkpoint_folders(str(folder_of(values)))[-1].endswith("step_11")


def test_keep_all_checkpoints(base, tmp_path):
    values = variant(base, tmp_path, save_every=1, keep_checkpoints=0, eval_every=0)
    run_here(values)
    assert steps_of(values) == ["step_1", "step_2", "step_3", "step_4"]


# ---- rewards that fail -----------------------------------------------------------------------------------------------

FAILING = '''
import os, time

def some(prompts, responses, bad=None):
    return [bad if i % 4 == 0 else float(len(r) % 3) for i, r in enumerate(responses)]

def some_none(prompts, responses, **columns): return some(prompts, responses, None)
def some_nan(prompts, responses, **columns): return some(prompts, responses, float("nan"))
def some_infinite(prompts, responses, **columns): return some(prompts, responses, float("inf"))
def all_none(prompts, responses, **columns): return [None] * len(responses)
def all_nan(prompts, responses, **columns): return [float("nan")] * len(responses)
def too_few(prompts, responses, **columns): return [1.0] * (len(responses) - 1)
def words(prompts, responses, **columns): return ["good"] * len(responses)
def number(prompts, responses, **columns): return 1.0
def raises(prompts, responses, **columns): raise RuntimeError("the judge is away")
def hangs(prompts, responses, **columns): time.sleep(600)
def ends(prompts, responses, **columns): os._exit(7)
def good(prompts, responses, **columns): return [float(len(r) % 3) for r in responses]

calls = 0
def third_call(prompts, responses, **columns):
    """Fails in the third step, as long as the file next to this one says so."""
    global calls
    calls += 1
    if calls >= 3 and os.path.exists(__file__ + ".broken"):
        raise RuntimeError("the judge is away")
    return good(prompts, responses)

def whenever(prompts, responses, **columns):
    if os.path.exists(__file__ + ".broken") and len(responses) > 2:  # not in the trial call
        raise RuntimeError("the judge is away")
    return [float(len(r) % 2) for r in responses]

def printing(prompts, responses, **columns):
    print('{"scores": [9, 9, 9, 9, 9, 9, 9, 9]}')
    return good(prompts, responses)
'''


@pytest.fixture(scope="module")
def failing(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("rewards") / "failing.py"
    path.write_text(FAILING)
    return str(path)


@pytest.mark.parametrize("name", ["some_none", "some_nan", "some_infinite"])
def test_missing_scores_are_counted_and_left_out(base, tmp_path, failing, name):
    values = variant(base, tmp_path, reward=(f"{failing}:good", f"{failing}:{name}"), total_episodes=8)
    run_here(values)
    row = metrics_of(values)[1]
    assert row["val/missing_scores"] == 2  # responses 0 and 4 of 8
    samples = read_lines(folder_of(values) / "samples.jsonl")  # null, and not NaN, which is no JSON
    second = f"{failing}:{name}"
    assert [sample[second] is None for sample in samples] == [i % 4 == 0 for i in range(8)]
    assert all(sample["advantage"] == 0 for sample in samples if sample[second] is None)
    totals = [sample[f"{failing}:good"] + sample[second] for sample in samples if sample[second] is not None]
    assert row["objective/scores"] == pytest.approx(sum(totals) / 6)
    assert finite_or_null([row])


def test_rows_that_name_their_sources(base, tmp_path):
    """Each response is scored and trained on by the source of its row alone; the other one's score is null."""
    sources = ("exact", base["reward"])
    rows = [{**row, "verifier": sources[i % 2]} for i, row in enumerate(helpers.ROWS)]
    path = helpers.write_rows(tmp_path / "rows.jsonl", rows)
    values = variant(base, tmp_path, dataset=path, eval_dataset="", reward=sources, total_episodes=16, eval_every=0)
    run_here(values)
    named = {row["prompt"]: row["verifier"] for row in rows}
    samples = read_lines(folder_of(values) / "samples.jsonl")
    assert {named[sample["prompt"]] for sample in samples} == set(sources)
    for sample in samples:
        assert [sample[name] is None for name in sources] == [named[sample["prompt"]] != name for name in sources]
    for row in metrics_of(values):
        own = [max(sample[name] or 0 for name in sources) for sample in samples if sample["step"] == row["step"]]
        assert row["objective/scores"] == pytest.approx(sum(own) / 8, rel=1e-5) and row["val/missing_scores"] == 0


def test_missing_scores_of_an_evaluation_are_counted(base, tmp_path, failing):
    values = variant(base, tmp_path, reward=f"{failing}:some_none", total_episodes=8, eval_every=1)
    done = run(values)
    rows = metrics_of(values)
    assert [row["eval/missing_scores"] for row in rows] == [2, 2]  # of 3 prompts x 2 samples
    # 0 and 4 of the 6 have no score; of 4, and of the one prompt with two scores, there are means.
    assert all(row["eval/accuracy"] in (0, 0.25, 0.5, 0.75, 1) and row["eval/pass@2"] in (0, 1) for row in rows)
    assert not re.search(r"\bnan\b", done.out)


def test_an_evaluation_without_scores(base, tmp_path, failing):
    """Is null and not 0, with a warning, and is repeated where the run goes on once the reward works again."""
    values = variant(base, tmp_path, reward=f"{failing}:whenever", total_episodes=8, eval_every=1)
    broken = failing + ".broken"
    open(broken, "w").close()
    try:
        done = run(values, code=2)
    finally:
        os.remove(broken)
    (row,) = metrics_of(values)
    measured = ["eval/greedy_accuracy", "eval/accuracy", "eval/pass@2", f"eval/reward/{values['reward']}"]
    assert [row[name] for name in measured] == [None] * 4 and row["eval/missing_scores"] == 6
    warnings = [line for line in done.err.replace("\r", "\n").split("\n") if line.startswith("warning:")]
    assert len(warnings) == 2 and all(values["reward"] in line and "no score" in line for line in warnings)
    run({**values, "resume": True})
    whole = {**values, "run_name": "whole"}
    run(whole)
    assert metrics_of(values) == metrics_of(whole) and metrics_of(whole)[0]["eval/accuracy"] is not None


@pytest.mark.parametrize("name", ["all_none", "all_nan"])
def test_a_step_without_scores_ends_the_run(base, tmp_path, capfd, failing, name):
    source = f"{failing}:{name}"
    values = variant(base, tmp_path, reward=(f"{failing}:good", source), eval_every=0, reward_timeout=2.0)
    with pytest.raises(SystemExit) as end:
        run_here(values)
    assert end.value.code == 2
    errors = [line for line in capfd.readouterr().err.replace("\r", "\n").split("\n") if line.startswith("error:")]
    assert len(errors) == 1 and source in errors[0] and "--reward" in errors[0], errors
    assert "(None)" not in errors[0]
    assert steps_of(values) == ["step_0"]


def test_a_function_that_fails_at_once_leaves_no_folder(base, tmp_path, capfd, failing):
    """What else a trial call finds is in tests/test_rewards.py."""
    with pytest.raises(SystemExit) as end:
        run_here(variant(base, tmp_path, reward=f"{failing}:too_few"))
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error:")]
    assert end.value.code == 2 and len(errors) == 1 and "returned 1 scores for 2 responses" in errors[0]
    assert not folder_of(variant(base, tmp_path)).exists()


def test_go_on_once_the_reward_works_again(base, tmp_path, failing):
    values = variant(base, tmp_path, reward=f"{failing}:third_call", eval_every=0, save_every=0)
    broken = failing + ".broken"
    open(broken, "w").close()
    done = run(values, code=2)
    assert len(done.errors) == 1 and "step 3" in done.errors[0]
    assert steps_of(values) == ["step_2"]
    os.remove(broken)
    run({**values, "resume": True})
    whole = {**values, "run_name": "whole"}
    run(whole)
    assert metrics_of(values) == metrics_of(whole)


def test_a_failing_reward_on_two_ranks(base, tmp_path, failing):
    values = variant(base, tmp_path, reward=f"{failing}:raises", eval_every=0)
    ranks = run_ranks(values, 2, (2, 2))
    assert [len(rank.errors) for rank in ranks] == [1, 0]


def row(answer: str, **columns) -> dict:
    return {"prompt": "p", "query": [1], "answer": answer, "columns": columns}


@pytest.fixture
def rewards():
    made = []

    def make(*names, timeout=30.0):
        made.append(Rewards(names, timeout, make_tokenizer()))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_math_from_a_thread(rewards):
    """math-verify's own time limits need signals, which fail outside of the main thread (verl issue 5635)."""
    found = []
    texts = ["so $\\boxed{\\frac{1}{2}}$", "\\boxed{0.5}", "The answer is 0.25.", "no idea", ""]
    work = lambda: found.append(rewards("math").score([row("1/2")] * 5, texts, [[]] * 5)["math"])
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [[1.0, 1.0, 0.0, 0.0, 0.0]]


def test_a_process_that_died_is_replaced(rewards, failing):
    source = rewards(f"{failing}:ends", f"{failing}:hangs", f"{failing}:good", timeout=1.0)
    for _ in range(2):
        scores = source.score([row("")] * 2, ["a", "bb"], [[]] * 2)
        assert [[None if math.isnan(x) else x for x in part] for part in scores.values()] == [
            [None] * 2,
            [None] * 2,
            [1, 2],
        ]


def test_what_a_reward_function_prints_is_not_its_answer(rewards, failing, capfd):
    name = f"{failing}:printing"
    assert rewards(name).score([row("")] * 2, ["a", "bb"], [[]] * 2) == {name: [1.0, 2.0]}
    assert '{"scores": [9' in capfd.readouterr().err


def test_a_slow_import_is_not_within_the_time_limit(rewards, tmp_path):
    """Neither at the start nor after a call was killed."""
    (tmp_path / "slow.py").write_text(
        "import time\ntime.sleep(1.5)\n"
        "def score(prompts, responses, **columns):\n"
        "    if responses[0] == 'hang':\n        time.sleep(600)\n"
        "    return [1.0] * len(responses)\n"
    )
    name = f"{tmp_path / 'slow.py'}:score"
    slow = rewards(name, timeout=0.7)
    assert [slow.score([row("")], [text], [[]])[name][0] for text in ("a", "hang", "b")] == pytest.approx(
        [1.0, math.nan, 1.0], nan_ok=True
    )


def test_columns_reach_the_reward_function(rewards, tmp_path):
    """All of them, those of some rows only too, and of types that JSON does not know."""
    import datetime

    (tmp_path / "look.py").write_text(
        "def score(prompts, responses, answer, level, day, **rest):\n"
        "    assert not rest and prompts == ['p', 'p'] and day[0].startswith('2024-02-29')\n"
        "    assert level[1] is None\n"
        "    return [level[0] + float(answer[0]), float(answer[1])]\n"
    )
    name = f"{tmp_path / 'look.py'}:score"
    rows = [row("1", level=2, day=datetime.date(2024, 2, 29)), row("5", day=None)]
    assert rewards(name).score(rows, ["a", "b"], [[]] * 2) == {name: [3.0, 5.0]}


# ---- gradients that are not finite -----------------------------------------------------------------------------------

HUGE = """
calls = 0
def always(prompts, responses, **columns):  # times WEIGHT, their sum overflows float32
    return [3e17 / (1 + i % 4) for i in range(len(responses))]

def first(prompts, responses, **columns):
    global calls
    calls += 1
    return always(prompts, responses) if calls == 1 else [len(r) % 3 * 1e-21 for r in responses]
"""
WEIGHT = 1e21


def test_a_gradient_that_is_not_finite_is_skipped_counted_and_said(base, tmp_path, capsys):
    (tmp_path / "huge.py").write_text(HUGE)
    values = variant(
        base, tmp_path, reward=f"{tmp_path / 'huge.py'}:first", eval_every=0, total_episodes=16, save_every=1,
        kl_controller="adaptive", reward_weights=(WEIGHT,),
    )  # fmt: skip
    run_here(values)
    first, second = metrics_of(values)
    assert first["val/skipped_updates"] == 4 and second["val/skipped_updates"] == 0
    assert capsys.readouterr().err.count("its loss or gradient is not finite, so it changes no weight") == 4
    assert finite_or_null([first, second]) and second["loss/grad_norm"] > 0 and first["loss/grad_norm"] is None
    assert second["objective/kl_coef"] is not None
    assert same_weights(folder_of(values) / "checkpoints" / "step_1", values["model"])
    assert all_finite(folder_of(values) / "final")
    assert not same_weights(folder_of(values) / "final", values["model"])


def test_too_many_skipped_updates_end_the_run(base, tmp_path, capsys):
    (tmp_path / "huge.py").write_text(HUGE)
    values = variant(
        base, tmp_path, reward=f"{tmp_path / 'huge.py'}:always", eval_every=0, save_every=1, max_skipped_updates=5,
        reward_weights=(WEIGHT,),
    )  # fmt: skip
    with pytest.raises(SystemExit) as end:
        run_here(values)  # four updates a step: ends in the second update of the second step
    errors = [line for line in capsys.readouterr().err.replace("\r", "\n").split("\n") if line.startswith("error:")]
    assert (
        end.value.code == 2
        and len(errors) == 1
        and "--max_skipped_updates 5" in errors[0]
        and " 6 updates" in errors[0]
    )
    assert steps_of(values) == ["step_1"] and same_weights(
        folder_of(values) / "checkpoints" / "step_1", values["model"]
    )


@pytest.mark.parametrize("learning_rate", ["1e15", "1e37"])
def test_a_huge_learning_rate(base, tmp_path, learning_rate):
    """Weights that no number comes out of end the run with a line, not in a traceback, and no checkpoint has a NaN."""
    values = variant(base, tmp_path, learning_rate=learning_rate, eval_every=0, save_every=1, max_skipped_updates=2)
    done = helpers.start(values).wait()
    assert "Traceback" not in done.err, done.err[-2000:]
    assert done.code == 0 or done.code == 2 and len(done.errors) == 1
    for checkpoint in (folder_of(values) / "checkpoints").glob("step_*"):
        assert all_finite(checkpoint), checkpoint


# ---- every option runs a step ----------------------------------------------------------------------------------------

ONCE = dict(total_episodes=8, eval_every=0, save_every=0)
OPTIONS = [
    *(dict(loss=loss) for loss in grpo.VARIANTS),
    *(dict(loss_aggregation=how) for how in ("token", "step_token", "sequence", "sequence_sum", "constant")),
    *(
        dict(kl_in=place, kl_estimator=estimator)
        for place in ("reward", "loss")
        for estimator in ("k1", "abs", "k2", "k3", "full")
        if (place, estimator) not in (("reward", "full"), ("loss", "k3"))  # elsewhere in this file
    ),
    *(dict(advantage_scale=scale) for scale in ("group", "batch", "none")),
    dict(kl_coef=0.0),
    dict(kl_coef=0.0, kl_in="reward"),
    dict(dual_clip=3.0),
    dict(dual_clip=3.0, loss="gspo", gradient_checkpointing=True),
    dict(precision="bf16"),
    dict(precision="bf16", gradient_checkpointing=True, kl_estimator="full", entropy_coef=0.01),
    dict(entropy_coef=0.01, num_epochs=1, mini_batch_size=8),
    dict(ref_refresh_every=1, ref_refresh_mix=0.3),
    dict(kl_controller="adaptive"),
    dict(top_p=0.9, top_k=5, repetition_penalty=1.1, min_response_length=3, temperature=0.7),
    dict(stop_token="+", non_stop_penalty=True, penalty_reward_value=-1.0),
    dict(lr_schedule="cosine", min_learning_rate=1e-4, weight_decay=0.1, warmup_ratio=0.0),
    dict(
        system_prompt="Add:", dataset="arithmetic", reward=("gsm8k", "format", "exact"), reward_weights=(1.0, 0.5, 2.0)
    ),
]


def runs_a_step(values: dict) -> dict:
    run_here(values)
    (row,) = metrics_of(values)
    assert finite_or_null([row]) and row["val/skipped_updates"] == 0
    empty = [name for name, value in row.items() if value is None]
    assert set(empty) <= ({"objective/kl", "objective/non_score_reward"} if values["kl_coef"] == 0 else set()), empty
    assert all_finite(folder_of(values) / "final")
    if not {"gsm8k", "+"} & {*values["reward"], values.get("stop_token")}:  # else all scores are equal
        assert row["loss/grad_norm"] > 0 and not same_weights(folder_of(values) / "final", values["model"])
    return row


@pytest.mark.parametrize("changes", OPTIONS, ids=lambda changes: "-".join(f"{k}={v}" for k, v in changes.items()))
def test_options(base, tmp_path, changes):
    runs_a_step(variant(base, tmp_path, **{**ONCE, **changes}))


@pytest.mark.parametrize("script", ["grpo", "rloo", "ppo"])
def test_the_reference_is_refreshed_after_its_steps(base, tmp_path, monkeypatch, script):
    """A policy that was just taken over has no KL to itself. The controller gets that of a token, of which all
    responses have ten."""
    module, seen = __import__(script), []
    adapt = module.adapt_kl_coef
    monkeypatch.setattr(module, "adapt_kl_coef", lambda coef, kl, *rest: seen.append(kl) or adapt(coef, kl, *rest))
    values = variant(
        base, tmp_path, total_episodes=24, num_epochs=1, mini_batch_size=8, eval_every=0, save_every=0,
        ref_refresh_every=2, kl_controller="adaptive", kl_estimator="k3", min_response_length=10,
        max_response_length=10, warmup_ratio=0.0,
    )  # fmt: skip
    run_here(values, script)
    first, second, third = (row["objective/kl"] for row in metrics_of(values))
    assert second > 1e-4 and max(abs(first), abs(third)) < 1e-2 * second
    assert seen == pytest.approx([first / 10, second / 10, third / 10], rel=1e-5, abs=1e-9)


def test_gradient_checkpointing_changes_nothing(base, tmp_path):
    for name, changes in (("plain", {}), ("recomputed", {"gradient_checkpointing": True})):
        run_here(variant(base, tmp_path, **{**ONCE, "run_name": name, **changes}))
    torch.testing.assert_close(
        weights_of(tmp_path / "runs/plain/final"), weights_of(tmp_path / "runs/recomputed/final")
    )


@pytest.mark.parametrize("kind", ["llama", "gemma", "gemma2", "gpt_neox", "qwen3", "untied qwen2"])
def test_architectures(base, tmp_path, kind):
    """Models of other families, with entropy and exact KL; rollout and training agree on their logits."""
    extra = {"gemma2": dict(final_logit_softcapping=5.0, attn_logit_softcapping=1.0)}.get(kind, {})
    if kind == "untied qwen2":
        extra = dict(tie_word_embeddings=False)
    model = helpers.tiny_model(tmp_path / "model", kind.removeprefix("untied "), **extra)
    changes = dict(model=model, kl_estimator="full", entropy_coef=0.01, num_epochs=1, mini_batch_size=8)
    row = runs_a_step(variant(base, tmp_path, **{**ONCE, **changes}))
    assert row["rollout/logprob_diff_max"] < 1e-4


def test_a_head_that_is_not_known_ends_the_run(base, tmp_path, capsys):
    """Cohere multiplies its logits by a constant, which `Policy.logits` does not know."""
    model = helpers.tiny_model(tmp_path / "model", "cohere", logit_scale=0.25)
    with pytest.raises(SystemExit) as end:
        run_here(variant(base, tmp_path, model=model, **ONCE))
    assert end.value.code == 2 and "error: --model" in capsys.readouterr().err


@pytest.mark.parametrize("estimator", ["full", "k3"])
def test_mfu_counts_what_each_phase_computed(base, tmp_path, monkeypatch, estimator):
    """By hand: 2 FLOPs a parameter and token forward, 6 with backward; a GPU of 1000 FLOP/s is made up."""
    monkeypatch.setattr(utils, "peak_flops", lambda device: 1e3)
    seen = []
    collected = grpo.collect
    monkeypatch.setattr(grpo, "collect", lambda *a, **k: seen.append(collected(*a, **k)) or seen[-1])
    values = variant(base, tmp_path, total_episodes=8, kl_estimator=estimator, kl_in="loss")
    helpers.run_here(values)
    (row,) = [row for row in read_lines(folder_of(values) / "metrics.jsonl") if row["step"] == 1]
    size = sum(x.numel() for x in weights_of(base["model"]).values())
    tokens = sum(seen[0].batch.lengths)
    epochs = base["num_epochs"]
    in_training = 2 if estimator == "full" else 0  # the exact KL passes the reference in each update
    flops = {"rollout": 2, "logprobs": 2 + 2, "training": epochs * (6 + in_training)}
    for name, each in flops.items():
        assert row[f"perf/mfu_{name}"] == pytest.approx(each * size * tokens / row[f"time/{name}"] / 1e3, rel=1e-6)
    assert row["perf/mfu"] == pytest.approx(sum(flops.values()) * size * tokens / row["time/step"] / 1e3, rel=1e-6)


def test_what_an_engine_frees_while_it_sleeps_is_no_peak(monkeypatch):
    """torch still counts it as allocated; once the engine is awake it counts."""
    engine = types.SimpleNamespace(asleep=True, freed_gb=30.0)
    clock = utils.Clock(torch.device("cpu"), 0.0, engine)
    monkeypatch.setattr(utils, "peak_memory_gb", lambda device: 50.0)
    clock.start()
    clock.begin("training")
    clock.begin("sync")
    assert clock.peak_gb == 20.0
    engine.asleep = False
    clock.begin("")
    assert clock.peak_gb == 50.0


def test_more_processes_than_gpus(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
    with pytest.raises(SystemExit) as end:
        utils.setup_processes()
    assert end.value.code == 2


def test_an_engine_of_several_ranks_is_not_asynchronous(capsys):
    with pytest.raises(SystemExit):
        flags.check_rl_args(grpo.Args(rollout_backend="vllm", vllm_tensor_parallel=2, async_steps=1))
    assert capsys.readouterr().err.startswith("error: --async_steps 1: ")
