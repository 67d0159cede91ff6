"""The reward of grpo_reward_server.sh: who the last paragraph calls a knight and who a knave is as
in the reference.
"""

import re


def roles(text: str) -> set[tuple[str, str]]:
    """Return {(name, "knight" or "knave")} of statements such as "Zoey is a knave" or "Zoey:
    knave"; none of a text that names a role otherwise, too, as in "Zoey is a knave or a knight".
    """
    text = re.sub(r"\\[a-z]+|[*_]", " ", text.lower())
    statements = re.findall(
        r"(\w[\w-]*)[^\w.,;!?\n]+(?:is\s+)?(?:an?\s+|the\s+)?(knight|knave)\b", text
    )
    return set(statements) if len(statements) == len(re.findall("knight|knave", text)) else set()


def score(responses: list[str], answer: list[str], **columns) -> list[float]:
    conclusions = [
        response.rpartition("</think>")[2].strip().rpartition("\n\n")[2] for response in responses
    ]
    return [float(roles(text) == roles(truth) != set()) for text, truth in zip(conclusions, answer)]
