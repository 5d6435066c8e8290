"""The guard inside vLLM's API server: every request except `/health` needs the key.

vLLM's own `--api-key` leaves the weight, cache and RPC endpoints open. vLLM gets the guard as `--middleware`. The key comes
from the environment, so that no list of processes shows it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from lockstep.engines.server_calls import HEALTH
from lockstep.server.keys import KEY_VARIABLE, checked_key

_Message = MutableMapping[str, Any]
_App = Callable[[_Message, Callable[..., Awaitable[Any]], Callable[..., Awaitable[None]]], Awaitable[None]]


class KeyGuard:
    """ASGI middleware that answers 401 to everything without `Authorization: Bearer KEY`.

    Raises:
        InputError: the environment holds no usable key. The server then does not start.
    """

    def __init__(self, app: _App) -> None:
        self._app = app
        self._digest = _digest(checked_key(os.environ.get(KEY_VARIABLE, ""), KEY_VARIABLE).encode())

    async def __call__(
        self, scope: _Message, receive: Callable[..., Awaitable[Any]], send: Callable[..., Awaitable[None]]
    ) -> None:
        if scope["type"] == "lifespan" or scope.get("path") == HEALTH or self._has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            body = b'{"error": "this server needs its key: Authorization: Bearer KEY"}'
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    def _has_key(self, scope: _Message) -> bool:
        shown = [value for name, value in scope.get("headers", ()) if name == b"authorization"]
        if len(shown) != 1:
            return False
        scheme, _, key = shown[0].partition(b" ")
        # Digests have one length, so that the time of the comparison does not reveal the key's length.
        return scheme.lower() == b"bearer" and hmac.compare_digest(_digest(key.strip()), self._digest)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
