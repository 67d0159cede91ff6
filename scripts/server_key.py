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


class CheckKey:
    """ASGI middleware that answers 401 to a request without the key, on every path but /health.

    The key is the value of an environment variable; without one, every request passes.
    """

    def __init__(self, app, variable: str = "VLLM_API_KEY"):
        self.app = app
        self.variable = variable
        self.key = os.environ.get(variable)

    async def __call__(self, scope: dict, receive, send) -> None:
        answer = self.app
        if self.key and scope["type"] != "lifespan" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not secrets.compare_digest(given, f"Bearer {self.key}".encode()):
                answer = JSONResponse(
                    {"error": {"message": f"{self.variable} is not the one of the server"}}, 401
                )
        await answer(scope, receive, send)
