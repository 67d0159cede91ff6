"""A reward server as a source of scores, asked in PaddleNLP's protocol (scripts/reward_server.py).

A key in the variable REWARD_API_KEY goes with every request, unless the server's address has a user and password.

Rooms: plumbing/rewards/reward_worker.py (what a score is, how long to wait for it).
"""

import json
import math
import multiprocessing
import os
import time
from multiprocessing.pool import ThreadPool
from urllib.parse import unquote

import urllib3
from requests.utils import get_environ_proxies, select_proxy

from plumbing.rewards.reward_worker import POLL, columns_of, finite_or_nan, never
from utils import first_line, warn

BATCH = 32  # responses in a request
CONNECTIONS = 8  # requests at the same time
RETRIES = 4  # of a request
TRANSIENT = (408, 429, *range(500, 600))  # statuses that another try may not get
LONGEST_WAIT = 60.0  # seconds before a retry, whatever the server asks for


class Retry(urllib3.Retry):
    """Waits of 1, 2, 4 and 8 s (urllib3's own sequence begins with no wait), or what the server's Retry-After says."""

    def get_backoff_time(self) -> float:
        return 2.0 ** (len(self.history) - 1)

    def parse_retry_after(self, retry_after: str) -> float:
        try:
            return min(LONGEST_WAIT, super().parse_retry_after(retry_after))
        except urllib3.exceptions.InvalidHeader:
            return 0.0  # then the usual wait is taken


class ServerSource:
    """A reward server. It gets its responses in batches, several at the same time.

    A batch is sent again after connection errors, time-outs and the statuses 408, 429 and 5xx, RETRIES times. If that
    does not help, and after anything else, its responses have no score (NaN).
    """

    def __init__(self, url: str, timeout: float):
        """`timeout`: seconds to wait for a server's answer, or for the next bytes of it."""
        self.url, self.timeout, self.failure = url, timeout, ""
        # A server that sends a byte now and then never exceeds urllib3's timeout, which is for each wait on the socket.
        self.limit = (RETRIES + 1) * timeout + RETRIES * LONGEST_WAIT  # seconds of a request with all its retries
        # urllib3, as requests would not try again when the connection breaks within an answer.
        retries = Retry(RETRIES, status_forcelist=TRANSIENT, allowed_methods=None, raise_on_status=False)
        options = {"maxsize": CONNECTIONS, "timeout": timeout, "retries": retries}
        proxy = select_proxy(url, get_environ_proxies(url))
        self.connections = urllib3.ProxyManager(proxy, **options) if proxy else urllib3.PoolManager(**options)
        user = unquote(urllib3.util.parse_url(url).auth or "")  # of http://user:password@host
        self.headers = {"Content-Type": "application/json", **urllib3.make_headers(basic_auth=user or None)}
        key = os.environ.get("REWARD_API_KEY")
        if key and not user:
            self.headers["Authorization"] = f"Bearer {key}"

    @property
    def verifies(self) -> bool:
        """Whether its scores tell right from wrong, as GET /health says; a server without that page is taken to."""
        page, options = f"{self.url.rstrip('/')}/health", {"headers": self.headers, "retries": 0}
        try:
            with ThreadPool(1) as pool:  # for a limit on all of the answer, as in `score`
                answer = pool.apply_async(self.connections.request, ("GET", page), options).get(self.timeout)
            return bool(json.loads(answer.data)["verifies"])
        except Exception:  # an address may answer anything
            warn(f"--reward {self.url}: has no /health, so a score of 1 or more is taken for a correct response")
            return True

    def try_out(self, rows: list[dict], texts: list[str], responses: list[list[int]]) -> str:
        """Return why there is no answer to a trial request, "" if there is one."""
        self.score(rows, texts, responses)
        return self.failure

    def score(self, rows: list[dict], texts: list[str], responses: list[list[int]], interrupted=never) -> list[float]:
        self.failure, scores = "", []
        parts = [slice(start, start + BATCH) for start in range(0, len(rows), BATCH)]
        end = time.monotonic() + math.ceil(len(parts) / CONNECTIONS) * self.limit
        with ThreadPool(CONNECTIONS) as pool:  # of daemon threads: one that is stuck does not keep the process alive
            answers = [pool.apply_async(self._ask, (question(rows[part], texts[part]),)) for part in parts]
            for part, answer in zip(parts, answers):
                while not (answer.ready() or interrupted() or time.monotonic() > end):
                    answer.wait(POLL)
                try:
                    found, failure = answer.get(0.0)
                except multiprocessing.TimeoutError:
                    found, failure = None, f"gave no complete answer within {self.limit:g} s"
                scores += found or [math.nan] * len(rows[part])
                self.failure = failure or self.failure
        return scores

    def _ask(self, question: dict) -> tuple[list[float] | None, str]:
        """Return the scores of a batch, or None and why there are none."""
        start, count = time.monotonic(), len(question["src"])
        try:
            body = json.dumps(question, default=str)
            answer = self.connections.request("POST", self.url, body=body, headers=self.headers)
            return read_scores(answer.status, answer.data, count), ""
        except Exception as error:  # an address may answer anything
            reason = error.reason if isinstance(error, urllib3.exceptions.MaxRetryError) else error
            return None, f"gave up after {time.monotonic() - start:.1f} s ({first_line(reason)})"


def read_scores(status: int, data: bytes, count: int) -> list[float]:
    """Return the `count` scores in a server's answer, NaN for null. Raise an exception that says why there are none."""
    beginning = data[:300].decode(errors="replace")
    if not 200 <= status < 300:
        raise ValueError(f"HTTP status {status}: {beginning}")
    try:
        content = json.loads(data)
    except ValueError:
        raise ValueError(f"gave no JSON but {beginning!r}") from None
    if content.get("error_code") != 0:
        raise ValueError(f"error_code {content.get('error_code')}: {content.get('error_msg')}")
    scores = content["score"]
    if not isinstance(scores, list):  # the characters of "00" and the keys of {"0": 1} would pass for numbers
        raise ValueError(f"gave {type(scores).__name__} as score, which has to be a list")
    if len(scores) != count:
        raise ValueError(f"gave {len(scores)} scores for {count} responses")
    return [finite_or_nan(score) for score in scores]


def question(rows: list[dict], texts: list[str]) -> dict:
    """Return what a request says: PaddleNLP's fields, and "columns" for what else a source may read from a row."""
    content = {
        "src": [row["prompt"] for row in rows], "tgt": [as_text(row.get("answer")) for row in rows], "response": texts
    }  # fmt: skip
    columns = columns_of(rows)
    return {**content, "columns": columns} if columns else content


def as_text(answer) -> str:
    """Return a reference answer as PaddleNLP's protocol has it."""
    if isinstance(answer, (list, dict)):
        return json.dumps(answer, default=str)
    return "" if answer is None else str(answer)
