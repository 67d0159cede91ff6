"""The key of the two HTTP servers, scripts/reward_server.py and scripts/vllm_server.py."""

import os
import secrets

from fastapi.responses import JSONResponse

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def require_key(host: str, variable: str) -> None:
    """Raise ValueError if `host` is not the machine's loopback and the environment variable has no
    key.
    """
    if host not in LOOPBACK and not os.environ.get(variable):
        raise ValueError(
            f"other machines can reach addresses but {', '.join(LOOPBACK)}; set the variable {variable} to a key of "
            "your choice, for the server and for the run"
        )


def has_key(headers, variable: str) -> bool:
    """Return whether a request has the key in the environment variable, or there is none.

    `headers`: (name, value) pairs of bytes.
    """
    key = os.environ.get(variable)
    given = {name.lower(): value for name, value in headers}.get(b"authorization", b"")
    return not key or secrets.compare_digest(given, f"Bearer {key}".encode())


class CheckKey:
    """ASGI middleware of vLLM's server that answers 401 to a request without the key, on every path
    but /health.
    """

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope: dict, receive, send) -> None:
        answer = self.app
        if scope["type"] != "lifespan" and scope["path"] != "/health":
            if not has_key(scope["headers"], "VLLM_API_KEY"):
                message = "VLLM_API_KEY is not the one of the server"
                answer = JSONResponse({"error": {"message": message}}, 401)
        await answer(scope, receive, send)
