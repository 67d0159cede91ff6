"""The reward sources of a run together: trial calls at its start, and rows that name the sources which score them."""

import math
import types

import pytest
import torch
from tiny_models import make_tokenizer

from plumbing.rewards import reward_processes
from plumbing.rewards.reward_worker import finite_or_nan
from plumbing.rewards.sources import Rewards, named_sources, needs_answer
from plumbing.rollout.batch import Batch
from plumbing.run import evaluation

FUNCTIONS = """
import os, time

calls = 0
def good(prompts, responses, **columns):
    global calls
    calls += 1
    return [float(calls)] * len(responses)

def none(prompts, responses, **columns): return [None] * len(responses)
def verl(data_source, solution_str, ground_truth, extra_info=None): return float(solution_str == ground_truth)
def trl(completions, answer, **kwargs): return [float(c == a) for c, a in zip(completions, answer)]
def too_few(prompts, responses, **columns): return [1.0]
def text(prompts, responses, **columns): return "11"
def table(prompts, responses, **columns): return {"a": 1.0, "b": 2.0}
def number(prompts, responses, **columns): return 1.0
def words(prompts, responses, **columns): return ["1"] * len(responses)
def raises(prompts, responses, **columns): raise RuntimeError("the judge is away")
def hangs(prompts, responses, **columns): time.sleep(600)
def ends(prompts, responses, **columns): os._exit(7)
def other_columns(prompts, responses, grade): return [1.0] * len(responses)
"""


def row(answer, sources=None, **columns) -> dict:
    own = {"prompt": "p", "query": [1], "messages": [{"role": "user", "content": "p"}], "answer": answer}
    return {**own, "dataset": "rows.jsonl", "sources": sources, "columns": columns}


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("rewards") / "judge.py"
    path.write_text(FUNCTIONS)
    return str(path)


@pytest.fixture
def make():
    made = []

    def make(*names, rows=(), timeout=30.0):
        made.append(Rewards(names, timeout, make_tokenizer(), rows))
        return made[-1]

    yield make
    for each in made:
        each.close()


# ---- a trial call ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, says",
    [
        ("too_few", "ValueError: returned 1 scores for 2 responses"),
        ("text", "TypeError: returned str '11', not a list of numbers"),
        ("table", "TypeError: returned dict"),
        ("number", "TypeError: returned float '1.0', not a list of numbers"),
        ("words", "TypeError: gave a response str '1', not a number"),
        ("raises", "RuntimeError: the judge is away"),
        ("hangs", "gave no answer within --reward_timeout 1 s"),
        ("ends", "its process ended with exit code 7"),
        ("other_columns", "with prompts, responses, level, answer: missing a required argument: 'grade'"),
    ],
)  # fmt: skip
def test_a_function_that_fails_in_the_trial_call(file, make, capfd, name, says):
    with pytest.raises(SystemExit) as end:
        make(f"{file}:{name}", rows=[row("1", level=3)], timeout=1.0)
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error:")]
    assert end.value.code == 2 and len(errors) == 1
    assert errors[0].startswith(f"error: --reward {file}:{name}: a trial call with two responses failed: ")
    assert says in errors[0]


def test_a_trial_call_leaves_no_trace(file, make):
    """It is made in a process that ends with it; one that gives no score, None, is no failure."""
    names = [f"{file}:{name}" for name in ("good", "none", "verl", "trl")]
    rewards = make("exact", *names, rows=[row("1"), row(None), row("2")])
    assert not rewards.workers.spare
    found = rewards.score([row("1"), row("2")], ["1", "1"], [[5], [5]])
    assert [found[name] for name in ("exact", names[0], *names[2:])] == [[1, 0], [1, 1], [1, 0], [1, 0]]
    assert all(map(math.isnan, found[names[1]]))
    assert rewards.verifiers == ("exact", *names)


@pytest.mark.parametrize("score, scored", [(1e18, True), (-1e18, True), (1.001e18, False), (-1.001e18, False)])
def test_the_largest_score(score, scored):
    assert finite_or_nan(score) == pytest.approx(score if scored else math.nan, nan_ok=True)


def test_scores_are_in_the_order_of_the_responses(make, monkeypatch):
    """However many processes share them."""
    monkeypatch.setattr(reward_processes, "worker_count", lambda: 3)
    rows, texts = [row(str(i % 7)) for i in range(8)], [str(i**2 % 7) for i in range(8)]
    assert make("exact").score(rows, texts, [[]] * 8)["exact"] == [1, 1, 0, 0, 0, 0, 0, 1]


# ---- rows that name their sources ------------------------------------------------------------------------------------

MIX = ("gsm8k", "math", "runs/rm/final")


@pytest.mark.parametrize(
    "columns, flag, expected",
    [
        ({}, "", None),
        ({"verifier": "math"}, "", ["math"]),
        ({"verifier": ["math", "runs/rm/final"]}, "", ["math", "runs/rm/final"]),
        ({"verifier": None}, "", None),
        ({"verifier": ""}, "", None),
        ({"verifier": "math"}, "none", None),
        ({"dataset": "MATH", "ground_truth": "1"}, "", ["math"]),  # open-instruct's rows
        ({"dataset": ["gsm8k"], "ground_truth": ["1"]}, "", ["gsm8k"]),
        ({"dataset": "GSM8K", "answer": "1"}, "", None),  # where the row is from, as others use the word
        ({"dataset": "GSM8K", "answer": "1"}, "dataset", ["gsm8k"]),
        ({"kind": "math", "verifier": "gsm8k"}, "kind", ["math"]),
    ],
)
def test_named_sources(columns, flag, expected):
    args = types.SimpleNamespace(reward=MIX, verifier_column=flag)
    assert named_sources("rows.jsonl row 1", columns, args) == expected


def test_open_instructs_column_is_no_choice_among_one():
    row = {"dataset": "gsm8k", "ground_truth": "1"}
    assert named_sources("row", row, types.SimpleNamespace(reward=("math",), verifier_column="")) is None


def test_a_source_that_reward_does_not_have(capsys):
    args = types.SimpleNamespace(reward=MIX, verifier_column="")
    with pytest.raises(SystemExit):
        named_sources("--dataset rows.jsonl row 3", {"verifier": "code"}, args)
    said = capsys.readouterr().err
    assert said.startswith("error: --dataset rows.jsonl row 3: verifier is 'code', which is not in --reward gsm8k math")
    assert "--verifier_column none" in said


def test_an_answer_is_needed_where_a_source_reads_it():
    args = types.SimpleNamespace(reward=("format", "exact", "gsm8k"))
    assert needs_answer(args) == needs_answer(args, ["exact"]) == "--reward exact"
    assert needs_answer(args, ["format"]) == ""


def test_only_the_named_sources_count(file, make, capsys):
    rows = [row("1", ["exact"]), row("#### 1", ["gsm8k"]), row("1"), row("1", ["exact", "format"])]
    rewards = make("exact", "gsm8k", "format", "knights", rows=rows[:2])
    said = capsys.readouterr().err  # trials
    assert said == "".join(
        f"warning: --reward {name}: scores no row, as all of them name other sources; see --verifier_column\n"
        for name in ("format", "knights")
    )
    found = rewards.score(rows[:2] + rows[3:], ["1", "#### 1", "1"], [[], [], []])
    assert found == {"exact": [1, 0, 1], "gsm8k": [0, 1, 0], "format": [0, 0, 0], "knights": [0, 0, 0]}


def batch_of(rows: list[dict], verifiers: tuple, **components) -> Batch:
    ones = torch.ones(len(rows), dtype=torch.bool)
    scores = {name: torch.tensor(column) for name, column in components.items()}
    tokens = {"response_mask": ones[:, None]}
    return Batch(rows, [[1]] * len(rows), ["t"] * len(rows), ones, scores, tokens, verifiers=verifiers)


def test_what_is_measured_of_rows_that_name_their_sources():
    """Means of a source are over its rows; a response is correct by the first verifier that scores its row."""
    rows = [row("1", ["math"]), row("1", ["math"]), row("1", ["code"]), row("1", ["code", "math"]), row("1", ["model"])]
    nan = math.nan
    batch = batch_of(
        rows, ("math", "code"), math=[1.0, 0.0, 0.0, 1.0, 0.0], code=[0.0, 0.0, 1.0, nan, 0.0],
        model=[0.0, 0.0, 0.0, 0.0, -3.0],
    )  # fmt: skip
    correct = evaluation.correct_responses(batch)
    assert correct.tolist() == pytest.approx([1, 0, 1, 1, nan], nan_ok=True)
    metrics = evaluation.batch_metrics(batch)
    assert metrics["objective/verifiable_correct_rate"] == 0.75 and metrics["val/missing_scores"] == 1
    means = {name: metrics[f"reward/{name}"] for name in ("math", "code", "model")}
    assert means == pytest.approx({"math": 2 / 3, "code": 1.0, "model": -3.0})
    assert metrics["reward_correct/math"] == pytest.approx(2 / 3) and "reward_correct/model" not in metrics
    shown = evaluation.sample_rows(batch, 5)
    assert [[math.isnan(sample[name]) for name in means] for sample in shown[:3]] == [
        [False, True, True], [False, True, True], [True, False, True],
    ]  # fmt: skip


def test_a_source_that_fails_on_all_of_its_rows():
    """The zeros of the rows that it does not score do not hide it."""
    args = types.SimpleNamespace(reward=("math", "code"), reward_weights=())
    rewards = types.SimpleNamespace(why_missing=lambda components: f"{', '.join(components)} failed")
    rows = [row("1", ["math"]), row("1", ["code"])]
    failed = batch_of(rows, ("math", "code"), math=[1.0, 0.0], code=[0.0, math.nan])
    assert evaluation.unscored(failed, rewards, args) == "code failed"
    without = batch_of(rows[:1], ("math", "code"), math=[1.0], code=[0.0])  # a step without rows for code
    assert evaluation.unscored(without, rewards, args) == ""


def test_a_model_alone_tells_nothing_right_from_wrong():
    assert evaluation.correct_responses(batch_of([row("1")], (), model=[0.5])) is None
