"""Functions from users' files: the forms in which they are called, and what they may return."""

import asyncio
import json
import math
from pathlib import Path

import numpy as np
import pytest

from plumbing.rewards.functions import load_reward_function, score_by

MESSAGES = [{"role": "user", "content": "1+1="}]
COLUMNS = {
    "prompt": ["1+1=", MESSAGES],
    "answer": ["2", 2],
    "data_source": ["a", None],
    "extra_info": [{"x": 1}, None],
}
SHOWN = ["<1+1=>", "<1+1=>"]
CALL = (SHOWN, ["two", "2"], [[7, 8, 9], [5]], COLUMNS)
# scores, or that it is refused, and the function
FORMS = Path(__file__).with_name("data") / "reward_functions.txt"


def lengths(responses: list, as_expected: bool = True) -> list[int]:
    assert as_expected
    return list(map(len, responses))


TOGETHER = asyncio.Barrier(2)


async def async_together(solution_str: str, **_) -> int:
    """Ends only if the calls for both responses run side by side."""
    await asyncio.wait_for(TOGETHER.wait(), 60)
    return len(solution_str)


@pytest.mark.parametrize(
    "expected, function", [line.split("\t") for line in FORMS.read_text().splitlines()]
)
def test_forms(expected, function):
    """A function that would get no responses is refused."""
    if expected == "refused":
        with pytest.raises(TypeError, match="gets the responses|missing"):
            score_by(eval(function), *CALL)
    else:
        results = [x if isinstance(x, dict) else {"score": x} for x in json.loads(expected)]
        assert score_by(eval(function), *CALL) == results


def test_token_ids_that_are_not_there():
    """On a reward server without a tokenizer: an error, not lengths of 0."""
    call = (*CALL[:2], [[], []], COLUMNS)
    assert score_by(lambda completions: [0, 1], *call) == [{"score": 0}, {"score": 1}]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'completion_ids'"):
        score_by(lambda completion_ids: [0, 1], *call)


def test_what_trl_hands_over_besides():
    """The step, and a metric, whose values of a call are averaged as in TRL; what there is not is
    missing by name, or read by a name that the message says.
    """

    def score(completions, trainer_state, log_metric, log_extra=None, **columns):
        log_metric("late", trainer_state.global_step > 3)
        for completion in completions:
            log_metric("length", len(completion))
        return {"epoch": trainer_state.epoch} if trainer_state.global_step == 9 else [1, None]

    columns = {"prompt": ["1+1=", "1+1="], "answer": ["2", "2"]}
    call = (SHOWN, ["two", "2"], [[7], [5]], columns)
    for step in (0, 4):
        results = score_by(score, *call, step)
        assert [x["late"] for x in results] == [step > 3] * 2
        assert [x["length"] for x in results] == [2.0] * 2
        assert results[0]["score"] == 1 and math.isnan(results[1]["score"])
    with pytest.raises(AttributeError, match="has no attribute 'epoch'"):
        score_by(score, *call, 9)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'trainer_state'"):
        score_by(score, *call)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'log_extra'"):
        score_by(lambda completions, log_extra: [1, 1], *call, 4)


OF_THE_FILE = ["of", "the file"]
TALKS = [[{"role": "assistant", "content": text}] for text in CALL[1]]
TAKEN = [  # a column, the responses as conversations, what it scores, and a function
    (
        "turns",
        (),
        [3, 1],
        lambda completions, turns: lengths(completions[:1], turns == OF_THE_FILE) + [1],
    ),
    ("turns", (), [3, 1], lambda responses, turns: lengths(responses, turns == OF_THE_FILE)),
    ("turns", TALKS, [1, 1], lambda completions: lengths(completions, completions == TALKS)),
    (
        "responses",
        (),
        [1, 1],
        lambda completion_ids, responses: lengths(["a", "b"], responses == OF_THE_FILE),
    ),
    ("prompts", (), [3, 1], lambda responses: lengths(responses)),
    ("solution_str", (), [3, 1], lambda solution_str, **_: len(solution_str)),
    ("turns", TALKS, None, lambda responses, turns: [0, 0]),
    ("turns", TALKS, None, lambda completions, **columns: [0, 0]),
    ("responses", (), None, lambda responses: [0, 0]),
    ("prompts", (), None, lambda prompts, completions: [0, 0]),
    ("prompts", (), None, lambda responses, **columns: [0, 0]),
    ("log_metric", (), None, lambda completions, log_metric: [0, 0]),
]


@pytest.mark.parametrize("column, turns, scores, function", TAKEN)
def test_columns_with_the_names_of_other_arguments(column, turns, scores, function):
    """They never replace what the project gives, and are refused where the function would get
    both.
    """
    call = (function, *CALL[:3], COLUMNS | {column: OF_THE_FILE}, 0, turns)
    if scores is None:
        with pytest.raises(TypeError, match=f"column '{column}', the name of another"):
            score_by(*call)
    else:
        assert [x["score"] for x in score_by(*call)] == scores


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
    calls = [score_by(load_reward_function(f"{path}:{name}"), *CALL) for _ in range(2)]
    assert calls == [[{"score": 1}] * 2, [{"score": 2}] * 2]


@pytest.mark.parametrize(
    "scores", [(1, None), [True, np.float32(2)], np.array([1.0, math.nan]), (x for x in (1, 2))]
)
def test_numbers(scores):
    results = score_by(lambda prompts, responses: scores, *CALL)
    assert len(results) == 2 and all(type(result["score"]) is float for result in results)


@pytest.mark.parametrize(
    "scores",
    [{1: 1, 2: 2}, {1, 2}, 1.0, None, [1.0], [1.0] * 3, "11", b"11", [[]] * 2, ["a", 1], [{}] * 2],
)
def test_other_results(scores):
    with pytest.raises(
        (TypeError, ValueError), match="returned (a|[13] scores)|, not 'list'|float: 'a'"
    ):
        score_by(lambda prompts, responses: scores, *CALL)


def test_a_file_with_postponed_annotations_and_a_dataclass(tmp_path):
    """dataclasses looks the file's names up in sys.modules. Two functions of a file share what it
    holds.
    """
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
    assert score_by(load_reward_function(f"{path}:score"), *CALL) == [{"score": 3}] * 2
    assert score_by(load_reward_function(f"{path}:calls"), *CALL) == [{"score": 1}] * 2
    with pytest.raises(AttributeError, match="has no attribute 'grade'"):
        load_reward_function(f"{path}:grade")
