"""scripts/evaluate.py: its measures against enumeration, its answers against tables, and what a run leaves."""

import importlib
import importlib.util
import itertools
import json
import math
import os
import random
import signal
import statistics
from collections import Counter
from fractions import Fraction
from pathlib import Path

import helpers
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plumbing import cli
from plumbing.data.rows import arithmetic_rows
from plumbing.rewards import answers, math_verifier
from plumbing.rewards.reward_processes import Workers
from plumbing.run import measures

evaluate = importlib.import_module("evaluate")  # in scripts/, which helpers has put on the path

# ---- pass@k and maj@k against all subsets ----------------------------------------------------------------------------


def vote_by_enumeration(correct: list[bool], answers: list, k: int) -> Fraction:
    """The share of the draws of k responses whose vote is correct: a tie counts as its share, no vote as wrong, and an
    answer as right to the share of all responses with it that are correct."""
    share = {
        answer: Fraction(sum(c for c, a in zip(correct, answers) if a == answer), answers.count(answer))
        for answer in answers
    }
    draws = []
    for draw in itertools.combinations(range(len(answers)), k):
        votes = Counter(answers[i] for i in draw if answers[i] is not None)
        winners = [answer for answer, count in votes.items() if count == max(votes.values())]
        draws.append(sum(share[answer] for answer in winners) / len(winners) if winners else Fraction(0))
    return sum(draws) / len(draws)


responses = st.lists(st.tuples(st.sampled_from("abcde-"), st.booleans()), min_size=1, max_size=9)


@settings(max_examples=150, deadline=None)
@given(responses)
def test_pass_and_majority_are_those_of_all_subsets(drawn):
    answers = [None if answer == "-" else answer for answer, _ in drawn]
    correct = [right and answer is not None for (_, right), answer in zip(drawn, answers)]
    n = len(drawn)
    found = measures.measures([correct], [answers], tuple(range(1, n + 1)))
    for k in range(1, n + 1):
        draws = list(itertools.combinations(correct, k))
        assert found[f"pass@{k}"]["value"] == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)
        assert found[f"maj@{k}"]["value"] == pytest.approx(float(vote_by_enumeration(correct, answers, k)), abs=1e-12)
    assert found["maj@1"]["value"] == pytest.approx(found[f"avg@{n}"]["value"], abs=1e-12)
    assert found["pass@1"]["value"] == pytest.approx(found[f"avg@{n}"]["value"], abs=1e-12)
    assert found[f"pass@{n}"]["value"] == any(correct)


@pytest.mark.parametrize(
    "answers, correct, k, expected",
    [
        ("aab", "110", 3, 1.0),
        ("abb", "100", 3, 0.0),
        ("ab", "10", 2, 0.5),  # a tie
        ("abc", "100", 3, 1 / 3),
        ("a-", "10", 2, 1.0),  # one does not vote
        ("--", "00", 2, 0.0),  # no one does
        ("aabb", "1100", 2, 0.5),
        ("aabbc", "11000", 5, 0.5),
        ("aa", "10", 2, 0.5),  # equal answers of different scores
    ],
)
def test_majority_by_hand(answers, correct, k, expected):
    answers = [None if answer == "-" else answer for answer in answers]
    groups = measures.count_votes([c == "1" for c in correct], answers)
    assert measures.majority_at_k(groups, len(answers), (k,)) == [pytest.approx(expected)]


def test_majority_of_many_responses():
    """With two answers and an odd k it is the upper half of a hypergeometric distribution, here in exact numbers."""
    for n, right, ks in ((200, 90, (1, 3, 99, 199)), (512, 300, (1, 255, 511))):
        found = measures.majority_at_k(((right, right), (n - right, 0)), n, ks)
        for k, value in zip(ks, found):
            ways = sum(math.comb(right, j) * math.comb(n - right, k - j) for j in range(k // 2 + 1, k + 1))
            assert value == pytest.approx(float(Fraction(ways, math.comb(n, k))), rel=1e-10)


# ---- intervals -------------------------------------------------------------------------------------------------------


def test_interval_of_single_responses_is_wilsons():
    """Its ends are where |p - q| = 1.96 sqrt(q (1 - q) / P), at P independent responses."""
    values = [1.0] * 13 + [0.0] * 27
    found = measures.estimate(values, 1)
    assert found["value"] == 13 / 40
    assert found["se"] == pytest.approx(statistics.stdev(values) / math.sqrt(40))
    for q in found["ci95"]:
        assert abs(13 / 40 - q) == pytest.approx(1.959964 * math.sqrt(q * (1 - q) / 40), rel=1e-9)


def test_interval_is_clustered_by_prompt():
    """Responses to the same prompt that always agree are worth one; those that differ at will are worth n."""
    once = measures.measures([[True]] * 13 + [[False]] * 27, None, (1,))
    often = measures.measures([[True] * 16] * 13 + [[False] * 16] * 27, None, (1,))
    assert once["avg@1"] == often["avg@16"] == often["pass@1"]
    width = lambda found: found["ci95"][1] - found["ci95"][0]
    mixed = measures.measures([[True] * 8 + [False] * 8] * 40, None, (1, 16))
    assert mixed["avg@16"]["se"] == 0
    wilson = width(measures.estimate([0.5 + 0.5 * (-1) ** i for i in range(40)], 1))
    assert width(mixed["avg@16"]) == pytest.approx(wilson)  # no spread to go by, so as if of one response each
    numbers = np.random.default_rng(0)
    coins = (numbers.random((4000, 16)) < 0.5).tolist()
    independent = 2 * 1.96 * math.sqrt(0.25 / 64000)
    assert width(measures.measures(coins, None, (1,))["avg@16"]) == pytest.approx(independent, rel=0.05)


def test_interval_at_the_ends():
    for value in (0.0, 1.0):
        found = measures.estimate([value] * 100, 8)
        assert found["value"] == value and found["se"] == 0 and 0 <= found["ci95"][0] < found["ci95"][1] <= 1
        assert found["ci95"][1] - found["ci95"][0] == pytest.approx(1.959964**2 / (100 + 1.959964**2))
    thirds = measures.estimate([1 / 3] * 7, 8)  # whose mean is not 1 / 3, but for rounding
    assert thirds["ci95"] == pytest.approx(measures.estimate([0.25] * 7, 8)["ci95"], abs=0.1)
    assert measures.estimate([1.0], 8) == {"value": 1.0, "se": None, "ci95": None}
    assert measures.estimate([math.nan], 8) == {"value": None, "se": None, "ci95": None}


def test_interval_of_other_numbers():
    values = [3.0, -1.0, math.nan, 2.5, 7.0]
    found, kept = measures.estimate(values), [3.0, -1.0, 2.5, 7.0]
    se = statistics.stdev(kept) / 2
    assert found["value"] == pytest.approx(2.875) and found["se"] == pytest.approx(se)
    assert found["ci95"] == pytest.approx([2.875 - 1.959964 * se, 2.875 + 1.959964 * se])


@pytest.mark.parametrize("k", [1, 2, 8])
def test_intervals_cover(k):
    """95% of them hold the truth, where value +- 1.96 se holds it in 51% (k = 8), measured with the same draws."""
    numbers, rates, hits = np.random.default_rng(k), lambda count: numbers.beta(2, 1, count), 0
    truth = (1 - (1 - rates(400_000)) ** k).mean()
    for _ in range(600):
        counts = numbers.binomial(8, rates(30))
        low, high = measures.estimate([measures.pass_at_k(8, count, k) for count in counts.tolist()], 8 / k)["ci95"]
        hits += low <= truth <= high
    assert 0.91 < hits / 600 < 0.99


# ---- answers ---------------------------------------------------------------------------------------------------------

SOLUTION = "She has 1,000 + 234 = <<1000+234=1234>>1,234 eggs.\n#### 1,234"


@pytest.mark.parametrize(
    "response, strict, flexible",
    [
        ("so\n#### 1234", "1234", "1234"),
        ("#### 1,234", "1234", "1234"),
        ("#### 1234.", "1234", "1234"),
        ("#### 1234 eggs, not 7", "1234", "7"),
        ("#### 5 and #### 1234", "5", "1234"),  # strict takes the first, flexible the last
        ("####1234", None, "1234"),  # no space
        ("#### $1234", None, "1234"),
        ("The answer is $1,234.", None, "1234"),
        ("The answer is \\boxed{1234}", None, "1234"),
        ("1234 eggs, 2 days", None, "2"),
        ("#### -1234", "-1234", "-1234"),
        ("#### 1234.0", "1234.0", "1234.0"),
        ("the answer is 1234...", None, "1234.."),
        ("no number", None, None),
        ("", None, None),
    ],
)
def test_gsm8k_strict_and_flexible(response, strict, flexible):
    found = [answers.harness_answer(response, flexible=way) for way in (False, True)]
    assert found == [strict, flexible]
    assert answers.harness_text(SOLUTION) == "1234"


@pytest.mark.parametrize(
    "response, answer",
    [
        ("so \\boxed{5}, or \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("<answer> Yes. </answer>", "yes"),
        ("<answer>\\boxed{7}</answer>", "7"),
        ("2 + 2\n#### $1,234.\nbye", "1234"),
        ("\\boxed{not closed", "\\boxed{not closed"),
        ("  Paris\n", "paris"),
        ("<think>Rome?</think> Paris.", "paris"),
        ("a  b\nc", "a b c"),
        ("1,2,3", "1,2,3"),
        ("", None),
        (" . ", None),
    ],
)
def test_plain_answer(response, answer):
    assert answers.plain_answer(response) == answer


def test_answers_of_sources():
    assert answers.voted_answer("gsm8k", "#### 3 then #### $1,234.") == "1234"
    assert answers.voted_answer("gsm8k", "#### $-3") == "-3"  # which the reward reads, too
    assert answers.voted_answer("gsm8k", "\\boxed{3}") is None
    assert answers.voted_answer("exact", " 1.0 ") == "1.0" and answers.voted_answer("exact", " ") is None
    assert answers.voted_answer("file.py:score", "<answer>B</answer>") == "b"


def test_equal_as_mathematics():
    texts = ["\\boxed{\\frac12}", "it is 0.5", "\\boxed{1/2}", "none", "\\boxed{2}", "", "so 2.0", "x \\boxed{x^2+x}",
             "\\boxed{x(x+1)}"]  # fmt: skip
    found = math_verifier.equal_answers(texts)
    assert found[3] == "none" and found[5] is None
    same = lambda *indices: len({found[i] for i in indices}) == 1
    assert same(0, 1, 2) and same(4, 6) and same(7, 8) and len(set(found)) == 5
    assert math_verifier.equal_answers(["The answer is Yes.", "\\boxed{\\text{yes}}", "No"]) == ["Yes", "Yes", "No"]


def test_a_vote_that_hangs_or_dies_has_no_answers(monkeypatch):
    """Only on its own prompt: the process is replaced, and the next call is answered."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(os.cpu_count()))  # so that there is one process
    workers = Workers(["math"], timeout=20.0)
    try:
        workers.start()
        prompts = [["\\boxed{1/2}", "0.5"], ["7", "no"]]
        expected = [["\\frac{1}{2}"] * 2, ["7", "no"]]
        assert workers.equal_answers(prompts) == expected
        for kind in (signal.SIGSTOP, signal.SIGKILL):
            workers.timeout = 0.3
            os.kill(workers.processes[0].process.pid, kind)
            assert workers.equal_answers(prompts[:1]) == [None]
            workers.timeout = 20.0
            assert workers.equal_answers(prompts) == expected
    finally:
        workers.close()


def test_a_vote_without_answers_is_taken_as_text(tmp_path, monkeypatch):
    """As many as it takes too long for are warned of."""
    monkeypatch.setattr(Workers, "equal_answers", lambda self, prompts: [None] * len(prompts))
    values = {**TINY, "output_dir": str(tmp_path), "reward": "math", "num_prompts": 3, "samples": 2}
    helpers.run_here(values, "evaluate")
    results, samples = read(values)
    assert results["votes_as_text"] == 3
    for sample in samples:
        stopped = sample["stop_reason"] == "stop"
        assert sample["extracted/math"] == (answers.plain_answer(sample["response"]) if stopped else None)


# ---- runs ------------------------------------------------------------------------------------------------------------

TINY = {"model": str(helpers.ROOT / "assets" / "tiny"), "dataset": "arithmetic", "system_prompt": "",
        "max_prompt_length": 16, "max_response_length": 48, "reward": "gsm8k", "num_prompts": 12, "samples": 6,
        "generation_batch_size": 20, "run_name": "run"}  # fmt: skip
ONE_CHECKER = {"LOCAL_WORLD_SIZE": "4"}


def measure(tmp_path, code: int = 0, **changes):
    """Run with TINY and changes: results, samples and the process."""
    values = {**TINY, "output_dir": str(tmp_path), **changes}
    done = helpers.run(values, code, script="evaluate", environment=ONE_CHECKER)
    return *read(values), done


def read(values: dict) -> tuple:
    folder = helpers.folder_of(values)
    if not (folder / "results.json").exists():
        return None, None
    results = json.loads((folder / "results.json").read_text(), parse_constant=helpers.refuse)
    return results, helpers.read_lines(folder / "samples.jsonl")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return measure(tmp_path_factory.mktemp("tiny"))


def test_run_on_arithmetic(tiny):
    results, samples, done = tiny
    rows = arithmetic_rows("test", 12)
    assert [(s["index"], s["sample"]) for s in samples] == [(i, j) for i in range(12) for j in range(6)]
    for sample in samples:
        row = rows[sample["index"]]
        assert sample["prompt"] == row["prompt"] and sample["answer"] == row["answer"]
        assert sample["reward/gsm8k"] == float(sample["response"].endswith(f"#### {row['answer']}"))
        assert sample["correct/gsm8k"] == (sample["reward/gsm8k"] == 1 and sample["stop_reason"] == "stop")
    correct = [[s["correct/gsm8k"] for s in samples[i : i + 6]] for i in range(0, 72, 6)]
    answers = [[s["extracted/gsm8k"] for s in samples[i : i + 6]] for i in range(0, 72, 6)]
    scores = results["scores"]["gsm8k"]
    assert list(scores) == ["avg@6", "pass@1", "pass@2", "pass@4", "maj@1", "maj@2", "maj@4"]
    assert len({s["response"] for s in samples}) > 40  # each has random numbers of its own
    assert 0.2 < scores["avg@6"]["value"] < 0.9  # the model is neither, so that this test sees something
    assert scores["avg@6"]["value"] == pytest.approx(sum(map(sum, correct)) / 72)
    for k in (1, 2, 4):
        expected = [float(vote_by_enumeration(*pair, k)) for pair in zip(correct, answers)]
        assert scores[f"maj@{k}"]["value"] == pytest.approx(sum(expected) / 12)
        expected = [[any(draw) for draw in itertools.combinations(row, k)] for row in correct]
        assert scores[f"pass@{k}"]["value"] == pytest.approx(statistics.fmean(map(statistics.fmean, expected)))
        assert scores[f"pass@{k}"]["se"] == pytest.approx(
            statistics.stdev(map(statistics.fmean, expected)) / math.sqrt(12)
        )
    assert (results["prompts"], results["samples"]) == (12, 6) and results["args"]["model"] == TINY["model"]
    assert results["versions"]["torch"] and results["rewards"]["gsm8k"]["missing"] == 0
    assert "avg@6" in done.out and f"{scores['avg@6']['value']:.4g}" in done.out and "results.json" in done.out
    assert "generate" in done.err and "Traceback" not in done.err


def test_samples_do_not_depend_on_how_many_or_on_the_batch(tiny, tmp_path):
    _, samples, _ = tiny
    _, fewer, _ = measure(tmp_path, samples=3, num_prompts=7, generation_batch_size=512)
    assert fewer == [s for s in samples if s["sample"] < 3 and s["index"] < 7]
    _, other, _ = measure(tmp_path, samples=3, num_prompts=7, seed=2, run_name="other")
    assert [s["response"] for s in other] != [s["response"] for s in fewer]


def test_ranks_share_the_prompts(tiny, tmp_path):
    values = {**TINY, "output_dir": str(tmp_path), "num_prompts": 7}
    helpers.run_ranks(values, 2, (0, 0), script="evaluate")
    results, samples = read(values)
    assert samples == [s for s in tiny[1] if s["index"] < 7] and results["generation"]["ranks"] == 2


def test_greedy(tmp_path):
    results, samples, _ = measure(tmp_path, temperature=0, samples=1, num_prompts=20)
    assert list(results["scores"]["gsm8k"]) == ["avg@1", "pass@1", "maj@1"] and len(samples) == 20
    _, again, _ = measure(tmp_path, temperature=0, samples=1, num_prompts=20, seed=5, run_name="again")
    assert again == samples


def test_same_accuracy_as_the_training_says(tmp_path):
    """Greedy, as grpo.py evaluates the model that it starts from."""
    results, _, _ = measure(tmp_path, temperature=0, samples=1, num_prompts=30)
    own = ("model", "dataset", "system_prompt", "max_prompt_length", "max_response_length", "reward")
    values = {name: TINY[name] for name in own} | {
        "output_dir": str(tmp_path), "run_name": "grpo", "rollout_batch_size": 2, "group_size": 2, "mini_batch_size": 4,
        "total_episodes": 4, "kl_coef": 0.0, "eval_prompts": 30, "eval_samples": 1, "save_every": 0,
    }  # fmt: skip
    helpers.run(values, environment=ONE_CHECKER)
    assert helpers.metrics_of(values)[0]["eval/greedy_accuracy"] == results["scores"]["gsm8k"]["avg@1"]["value"]


GSM8K = [{"question": f"{a}+{a}=", "answer": f"twice\n#### {2 * a:,}"} for a in (105, 206, 309, 777)]


def test_gsm8k_rows_and_mathematics(tmp_path):
    data = helpers.write_rows(tmp_path / "rows.jsonl", GSM8K)
    results, samples, _ = measure(tmp_path, dataset=data, reward="math", num_prompts=0, k=(1, 6))
    assert list(results["scores"]) == ["math", "gsm8k_strict", "gsm8k_flexible"]
    assert all(list(each) == ["avg@6", "pass@1", "pass@6", "maj@1", "maj@6"] for each in results["scores"].values())
    assert sum(s["correct/gsm8k_strict"] for s in samples) > 0
    for s in samples:
        expected = s["answer"].split("#### ")[1].replace(",", "")
        assert s["correct/gsm8k_strict"] == (f"#### {expected}" in s["response"])
        assert s["correct/math"] == (s["extracted/math"] == expected and s["stop_reason"] == "stop")
    assert results["votes_as_text"] == 0


def test_responses_that_are_cut_off(tmp_path):
    """They are not correct and don't vote, unless asked for; the harness's scores don't care."""
    (tmp_path / "r.py").write_text("def score(prompts, responses, **columns):\n    return [1.0] * len(responses)\n")
    data = helpers.write_rows(tmp_path / "rows.jsonl", [{**row, "answer": "#### 7"} for row in GSM8K])
    shared = dict(reward=f"{tmp_path / 'r.py'}:score", dataset=data, max_response_length=3, num_prompts=0)
    results, samples, _ = measure(tmp_path, **shared)
    name = shared["reward"]
    assert {s["stop_reason"] for s in samples} == {"length"} and {s["tokens"] for s in samples} == {3}
    assert results["scores"][name]["avg@6"]["value"] == results["scores"][name]["maj@4"]["value"] == 0
    assert results["stopped"] == 0 and results["without_answer"][name] == 1 and results["rewards"][name]["value"] == 1
    results, _, done = measure(tmp_path, **shared, require_stop=False, run_name="any")
    assert results["scores"][name]["avg@6"]["value"] == results["scores"][name]["maj@4"]["value"] == 1


def test_missing_scores_are_counted_and_no_silent_zero(tmp_path):
    (tmp_path / "r.py").write_text(
        "def some(prompts, responses, **columns):\n    return [None if '1' in p else 2.0 for p in prompts]\n"
        "def third(prompts, responses, **columns):\n"
        "    return [float(p[0]) if i % 3 else None for i, p in enumerate(prompts)]\n"
        "def none(prompts, responses, **columns):\n    return [None for p in prompts]\n"
        "def bad(prompts, responses, **columns):\n    raise RuntimeError('the judge is away')\n"
    )
    some = f"{tmp_path / 'r.py'}:some"
    results, samples, done = measure(tmp_path, reward=(some, "format"))
    missing = sum("1" in s["prompt"] for s in samples)
    assert 0 < missing < 72 and results["rewards"][some]["missing"] == missing
    assert results["rewards"][some]["value"] == 2 and results["scores"][some]["pass@1"]["value"] < 1
    assert f"{missing} of 72 responses got no score" in done.err
    assert list(results["scores"]) == [some]  # only the first source says what is correct
    # A prompt's mean is that of the scores that it got: in a batch of 5, the first and the fourth get none.
    third, values = f"{tmp_path / 'r.py'}:third", dict(run_name="third", num_prompts=4, samples=3)
    results, samples, _ = measure(tmp_path, reward=third, generation_batch_size=5, **values)
    lost = [s["reward/" + third] is None for s in samples]
    assert lost == [i % 5 in (0, 3) for i in range(12)]
    expected = statistics.fmean(float(s["prompt"][0]) for s in samples[::3])
    assert results["rewards"][third]["value"] == pytest.approx(expected)
    for name, why in (("none", "returned None"), ("bad", "the judge is away")):
        results, _, done = measure(tmp_path, 2, reward=f"{tmp_path / 'r.py'}:{name}", run_name=name)
        assert results is None and len(done.errors) == 1 and why in done.errors[0]


def test_sources_without_answers_have_no_vote(tmp_path):
    results, _, _ = measure(tmp_path, reward="format", samples=2)
    assert list(results["scores"]["format"]) == ["avg@2", "pass@1", "pass@2"] and results["without_answer"] == {}


def test_a_reward_model_alone(tmp_path):
    """It says nothing of right and wrong: only its mean is given."""
    from transformers import AutoModelForSequenceClassification

    folder = helpers.tiny_model(tmp_path / "model")
    scorer = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    scorer.save_pretrained(tmp_path / "scorer")
    helpers.make_tokenizer().save_pretrained(tmp_path / "scorer")
    name = str(tmp_path / "scorer")
    results, samples, _ = measure(tmp_path, model=folder, reward=name, num_prompts=5, samples=3)
    assert results["scores"] == {} and results["rewards"][name]["missing"] == 0
    means = [statistics.fmean(s[f"reward/{name}"] for s in samples[i : i + 3]) for i in range(0, 15, 3)]
    assert results["rewards"][name]["value"] == pytest.approx(statistics.fmean(means))
    assert results["rewards"][name]["se"] == pytest.approx(statistics.stdev(means) / math.sqrt(5))


GAME = """
class Again:
    def reset(self, prompt, index):
        self.prompt, self.index, self.turns = prompt, index, 0

    def step(self, response):
        if self.index < 0:
            raise RuntimeError("the board is lost")
        self.turns += 1
        return self.prompt, 0.5, self.turns == self.index
"""


def test_conversations(tmp_path):
    """As many turns as the environment asks for, their tokens without the observations; two ranks do the same."""
    (tmp_path / "game.py").write_text(GAME)
    rows = [{**row, "index": index} for index, row in zip((2, -1, 9, 1), arithmetic_rows("test", 4))]
    flags = dict(
        dataset=helpers.write_rows(tmp_path / "rows.jsonl", rows), environment=f"{tmp_path / 'game.py'}:Again",
        reward=("gsm8k", "environment"), num_prompts=0, samples=6, max_turns=3, max_response_length=160,
    )  # fmt: skip
    results, samples, done = measure(tmp_path, **flags)
    assert "6 of 24 responses are left out" in done.err and "the board is lost" in done.err
    assert {s["stop_reason"] for s in samples if s["index"] == 1} == {"error"}
    for s in samples:
        said = [turn["content"] for turn in s["turns"] if turn["role"] == "assistant"]
        last = said[-1].endswith(f"#### {s['answer']}")
        wanted = {0: ("done", 2, 1.0), 1: ("error", 1, None), 2: ("max_turns", 3, 1.5), 3: ("done", 1, 0.5)}[s["index"]]
        assert (s["stop_reason"], len(said), s["reward/environment"]) == wanted
        assert s["response"] == "".join(turn["content"] for turn in s["turns"])
        assert len("".join(said)) <= s["tokens"] <= len("".join(said)) + len(said)  # a token a character, and the stops
        assert s["reward/gsm8k"] == (None if s["index"] == 1 else float(last))
        assert s["correct/gsm8k"] == (last and s["stop_reason"] == "done")
    assert 0 < sum(s["correct/gsm8k"] for s in samples) < 12  # a second turn is nothing that the model has seen
    assert results["stopped"] == 0.5 and results["conversations"]["conversation/turns"] == 1.75
    assert results["conversations"]["stop_reason/error"] == results["conversations"]["stop_reason/max_turns"] == 0.25
    assert results["rewards"]["environment"]["missing"] == 6 and "maj@2" not in results["scores"].get("environment", {})
    values = {**TINY, **flags, "output_dir": str(tmp_path), "run_name": "ranks", "generation_batch_size": 2}
    helpers.run_ranks(values, 2, (0, 0), script="evaluate")
    assert read(values)[1] == samples


# ---- bad input -------------------------------------------------------------------------------------------------------

OUT_OF_RANGE = [
    dict(samples=-1), dict(samples=513), dict(temperature=-1), dict(temperature="nan"), dict(k=(0,)), dict(top_p=0),
    dict(top_k=-1), dict(num_prompts=-1), dict(max_response_length=0), dict(generation_batch_size=0),
    dict(reward_timeout=0), dict(micro_batch_tokens=0), dict(backend="nothing"),
]  # fmt: skip


@pytest.mark.parametrize("changes", OUT_OF_RANGE, ids=str)
def test_a_flag_out_of_range_is_named(changes, capsys):
    with pytest.raises(SystemExit) as end:
        cli.parse(evaluate.Args, helpers.words({**TINY, **changes}))
    (name,) = changes
    assert end.value.code == 2 and f"--{name}".replace("_", "-") in capsys.readouterr().err.replace("_", "-")


ERRORS = [
    (dict(temperature=0), "--samples 6"),  # of which all would be the same
    (dict(k=(1, 7)), "--k 1 7"),
    (dict(min_response_length=49), "--min_response_length 49"),
    (dict(reward="nothing"), "--reward nothing"),
    (dict(reward=("math", "math")), "names a source twice"),
    (dict(dataset="nothing"), "--dataset nothing"),
    (dict(dataset_split="validation"), "validation"),
    (dict(model="nothing/there"), "--model nothing/there"),
    (dict(max_prompt_length=3), "--max_prompt_length 3"),
    (dict(stop_token="ab"), "--stop_token 'ab'"),
]


def refused(tmp_path, capsys, **changes) -> str:
    """Return the one line with which evaluate.py ends the run."""
    with pytest.raises(SystemExit) as end:
        helpers.run_here({**TINY, "output_dir": str(tmp_path), **changes}, "evaluate")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert end.value.code == 2
    return line


@pytest.mark.parametrize("changes, message", ERRORS, ids=lambda x: x if isinstance(x, str) else "")
def test_bad_input_ends_with_one_line(changes, message, tmp_path, capsys):
    assert message in refused(tmp_path, capsys, **changes)
    assert not list(tmp_path.glob("**/*.json*"))


def test_a_model_that_the_decode_loop_cannot_run(tmp_path, capsys):
    model = helpers.tiny_model(tmp_path / "bloom", "bloom")
    line = refused(tmp_path, capsys, model=model)
    assert line.startswith(f"error: --model {model}: BloomForCausalLM ") and line.endswith("; take --backend vllm")


def test_no_folder_is_overwritten(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    line = refused(tmp_path, capsys)
    assert "--run_name run" in line and "exists" in line and not list((tmp_path / "run").iterdir())


def test_more_ranks_than_prompts(tmp_path):
    values = {**TINY, "output_dir": str(tmp_path), "num_prompts": 1}
    ranks = helpers.run_ranks(values, 2, (2, 2), script="evaluate")
    assert "1 prompts for 2 processes" in ranks[0].errors[0]


def test_default_names_differ_by_model(tmp_path):
    names = set()
    for model in ("runs/a/final", "runs/b/final", "org/name"):
        args = evaluate.Args(model=model, output_dir=str(tmp_path))
        names.add(Path(evaluate.check_args(args)[0]).name)
    assert names == {f"evaluate__{name}__gsm8k__1" for name in ("a-final", "b-final", "org-name")}


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_vllm_that_is_missing_is_named(tmp_path):
    _, _, done = measure(tmp_path, 2, backend="vllm")
    assert "--backend vllm" in done.errors[0] and "not installed" in done.errors[0]


def test_rows_that_name_their_sources(tmp_path):
    """Each prompt is judged by its own source; what is said of a source is said of its prompts."""
    rows = [{**row, "verifier": "gsm8k" if i < 3 else ["format"]} for i, row in enumerate(arithmetic_rows("test", 5))]
    data = helpers.write_rows(tmp_path / "rows.jsonl", rows)
    results, samples, _ = measure(tmp_path, dataset=data, reward=("gsm8k", "format"), num_prompts=0, samples=2)
    assert list(results["scores"]) == ["gsm8k", "format"] and results["prompts"] == 5
    for sample in samples:
        judges = [key for key in sample if key.startswith(("reward/", "correct/"))]
        own = "gsm8k" if sample["index"] < 3 else "format"
        assert judges == [f"reward/{own}", f"correct/{own}"]
    right = [s["correct/gsm8k"] for s in samples[:6]]
    assert results["scores"]["gsm8k"]["avg@2"]["value"] == pytest.approx(sum(right) / 6)
    assert results["rewards"]["format"] == {**results["rewards"]["format"], "value": 0, "missing": 0}
    assert results["scores"]["format"]["avg@2"]["value"] == 0 and "maj@2" not in results["scores"]["format"]


def test_columns_named_as_those_of_the_samples(tmp_path):
    """Rows may have columns of the names that samples.jsonl uses: a reward function gets its own. Of a list of data
    sets, which take turns, each has results of its own, too."""
    rows = [
        {"prompt": f"{a}+{a}=", "answer": str(2 * a), "index": 100 + a} for a in random.Random(0).sample(range(9), 5)
    ]
    (tmp_path / "r.py").write_text(
        "def score(prompts, responses, index, answer, **columns):\n"
        "    return [float(str(2 * (i - 100)) == a) for i, a in zip(index, answer)]\n"
    )
    helpers.write_rows(tmp_path / "rows.jsonl", rows)
    name = f"{tmp_path / 'r.py'}:score"
    helpers.write_rows(tmp_path / "zero.jsonl", [{"prompt": f"{a}+0=", "answer": "?", "index": 100} for a in range(3)])
    entries = [{"prob": weight, "filepath": path} for weight, path in ((2, "rows.jsonl"), (1, "zero.jsonl"))]
    (tmp_path / "mix.json").write_text(json.dumps(entries))
    results, samples, _ = measure(tmp_path, dataset=str(tmp_path / "mix.json"), reward=name, num_prompts=6, samples=2)
    assert results["rewards"][name]["value"] == pytest.approx(2 / 3)
    assert [s["index"] for s in samples[::2]] == list(range(6))
    assert Counter(s["dataset"] for s in samples) == {"rows.jsonl": 8, "zero.jsonl": 4}
    avg = {part: scores[name]["avg@2"]["value"] for part, scores in results["datasets"].items()}
    for part, value in avg.items():
        assert value == statistics.fmean(s[f"correct/{name}"] for s in samples if s["dataset"] == part)
    assert avg.keys() == {"rows.jsonl", "zero.jsonl"} and avg["zero.jsonl"] == 0
