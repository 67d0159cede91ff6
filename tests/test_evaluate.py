"""scripts/evaluate.py: its measures against enumeration, what a run leaves, and what it refuses."""

import importlib
import itertools
import json
import math
import statistics

import helpers
import pandas
import pytest

from plumbing.data.rows import arithmetic_rows
from plumbing.rewards import answers

evaluate = importlib.import_module("evaluate")  # in scripts/, which helpers has put on the path

# ---- measures --------------------------------------------------------------------------------------------------------


def table(*prompts: str) -> pandas.DataFrame:
    """Responses to some prompts: "a1 b0" is one with the answer a, which is correct, and one with b, which is not; "-"
    stands for no answer, and "?" for no score."""
    rows = []
    for index, responses in enumerate(prompts):
        for answer, score in responses.split():
            correct = math.nan if score == "?" else float(score)
            rows.append({"index": index, "extracted": None if answer == "-" else answer, "correct": correct})
    return pandas.DataFrame(rows)


def test_measures_by_hand():
    """Means over prompts; a missing score is left out; the standard error is that of the prompts."""
    prompts = "a1 a1 b0 c0", "b0 a1 b0 a1", "-0 -0 -0 a1", "a1 b0 b? a1"
    found = evaluate.measure(table(*prompts), 4)
    shares = [2 / 4, 2 / 4, 1 / 4, 2 / 3]
    assert found["avg@4"]["value"] == pytest.approx(statistics.fmean(shares))
    assert found["pass@1"]["value"] == pytest.approx(statistics.fmean(shares))
    assert found["avg@4"]["se"] == pytest.approx(statistics.stdev(shares) / 2)
    correct = [[1, 1, 0, 0], [0, 1, 0, 1], [0, 0, 0, 1], [1, 0, 1]]
    pairs = [[any(pair) for pair in itertools.combinations(row, 2)] for row in correct]
    assert found["pass@2"]["value"] == pytest.approx(statistics.fmean(map(statistics.fmean, pairs)))
    assert found["pass@4"] == {"value": 1.0, "se": 0.0}  # without the prompt that has three scores
    assert found["maj@4"]["value"] == 3 / 4  # of a tie the answer that came first


def test_measures_of_nothing():
    assert evaluate.measure(table("-? -?"), 2) == {}
    assert evaluate.measure(table("-0 -1"), 2).keys() == {"avg@2", "pass@1", "pass@2"}  # no answers: no vote
    assert evaluate.measure(table("a1"), 1)["avg@1"] == {"value": 1.0, "se": None}


VOTES = {  # where the answer stands is in test_answers.py
    ("math", "<answer> Yes. </answer>"): "yes",
    ("exact", "a  b\nc"): "a b c",
    ("exact", " . "): None,
    ("gsm8k", "#### 3 then #### $1,234."): "1234",
    ("gsm8k", "\\boxed{3}"): None,
}


def test_answers_that_vote():
    assert {case: answers.voted_answer(*case) for case in VOTES} == VOTES


# ---- runs ------------------------------------------------------------------------------------------------------------

TINY = {"model": str(helpers.ROOT / "assets" / "tiny"), "dataset": "arithmetic", "system_prompt": "",
        "max_prompt_length": 16, "max_response_length": 48, "reward": "gsm8k", "num_prompts": 12, "samples": 6,
        "generation_batch_size": 20, "run_name": "run"}  # fmt: skip


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
    rows = arithmetic_rows("test", 12)
    assert [(s["index"], s["sample"]) for s in samples] == [(i, j) for i in range(12) for j in range(6)]
    for sample in samples:
        row = rows[sample["index"]]
        assert sample["prompt"] == row["prompt"] and sample["answer"] == row["answer"]
        assert sample["reward/gsm8k"] == float(sample["response"].endswith(f"#### {row['answer']}"))
        assert sample["correct"] == (sample["reward/gsm8k"] == 1 and sample["stop_reason"] == "stop")
    assert len({s["response"] for s in samples}) > 40  # each has random numbers of its own
    scores = results["scores"]
    assert list(scores) == ["avg@6", "pass@1", "pass@2", "pass@4", "maj@6"]
    assert 0.2 < scores["avg@6"]["value"] < 0.9  # the model is neither, so that this test sees something
    assert scores["avg@6"]["value"] == pytest.approx(sum(s["correct"] for s in samples) / 72)
    assert (results["prompts"], results["samples"]) == (12, 6) and results["args"]["model"] == TINY["model"]
    assert results["versions"]["torch"] and results["rewards"]["gsm8k"]["missing"] == 0
    values = {**TINY, "output_dir": str(tmp_path), "run_name": "ranks", "generation_batch_size": 7}
    helpers.run_ranks(values, 2, (0, 0), script="evaluate")
    assert read(values)[1] == samples and read(values)[0]["generation"]["ranks"] == 2


def test_greedy_accuracy_is_that_of_training(tmp_path):
    """As grpo.py evaluates the model that it starts from."""
    results, samples = measure(tmp_path, temperature=0, samples=0, num_prompts=30)
    assert len(samples) == 30 and list(results["scores"]) == ["avg@1", "pass@1", "maj@1"]
    shared = ("model", "dataset", "system_prompt", "max_prompt_length", "max_response_length", "reward")
    values = {name: TINY[name] for name in shared} | {
        "output_dir": str(tmp_path), "run_name": "grpo", "rollout_batch_size": 2, "group_size": 2, "mini_batch_size": 4,
        "total_episodes": 4, "kl_coef": 0.0, "eval_prompts": 30, "eval_samples": 1, "save_every": 0,
    }  # fmt: skip
    helpers.run_here(values)
    assert helpers.metrics_of(values)[0]["eval/greedy_accuracy"] == results["scores"]["avg@1"]["value"]


def test_responses_that_are_cut_off(tmp_path):
    """They are not correct and do not vote."""
    (tmp_path / "r.py").write_text("def score(prompts, responses, **columns):\n    return [1.0] * len(responses)\n")
    name = f"{tmp_path / 'r.py'}:score"
    results, samples = measure(tmp_path, reward=name, max_response_length=3)
    assert {s["stop_reason"] for s in samples} == {"length"} and {s["tokens"] for s in samples} == {3}
    assert results["scores"]["avg@6"]["value"] == 0 and "maj@6" not in results["scores"]
    assert results["stopped"] == 0 and results["rewards"][name]["value"] == 1


def test_missing_scores_are_counted_and_not_zero(tmp_path, capsys):
    (tmp_path / "r.py").write_text(
        "def some(prompts, responses, **columns):\n    return [None if '1' in p else 2.0 for p in prompts]\n"
        "def bad(prompts, responses, **columns):\n    return [None] * len(prompts)\n"
    )
    some = f"{tmp_path / 'r.py'}:some"
    results, samples = measure(tmp_path, reward=(some, "format"))
    missing = sum("1" in s["prompt"] for s in samples)
    assert 0 < missing < 72 and results["rewards"][some]["missing"] == missing
    assert results["rewards"][some]["value"] == 2 and results["scores"]["pass@1"]["value"] > 0.9
    assert f"{missing} of 72 responses got no score" in capsys.readouterr().err
    bad = f"{tmp_path / 'r.py'}:bad"
    assert "no response got a score" in helpers.refused(capsys, measure, tmp_path, reward=bad, run_name="bad")


def test_rows_of_several_data_sets_that_name_their_sources(tmp_path):
    """Each prompt is judged by its own source. Rows may have columns that are named as those of the samples."""
    rows = [{**row, "verifier": "gsm8k", "index": 7} for row in arithmetic_rows("test", 3)]
    helpers.write_rows(tmp_path / "rows.jsonl", rows)
    helpers.write_rows(tmp_path / "zero.jsonl", [{"prompt": "1+0=", "answer": "?", "verifier": ["format"]}] * 2)
    entries = [{"prob": 1, "filepath": name} for name in ("rows.jsonl", "zero.jsonl")]
    (tmp_path / "mix.json").write_text(json.dumps(entries))
    flags = dict(dataset=str(tmp_path / "mix.json"), reward=("gsm8k", "format"), num_prompts=0, samples=2)
    results, samples = measure(tmp_path, **flags)
    assert [s["dataset"] for s in samples] == ["rows.jsonl"] * 6 + ["zero.jsonl"] * 4
    right = [s["correct"] for s in samples[:6]]
    assert results["datasets"]["rows.jsonl"]["avg@2"]["value"] == pytest.approx(sum(right) / 6)
    assert results["datasets"]["zero.jsonl"]["avg@2"]["value"] == 0
    assert results["rewards"]["gsm8k"]["value"] == pytest.approx(sum(right) / 6)


def test_a_reward_model_alone(tmp_path):
    """It says nothing of right and wrong: only its mean is given."""
    folder = helpers.tiny_model(tmp_path / "model")
    name = helpers.scalar_folder(folder, tmp_path / "scorer")
    results, samples = measure(tmp_path, model=folder, reward=name, num_prompts=5, samples=3)
    means = [statistics.fmean(s[f"reward/{name}"] for s in samples[i : i + 3]) for i in range(0, 15, 3)]
    assert results["scores"] == {} and results["rewards"][name]["value"] == pytest.approx(statistics.fmean(means))
    assert results["rewards"][name]["se"] == pytest.approx(statistics.stdev(means) / math.sqrt(5))


def test_conversations(tmp_path):
    """The response is all turns, and the vote that of the last; tokens are the model's."""
    flags = {"model": str(helpers.ROOT / "assets" / "guess"), "dataset": str(helpers.ROOT / "assets/guess/test.jsonl")}
    flags |= {"environment": f"{helpers.ROOT / 'assets/guess/game.py'}:GuessTheNumber", "reward": "environment"}
    results, samples = measure(tmp_path, **flags, num_prompts=6, samples=4, max_response_length=64)
    for s in samples:
        guesses = [turn["content"] for turn in s["turns"] if turn["role"] == "assistant"]
        assert s["stop_reason"] == "done" and s["correct"] == s["reward/environment"] and 1 <= len(guesses) <= 5
        assert s["response"] == "".join(turn["content"] for turn in s["turns"])
        assert len("".join(guesses)) <= s["tokens"] <= len("".join(guesses)) + len(guesses)  # and the stops
    assert 0 < results["scores"]["avg@4"]["value"] < 1 and "maj@4" not in results["scores"]
    assert 1 < results["conversations"]["conversation/turns"] <= 5


# ---- bad input -------------------------------------------------------------------------------------------------------


def test_bad_input_exits_with_one_line(tmp_path, capsys):
    model = helpers.tiny_model(tmp_path / "mamba", "mamba", state_size=8)
    line = helpers.refused(capsys, measure, tmp_path, model=model)
    assert line.startswith(f"error: --model {model}: ") and "the decode loop; use --backend vllm: " in line
    assert not list(tmp_path.glob("run*"))
    (tmp_path / "run").mkdir()
    assert "--run_name run" in helpers.refused(capsys, measure, tmp_path) and not list((tmp_path / "run").iterdir())
