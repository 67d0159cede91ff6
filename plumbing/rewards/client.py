"""A reward server as a source of scores, asked in PaddleNLP's protocol (scripts/reward_server.py).

A key in the variable REWARD_API_KEY goes with every request.
"""

import json
import math
import os
from multiprocessing.pool import ThreadPool

import urllib3

from plumbing.rewards.workers import POLL, columns_of, finite_or_nan, never
from utils import warn

BATCH = 32  # responses in a request
CONNECTIONS = 8  # requests at the same time
RETRIES = urllib3.Retry(  # after 0, 2, 4, 8 and 16 s, or what the server's Retry-After says
    5, backoff_factor=1, retry_after_max=60, allowed_methods=None, raise_on_status=False,
    status_forcelist=(408, 429, *range(500, 600)),
)  # fmt: skip


class ServerSource:
    """A reward server, which gets the responses in batches, several at the same time.

    A batch is sent again after connection errors, time-outs and the statuses 408, 429 and 5xx. If that does not help,
    and after any other error, its responses have no score (NaN).
    """

    def __init__(self, url: str, timeout: float):
        """`timeout`: seconds to wait for a connection, and for the server's answer."""
        self.url, self.failure = url, ""
        # urllib3, as requests does not retry where the connection breaks within an answer.
        self.connections = urllib3.PoolManager(maxsize=CONNECTIONS, timeout=timeout, retries=RETRIES)
        self.headers = {"Content-Type": "application/json"}
        if key := os.environ.get("REWARD_API_KEY"):
            self.headers["Authorization"] = f"Bearer {key}"

    @property
    def verifies(self) -> bool:
        """Whether its scores tell right from wrong, by GET /health; True for a server without that page."""
        try:
            answer = self.connections.request("GET", f"{self.url.rstrip('/')}/health", headers=self.headers, retries=0)
            return bool(answer.json()["verifies"])
        except Exception:  # an address may answer anything
            warn(f"--reward {self.url}: has no /health, so a score of 1 or more counts as a correct response")
            return True

    def score(self, rows: list[dict], texts: list[str], responses: list[list[int]], interrupted=never) -> list[float]:
        self.failure = ""
        batches = [(rows[i : i + BATCH], texts[i : i + BATCH]) for i in range(0, len(rows), BATCH)]
        with ThreadPool(CONNECTIONS) as pool:
            answers = pool.starmap_async(self._ask, batches, chunksize=1)
            while not (answers.ready() or interrupted()):
                answers.wait(POLL)
            if not answers.ready():
                self.failure = "the run is interrupted"
                return [math.nan] * len(rows)
        return [score for scores in answers.get() for score in scores]

    def _ask(self, rows: list[dict], texts: list[str]) -> list[float]:
        """Return the scores of a batch; NaN for each response, and why in `failure`, if there are none."""
        columns = columns_of(rows)
        body = {"src": [row["prompt"] for row in rows], "tgt": list(map(as_text, columns.pop("answer")))}
        body |= {"response": texts, "columns": columns} if columns else {"response": texts}
        try:
            content = json.dumps(body, default=str)
            answer = self.connections.request("POST", self.url, body=content, headers=self.headers, redirect=False)
            if not 200 <= answer.status < 300:
                raise ValueError(f"HTTP status {answer.status}: {answer.data[:300].decode(errors='replace')}")
            content = answer.json()
            if content["error_code"] or not isinstance(content["score"], list) or len(content["score"]) != len(rows):
                raise ValueError(f"not {len(rows)} scores: {content}")
            return list(map(finite_or_nan, content["score"]))  # null, NaN and infinity are scores that are missing
        except Exception as error:  # an address may answer anything
            self.failure = f"gave no scores ({type(error).__name__}: {' '.join(str(error).split())[:300]})"
            return [math.nan] * len(rows)


def as_text(answer) -> str:
    """Return a reference answer as PaddleNLP's protocol has it."""
    if isinstance(answer, (list, dict)):
        return json.dumps(answer, default=str)
    return "" if answer is None else str(answer)
