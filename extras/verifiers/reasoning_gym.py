"""--reward reasoning_gym: the scores of the tasks of the package reasoning_gym."""

from typing import Any

from plumbing.data.tasks import reasoning_gym_dataset
from plumbing.rewards.answers import stated_text
from plumbing.rewards.verifiers import Verifier


def reasoning_gym(response: str, source: Any) -> float:
    """Return the score of the reasoning_gym task itself, between 0 and 1 for an answer that is
    partly right.

    An answer that its scorer cannot read (some raise an exception) gives 0, if it can read the
    right answer.

    Args:
        source: [task, size, seed, index], from which the problem is made again: the row's column
            "reasoning_gym".
    """
    task, size, seed, index = source
    dataset = reasoning_gym_dataset(task, size, seed)
    entry = dataset[index]
    try:
        return float(dataset.score_answer(stated_text(response), entry=entry))
    except Exception:
        dataset.score_answer(entry["answer"], entry=entry)
        return 0.0


VERIFIER = Verifier(reasoning_gym, "reasoning_gym", "reasoning_gym", read=tuple)
