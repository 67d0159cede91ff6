"""HTTP: how runs ask servers, and what this project's own servers log of malformed requests."""

import asyncio
import contextlib
import json
import logging
import os
import time

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web import RequestPayloadError

from utils import first_line, one_line

SERVER_START = 600.0  # seconds in which a server has to answer when a run starts
SERVER_PATIENCE = 120.0  # seconds for which a server may be away later


class NoSuchPage(RuntimeError):
    """A server has nothing at a path, or does not know GET."""


async def ask_server(
    url: str,
    path: str,
    body: dict | None = None,
    timeout: float | None = 600.0,
    patience: float = 0.0,
    key: str = "VLLM_API_KEY",
) -> dict:
    """Return the server's answer to a POST of `body`, or to a GET without a body; {"text": the
    answer} if it is no JSON object.

    The request is sent again, for `patience` seconds after it has first failed, if there is no
    connection, after `timeout` seconds, and at the statuses 408, 429 and 5xx except 501. Then, and
    after any other error, this raises RuntimeError. (urllib3's Retry counts attempts, not seconds,
    and cannot be cancelled.)

    Args:
        key: environment variable with the key that is sent along.
    """
    headers = {"Content-Type": "application/json"}
    if os.environ.get(key):
        headers["Authorization"] = f"Bearer {os.environ[key]}"
    limits = aiohttp.ClientTimeout(timeout, sock_connect=10.0)
    content = None if body is None else json.dumps(body, default=str)
    begin = 0.0
    while True:
        may_help = True  # to ask again
        try:
            async with aiohttp.request(
                "POST" if content else "GET",
                url + path,
                data=content,
                timeout=limits,
                headers=headers,
                allow_redirects=False,
            ) as answer:
                status = answer.status
                text = await answer.text()
            if status == 200:
                break
            why = f"HTTP status {status}: {text[:300]}"
            if status in (404, 405, 501):
                raise NoSuchPage(f"{url}{path} failed ({why})")
            may_help = status in (408, 429) or status >= 500
        except (aiohttp.ClientError, OSError, ValueError) as error:  # a TimeoutError has no text
            why = first_line(error) if str(error) else f"no answer within {timeout} s"
            may_help = not isinstance(error, ValueError)  # of an address, or bytes that are no text
        now = time.monotonic()
        begin = begin or now
        tried = now - begin
        if not may_help or tried >= patience:
            raise RuntimeError(
                f"{url}{path} failed{f' for {tried:.0f} s' if tried else ''} ({why})"
            )
        await asyncio.sleep(min(2.0, patience))
    with contextlib.suppress(ValueError):  # some answers have no body, or are a sentence
        if isinstance(found := json.loads(text), dict):
            return found
    return {"text": text}


def in_one_line(record: logging.LogRecord) -> bool:
    """Have a record of aiohttp name what is wrong with a request, or that its client has left, in
    place of a traceback: any client can do that.
    """
    error = record.exc_info and record.exc_info[1]
    if isinstance(error, HttpProcessingError | ConnectionError | RequestPayloadError):
        record.msg = one_line(f"{record.getMessage()}: {error}")
        record.args = ()
        record.exc_info = None
    return True
