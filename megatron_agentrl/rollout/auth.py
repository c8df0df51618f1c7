"""Bearer token in front of every route of an engine.

vLLM's own `--api-key` guards generation only and leaves its development routes (weights, pause, remote calls) open;
this ASGI middleware guards all but `/health`. Loaded by vLLM through `--middleware`.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

#: Environment variable that holds the run's token in the engine process.
TOKEN_ENV = "MEGATRON_AGENTRL_TOKEN"

Asgi = Callable[[dict[str, Any], Callable[..., Any], Callable[..., Any]], Awaitable[None]]


class BearerToken:
    """Answers 401 unless `Authorization: Bearer TOKEN` carries the token of this process's environment."""

    def __init__(self, app: Asgi) -> None:
        self.app = app
        token = os.environ.get(TOKEN_ENV, "")
        if not token:
            raise RuntimeError(f"an engine needs a token: set {TOKEN_ENV}")
        self.expected = f"Bearer {token}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        if scope["type"] == "websocket" and not self._authorized(scope):
            await send({"type": "websocket.close", "code": 1008})  # before it was accepted: the handshake gets a 403
            return
        if scope["type"] == "http" and scope["path"] != "/health" and not self._authorized(scope):
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"this route needs the run's bearer token"})
            return
        await self.app(scope, receive, send)

    def _authorized(self, scope: dict[str, Any]) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, self.expected)
