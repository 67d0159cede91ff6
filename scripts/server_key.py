"""The key of the two HTTP servers, scripts/reward_server.py and scripts/vllm_server.py."""

import ipaddress
import os
import secrets
import socket

from starlette.responses import JSONResponse


def require_key(host: str, variable: str) -> None:
    """Raise ValueError if other machines can reach `host` and the environment variable has no key."""
    addresses = [ipaddress.ip_address(found[4][0]) for found in socket.getaddrinfo(host, None)]
    if not (all(address.is_loopback for address in addresses) or os.environ.get(variable)):
        raise ValueError(
            f"other machines can reach this address; set the variable {variable} to a key of your choice, for the "
            "server and for the run"
        )


class CheckKey:
    """ASGI middleware that answers 401 to a request without the key, on every path but /health.

    The key is the value of an environment variable; without one, every request passes.
    """

    def __init__(self, app, variable: str = "VLLM_API_KEY"):
        self.app, self.variable = app, variable
        self.expected = f"Bearer {os.environ.get(variable, '')}".encode()

    async def __call__(self, scope: dict, receive, send) -> None:
        answer = self.app
        if os.environ.get(self.variable) and scope["type"] != "lifespan" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not secrets.compare_digest(given, self.expected):
                answer = JSONResponse({"error": {"message": f"{self.variable} is not the one of the server"}}, 401)
        await answer(scope, receive, send)
