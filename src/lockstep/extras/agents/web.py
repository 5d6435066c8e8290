"""The HTTP server of the gateway: it finds the rollout of a request by its key, and passes the call to that rollout.

It runs in a thread of its own, so that it answers while the trainer learns. The number of connections is bounded, and
so is the time in which each must ask something: the gateway runs in the trainer's process, whose limit of open files
holds for both.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import socket
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from lockstep.errors import InputError, LockstepError
from lockstep.extras.agents import chat_completions as chat
from lockstep.extras.agents import responses
from lockstep.extras.agents.agent_calls import Answer, Call, Listener
from lockstep.extras.agents.request_fields import Refused, RunLimits, bad_value, ended, failed, unreadable
from lockstep.extras.agents.streamed_answers import Heard, SentText
from lockstep.server.keys import make_key
from lockstep.server.supervisor import raise_file_limit
from lockstep.tokens.tool_calls import is_whole, read_json, whole_characters

# Seconds in which a client must send the head of a request, after its connection and after each answer, and in which
# a client must go on reading an answer that waits for it.
HEAD_LIMIT = 60.0
_MOST = 8192


def most_connections() -> int:
    """The number of connections that the gateway may hold: half of the files that this process may open."""
    return max(1, min(raise_file_limit() // 2, _MOST))


class Idle:
    """The connections, of `most` open ones, in which no request is being answered, the longest idle one first."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.connections: dict[BoundedConnection, None] = {}


class BoundedConnection(H11Protocol):
    """One connection. It is closed if no request comes, if nobody reads its answers, and to make room for a new one.

    h11 bounds the head of a request. All connections of a gateway share `idle`.
    """

    def __init__(self, idle: Idle, **given: Any) -> None:
        super().__init__(**given)
        self._idle = idle
        self._limit: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_request()
        if len(self.connections) > self._idle.most:
            # If all others are being answered, this one is the only idle one.
            next(iter(self._idle.connections))._close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._is_read()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._is_read()
        self._unread = self.loop.call_later(HEAD_LIMIT, self._close)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._is_read()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._answers():
            self._stop_waiting()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._answers():
            # Also if the connection is being closed: that waits for the client to read.
            self._await_request()

    def _answers(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_request(self) -> None:
        self._stop_waiting()
        self._idle.connections[self] = None
        self._limit = self.loop.call_later(HEAD_LIMIT, self._close)

    def _stop_waiting(self) -> None:
        self._idle.connections.pop(self, None)
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _is_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _close(self) -> None:
        self._stop_waiting()
        self.connections.discard(self)
        self.transport.abort()


_logger = logging.getLogger(__name__)

# The images of a conversation are in each of its calls. OpenAI's own limit is of this size.
LARGEST_BODY = 32 << 20
# Keys of ended rollouts that are remembered, so that their late calls get 410 instead of 401.
_REMEMBERED = 100_000
_START_LIMIT = 30.0
# Seconds that the body of a request may take.
BODY_LIMIT = 120.0


class AnsweringRollout(Protocol):
    """A rollout that answers calls."""

    def submit(self, call: Call, listener: Listener | None = None) -> Future[Answer]:
        """Begin to answer a call; a `Refused` if the rollout has ended. Cancelling the future cancels the call."""


class Gateway:
    """The HTTP server and the rollouts behind it, on port `port`; 0 for a free one.

    Raises:
        InputError: the address cannot be listened on.
    """

    def __init__(self, limits: RunLimits, host: str = "127.0.0.1", port: int = 0) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._rollouts: dict[bytes, AnsweringRollout] = {}
        self._ended: OrderedDict[bytes, None] = OrderedDict()
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=2048)
        except OSError as error:
            raise InputError(f"the gateway cannot listen on {host}, port {port}: {error.strerror}") from error
        self._host, self.port = host, self._socket.getsockname()[1]
        most = most_connections()
        config = Config(
            self._app(), log_level="warning", access_log=False, lifespan="off", ws="none", loop="asyncio",
            http=partial(BoundedConnection, Idle(most)),  # type: ignore[arg-type]
            # asyncio accepts so many connections at once, before the first of them is counted.
            backlog=min(2048, max(1, most // 4)),
            timeout_keep_alive=60, timeout_graceful_shutdown=2,
        )  # fmt: skip
        self._server = Server(config)
        self._thread = threading.Thread(target=self._serve, name="lockstep-gateway", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))

    @property
    def url(self) -> str:
        """The address at which this machine reaches the gateway, without a path."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def base_url(self, key: str) -> str:
        """The base URL of a rollout, for OpenAI's SDK and everything that uses one."""
        return f"{self.url}/rollouts/{key}/v1"

    def open(self, rollout: AnsweringRollout) -> str:
        """Serve a rollout's calls. Returns its new key."""
        key = make_key()
        with self._lock:
            self._rollouts[_digest(key)] = rollout
        return key

    def end(self, key: str) -> None:
        """Refuse all later calls with this key."""
        with self._lock:
            if self._rollouts.pop(_digest(key), None) is not None:
                self._ended[_digest(key)] = None
            while len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)

    def close(self) -> None:
        """Stop the server. Open connections are closed after two seconds."""
        self._server.should_exit = True
        self._thread.join(_START_LIMIT)
        self._socket.close()

    # ---- requests: in the server's thread ---------------------------------------------------------------------------

    def _app(self) -> Starlette:
        routes = []
        for start in ("/v1", "/rollouts/{key}/v1"):
            for end, api in (("chat/completions", chat), ("responses", responses)):
                routes.append(Route(f"{start}/{end}", partial(self._answer, api), methods=["POST"]))
            routes.append(Route(f"{start}/models", self._models, methods=["GET"]))
        handlers = {Refused: _refused, HTTPException: _no_route, ClientDisconnect: _gone, Exception: _failed}
        return Starlette(routes=routes, exception_handlers=handlers)

    def _rollout(self, request: Request) -> AnsweringRollout:
        """The rollout whose key is in the URL, or in the header `Authorization: Bearer KEY`."""
        scheme, _, shown = request.headers.get("authorization", "").partition(" ")
        key = request.path_params.get("key") or (shown.strip() if scheme.lower() == "bearer" else "")
        # The digest is looked up, so that the time of the comparison says nothing about a key.
        digest = _digest(key)
        with self._lock:
            rollout, is_ended = self._rollouts.get(digest), digest in self._ended
        if rollout is not None:
            return rollout
        if is_ended:
            raise ended()
        raise Refused(
            401,
            "this is the key of no rollout: use the base URL that the agent was started with "
            "(OPENAI_BASE_URL), or send its key (OPENAI_API_KEY) as Authorization: Bearer KEY",
            "invalid_api_key",
        )

    async def _models(self, request: Request) -> Response:
        self._rollout(request)
        model = {"id": self._limits.model, "object": "model", "created": 0, "owned_by": "lockstep"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _answer(self, api: ModuleType, request: Request) -> Response:
        rollout = self._rollout(request)
        body = await _body(request)
        try:
            call = _named(api.read_call(body, self._limits), request, body)
        except Refused:
            raise
        except Exception as error:
            # Nothing but the request is read here.
            raise unreadable("body", error) from error
        if not call.stream:
            answers = await self._whole(rollout, call, api.choices_of(body), request)
            return JSONResponse(api.whole(body, answers, self._limits))
        heard = Heard(asyncio.get_running_loop())
        future = rollout.submit(call, heard)
        answer = asyncio.wrap_future(future)
        try:
            await _wait(request, answer, heard.begins())
            if answer.done():
                await _settled(answer)
        except BaseException:
            future.cancel()
            raise
        events = self._events(api, body, future, answer, heard)
        return StreamingResponse(events, media_type="text/event-stream")

    async def _whole(
        self, rollout: AnsweringRollout, call: Call, count: int, request: Request
    ) -> list[Answer]:
        """The answers of a call that is not streamed. Each is a turn of its own, in a branch of its own."""
        calls = [call, *(replace(call, name=f"{call.name} choice {i}") for i in range(1, count))]
        futures = [rollout.submit(one) for one in calls]
        try:
            answers = [asyncio.wrap_future(future) for future in futures]
            await _wait(request, asyncio.gather(*answers, return_exceptions=True))
            return [await _settled(answer) for answer in answers]
        except BaseException:
            for future in futures:
                future.cancel()
            raise

    async def _events(
        self,
        api: ModuleType,
        body: Mapping[str, Any],
        future: Future[Answer],
        answer: asyncio.Future[Answer],
        heard: Heard,
    ) -> AsyncIterator[bytes]:
        # Starlette cancels this generator when the client is gone.
        try:
            name, created = heard.begin or ((found := await _settled(answer)).name, found.created)
            sent = SentText(api.Events(body, name, created, self._limits))
            for event in sent.start():
                yield event
            async for partial in heard.until(answer):
                for event in sent.more(partial):
                    yield event
            for event in sent.end(await _settled(answer)):
                yield event
        except Refused as error:
            yield _error_event(error)
        except Exception as error:
            _logger.exception("an answer of the gateway failed")
            yield _error_event(failed(error))
        finally:
            future.cancel()


async def _body(request: Request) -> dict[str, Any]:
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_LIMIT):
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > LARGEST_BODY:
                    why = f"the request has more than {LARGEST_BODY >> 20} MiB"
                    raise Refused(413, why, "request_too_large")
    except TimeoutError:
        raise Refused(408, f"the request takes longer than {BODY_LIMIT:.0f} s", "request_timeout") from None
    try:
        body = read_json(b"".join(parts))
    except ValueError as error:
        raise bad_value("body", f"the request is no JSON that can be read: {error}") from error
    if not isinstance(body, dict):
        raise bad_value("body", "the request must be a JSON object")
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return {name: _without_halves(name, value) for name, value in body.items()}
    return body


# An agent that cuts a text may cut a character in two. Chat templates get U+FFFD in its place.
_MAY_BE_CUT = {"messages", "input", "instructions"}


def _without_halves(name: str, value: Any) -> Any:
    whole = whole_characters(value)
    if name not in _MAY_BE_CUT and (whole != value or not is_whole(name)):
        half = "half of a character (a surrogate without its pair)"
        raise bad_value("body", f"a field of the request has {half}")
    return whole


def _error_event(error: Refused) -> bytes:
    return f"event: error\ndata: {json.dumps(error.body())}\n\n".encode()


def _named(call: Call, request: Request, body: Mapping[str, Any]) -> Call:
    """The call with the name of its repetitions: its `Idempotency-Key`, or its content.

    Two calls with the same content are two calls, unless the client says that it repeats one, as OpenAI's SDK does.
    """
    given = request.headers.get("idempotency-key")
    if given is not None:
        return replace(call, name=f"key {given}", may_repeat=True)
    content = json.dumps([request.url.path.rpartition("/v1/")[2], body], sort_keys=True)
    count = request.headers.get("x-stainless-retry-count", "0")
    return replace(call, name=f"content {_digest(content).hex()}", may_repeat=count != "0")


async def _wait(request: Request, *awaited: Awaitable[Any]) -> None:
    """Wait until one of several things has happened; a `ClientDisconnect` if the client went away before that."""
    gone = asyncio.ensure_future(_disconnected(request))
    others = [asyncio.ensure_future(one) for one in awaited]
    try:
        await asyncio.wait([gone, *others], return_when=asyncio.FIRST_COMPLETED)
        if gone.done() and not any(other.done() for other in others):
            raise ClientDisconnect
    finally:
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _settled(answer: Awaitable[Answer]) -> Answer:
    """The answer; a `Refused` if the call was refused, the rollout ended meanwhile, or the engine failed."""
    try:
        return await answer
    except asyncio.CancelledError:
        if isinstance(answer, asyncio.Future) and answer.cancelled():
            raise ended() from None
        raise
    except LockstepError as error:
        raise Refused(500, str(error), "engine_failed") from error


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    # OpenAI's SDK would repeat a call that failed with 500.
    headers = {"x-should-retry": "false"} if error.status >= 500 else {}
    return JSONResponse(error.body(), error.status, headers)


async def _failed(request: Request, error: Exception) -> Response:
    # The reason is in the trainer's log; uvicorn writes it there.
    return await _refused(request, failed(error))


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    served = "POST chat/completions, POST responses and GET models"
    asked = f"{request.method} {request.url.path.rpartition('/v1')[1:]}"
    found = Refused(error.status_code, f"{asked} is not served here; there are {served}", "not_found")
    return JSONResponse(found.body(), error.status_code)


async def _gone(request: Request, error: Exception) -> Response:
    # Nobody reads it.
    return Response(status_code=499)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
