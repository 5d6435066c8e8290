"""The guard inside vLLM's API server. Every request except `/health` and a greeting needs the key.

It also lets `/health` fail when the engine has stopped to answer (vLLM's own only says that no process has ended), and
lets `/collective_rpc` call Lockstep's own methods only.

vLLM's own `--api-key` leaves the weight, cache and RPC endpoints open. vLLM loads the guard by its argument
`--middleware`. The key comes from the environment, so that no list of processes shows it. A trainer proves that it has
the key without sending it (`engines/servers/calls.py`). Users and other programs may send `Authorization: Bearer KEY`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import math
import re
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from lockstep.engines.servers import calls
from lockstep.engines.servers.calls import Session
from lockstep.server.keys import guards_key

# Seconds between two questions to the engine, however many ask for the server's health.
_EVERY = 5.0
# Seconds that a caller waits who does not say how long: the time limit of OpenAI's SDK.
_USUAL_LIMIT = 600.0


@dataclass(slots=True, eq=False)
class _Open:
    """A call that the server has not answered yet, and when its caller stops waiting."""

    until: float
    ended: float = math.inf

    def waited_until(self, now: float) -> float:
        return min(self.until, self.ended, now)


class EngineHealth:
    """Asks the engine, one question at a time, and counts the seconds for which it owes the answer.

    The engine does one thing after the other: it answers after the step or the push that it is in. A push may take
    long, and so may a step on a CPU. Therefore the seconds count only from the moment when no caller waits any more
    whose call came before the question. Calls that came after it are no excuse.
    """

    def __init__(self) -> None:
        self._open: set[_Open] = set()
        self._asked = -math.inf
        self._before: tuple[_Open, ...] = ()
        self._answer: asyncio.Task[None] | None = None

    @contextmanager
    def call(self, limit: str) -> Iterator[None]:
        """Inside the context, a caller waits for an answer for `limit` seconds; another text: it gives no limit."""
        opened = _Open(time.monotonic() + _seconds(limit))
        self._open.add(opened)
        try:
            yield
        finally:
            opened.ended = time.monotonic()
            self._open.discard(opened)

    def silence(self, ask: Callable[[], Awaitable[Any]]) -> float:
        """Seconds for which the engine owes an answer; 0 if it owes none. It asks again, but does not wait.

        `ask` asks the engine something that every one of its workers answers.
        """
        now = time.monotonic()
        if self._answer is not None and not self._answer.done():
            return max(0.0, now - max([self._asked, *(call.waited_until(now) for call in self._before)]))
        if now - self._asked >= _EVERY:
            self._asked, self._before = now, tuple(self._open)
            self._answer = asyncio.ensure_future(_answered(ask))
        return 0.0


async def _answered(ask: Callable[[], Awaitable[Any]]) -> None:
    # An engine that answers with an error answers. If its process has ended, vLLM's own check says so.
    with contextlib.suppress(Exception):
        await ask()


def _seconds(limit: str) -> float:
    try:
        found = float(limit)
    except ValueError:
        return _USUAL_LIMIT
    return found if 0 <= found < math.inf else _USUAL_LIMIT


_Message = MutableMapping[str, Any]
_Receive = Callable[..., Awaitable[Any]]
_Send = Callable[..., Awaitable[None]]
_App = Callable[[_Message, _Receive, _Send], Awaitable[None]]

# The path through which a caller may call a method of every worker, and the beginning of the names of our methods.
_RPC, _OURS = "/collective_rpc", "lockstep_"
# The method that each worker answers at once.
ALIVE = "lockstep_alive"
# Bytes of a call of `/collective_rpc`. The longest one lists the names of all tensors of a model.
LARGEST_RPC = 64 << 20
# The number of a trainer's call, and how many numbers of a session are kept beyond one that has not come.
_NUMBER, MOST_HIGHER = re.compile(r"[1-9][0-9]{0,17}"), 4096
# A server whose engine owes an answer for this many seconds is not healthy any more, and what it answers then. A
# server that does not answer for so long is ended, and so is one of which a signal has stopped a process. The limit
# is long, because the server may only be busy.
SILENT_LIMIT = 120.0
SILENT_STATUS = 504


class KeyGuard:
    """ASGI middleware that answers 401 to every call without the key or a proof of it.

    A server whose environment has no valid key does not start.
    """

    def __init__(self, app: _App) -> None:
        self._app = app
        self._key = guards_key()
        self._digest = _digest(self._key.encode())
        # A restarted server has another nonce, so that every trainer must greet it again.
        self.nonce = calls.make_nonce()
        self._calls: defaultdict[str, Calls] = defaultdict(Calls)
        self._watch = EngineHealth()

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http" and scope.get("path") == calls.HEALTH:
            await self._say_health(scope, receive, send)
        elif self._has_key(scope):
            await self._pass_on(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        elif scope.get("path") == calls.GREETING:
            await self._greet(scope, send)
        elif (proven := self._proven(scope)) is not None:
            mark, proof = proven
            body = await _body(receive, int(mark.partition("-")[0]))
            if body is not None and calls.body_mark(body) == mark:
                await self._pass_on(scope, _again(body, receive), _with_proof(send, proof))
            else:
                await _answer(send, 401, {"error": "this is not the call that the trainer has signed"})
        else:
            await _answer(send, 401, {"error": "this server needs its key: Authorization: Bearer KEY"})

    async def _say_health(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        engine = getattr(getattr(scope.get("app"), "state", None), "engine_client", None)
        silence = self._watch.silence(lambda: engine.collective_rpc(ALIVE)) if engine is not None else 0.0
        if silence < SILENT_LIMIT:
            await self._app(scope, receive, send)
        else:
            await _answer(send, SILENT_STATUS, {"error": f"the engine has not answered for {silence:.0f} s"})

    async def _pass_on(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        """Let a call with the key through."""
        with self._watch.call(_only_header(scope, calls.LIMIT_HEADER.encode())):
            if (scope.get("method"), scope.get("path")) != ("POST", _RPC):
                await self._app(scope, receive, send)
            elif (body := await _body(receive, LARGEST_RPC)) is None:
                await _answer(send, 413, {"error": f"{_RPC} takes at most {LARGEST_RPC >> 20} MiB"})
            elif (checked := _checked_rpc(body)) is None:
                # Any other method may end the engine's threads, change weights behind the proofs, or run code.
                await _answer(
                    send, 403, {"error": f"{_RPC} calls only methods whose names begin with {_OURS}"}
                )
            else:
                await self._app(scope, _again(checked, receive), send)

    async def _greet(self, scope: _Message, send: _Send) -> None:
        nonce = _only_header(scope, calls.NONCE_HEADER.encode())
        if not calls.is_nonce(nonce):
            await _answer(
                send,
                401,
                {"error": f"a greeting needs a nonce of 32 hexadecimal digits ({calls.NONCE_HEADER})"},
            )
        else:
            await _answer(
                send, 200, {"nonce": self.nonce, "proof": calls.server_proof(self._key, nonce, self.nonce)}
            )

    def _has_key(self, scope: _Message) -> bool:
        scheme, _, key = _only_header(scope, b"authorization").partition(" ")
        # All digests have the same length. The time of the comparison therefore does not reveal the key's length.
        return scheme.lower() == "bearer" and hmac.compare_digest(_digest(key.strip().encode()), self._digest)

    def _proven(self, scope: _Message) -> tuple[str, str] | None:
        """The mark of the body of a trainer's call, and the proof for its answer; None: no proof, or it came before."""
        scheme, _, words = _only_header(scope, b"authorization").partition(" ")
        nonce, call, mark, proof = (words.split(".") + [""] * 4)[:4]
        if scheme != calls.SCHEME or not calls.is_nonce(nonce) or not _NUMBER.fullmatch(call):
            return None
        session = Session(self._key, nonce, self.nonce)
        query = parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
        is_trainer = session.is_trainer(call, scope["method"], scope["path"], query, mark, proof)
        return (mark, session.proof(call)) if is_trainer and self._calls[nonce].take(int(call)) else None


class Calls:
    """The numbers of one session's calls. Each is taken once. They come nearly in order."""

    def __init__(self) -> None:
        # All numbers up to this one count as taken, and some higher ones are.
        self._all_up_to = 0
        self.higher: set[int] = set()

    def take(self, number: int) -> bool:
        """Take a number. Returns False if it was taken before."""
        if number <= self._all_up_to or number in self.higher:
            return False
        self.higher.add(number)
        if len(self.higher) > MOST_HIGHER:
            # A call that has not come until now never will.
            self._all_up_to = min(self.higher) - 1
        while self._all_up_to + 1 in self.higher:
            self._all_up_to += 1
            self.higher.remove(self._all_up_to)
        return True


def _only_header(scope: _Message, wanted: bytes) -> str:
    """The value of a header; empty if the header is missing or there are several."""
    found = [value for name, value in scope.get("headers", ()) if name == wanted]
    return found[0].decode("latin-1") if len(found) == 1 else ""


async def _body(receive: _Receive, limit: int) -> bytes | None:
    """The body of a call; None: it has more than `limit` bytes."""
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        # A client that has gone away sends nothing more.
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            return None
        more = message["type"] == "http.request" and message.get("more_body", False)
    return b"".join(parts)


def _checked_rpc(body: bytes) -> bytes | None:
    """The body of a call of one of our methods, as JSON that can only be read in one way; None: it is none."""
    try:
        asked = json.loads(body)
        method = asked.get("method") if isinstance(asked, dict) else None
        return json.dumps(asked).encode() if isinstance(method, str) and method.startswith(_OURS) else None
    except (ValueError, RecursionError):
        return None


def _again(body: bytes, receive: _Receive) -> _Receive:
    """What gives an application a body that has been read already, and then what follows."""
    given = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return given.pop() if given else await receive()

    return again


def _with_proof(send: _Send, proof: str) -> _Send:
    async def prove(message: _Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), (calls.PROOF_HEADER.encode(), proof.encode())]
            message = {**message, "headers": headers}
        await send(message)

    return prove


async def _answer(send: _Send, status: int, content: dict[str, str]) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
