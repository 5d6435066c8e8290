"""Trainer and guarded server prove to each other that they have the key. A program without the key gets no information."""

from __future__ import annotations

import json
import os
import resource
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from lockstep.engines.http.greeting import GREETING, PROOF_HEADER, Session, make_nonce, server_proof
from lockstep.engines.http.server_calls import CallLoop, ServerCalls
from lockstep.errors import EngineLost, InputError, LockstepError
from lockstep.server.guard import KeyGuard
from lockstep.server.keys import KEY_VARIABLE

KEY = "a-key-for-tests-only"
# Gets a request; returns status, headers and JSON of its answer.
Program = Callable[[httpx.Request], tuple[int, dict[str, str], Any]]


class Port:
    """A port on which different programs listen, one after the other. It keeps everything that a trainer sent there."""

    def __init__(self, loop: CallLoop) -> None:
        self.seen: list[httpx.Request] = []
        self.program: Any = None
        self.calls = ServerCalls("http://127.0.0.1:1", KEY, 5.0, loop, lambda: None)
        self.calls._client = httpx.AsyncClient(transport=httpx.MockTransport(self._answer), base_url=self.calls.url)

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request)
        if isinstance(self.program, KeyGuard):
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(self.program), base_url=self.calls.url
            ) as client:
                return await client.send(request)
        status, headers, body = self.program(request)
        return httpx.Response(status, headers=headers, json=body)

    def sent(self) -> str:
        """Everything that was sent here, as one text."""
        return "\n".join(f"{r.url} {dict(r.headers)} {r.content!r}" for r in self.seen)


@pytest.fixture
def port() -> Iterator[Port]:
    loop = CallLoop()
    yield Port(loop)
    loop.close()


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)


def guarded() -> KeyGuard:
    """A server with the key; its application answers every call."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"fine": true}'})

    return KeyGuard(app)


def impostor(request: httpx.Request) -> tuple[int, dict[str, str], Any]:
    """A program without the key that answers everything as if all were well."""
    return 200, {}, {"nonce": make_nonce(), "proof": "0" * 64, "results": [{}]}


def test_the_server_gets_a_call_and_never_the_key(port: Port) -> None:
    port.program = guarded()
    assert port.calls.call("POST", "/update_weights", {"weights": 1}) == {"fine": True}
    assert port.calls.call("GET", "/weight_info") == {"fine": True}
    assert KEY not in port.sent()
    assert [r.url.path for r in port.seen] == [GREETING, "/update_weights", "/weight_info"]


@pytest.mark.parametrize(
    "program",
    [
        impostor,
        lambda request: (200, {}, {}),
        lambda request: (404, {}, {"error": "what?"}),
        lambda request: (200, {}, ["nonce"]),
        # A server with another key.
        lambda request: (
            200,
            {},
            {"nonce": "n", "proof": server_proof("other" * 5, request.headers["x-lockstep-nonce"], "n")},
        ),
    ],
)
def test_a_program_without_the_key_gets_only_a_nonce(port: Port, program: Program) -> None:
    port.program = program
    with pytest.raises(InputError, match="he key was not sent"):
        port.calls.call("POST", "/update_weights", {"weights": "secret"})
    assert [r.url.path for r in port.seen] == [GREETING]
    assert KEY not in port.sent()
    assert "secret" not in port.sent()


def test_an_impostor_that_takes_the_port_between_two_calls_is_no_server_any_more(port: Port) -> None:
    port.program = guarded()
    port.calls.call("GET", "/weight_info")
    port.program = impostor
    with pytest.raises(EngineLost, match="without a proof"):
        port.calls.call("POST", "/pause")
    with pytest.raises(InputError, match="does not accept the key"):
        port.calls.call("POST", "/update_weights", {"weights": "secret"})
    assert KEY not in port.sent()
    assert "secret" not in port.sent()


def test_a_restarted_server_is_lost_once_and_greeted_again(port: Port) -> None:
    port.program = guarded()
    port.calls.call("GET", "/weight_info")
    port.program = guarded()
    with pytest.raises(EngineLost, match="was started again"):
        port.calls.call("GET", "/weight_info")
    assert port.calls.call("GET", "/weight_info") == {"fine": True}


def test_a_call_without_the_trainers_proof_is_answered_401(port: Port) -> None:
    guard = guarded()
    port.program = guard
    port.calls.call("GET", "/weight_info")
    shown = port.seen[-1].headers["authorization"]
    session = Session("a-key-of-somebody-else", make_nonce(), guard._nonce)

    async def status(**headers: str) -> tuple[int, str | None]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url="http://x") as client:
            answer = await client.get("/weight_info", headers=headers)
            return answer.status_code, answer.headers.get(PROOF_HEADER)

    def ask(**headers: str) -> tuple[int, str | None]:
        return port.calls._loop.run(status(**headers))

    assert ask(authorization=shown)[0] == 200
    nonce, call, proof = shown.split()[1].split(".")
    for words in (
        session.authorization(make_nonce()),
        f"Lockstep {nonce}.{make_nonce()}.{proof}",
        f"Lockstep {make_nonce()}.{call}.{proof}",
        f"Lockstep {nonce}.{call}.",
        f"Lockstep {nonce}..{proof}",
        "Lockstep",
        f"Bearer {nonce}.{call}.{proof}",
    ):
        assert ask(authorization=words) == (401, None), words


def test_a_greeting_without_a_usable_nonce_is_answered_401(port: Port) -> None:
    guard = guarded()

    async def greet(nonce: str) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url="http://x") as client:
            return await client.get(GREETING, headers={"x-lockstep-nonce": nonce} if nonce else {})

    for nonce in ("", "short", "x" * 100, "a|b" * 12):
        assert port.calls._loop.run(greet(nonce)).status_code == 401, nonce
    answer = port.calls._loop.run(greet(make_nonce()))
    assert KEY not in answer.text
    assert json.loads(answer.text).keys() == {"nonce", "proof"}


def test_a_process_without_free_descriptors_names_its_limit_and_not_the_server() -> None:
    loop, (soft, hard) = CallLoop(), resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        calls = ServerCalls(f"http://127.0.0.1:{listener.getsockname()[1]}", None, 30.0, loop, lambda: None)
        # From here on this process can open nothing: the lowest free descriptor is at its limit.
        free = os.dup(listener.fileno())
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            with pytest.raises(
                LockstepError, match=rf"this process may open only {free} files .*ulimit -n 4096"
            ) as found:
                calls.call("GET", "/health")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            loop.close()
    assert not isinstance(found.value, EngineLost), "nobody should wait for the server"
