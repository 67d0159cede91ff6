"""Reward servers as sources of --reward."""

import asyncio
import json
from typing import Any

from extras.http import SERVER_PATIENCE, NoSuchPage, ask_server
from plumbing.rewards.sources import Source, columns_of, finite_or_nan, turns_of
from utils import UserError, warn


class ServerSource(Source):
    """A reward server, asked in PaddleNLP's protocol (scripts/reward_server.py) for batches of
    responses.

    If `ask_server` has no answer, or one that is none, the responses of the batch have no score.
    --timeout limits a request. A key in the variable REWARD_API_KEY is sent along.
    """

    most = 32  # responses in a request

    async def load(self) -> None:
        """Ask GET /health for `verifies` and `whole`, which a server without that page lacks."""
        self.at_once = asyncio.Semaphore(8)
        try:
            health = await self._ask(self.name.rstrip("/"), "/health")
        except NoSuchPage:
            health = {}
        except RuntimeError as error:
            raise UserError(f"--reward {error}", local=True) from error
        if "verifies" not in health:
            warn(
                f"--reward {self.name}: has no `verifies` at /health, so a score of 1 or more counts "
                "as a correct response"
            )
        self.verifies = bool(health.get("verifies", True))
        self.whole = bool(health.get("whole"))
        if self.whole:
            self.most = Source.most

    async def score(self, samples: list) -> list:
        count = len(samples)
        rows = [sample.row for sample in samples]
        columns = columns_of(rows)
        body = {
            "src": [row["prompt"] for row in rows],
            "tgt": list(map(answer_text, columns.pop("answer"))),
            "response": [sample.text for sample in samples],
            "messages": [row.get("messages") for row in rows],
            "columns": columns,
            **({"turns": turns} if (turns := turns_of(rows)) else {}),
        }
        try:
            answer = await self._ask(self.name, "", body)
            scores = answer.get("score")
            if not isinstance(scores, list) or len(scores) != count or answer["error_code"]:
                raise ValueError(f"not {count} scores: {answer}")
            # JSON's null, NaN and infinity are scores that are missing.
            return list(map(finite_or_nan, scores))
        except Exception as error:  # an address may answer anything
            self.failure = f"{type(error).__name__}: {error}"[:300]
            return [None] * count

    async def _ask(self, url: str, path: str, body: dict | None = None) -> dict:
        return await ask_server(
            url, path, body, self.timeout, SERVER_PATIENCE, key="REWARD_API_KEY"
        )


def answer_text(answer: Any) -> str:
    """Return a reference answer as PaddleNLP's protocol has it."""
    if isinstance(answer, (list, dict)):
        return json.dumps(answer, default=str)
    return "" if answer is None else str(answer)
