"""The reward of grpo_group_judge.sh: a model ranks the responses to each prompt.

JUDGE_URL is an OpenAI-compatible address, JUDGE_MODEL its model, and JUDGE_API_KEY its key.
"""

import asyncio
import os
import re
from itertools import groupby

import httpx

TASK = """Rank these answers to a question by how helpful and correct they are. End with "Ranking:" and all their \
numbers, the best first.

Question: {}

{}"""
KEY = {"Authorization": f"Bearer {os.environ.get('JUDGE_API_KEY', 'none')}"}
# All calls of a run have one event loop.
client = httpx.AsyncClient(base_url=os.environ["JUDGE_URL"], headers=KEY, timeout=None)


async def ranks(prompt: str, responses: list[str]) -> list[float]:
    """Return the share of the other responses that each one beats."""
    answers = "\n\n".join(f"Answer {i}: {response}" for i, response in enumerate(responses, 1))
    message = {"role": "user", "content": TASK.format(prompt, answers)}
    request = {"model": os.environ["JUDGE_MODEL"], "messages": [message], "temperature": 0}
    answer = await client.post("/v1/chat/completions", json=request)
    text = answer.raise_for_status().json()["choices"][0]["message"]["content"]
    order = list(map(int, re.findall(r"\d+", text.rpartition("Ranking:")[2])))
    places = {number: place for place, number in enumerate(order)}
    if sorted(order) != list(range(1, len(responses) + 1)):
        raise ValueError(f"no ranking: {text[-100:]}")
    return [1 - places[i] / max(1, len(order) - 1) for i in sorted(places)]


async def score(prompts, responses, **columns):
    pairs = groupby(zip(prompts, responses), key=lambda pair: pair[0])
    groups = [(prompt, [response for _, response in group]) for prompt, group in pairs]
    ranked = await asyncio.gather(*(ranks(*group) for group in groups), return_exceptions=True)
    if all(isinstance(x, Exception) for x in ranked):
        raise ranked[0]  # such as for a wrong address
    missing = [[None] * len(group) for _, group in groups]  # no ranking: no scores
    scores = [none if isinstance(x, Exception) else x for x, none in zip(ranked, missing)]
    return sum(scores, [])


score.whole = True  # it gets whole groups, the responses to a prompt next to each other
score.verifies = False
