"""Trainer and guarded server prove to each other that they have the key.

A program without the key gets no information.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from lockstep import bounded_http
from lockstep.engines.servers.calls import (
    GREETING,
    HEALTH,
    PROOF_HEADER,
    CallLoop,
    ServerCalls,
    Session,
    make_nonce,
    server_proof,
)
from lockstep.errors import EngineLost, InputError, LockstepError
from lockstep.extras.audit.dumps import AuditedRollout
from lockstep.extras.audit.rollout_logprobs import server_logprobs
from lockstep.images.urls import ImageUrls
from lockstep.server import guard as guard_module
from lockstep.server.guard import KeyGuard
from lockstep.server.keys import KEY_VARIABLE, read_key, write_key

KEY = "a-key-for-tests-only"
# Gets a request; returns status, headers and JSON of its answer.
Program = Callable[[httpx.Request], tuple[int, dict[str, str], Any]]


class Port:
    """A port on which different programs listen, one after the other. It keeps everything that a trainer sent there."""

    def __init__(self, loop: CallLoop) -> None:
        self.seen: list[httpx.Request] = []
        self.program: Any = None
        self.calls = ServerCalls("http://127.0.0.1:1", KEY, 5.0, loop, lambda: None)
        self.calls.client = httpx.AsyncClient(
            transport=httpx.MockTransport(self._answer), base_url=self.calls.url
        )

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request)
        if isinstance(self.program, KeyGuard):
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(self.program), base_url=self.calls.url
            ) as client:
                found = await client.send(request)
                return httpx.Response(
                    found.status_code, headers=found.headers, stream=httpx.ByteStream(found.content)
                )
        status, headers, body = self.program(request)
        return httpx.Response(status, headers=headers, stream=httpx.ByteStream(json.dumps(body).encode()))

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


@pytest.mark.parametrize("first", [KEY, None])
def test_a_server_that_was_started_by_hand_with_another_key_is_found_by_its_key_file(
    port: Port, first: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_key(tmp_path / "k", first or KEY)
    now = lambda: read_key(tmp_path / "k")  # noqa: E731
    calls = ServerCalls(port.calls.url, first, 5.0, port.calls.loop, lambda: None, now)
    calls.client = port.calls.client
    port.program = guarded()
    if first is not None:
        calls.call("GET", "/weight_info")
    monkeypatch.setenv(KEY_VARIABLE, other := "the-key-of-the-next-server")
    port.program = guarded()
    write_key(tmp_path / "k", other)
    if first is not None:
        with pytest.raises(EngineLost, match="was started again"):
            calls.call("GET", "/weight_info")
    assert calls.call("GET", "/weight_info") == {"fine": True}
    assert KEY not in port.sent()
    assert other not in port.sent()
    # Another program still gets nothing, whether the file is there or not.
    port.program = impostor
    with pytest.raises(EngineLost, match="without a proof"):
        calls.call("GET", "/weight_info")
    for spoil in (
        lambda: None,
        lambda: write_key(tmp_path / "k", "a-third-key-in-the-file"),
        (tmp_path / "k").unlink,
    ):
        spoil()
        with pytest.raises(InputError, match="he key was not sent"):
            calls.call("POST", "/update_weights", {"weights": "secret"})
    assert "secret" not in port.sent()


def replayed(
    port: Port, guard: KeyGuard, method: str, target: str, body: bytes, shown: str
) -> tuple[int, str | None]:
    """The status of a call that contains this `Authorization` header, and the proof of its answer."""

    async def status() -> tuple[int, str | None]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url="http://x") as client:
            answer = await client.request(method, target, content=body, headers={"authorization": shown})
            return answer.status_code, answer.headers.get(PROOF_HEADER)

    return port.calls.loop.run(status())


def test_a_call_without_the_trainers_proof_is_answered_401(port: Port) -> None:
    guard = guarded()
    port.program = guard
    port.calls.call("GET", "/weight_info")
    nonce, call, mark, proof = port.seen[-1].headers["authorization"].split()[1].split(".")
    session = Session("a-key-of-somebody-else", make_nonce(), guard.nonce)
    for words in (
        session.authorization("GET", "/weight_info", [], b"")[1],
        f"Lockstep {nonce}.{int(call) + 1}.{mark}.{proof}",
        f"Lockstep {nonce}.0{call}.{mark}.{proof}",
        f"Lockstep {make_nonce()}.{call}.{mark}.{proof}",
        f"Lockstep {nonce}.{call}.{mark}.",
        f"Lockstep {nonce}..{mark}.{proof}",
        f"Lockstep {nonce}.{call}..{proof}",
        f"Lockstep {nonce}.{call}.{proof}",
        "Lockstep",
        f"Bearer {nonce}.{call}.{mark}.{proof}",
    ):
        assert replayed(port, guard, "GET", "/weight_info", b"", words) == (401, None), words


def test_a_call_that_somebody_has_read_can_neither_be_sent_again_nor_made_another(port: Port) -> None:
    body, session = b'{"weights": 1}', None
    guard = guarded()
    port.program = guard
    port.calls.call("POST", "/update_weights", {"weights": 1}, mode="keep", clear="false")
    session = port.calls.session
    assert session is not None
    assert port.seen[-1].content == b'{"weights":1}'
    # Read on the way, and sent again: the same, or another call, body or query.
    old = port.seen[-1].headers["authorization"]
    assert (
        replayed(port, guard, "POST", "/update_weights?mode=keep&clear=false", port.seen[-1].content, old)[0]
        == 401
    )
    # Stopped on the way: whatever is made of it is refused, also after its number has come.
    signed = lambda: session.authorization("POST", "/pause", [("mode", "keep"), ("x", "a&b=c")], body)[1]  # noqa: E731
    for method, target, sent in (
        ("PUT", "/pause?mode=keep&x=a%26b%3Dc", body),
        ("POST", "/resume?mode=keep&x=a%26b%3Dc", body),
        ("POST", "/pause", body),
        ("POST", "/pause?mode=wait&x=a%26b%3Dc", body),
        ("POST", "/pause?mode=keep&x=a&b=c", body),
        ("POST", "/pause?mode=keep&mode=keep&x=a%26b%3Dc", body),
        ("POST", "/pause?mode=keep&x=a%26b%3Dc", b""),
        ("POST", "/pause?mode=keep&x=a%26b%3Dc", b'{"weights": 2}'),
        ("POST", "/pause?mode=keep&x=a%26b%3Dc", body + b" " * (1 << 20)),
    ):
        assert replayed(port, guard, method, target, sent, signed()) == (401, None), (
            method,
            target,
            sent[:20],
        )
    # The order of the query is that of a proxy.
    shown = signed()
    assert replayed(port, guard, "POST", "/pause?x=a%26b%3Dc&mode=keep", body, shown)[0] == 200
    assert replayed(port, guard, "POST", "/pause?mode=keep&x=a%26b%3Dc", body, shown)[0] == 401
    # A restart ends the session.
    assert replayed(port, guarded(), "POST", "/pause?mode=keep&x=a%26b%3Dc", body, signed())[0] == 401
    assert port.calls.call("GET", "/weight_info") == {"fine": True}


def test_numbers_of_calls_are_taken_once_in_whatever_order_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = guard_module.Calls()
    for number in (1, 3, 2, 7, 5):
        assert calls.take(number), number
        assert not calls.take(number), number
    assert calls.higher == {5, 7}
    # A call that never came is given up, and the memory stays small.
    monkeypatch.setattr(guard_module, "MOST_HIGHER", 8)
    assert all(calls.take(number) for number in range(8, 100))
    assert len(calls.higher) <= 8
    assert not any(calls.take(number) for number in range(1, 100))


def test_a_greeting_without_a_usable_nonce_is_answered_401(port: Port) -> None:
    guard = guarded()

    async def greet(nonce: str) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url="http://x") as client:
            return await client.get(GREETING, headers={"x-lockstep-nonce": nonce} if nonce else {})

    for nonce in ("", "short", "x" * 100, "a|b" * 12):
        assert port.calls.loop.run(greet(nonce)).status_code == 401, nonce
    answer = port.calls.loop.run(greet(make_nonce()))
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


# What follows a status line without end: the number of bytes that were sent is counted.
HEADS = {
    "plain": b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n",
    "an error": b"HTTP/1.1 500 no\r\nconnection: close\r\n\r\n",
    "not allowed": b"HTTP/1.1 401 no\r\nconnection: close\r\n\r\n",
    "chunks": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
    "a length": b"HTTP/1.1 200 OK\r\ncontent-length: 10737418240\r\n\r\n",
    "gzip": b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\n\r\n",
    "a head": b"HTTP/1.1 200 OK\r\n",
    "a line": b"HTTP/1.1 200 ",
    "a redirect": b"HTTP/1.1 302 x\r\nlocation: /health\r\n\r\n",
}

# Nothing is filled where a test fails.
_ENOUGH = 256 << 20


@contextmanager
def flood(head: bytes, part: bytes, pause: float = 0.0) -> Iterator[tuple[str, list[int]]]:
    """A program that answers every call with a head and then the same part again and again; the bytes that it sent."""
    sent = [0]

    class Flood(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                self.request.recv(65536)
                self.request.sendall(head)
                while not done.wait(pause) and sent[0] < _ENOUGH:
                    self.request.sendall(part)
                    sent[0] += len(part)

    done = threading.Event()
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Flood) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", sent
        done.set()
        server.shutdown()


@pytest.fixture(scope="module")
def loop() -> Iterator[CallLoop]:
    made = CallLoop()
    yield made
    made.close()


@pytest.mark.parametrize("path", ["/update_weights", HEALTH])
@pytest.mark.parametrize("kind", HEADS)
def test_a_program_without_the_key_cannot_fill_the_trainers_memory(
    kind: str, path: str, loop: CallLoop
) -> None:
    part = {"chunks": b"10000\r\n" + b"x" * 0x10000 + b"\r\n", "a head": b"a: " + b"x" * 1000 + b"\r\n"}.get(
        kind, b"[" * 65536
    )
    with flood(HEADS[kind], part) as (url, sent):
        calls = ServerCalls(url, KEY, 60.0, loop, lambda: None)
        with pytest.raises(LockstepError):
            calls.call("GET", path)
        # The kernel's buffers of both ends, beside what was read.
        assert sent[0] < 16 << 20


def test_the_answer_of_the_server_itself_is_read_whole_and_bounded(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "x" * (1 << 20)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(long).encode()})

    port.program = KeyGuard(app)
    assert port.calls.call("GET", "/long") == long
    monkeypatch.setattr("lockstep.engines.servers.calls.LARGEST", 1 << 19)
    with pytest.raises(EngineLost, match="sent more than 524,288 bytes"):
        port.calls.call("GET", "/long")


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\n", HEADS["plain"], b""])
def test_an_answer_that_drips_ends_at_the_time_limit(
    head: bytes, loop: CallLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.extras.audit.rollout_logprobs.SECONDS", 0.5)
    with flood(head, b"a", pause=0.05) as (url, _):
        for key in (KEY, None):
            with pytest.raises(EngineLost, match=r"did not answer within|cannot be reached"):
                ServerCalls(url, key, 0.5, loop, lambda: None).call("GET", "/weight_info")
        with pytest.raises(LockstepError, match=r"did not answer within|cannot be asked"):
            server_logprobs(url, [])


def test_ctrl_c_ends_a_call_at_once() -> None:
    async def long() -> None:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        await asyncio.sleep(20)

    # Python has no handler where the tests were started in the background.
    before, began = signal.signal(signal.SIGINT, signal.default_int_handler), time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            bounded_http.run(long())
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("logprob", ['"x"', "1" + "0" * 400, "null"])
def test_an_audit_of_a_server_that_makes_no_sense_is_one_sentence(
    logprob: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = f'[{{"prompt_logprobs": [null, {{"2": {{"logprob": {logprob}}}}}]}}]'
    answer = f'{{"data": [{{"id": "m"}}], "choices": {choices}}}'
    rollout = AuditedRollout("r", [1], [2], np.array([True]), np.array([0.0]))

    async def call(*_: Any, **__: Any) -> tuple[httpx.Response, bytes]:
        return httpx.Response(200), answer.encode()

    monkeypatch.setattr(bounded_http, "call", call)
    with pytest.raises(InputError, match="does not answer as a vLLM server does"):
        server_logprobs("http://127.0.0.1:1", [rollout])


@pytest.mark.parametrize("kind", ["plain", "gzip", "a head"])
def test_other_servers_cannot_fill_the_memory_either(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.extras.audit.rollout_logprobs.LARGEST", 1 << 20)
    monkeypatch.setattr("lockstep.images.urls.LARGEST", 1 << 20)
    part = b"a: " + b"x" * 1000 + b"\r\n" if kind == "a head" else b"[" * 65536
    with flood(HEADS[kind], part) as (url, sent):
        with pytest.raises(LockstepError):
            server_logprobs(url, [])
        with pytest.raises(InputError, match="cannot be fetched"):
            ImageUrls([url]).fetch(f"{url}/a.png")
        assert sent[0] < 32 << 20


@pytest.mark.parametrize(
    "body", ["[" * 20_000, '{"nonce": "\\ud800", "proof": "\\ud800"}', '{"nonce": 1e999, "proof": []}', "\0"]
)
def test_a_strange_greeting_is_one_error(body: str, loop: CallLoop) -> None:
    head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
    with flood(head, b"x") as (url, _), pytest.raises(InputError, match="he key was not sent"):
        ServerCalls(url, KEY, 60.0, loop, lambda: None).call("GET", "/weight_info")
