"""Reward servers as sources of --reward."""

import asyncio
import json
import math
import os
from typing import Any

from plumbing.rewards.sources import Source, columns_of, finite_or_nan, turns_of
from utils import warn


class ServerSource(Source):
    """A reward server, asked in PaddleNLP's protocol (scripts/reward_server.py) for batches of
    responses.

    A request ends after --timeout, whatever has come until then. A batch is sent again after
    connection errors, time-outs and the statuses 408, 429 and 5xx. If that does not help, and after
    any other error, its responses have no score (NaN). A key in the variable REWARD_API_KEY is sent
    along.
    """

    most = 32  # responses in a request
    LARGEST = 1 << 24  # bytes of an answer, once it is decompressed
    PAUSES = (0, 2, 4, 8, 16, 0)  # seconds after each try that fails

    async def load(self) -> None:
        """Ask GET /health for `verifies` and `whole`, which a server without that page lacks."""
        self.at_once = asyncio.Semaphore(8)
        try:
            health = await self._request("GET", f"{self.name.rstrip('/')}/health")
            self.verifies, self.whole = bool(health["verifies"]), bool(health.get("whole"))
            if self.whole:
                self.most = Source.most
        except Exception:  # an address may answer anything
            warn(
                f"--reward {self.name}: has no /health, so a score of 1 or more counts as a correct response"
            )

    async def score(self, samples: list) -> list[float]:
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
        content = json.dumps(body, default=str)
        for pause in self.PAUSES:
            try:
                answer = await self._request("POST", self.name, content)
                scores = answer["score"]
                if answer["error_code"] or not isinstance(scores, list) or len(scores) != count:
                    raise ValueError(f"not {count} scores: {answer}")
                # JSON's null, NaN and infinity are scores that are missing.
                return list(map(finite_or_nan, scores))
            except TimeoutError:
                reason = self.late(self.timeout)
            except Exception as error:  # an address may answer anything
                reason = f"{type(error).__name__}: {error}"[:300]
                if isinstance(error, (ValueError, TypeError, LookupError)):
                    break  # it is no answer, and there will be no other one
            await asyncio.sleep(pause)
        self.failure = reason
        return [math.nan] * count

    async def _request(self, method: str, url: str, content: str = "") -> dict:
        """Return what a JSON answer holds; raise ValueError for another one, or OSError, if asking
        again may help.
        """
        import aiohttp  # slow, and for runs with a server only

        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("REWARD_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        limit = aiohttp.ClientTimeout(self.timeout)
        async with aiohttp.request(
            method, url, data=content, headers=headers, timeout=limit, allow_redirects=False
        ) as answer:
            body = bytearray()
            async for part in answer.content.iter_any():
                body += part
                if len(body) > self.LARGEST:
                    raise ValueError(f"the answer is longer than {self.LARGEST} bytes")
        if answer.status == 200:
            return json.loads(body)
        may_help = answer.status in (408, 429) or answer.status >= 500
        text = body.decode(errors="replace")
        raise (OSError if may_help else ValueError)(f"HTTP status {answer.status}: {text}")


def answer_text(answer: Any) -> str:
    """Return a reference answer as PaddleNLP's protocol has it."""
    if isinstance(answer, (list, dict)):
        return json.dumps(answer, default=str)
    return "" if answer is None else str(answer)
