"""Whole runs of grpo.py, in processes of their own: what they leave, resuming, signals, failing
rewards.
"""

import dataclasses
import json
import math
import re
import subprocess
import sys

import helpers
import pytest
import torch
from helpers import (
    MOVING,
    all_finite,
    folder_of,
    metrics_of,
    read_lines,
    recorded,
    run,
    run_here,
    steps_of,
    variant,
    weights_of,
)
from test_equations import close, gdpo_by_hand

import grpo
import utils


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict:
    return helpers.workspace(tmp_path_factory.mktemp("run"))


# ---- what a run leaves ---------------------------------------------------------------------------

METRICS = """
    episode epoch lr objective/kl objective/scores objective/rlhf_reward objective/non_score_reward
    objective/entropy objective/loss objective/verifiable_correct_rate loss/policy_avg policy/approxkl_avg
    policy/clipfrac_avg policy/entropy_avg time/from_scratch time/training time/rollout val/sequence_lengths
    val/num_stop_token_ids val/zero_std_fraction rollout/logprob_diff_mean perf/tokens_per_second perf/mfu
    perf/peak_memory_gb perf/decode_ms_per_token perf/decode_ms_bound
""".split()


def test_main_is_a_function(tmp_path):
    """As in a notebook: it returns, or raises what a command exits for, and can be called again.
    Ctrl-C after it is Python's again. The system prompt goes by the reward. With default flags it
    imports as many files as README says, and nothing of extras/.
    """
    values = {
        "model": "assets/tiny",
        "dataset": "arithmetic",
        "reward": ("gsm8k",),
        "output_dir": str(tmp_path),
        "run_name": "a",
        "rollout_batch_size": 2,
        "total_episodes": 32,
        "max_response_length": 8,
        "eval_prompts": 2,
    }
    code = f"""
import signal, sys, grpo, utils
args = grpo.Args(**{values!r})
grpo.main(args)
print("system prompt:", args.system_prompt == args.SYSTEM_PROMPTS["gsm8k"])
for args.run_name, args.stop_at in (("a", None), ("b", 1.0)):
    try:
        grpo.main(args)
    except utils.UserError as error:
        print("raised:", error)
args.stop_at = None
grpo.main(args)
for _ in range(2):
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        print("interrupted here")
print("extras:", [name for name in sys.modules if name.startswith("extras")])
ours = [module for name, module in sys.modules.items() if name.split(".")[0] in ("grpo", "utils", "plumbing")]
print("files:", sum(module.__file__ is not None for module in ours))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=helpers.ROOT, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0 and "extras: []" in done.stdout, done.stderr[-2000:]
    assert f"raised: --run_name a: {tmp_path}/a exists" in done.stdout
    assert "raised: --stop_at requires a --keep_best" in done.stdout
    assert "system prompt: True" in done.stdout
    assert done.stdout.count("interrupted here") == 2 and "SIGINT" not in done.stderr
    said = re.search(r"reads (\d+) Python files", (helpers.ROOT / "README.md").read_text())
    assert f"files: {said[1]}\n" in done.stdout
    first, second = (read_lines(tmp_path / name / "metrics.jsonl") for name in "ab")
    scores = [row["objective/scores"] for row in first[1:]]
    assert len(scores) == 2 and scores == [row["objective/scores"] for row in second[1:]]


def test_a_run_stops_at_its_goal(base, tmp_path, capsys):
    """And does not go on when it is resumed."""
    goal = {"keep_best": "eval/sequence_lengths", "stop_at": 1.0, "resume": True}
    values = variant(base, tmp_path, **goal, shuffle=False)
    for _ in range(2):
        run_here(values)
        assert metrics_of(values)[-1]["step"] == values["eval_every"]
        assert "--stop_at 1.0: reached after step" in capsys.readouterr().out
    assert (folder_of(values) / "final").is_dir()
    prompts = [row["prompt"] for row in read_lines(folder_of(values) / "samples.jsonl")]
    assert list(dict.fromkeys(prompts))[:2] == [row["prompt"] for row in helpers.ROWS[:2]]


def test_what_a_run_leaves(base, tmp_path):
    """The command as a user types it, from another folder, and every file that the design
    promises.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    values = variant(
        base,
        tmp_path,
        total_episodes=16,
        save_every=1,
        keep_best="eval/accuracy",
        output_dir="here",
    )
    words = [sys.executable, str(helpers.ROOT / "grpo.py"), *helpers.words(values)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert not re.search(r"\b(nan|inf)\b", done.stdout + done.stderr, re.IGNORECASE)
    folder = tmp_path / "here" / "run"
    files = ".lock args.json checkpoints curves.png final git.diff grpo.py"
    logs = "held_out.jsonl metrics.jsonl samples.jsonl tokens.jsonl"
    assert sorted(path.name for path in folder.iterdir()) == [*files.split(), *logs.split()]
    assert (folder / "grpo.py").read_text() == (helpers.ROOT / "grpo.py").read_text()

    assert done.stdout.startswith(f"Loopwise {utils.VERSION}: loading {values['model']}\n")
    facts = json.loads((folder / "args.json").read_text())
    assert facts["version"] == utils.VERSION and facts["machine"]
    assert facts["args"].keys() == {field.name for field in dataclasses.fields(grpo.Args)}
    assert all(facts["args"][name] in (value, [value]) for name, value in values.items())
    assert (
        facts["versions"]["torch"] == torch.__version__
        and {"python", "transformers"} <= facts["versions"].keys()
    )
    git = lambda *words: (
        subprocess.run(
            ["git", "-C", str(helpers.ROOT), *words], capture_output=True, text=True
        ).stdout
    )
    assert (facts["git_commit"] or "").rstrip("+") == git("rev-parse", "HEAD").strip()
    assert (folder / "git.diff").read_text() == git("diff", "HEAD")

    rows = read_lines(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2] and [row["episode"] for row in rows] == [
        0,
        8,
        16,
    ]
    assert all(set(METRICS) <= row.keys() for row in rows[1:])
    for name, steps in {
        "eval/accuracy": [0, 2],
        "time/evaluation": [0, 2],
        "time/save": [1, 2],
    }.items():
        assert [row["step"] for row in rows if name in row] == steps
    # each token counts once
    assert all(row["rollout/correction_mean"] == pytest.approx(1) for row in rows[1:])
    assert None not in rows[2].values()
    assert 0 < rows[2]["perf/decode_ms_bound"] < rows[2]["perf/decode_ms_per_token"]

    samples = read_lines(folder / "samples.jsonl")
    assert [row["step"] for row in samples] == [1] * 8 + [2] * 8
    answers = {row["prompt"]: row["answer"] for row in helpers.ROWS}
    for row in samples:
        assert row["answer"] == answers[row["prompt"]] and row["stop_reason"] in ("stop", "length")
        assert math.isfinite(row["advantage"])
        assert row["reward.py:score"] == pytest.approx(
            sum(map(ord, row["prompt"] + row["response"])) % 7 / 7
        )
    assert rows[2]["objective/scores"] == pytest.approx(
        sum(row["reward.py:score"] for row in samples[8:]) / 8
    )
    tokens = read_lines(folder / "tokens.jsonl")
    assert [(row["step"], row["sample"]) for row in tokens] == [
        (i // 8 + 1, i % 8) for i in range(16)
    ]
    for row, sample in zip(tokens, samples):
        # Bytes that are no character have no text at the end of a response.
        texts = re.sub("<(eos|unk|pad)>|\ufffd", "", "".join(row["texts"]))
        assert texts == sample["response"].replace("\ufffd", "")
        assert row["advantages"] == pytest.approx(
            [sample["advantage"]] * sample["length"], rel=1e-3
        )
        assert row["trains"] == [1] * sample["length"] and row["weights"] == row["trains"]
        assert row["start_logprobs"] == pytest.approx(row["rollout_logprobs"], rel=1e-2, abs=1e-3)
        assert None not in row["ref_logprobs"] + row["entropies"] and set(row["clipped"]) <= {0, 1}

    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "best",
        "step_1",
        "step_2",
    ]
    assert not (folder / "checkpoints/best/optimizer").exists()
    assert helpers.same_weights(folder / "checkpoints/best", folder / "final")
    start = weights_of(base["model"])
    for name in ("checkpoints/step_1", "checkpoints/step_2", "final"):
        model = AutoModelForCausalLM.from_pretrained(folder / name)
        tokenizer = AutoTokenizer.from_pretrained(folder / name)
        assert tokenizer.decode(tokenizer.encode("12+34=")) == "12+34="
        output = model.generate(**tokenizer(["12+34="], return_tensors="pt"), max_new_tokens=3)
        assert output.shape == (1, 9)
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id
        weights = weights_of(folder / name)
        assert all_finite(folder / name) and any(
            not torch.equal(weights[key], start[key]) for key in start
        )
    assert helpers.same_weights(folder / "checkpoints/step_2", folder / "final")


def test_a_run_from_what_another_one_saved(base, tmp_path):
    """Its default name has that of the other run. What was saved has the system prompt: plain
    transformers renders what the run has trained on, and the run from there reads the same.
    """
    from transformers import AutoTokenizer

    model = helpers.tiny_model(tmp_path / "chat", chat=True)
    values = variant(
        base, tmp_path, model=model, system_prompt='Add "x".', total_episodes=8, save_every=1
    )
    run_here(values)
    prompts = {row["prompt"] for row in read_lines(folder_of(values) / "samples.jsonl")}
    seen = set()
    for name in ("final", "checkpoints/step_1"):
        saved = folder_of(values) / name
        tokenizer = AutoTokenizer.from_pretrained(saved)
        for row in helpers.ROWS:
            asked = [{"role": "user", "content": row["prompt"]}]
            seen.add(
                tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
            )
        again = {**values, "model": str(saved), "run_name": "", "output_dir": str(tmp_path / name)}
        run_here(again)
        (folder,) = (tmp_path / name).iterdir()
        assert folder.name == "grpo__run__train.jsonl__1"
        assert prompts == {row["prompt"] for row in read_lines(folder / "samples.jsonl")}
    assert prompts <= seen and len(seen) == len(helpers.ROWS) and 'Add "x".' in min(prompts)


# ---- resume --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def straight(base) -> dict:
    """Four steps in one go."""
    values = {**base, **MOVING, "pass_rates": (0.3, 0.5), "run_name": "straight"}
    run(values)
    names = "objective/kl objective/kl_coef lr objective/scores loss/policy_avg policy/entropy_avg".split()
    # else equality says little
    assert all(len({row[name] for row in metrics_of(values)[1:]}) >= 3 for name in names)
    return values


def goes_on_after(done) -> list[int]:
    """Return the step that a run said it goes on after, in a list; none for one that began."""
    return [int(step) for step in re.findall(r"goes on after step (\d+)", done.out)]


STOPS = helpers.table("stops.yaml")["grpo"]


def stop_again_and_again(
    straight: dict, folder, stops: list[tuple], save_every: int, **options
) -> None:
    """Stop a run at each of some places. Each time: its exit code, what is saved and logged, where
    the next one begins; and the last one ends like the straight run, bit for bit, also if a SIGINT
    comes when all is done.
    """
    values = {**straight, "output_dir": str(folder), "save_every": save_every}
    after = []
    for phase, place, step in stops:
        killed = place.endswith("SIGKILL")
        done = run(
            {**values, "resume": bool(after)}, code=-9 if killed else 75, place=place, **options
        )
        assert goes_on_after(done) == after[-1:], phase
        after.append(step)
        # with a dot: what a kill left of a save
        saved = [name for name in steps_of(values) if name[0] != "."]
        assert saved == [f"step_{each}" for each in sorted({*after})[-2:]], phase
        assert "Traceback" not in done.err and not (folder_of(values) / "final").exists(), phase
        if killed:  # no row is lost or there twice
            for part in ("metrics.jsonl", "samples.jsonl"):
                ours, theirs = (read_lines(folder_of(each) / part) for each in (values, straight))
                assert [row["step"] for row in ours] == [row["step"] for row in theirs][
                    : len(ours)
                ], (phase, part)
        else:
            said = f"{place.split(':')[2]}: the run exits as soon as it has saved a checkpoint"
            assert f"step {step} is saved" in done.out and said in done.err, phase
    # as it exits
    done = run({**values, "resume": True}, place="rollouts.Rollouts._leave:1:SIGINT+9", **options)
    assert goes_on_after(done) == after[-1:]
    helpers.assert_same_run(values, straight)
    ours, theirs = (folder_of(each) / "final/config.json" for each in (values, straight))
    assert ours.read_text() == theirs.read_text()


@pytest.mark.parametrize("name", STOPS)
def test_a_stopped_run_goes_on_without_a_trace(straight, tmp_path, name):
    stop_again_and_again(straight, tmp_path, STOPS[name], 0 if name == "stopped" else 2)


def test_a_second_sigint_ends_at_once(base, tmp_path):
    done = run(
        variant(base, tmp_path),
        130,
        place="utils.Optimizer.step:1:SIGINT;utils.Optimizer.step:2:SIGINT",
    )
    assert "Traceback" not in done.err


def test_k2_and_k3_times_the_ratio_have_the_same_gradient(base, tmp_path):
    """Off policy, too: a mini-batch of a step is trained on by a policy that has moved."""
    values = variant(
        base, tmp_path, kl_coef=1.0, precision="float64", total_episodes=16, eval_every=0
    )
    # padded
    values["ref_model"] = helpers.tiny_model(
        tmp_path / "other", initializer_range=0.1, vocab_size=300
    )
    heads = []
    for estimator, weighting in (("k2", "ratio"), ("k3", "ratio"), ("k2", "none")):
        values |= {
            "kl_estimator": estimator,
            "kl_weighting": weighting,
            "run_name": f"{estimator} {weighting}",
        }
        run_here(values)
        heads.append(weights_of(folder_of(values) / "final")["lm_head.weight"])
    assert (heads[1] - heads[0]).abs().max() < 1e-6 < 1e-4 < (heads[2] - heads[0]).abs().max()


# ---- rewards that fail ---------------------------------------------------------------------------

FAILING = """
def good(prompts, responses, **columns): return [float(len(r) % 3) for r in responses]
def some(prompts, responses, **columns):
    return [None if i % 4 == 0 else float(len(r) % 4) for i, r in enumerate(responses)]
some.whole = True
"""


def test_a_function_of_trl_knows_the_step(base, tmp_path):
    """In a rollout the steps before it, in an evaluation those so far, also once the run goes
    on.
    """
    (tmp_path / "trl.py").write_text(
        "def score(completions, trainer_state, log_metric, **columns):\n"
        "    log_metric('step', trainer_state.global_step)\n"
        "    return [float(len(completion)) for completion in completions]\n"
    )
    values = variant(base, tmp_path, reward=f"{tmp_path / 'trl.py'}:score", eval_every=1)
    for changes in ({"total_episodes": 16}, {"total_episodes": 24, "resume": True}):
        run_here({**values, "save_every": 1, **changes})
    rows = metrics_of(values)
    assert [row["eval/reward/trl.py:score/step"] for row in rows] == [0, 1, 2, 3]
    assert [row["reward/trl.py:score/step"] for row in rows[1:]] == [0, 1, 2]


@pytest.mark.parametrize("scale", ["group", "gdpo"])
def test_missing_scores_are_counted_and_left_out(base, tmp_path, scale):
    (tmp_path / "failing.py").write_text(FAILING)
    first, second = names = ("failing.py:good", "failing.py:some")
    rewards = tuple(f"{tmp_path}/{name}" for name in names)
    values = variant(base, tmp_path, reward=rewards, total_episodes=8)
    values |= {"advantage_scale": scale, "reward_weights": (1.0, 0.5)}
    run_here(values)
    row = metrics_of(values)[1]
    assert row["val/missing_scores"] == 2  # responses 0 and 4 of 8
    samples = read_lines(folder_of(values) / "samples.jsonl")  # null, and not NaN, which is no JSON
    assert [sample[second] is None for sample in samples] == [i % 4 == 0 for i in range(8)]
    assert all(sample["advantage"] == 0 for sample in samples if sample[second] is None)
    totals = [
        sample[first] + sample[second] / 2 for sample in samples if sample[second] is not None
    ]
    assert row["objective/scores"] == pytest.approx(sum(totals) / 6)
    if scale == "gdpo":
        scores = [[math.nan if x[name] is None else x[name] for x in samples] for name in names]
        close(
            [sample["advantage"] for sample in samples], gdpo_by_hand(scores, (1.0, 0.5), 4), 1e-5
        )


# ---- gradients that are not finite ---------------------------------------------------------------


@pytest.mark.parametrize("script", ["grpo", "rloo"])
def test_step_token_divides_by_the_tokens_of_the_step(base, tmp_path, monkeypatch, script):
    """Over the updates, so that their mean is the mean of the step; tests/test_ppo.py has that of
    ppo.py.
    """
    module = __import__(script)
    calls = []
    loss_reduction = grpo.loss_reduction

    def recorded(*args):
        reduce = loss_reduction(*args)
        divisor = 1 / reduce(torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool)).item()
        return lambda x, mask: calls.append((int(mask.sum()), divisor)) or reduce(x, mask)

    monkeypatch.setattr(module, "loss_reduction", recorded)
    values = variant(base, tmp_path, total_episodes=8, eval_every=0, save_every=0, kl_coef=0.0)
    model = helpers.tiny_model(tmp_path / "stops", "gpt_neox", stop=4)
    values |= {"model": model, "micro_batch_tokens": 1000}
    run_here({**values, "loss_aggregation": "step_token"}, script)  # two epochs of two updates
    assert len({tokens for tokens, _ in calls}) > 1
    (divisor,) = {divisor for _, divisor in calls}
    assert divisor == pytest.approx(sum(tokens for tokens, _ in calls) / 4)


# ---- a reference that moves ----------------------------------------------------------------------


@pytest.mark.parametrize("script", ["grpo", "rloo", "ppo"])
def test_the_reference_is_refreshed_after_its_steps(base, tmp_path, monkeypatch, script):
    """A policy that was just taken over has no KL to itself. The controller gets that of a token,
    of which all responses have ten.
    """
    updates = recorded(monkeypatch, utils.AdaptiveKL, "update")
    values = variant(
        base,
        tmp_path,
        total_episodes=24,
        num_epochs=1,
        mini_batch_size=8,
        eval_every=0,
        save_every=0,
        ref_refresh_every=2,
        kl_target=0.1,
        kl_estimator="k3",
        min_response_length=10,
        max_response_length=10,
        warmup_ratio=0.0,
    )
    run_here(values, script)
    first, second, third = (row["objective/kl"] for row in metrics_of(values))
    assert second > 1e-4 and max(abs(first), abs(third)) < 1e-2 * second
    seen = [kl for (_, kl, _), _ in updates]
    assert seen == pytest.approx([first / 10, second / 10, third / 10], rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("loaded", [True, False])
def test_only_triton_is_silenced_and_only_at_the_end(loaded):
    """Its lines come after all handlers, as does what one that was registered before ours writes."""
    code = (
        "import atexit, os, sys\natexit.register(os.write, 2, b'late')\nimport plumbing.run.command\n"
        f"sys.modules.pop('triton', None)\nif {loaded}: sys.modules['triton'] = sys\n"
        "atexit.register(os.write, 2, b'handler')\nprint('early', file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=helpers.ROOT, capture_output=True)
    said = done.stderr.decode()
    assert "early\nhandler" in said and ("late" in said) == (not loaded)
