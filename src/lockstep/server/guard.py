"""The guard inside vLLM's API server. Every request except `/health` and a greeting needs the key.

The guard is needed because vLLM's own `--api-key` leaves the weight, cache and RPC endpoints open. vLLM loads it by its argument
`--middleware`. The key comes from the environment, so that no list of processes shows it. A trainer proves that it has the key
without sending it (`engines/http/greeting.py`). Users and other programs may send `Authorization: Bearer KEY`.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from lockstep.engines.http.greeting import (
    GREETING,
    NONCE_HEADER,
    PROOF_HEADER,
    SCHEME,
    Session,
    is_nonce,
    make_nonce,
    server_proof,
)
from lockstep.engines.http.server_calls import HEALTH
from lockstep.server.keys import KEY_VARIABLE, checked_key

_Message = MutableMapping[str, Any]
_App = Callable[[_Message, Callable[..., Awaitable[Any]], Callable[..., Awaitable[None]]], Awaitable[None]]


class KeyGuard:
    """ASGI middleware that answers 401 to every call that neither contains the key nor proves that the caller has it.

    Raises:
        InputError: the environment has no valid key. The server then does not start.
    """

    def __init__(self, app: _App) -> None:
        self._app = app
        self._key = checked_key(os.environ.get(KEY_VARIABLE, ""), KEY_VARIABLE)
        self._digest = _digest(self._key.encode())
        # A restarted server has another nonce, so that every trainer must greet it again.
        self._nonce = make_nonce()

    async def __call__(
        self, scope: _Message, receive: Callable[..., Awaitable[Any]], send: Callable[..., Awaitable[None]]
    ) -> None:
        if scope["type"] == "lifespan" or scope.get("path") == HEALTH or self._has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        elif scope.get("path") == GREETING:
            await self._greet(scope, send)
        elif (proof := self._proof_for(scope)) is not None:
            await self._app(scope, receive, _with_proof(send, proof))
        else:
            await _answer(send, 401, {"error": "this server needs its key: Authorization: Bearer KEY"})

    async def _greet(self, scope: _Message, send: Callable[..., Awaitable[None]]) -> None:
        nonce = _only_header(scope, NONCE_HEADER.encode())
        if not is_nonce(nonce):
            await _answer(send, 401, {"error": f"a greeting needs a nonce of 32 hexadecimal digits ({NONCE_HEADER})"})
        else:
            await _answer(send, 200, {"nonce": self._nonce, "proof": server_proof(self._key, nonce, self._nonce)})

    def _has_key(self, scope: _Message) -> bool:
        scheme, _, key = _only_header(scope, b"authorization").partition(" ")
        # All digests have the same length. The time of the comparison therefore does not reveal the key's length.
        return scheme.lower() == "bearer" and hmac.compare_digest(_digest(key.strip().encode()), self._digest)

    def _proof_for(self, scope: _Message) -> str | None:
        """The proof for the answer to a trainer's call; None if the call does not prove that the trainer has the key."""
        scheme, _, words = _only_header(scope, b"authorization").partition(" ")
        nonce, _, rest = words.partition(".")
        call, _, proof = rest.partition(".")
        if scheme != SCHEME or not (is_nonce(nonce) and is_nonce(call)):
            return None
        session = Session(self._key, nonce, self._nonce)
        return session.proof(call) if session.is_trainer(call, proof) else None


def _only_header(scope: _Message, wanted: bytes) -> str:
    """The value of a header; empty if the header is missing or there are several."""
    found = [value for name, value in scope.get("headers", ()) if name == wanted]
    return found[0].decode("latin-1") if len(found) == 1 else ""


def _with_proof(send: Callable[..., Awaitable[None]], proof: str) -> Callable[..., Awaitable[None]]:
    async def prove(message: _Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), (PROOF_HEADER.encode(), proof.encode())]
            message = {**message, "headers": headers}
        await send(message)

    return prove


async def _answer(send: Callable[..., Awaitable[None]], status: int, content: dict[str, str]) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
