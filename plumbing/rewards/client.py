"""A reward server as a source of scores, asked in PaddleNLP's protocol (scripts/reward_server.py).

A key in the variable REWARD_API_KEY goes with every request.
"""

import json
import math
import os
from multiprocessing.pool import ThreadPool

import urllib3

from plumbing.rewards.workers import POLL, columns_of, finite_or_nan, never
from utils import first_line, warn

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

    def try_out(self, rows: list[dict], texts: list[str], responses: list[list[int]]) -> str:
        """Return why there is no answer to a trial request, "" if there is one."""
        self.score(rows, texts, responses)
        return self.failure

    def score(self, rows: list[dict], texts: list[str], responses: list[list[int]], interrupted=never) -> list[float]:
        self.failure, scores = "", []
        batches = [slice(start, start + BATCH) for start in range(0, len(rows), BATCH)]
        with ThreadPool(CONNECTIONS) as pool:
            answers = [pool.apply_async(self._ask, (rows[batch], texts[batch])) for batch in batches]
            for batch, answer in zip(batches, answers):
                while not (answer.ready() or interrupted()):
                    answer.wait(POLL)
                if answer.ready():
                    batch_scores, failure = answer.get()
                else:
                    batch_scores, failure = [math.nan] * len(rows[batch]), "the run is interrupted"
                scores += batch_scores
                self.failure = failure or self.failure
        return scores

    def _ask(self, rows: list[dict], texts: list[str]) -> tuple[list[float], str]:
        """Return the scores of a batch and "", or NaN for each response and why there are none."""
        try:
            body = json.dumps(request_body(rows, texts), default=str)
            answer = self.connections.request("POST", self.url, body=body, headers=self.headers)
            return read_scores(answer.status, answer.data, len(rows)), ""
        except Exception as error:  # an address may answer anything
            reason = error.reason if isinstance(error, urllib3.exceptions.MaxRetryError) else error
            return [math.nan] * len(rows), f"gave no scores ({first_line(reason)})"


def read_scores(status: int, data: bytes, count: int) -> list[float]:
    """Return the `count` scores in a server's answer, NaN for null. Raise an exception if it has another form."""
    if not 200 <= status < 300:
        raise ValueError(f"HTTP status {status}: {data[:300].decode(errors='replace')}")
    content = json.loads(data)
    if content.get("error_code") != 0:
        raise ValueError(f"error_code {content.get('error_code')}: {content.get('error_msg')}")
    scores = content["score"]
    if not isinstance(scores, list) or len(scores) != count:  # the characters of "00" would pass for numbers
        raise ValueError(f"score is {str(scores)[:100]}, not a list of {count} numbers")
    return [finite_or_nan(score) for score in scores]


def request_body(rows: list[dict], texts: list[str]) -> dict:
    """Return PaddleNLP's fields, and "columns" for what else a source may read from a row."""
    body = {
        "src": [row["prompt"] for row in rows], "tgt": [as_text(row.get("answer")) for row in rows], "response": texts
    }  # fmt: skip
    columns = {name: values for name, values in columns_of(rows).items() if name != "answer"}
    return {**body, "columns": columns} if columns else body


def as_text(answer) -> str:
    """Return a reference answer as PaddleNLP's protocol has it."""
    if isinstance(answer, (list, dict)):
        return json.dumps(answer, default=str)
    return "" if answer is None else str(answer)
