"""scripts/evaluate.py: its measures against enumeration, what a run leaves, and what it refuses."""

import importlib
import json
import math
import statistics
from pathlib import Path

import helpers
import pandas
import pytest

from plumbing.data.tasks import arithmetic
from plumbing.run import command
from plumbing.run.folder import run_of

evaluate = importlib.import_module("evaluate")  # in scripts/, which helpers has put on the path

CASES = helpers.table("evaluate.json")

# ---- measures ------------------------------------------------------------------------------------


def table(*prompts: str) -> pandas.DataFrame:
    """Responses to some prompts: "a1 b0" is one with the answer a, which is correct, and one with
    b, which is not; "-" stands for no answer, and "?" for no score.
    """
    rows = []
    for index, responses in enumerate(prompts):
        for answer, score in responses.split():
            correct = math.nan if score == "?" else float(score)
            rows.append(
                {"index": index, "extracted": None if answer == "-" else answer, "correct": correct}
            )
    return pandas.DataFrame(rows)


@pytest.mark.parametrize("case", CASES["measures"], ids=lambda case: " | ".join(case["prompts"]))
def test_measures(case):
    """Means over prompts, by enumeration; without what has no score. Of a tie, the answer that came
    first.
    """
    found = evaluate.measure(table(*case["prompts"]), case["n"], [])
    values = {name: x["value"] for name, x in found.items()} | {
        f"{name} se": x["se"] for name, x in found.items()
    }
    assert values == pytest.approx(case["measures"])


def test_intervals():
    """Newcombe 1998, table I, and none of 4 prompts, where the standard error says nothing."""
    for right, trials, low, high in CASES["intervals"]:
        interval = evaluate.wilson_interval(right / trials, trials)
        assert interval == pytest.approx({"low": low, "high": high}, abs=5e-5)
    found = evaluate.measure(table(*["b0 b0"] * 4).assign(tokens=5.0), 2, ["tokens"])
    assert found["avg@2"] == pytest.approx(
        {"value": 0, "se": None, "low": 0, "high": 0.4899}, abs=1e-4
    )
    assert found["tokens"] == {"value": 5, "se": None}
    for trials in range(1, 2000):
        assert evaluate.wilson_interval(0.0, trials)["low"] >= 0
        assert evaluate.wilson_interval(1.0, trials)["high"] <= 1


def test_answers_that_vote():
    """Where the answer stands is in test_answers.py."""
    for response, answer in CASES["votes"]:
        assert evaluate.voted_answer(response) == answer


# ---- runs ----------------------------------------------------------------------------------------

TINY = {
    "model": str(helpers.ROOT / "assets" / "tiny"),
    "dataset": "arithmetic",
    "system_prompt": "",
    "max_prompt_length": 16,
    "max_response_length": 48,
    "reward": "gsm8k",
    "num_prompts": 12,
    "samples": 6,
    "generation_batch_size": 20,
    "run_name": "run",
}


def measure(tmp_path, **changes):
    """Evaluate with TINY and changes in this process: results and samples."""
    values = {**TINY, "output_dir": str(tmp_path), **changes}
    helpers.run_here(values, "evaluate")
    return read(values)


def read(values: dict) -> tuple:
    folder = helpers.folder_of(values)
    results = json.loads((folder / "results.json").read_text(), parse_constant=helpers.refuse)
    return results, helpers.read_lines(folder / "samples.jsonl")


def test_run_on_arithmetic(tmp_path):
    """What each response is and scored; two ranks, and other batches, make the same responses."""
    results, samples = measure(tmp_path)
    assert [s["prompt"] for s in samples] == [
        row["prompt"] for row in arithmetic("", "test", 12) for _ in range(6)
    ]
    for s in samples:
        assert s["gsm8k"] == float(s["response"].endswith(f"#### {s['answer']}"))
        assert s["correct"] == (s["gsm8k"] == 1 and s["stop_reason"] == "stop")
    assert len({s["response"] for s in samples}) > 40  # each has random numbers of its own
    for s, row in zip(samples, helpers.read_lines(tmp_path / "run/tokens.jsonl"), strict=True):
        assert "".join(row["texts"]).removesuffix("<eos>") == s["response"]
        assert len(row["rollout_logprobs"]) == s["tokens"] and max(row["rollout_logprobs"]) <= 0
    scores = {name: x["value"] for name, x in results["scores"].items()}
    assert list(scores) == "avg@6 pass@1 pass@2 pass@4 maj@6 gsm8k stopped tokens".split()
    assert scores["avg@6"] == pytest.approx(sum(s["correct"] for s in samples) / 72)
    assert 0.2 < scores["avg@6"] < 0.9
    assert results["args"]["backend"] == "hf"
    values = {**TINY, "output_dir": str(tmp_path), "run_name": "ranks", "generation_batch_size": 7}
    values["log_tokens"] = False
    helpers.run_ranks(values, 2, (0, 0), script="evaluate")
    assert read(values)[1] == samples and not (tmp_path / "ranks/tokens.jsonl").exists()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> dict:
    """A run of grpo.py without a system prompt, and with short responses: neither is the
    default.
    """
    folder = tmp_path_factory.mktemp("runs")
    shared = "model system_prompt max_prompt_length max_response_length reward run_name".split()
    rows = helpers.write_rows(folder / "rows.jsonl", arithmetic("", "test", 60))
    values = {name: TINY[name] for name in shared} | {
        "output_dir": str(folder),
        "dataset": rows,
        "eval_share": 0.4,
        "eval_prompts": 20,
        "eval_samples": 3,
        "rollout_batch_size": 2,
        "group_size": 4,
        "mini_batch_size": 8,
        "total_episodes": 8,
        "learning_rate": 1e-4,
        "seed": 5,
    }
    helpers.run_here(values)
    return values


def parse(*words) -> evaluate.Args:
    return command.parse(evaluate.Args, list(map(str, words)))


def test_the_accuracy_that_a_run_logged(run, tmp_path, capsys):
    """Of its last model, as the run's args.json has prompts and lengths; with --config all else,
    too.
    """
    logged = helpers.metrics_of(run)[-1]
    folder = helpers.folder_of(run)
    given = {"model": str(folder / "final"), "output_dir": str(tmp_path)}
    values = {**given, "temperature": 0, "num_prompts": 20, "run_name": "greedy"}
    values |= {name: run[name] for name in ("dataset", "eval_share", "reward")}
    helpers.run_here(values, "evaluate")
    assert f"defaults by {folder}/args.json: {{'system_prompt': ''" in capsys.readouterr().out
    assert read(values)[0]["scores"]["avg@1"]["value"] == logged["eval/greedy_accuracy"] > 0.9
    values = {**given, "config": str(folder / "args.json"), "run_name": "sampled"}
    helpers.run_here(values, "evaluate")
    assert read(values)[0]["scores"]["avg@3"]["value"] == pytest.approx(logged["eval/accuracy"])
    assert logged["eval/accuracy"] < 0.9


def test_flags_of_the_run_that_saved_a_model(run, tmp_path, capsys):
    """They are defaults: below --config, and below the command line, whatever it says."""
    folder = helpers.folder_of(run)
    for model in (folder / "final", folder / "checkpoints" / "step_1"):
        args = parse("--model", model)
        assert (args.system_prompt, args.max_prompt_length, args.max_response_length) == (
            "",
            16,
            48,
        )
        assert (args.seed, args.dataset, args.reward) == (1, "openai/gsm8k", ("math",))
    assert parse("--model", model, "--max_response_length", 1024).max_response_length == 1024
    assert [run_of(str(folder / name)) for name in ("final/", "no/such", ".")] == [
        folder,
        None,
        None,
    ]
    (tmp_path / "flags.json").write_text(
        json.dumps({"model": str(model), "max_response_length": 1024})
    )
    args = parse("--config", tmp_path / "flags.json")
    assert (args.max_prompt_length, args.max_response_length) == (16, 1024)
    args = parse("--config", folder / "args.json", "--samples", 2)
    assert (args.model, args.seed, args.run_name, args.num_prompts, args.samples) == (
        run["model"],
        5,
        "",
        20,
        2,
    )
    capsys.readouterr()
    assert (
        parse("--model", run["model"]).max_response_length == 1024
        and "args.json" not in capsys.readouterr().out
    )


def test_the_data_set_that_a_run_evaluates_on():
    for flags, name in CASES["data sets of a run"]:
        assert (
            evaluate.Args.from_run({**flags, "eval_prompts": 5, "eval_samples": 2})["dataset"]
            == name
        )


def test_responses_that_are_cut_off(tmp_path):
    """They are not correct and do not vote."""
    (tmp_path / "r.py").write_text(
        "def score(prompts, responses, **columns):\n    return [1.0] * len(responses)\n"
    )
    name = f"{tmp_path / 'r.py'}:score"
    results, samples = measure(tmp_path, reward=name, max_response_length=3)
    assert {s["stop_reason"] for s in samples} == {"length"} and {s["tokens"] for s in samples} == {
        3
    }
    assert results["scores"]["avg@6"]["value"] == 0 and "maj@6" not in results["scores"]
    assert results["scores"]["stopped"]["value"] == 0 and results["scores"][name]["value"] == 1


def test_another_evaluation_of_its_name_ends_first(tmp_path, monkeypatch, capsys):
    """Its folder stays as it is, and the samples of this one are not lost."""
    before = evaluate.sample_table
    end_first = lambda *given: (tmp_path / "run").mkdir() or before(*given)
    monkeypatch.setattr(evaluate, "sample_table", end_first)
    helpers.run_here(
        {**TINY, "output_dir": str(tmp_path), "num_prompts": 1, "max_response_length": 3},
        "evaluate",
    )
    results = Path(capsys.readouterr().out.splitlines()[-1])
    assert results.exists() and results.parent.parent == tmp_path
    assert not list((tmp_path / "run").iterdir())


def test_missing_scores_are_counted_and_not_zero(tmp_path, capsys):
    (tmp_path / "r.py").write_text(
        "def some(prompts, responses, **columns):\n    return [None if '1' in p else 2.0 for p in prompts]\n"
        "def bad(prompts, responses, **columns):\n    return [None] * len(prompts)\n"
    )
    some = f"{tmp_path / 'r.py'}:some"
    results, samples = measure(tmp_path, reward=(some, "format"))
    missing = sum("1" in s["prompt"] for s in samples)
    assert 0 < missing < 72 and results["missing_scores"] == {some: missing, "format": 0}
    assert results["scores"][some]["value"] == 2 and results["scores"]["pass@1"]["value"] > 0.9
    assert f"without a score: {{{some!r}: {missing}, 'format': 0}}" in capsys.readouterr().out
    bad = f"{tmp_path / 'r.py'}:bad"
    assert "no response got a score" in helpers.refused(
        capsys, measure, tmp_path, reward=bad, run_name="bad"
    )
    assert len(helpers.read_lines(tmp_path / "bad/samples.jsonl")) == 72  # hours of work, perhaps


def test_rows_of_several_data_sets_that_name_their_sources(tmp_path):
    """Each prompt is judged by its own source. Rows may have columns that are named as those of the
    samples.
    """
    rows = [{**row, "verifier": "gsm8k", "index": 7} for row in arithmetic("", "test", 3)]
    helpers.write_rows(tmp_path / "rows.jsonl", rows)
    helpers.write_rows(
        tmp_path / "zero.jsonl", [{"prompt": "1+0=", "answer": "?", "verifier": ["format"]}] * 2
    )
    entries = [{"prob": 1, "filepath": name} for name in ("rows.jsonl", "zero.jsonl")]
    (tmp_path / "mix.json").write_text(json.dumps(entries))
    flags = dict(
        dataset=str(tmp_path / "mix.json"), reward=("gsm8k", "format"), num_prompts=0, samples=2
    )
    results, samples = measure(tmp_path, **flags)
    shares = {name: scores["avg@2"]["value"] for name, scores in results["datasets"].items()}
    right = [s["correct"] for s in samples if s["dataset"] == "rows.jsonl"]
    assert shares == pytest.approx({"rows.jsonl": sum(right) / 6, "zero.jsonl": 0})


def test_a_reward_model_alone(tmp_path):
    """It says nothing of right and wrong: only its mean is given."""
    folder = helpers.tiny_model(tmp_path / "model")
    name = helpers.scalar_folder(folder, tmp_path / "scorer")
    results, samples = measure(tmp_path, model=folder, reward=name, num_prompts=5, samples=3)
    assert results["scores"].keys() == {name, "stopped", "tokens"}
    assert results["scores"][name]["value"] == pytest.approx(
        statistics.fmean(s[name] for s in samples)
    )


def test_conversations(tmp_path):
    """The response is all turns, and the vote that of the last; tokens are the model's."""
    flags = {
        "model": str(helpers.ROOT / "assets" / "guess"),
        "dataset": str(helpers.ROOT / "assets/guess/test.jsonl"),
    }
    flags |= {
        "environment": f"{helpers.ROOT / 'assets/guess/game.py'}:GuessTheNumber",
        "reward": "episode",
    }
    results, samples = measure(tmp_path, **flags, num_prompts=6, samples=4, max_response_length=64)
    for s in samples:
        guesses = [turn["content"] for turn in s["turns"] if turn["role"] == "assistant"]
        assert s["stop_reason"] == "done" and s["correct"] == s["episode"]
        # and the stops
        assert len("".join(guesses)) <= s["tokens"] <= len("".join(guesses)) + len(guesses)
        assert s["extracted"] == guesses[-1]
    assert 0 < results["scores"]["avg@4"]["value"] < 1
    assert 1 < results["conversations"]["conversation/turns"] <= 5


# ---- bad input -----------------------------------------------------------------------------------


def test_bad_input_exits_with_one_line(tmp_path, capsys):
    model = helpers.tiny_model(tmp_path / "mamba", "mamba", state_size=8)
    line = helpers.refused(capsys, measure, tmp_path, model=model)
    assert (
        line.startswith(f"error: --model {model}: ")
        and "the decode loop; use --backend vllm" in line
    )
    assert not list(tmp_path.glob("run*"))
    (tmp_path / "run").mkdir()
    assert "--run_name run" in helpers.refused(capsys, measure, tmp_path) and not list(
        (tmp_path / "run").iterdir()
    )
