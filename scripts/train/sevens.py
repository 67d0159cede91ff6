"""A reward whose credit shows in the text: how many sevens a response has.

bash scripts/demo.sh ppo --reward scripts/train/sevens.py:sevens --no-non_stop_penalty
"""


def sevens(prompts: list[str], responses: list[str], **columns) -> list[float]:
    """Return a tenth of a point for each digit 7 of a response, up to 1."""
    return [min(1.0, response.count("7") / 10) for response in responses]
