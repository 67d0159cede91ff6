"""What the HTTP servers of this project log of malformed requests."""

import logging

from aiohttp.http_exceptions import HttpProcessingError

from utils import one_line


def in_one_line(record: logging.LogRecord) -> bool:
    """Have a record of aiohttp name what is wrong with a request, or that its client has left, in
    place of a traceback: any client can do that.
    """
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError | ConnectionError):
        record.msg = one_line(f"{record.getMessage()}: {error}")
        record.args = ()
        record.exc_info = None
    return True
