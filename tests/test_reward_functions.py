"""Functions from users' files: the forms in which they are called, and what they may return."""

import math

import numpy as np
import pytest

from plumbing.rewards.functions import load_scorer, score_by

MESSAGES = [{"role": "user", "content": "1+1="}]
COLUMNS = {"prompt": ["1+1=", MESSAGES], "answer": ["2", 2], "data_source": ["a", None], "extra_info": [{"x": 1}, None]}
CALL = (["<1+1=>", "<1+1=>"], ["two", "2"], [[7, 8, 9], [5]], COLUMNS)


def ours(prompts, responses, **columns):
    assert prompts == ["<1+1=>", "<1+1=>"] and columns == COLUMNS
    return [len(r) for r in responses]


def ours_by_other_names(prompt, texts, answer, data_source):
    assert prompt == ["<1+1=>", "<1+1=>"] and (answer, data_source) == (["2", 2], ["a", None])
    return [len(t) for t in texts]


async def asynchronous(prompts, responses, **columns):
    return [len(r) for r in responses]


def trl(completions, answer, **kwargs):
    assert kwargs.keys() - {"completion_ids"} == {"prompts", "data_source", "extra_info"}
    assert kwargs["prompts"] == COLUMNS["prompt"] and answer == ["2", 2]
    assert completions[1] == [{"role": "assistant", "content": "2"}]
    return [len(completions[0]), len(completions[1][0]["content"])]


def trl_ids(completion_ids, **kwargs):
    return [len(ids) for ids in completion_ids]


def verl(data_source, solution_str, ground_truth, extra_info=None):
    row = {"two": ("a", "2", {"x": 1}), "2": (None, 2, {})}[solution_str]
    assert (data_source, ground_truth, extra_info) == row
    return len(solution_str)


def verl_dict(solution_str, ground_truth, **kwargs):
    return {"score": len(solution_str), "acc": solution_str == ground_truth}


@pytest.mark.parametrize("function", [ours, ours_by_other_names, asynchronous, trl, trl_ids, verl, verl_dict])
def test_forms(function):
    assert score_by(function, *CALL) == [3.0, 1.0]


def test_token_ids_that_are_not_there():
    """On a reward server without a tokenizer: an error, not lengths of 0."""
    assert score_by(trl, CALL[0], CALL[1], [[], []], COLUMNS) == [3, 1]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'completion_ids'"):
        score_by(trl_ids, CALL[0], CALL[1], [[], []], COLUMNS)


def test_a_function_that_shortens_the_list_of_responses():
    def pops(prompts, responses):
        responses.pop(0)
        return [len(response) for response in responses]

    with pytest.raises(ValueError, match="returned 1 scores for 2 responses"):
        score_by(pops, ["p", "p"], ["two", "2"], [[], []], {})


@pytest.mark.parametrize("name", ["Counter", "counter.score", "counter"])
def test_a_class_or_method_keeps_its_state(tmp_path, name):
    path = tmp_path / "judge.py"
    path.write_text(
        "class Counter:\n    calls = 0\n"
        "    def __call__(self, prompts, responses, **columns): return self.score(prompts, responses)\n"
        "    def score(self, prompts, responses, **columns):\n        self.calls += 1\n"
        "        return [self.calls] * len(responses)\n"
        "counter = Counter()\n"
    )
    assert [score_by(load_scorer(f"{path}:{name}"), *CALL) for _ in range(2)] == [[1, 1], [2, 2]]


@pytest.mark.parametrize("scores", [(1, None), [True, np.float32(2)], np.array([1.0, math.nan]), (x for x in (1, 2))])
def test_numbers(scores):
    numbers = score_by(lambda prompts, responses: scores, *CALL)
    assert len(numbers) == 2 and all(x is None or type(x) is float for x in numbers)


@pytest.mark.parametrize("scores", [{1: 1, 2: 2}, {1, 2}, 1.0, None, [1.0], [1.0] * 3, "11", [[1.0], [1.0]], ["a", 1]])
def test_other_results(scores):
    with pytest.raises((TypeError, ValueError)):
        score_by(lambda prompts, responses: scores, *CALL)


def test_a_file_with_postponed_annotations_and_a_dataclass(tmp_path):
    """dataclasses looks the file's names up in sys.modules. Two functions of a file share what it holds."""
    path = tmp_path / "judge.py"
    path.write_text(
        "from __future__ import annotations\n"
        "import dataclasses, typing\n"
        "@dataclasses.dataclass\n"
        "class Limits:\n    most: typing.ClassVar[int] = 3\n    seen: int = 0\n"
        "limits = Limits()\n"
        "def score(prompts, responses):\n    limits.seen += 1\n    return [limits.most] * len(responses)\n"
        "def calls(prompts, responses):\n    return [limits.seen] * len(responses)\n"
    )
    assert score_by(load_scorer(f"{path}:score"), *CALL) == [3, 3]
    assert score_by(load_scorer(f"{path}:calls"), *CALL) == [1, 1]
    with pytest.raises(AttributeError, match="has no attribute 'grade'"):
        load_scorer(f"{path}:grade")
