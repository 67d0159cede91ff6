"""The reward that scripts/train/smollm2.sh measures brevity by: whether a response is short."""


def at_most_30_words(prompts: list, responses: list, **columns: list) -> list[float]:
    return [float(len(response.split()) <= 30) for response in responses]
