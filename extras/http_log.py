"""What the HTTP servers of this project log of requests that are not HTTP."""

import logging

from aiohttp.http_exceptions import HttpProcessingError

from utils import one_line


def in_one_line(record: logging.LogRecord) -> bool:
    """Have a record of aiohttp name what is malformed in a request in place of a traceback: anyone
    can send such requests.
    """
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.msg = one_line(f"{record.getMessage()}: {error}")
        record.args = ()
        record.exc_info = None
    return True
