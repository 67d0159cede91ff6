"""The reward of grpo_group_judge.sh: a model ranks the responses to each prompt.

JUDGE_URL is an OpenAI-compatible address, JUDGE_MODEL its model, and JUDGE_API_KEY its key.
"""

import asyncio
import os
import re
import sys
from itertools import groupby

import aiohttp

URL = os.environ["JUDGE_URL"] + "/v1/chat/completions"
KEY = {"Authorization": f"Bearer {os.environ.get('JUDGE_API_KEY', 'none')}"}
TASK = """Rank these answers to a question by how helpful and correct they are. End with "Ranking:" and all their \
numbers, the best first.

Question: {}

{}"""


async def ranks(prompt: str, responses: list[str]) -> list[float | None]:
    """Return the share of the others that each response beats; None without a ranking."""
    answers = "\n\n".join(f"Answer {i}: {response}" for i, response in enumerate(responses))
    message = {"role": "user", "content": TASK.format(prompt, answers)}
    request = {"model": os.environ["JUDGE_MODEL"], "messages": [message], "temperature": 0}
    try:
        async with aiohttp.request("POST", URL, json=request, headers=KEY) as answer:
            answer.raise_for_status()
            text = (await answer.json())["choices"][0]["message"]["content"]
            order = list(map(int, re.findall(r"\d+", text.rpartition("Ranking:")[2])))
    except Exception as error:  # it may answer anything; the other groups keep their scores
        print(f"warning: the judge: {error!r}", file=sys.stderr)
        order = []
    numbers = range(len(responses))
    if sorted(order) != [*numbers]:
        return [None] * len(responses)
    return [1 - order.index(i) / max(1, len(order) - 1) for i in numbers]


async def score(prompts, responses, rollout_group, **columns):
    rows = groupby(zip(rollout_group, prompts, responses), key=lambda row: row[:2])
    groups = [ranks(prompt, [response for *_, response in group]) for (_, prompt), group in rows]
    return sum(await asyncio.gather(*groups), [])


score.whole = True  # it gets whole groups, the responses to a prompt next to each other
score.verifies = False
