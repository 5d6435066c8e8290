"""The HTTP server of the gateway: keys, limits, repeated calls, clients that go away.

The rollouts behind it are stand-ins.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from lockstep.contract.sampling import Sampling
from lockstep.errors import InputError, LockstepError
from lockstep.extras.agents.agent_calls import Answer, Call, Listener, Partial
from lockstep.extras.agents.request_fields import Refused, RunLimits, no_room
from lockstep.extras.agents.web import LARGEST_BODY, Gateway

HELLO = [{"role": "user", "content": "hello"}]
ANSWER = Answer("a1", 7, "hi", None, (), "stop", 3, 2)
LIMIT = 60


class StandIn:
    """A rollout that gives prepared results, and keeps the calls."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.result: Answer | Exception | None = ANSWER
        self.partial: list[Partial] = []
        self.asked = threading.Event()
        self.futures: list[Future[Answer]] = []

    def submit(self, call: Call, listener: Listener | None = None) -> Future[Answer]:
        self.calls.append(call)
        future: Future[Answer] = Future()
        self.futures.append(future)
        if listener is not None:
            listener.begun(ANSWER.name, ANSWER.created)
            for partial in self.partial:
                listener.said(partial)
        if isinstance(self.result, Exception):
            future.set_exception(self.result)
        elif self.result is not None:
            future.set_result(self.result)
        self.asked.set()
        return future


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    made = Gateway(RunLimits("tiny", Sampling(max_tokens=8)))
    yield made
    made.close()


@pytest.fixture
def rollout() -> StandIn:
    return StandIn()


@pytest.fixture
def key(gateway: Gateway, rollout: StandIn) -> str:
    return gateway.open(rollout)


def is_open(connection: socket.socket) -> bool:
    """Whether the gateway has not closed a connection."""
    connection.setblocking(False)
    try:
        return bool(connection.recv(1))
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def client(gateway: Gateway, key: str, **more: Any) -> OpenAI:
    return OpenAI(base_url=gateway.base_url(key), api_key=key, timeout=LIMIT, max_retries=0, **more)


def post(url: str, **more: Any) -> httpx.Response:
    return httpx.post(url, timeout=LIMIT, **{"json": {"messages": HELLO}, **more})


class TestKeys:
    def test_the_key_in_the_url_or_in_the_header_names_the_rollout(self, gateway: Gateway, key: str) -> None:
        for base, shown in ((gateway.base_url(key), "not-read"), (f"{gateway.url}/v1", key)):
            sdk = OpenAI(base_url=base, api_key=shown, timeout=LIMIT)
            assert sdk.chat.completions.create(model="x", messages=HELLO).choices[0].message.content == "hi"
            assert sdk.responses.create(model="x", input="hello").output_text == "hi"
            assert [model.id for model in sdk.models.list()] == ["tiny"]

    @pytest.mark.parametrize("path", ["/v1", "/rollouts/wrong/v1", "/rollouts/%00/v1"])
    @pytest.mark.parametrize(
        "header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic wrong"}]
    )
    def test_a_wrong_key_or_none_gets_401(
        self, gateway: Gateway, key: str, rollout: StandIn, path: str, header: dict[str, str]
    ) -> None:
        for end in ("chat/completions", "responses"):
            answer = post(f"{gateway.url}{path}/{end}", headers=header)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert httpx.get(f"{gateway.url}{path}/models", headers=header).status_code == 401
        assert not rollout.calls

    def test_each_rollout_has_its_own_key(self, gateway: Gateway, key: str, rollout: StandIn) -> None:
        other = StandIn()
        second = gateway.open(other)
        post(f"{gateway.base_url(second)}/chat/completions")
        assert (len(rollout.calls), len(other.calls)) == (0, 1)

    def test_a_call_after_the_end_gets_410_and_is_not_repeated(
        self, gateway: Gateway, key: str, rollout: StandIn
    ) -> None:
        gateway.end(key)
        sdk = OpenAI(base_url=gateway.base_url(key), api_key=key, timeout=LIMIT)
        with pytest.raises(openai.APIStatusError) as caught:
            sdk.chat.completions.create(model="x", messages=HELLO)
        assert (caught.value.status_code, caught.value.code) == (410, "rollout_ended")
        assert not rollout.calls

    def test_only_this_machine_reaches_it_unless_told(self, gateway: Gateway) -> None:
        socket.create_connection(("127.0.0.1", gateway.port), timeout=LIMIT).close()
        # Another address of this machine.
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", gateway.port), timeout=LIMIT)

    def test_a_port_in_use_is_refused(self, gateway: Gateway) -> None:
        with pytest.raises(InputError, match=f"127.0.0.1, port {gateway.port}"):
            Gateway(RunLimits("tiny", Sampling(max_tokens=8)), port=gateway.port)


class TestRefusals:
    def test_errors_come_in_openais_format(self, gateway: Gateway, key: str, rollout: StandIn) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            client(gateway, key).chat.completions.create(model="x", messages=HELLO, temperature=0.1)
        assert (caught.value.param, caught.value.code) == ("temperature", "unsupported_value")
        assert "temperature" in caught.value.message
        assert not rollout.calls

    def test_a_body_that_is_too_large_gets_413(self, gateway: Gateway, key: str, rollout: StandIn) -> None:
        answer = post(
            f"{gateway.base_url(key)}/chat/completions", content=b" " * (LARGEST_BODY + 1), json=None
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
        assert not rollout.calls

    @pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b""])
    def test_a_body_that_is_no_json_object_gets_400(self, gateway: Gateway, key: str, content: bytes) -> None:
        assert (
            post(f"{gateway.base_url(key)}/chat/completions", content=content, json=None).status_code == 400
        )

    def test_other_paths_and_methods_get_404_and_405_with_the_paths_that_are_there(
        self, gateway: Gateway, key: str
    ) -> None:
        answer = post(f"{gateway.base_url(key)}/embeddings")
        assert answer.status_code == 404
        assert "chat/completions" in answer.json()["error"]["message"]
        assert key not in answer.text
        assert httpx.get(f"{gateway.base_url(key)}/responses").status_code == 405

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_refusal_before_sampling_is_a_status_in_streams_too(
        self, gateway: Gateway, key: str, rollout: StandIn, stream: bool
    ) -> None:
        rollout.result = no_room("the rollout is full")
        with pytest.raises(openai.BadRequestError) as caught:
            client(gateway, key).chat.completions.create(model="x", messages=HELLO, stream=stream)
        assert caught.value.code == "context_length_exceeded"

    def test_a_failed_engine_gets_500_once(self, gateway: Gateway, key: str, rollout: StandIn) -> None:
        rollout.result = LockstepError("the engine is gone")
        sdk = OpenAI(base_url=gateway.base_url(key), api_key=key, timeout=LIMIT, max_retries=2)
        with pytest.raises(openai.InternalServerError, match="the engine is gone"):
            sdk.chat.completions.create(model="x", messages=HELLO)
        assert len(rollout.calls) == 1


class TestRepetitions:
    def test_a_client_that_repeats_a_call_says_so(self, gateway: Gateway, key: str, rollout: StandIn) -> None:
        sdk = client(gateway, key)
        sdk.chat.completions.create(model="x", messages=HELLO)
        sdk.chat.completions.create(model="x", messages=HELLO)
        sdk.chat.completions.create(model="x", messages=HELLO, extra_headers={"x-stainless-retry-count": "1"})
        sdk.chat.completions.create(model="x", messages=[*HELLO, *HELLO])
        first, again, repeated, other = rollout.calls
        assert first.name == again.name == repeated.name != other.name
        assert [call.may_repeat for call in rollout.calls] == [False, False, True, False]

    def test_an_idempotency_key_names_a_call(self, gateway: Gateway, key: str, rollout: StandIn) -> None:
        sdk = client(gateway, key)
        for name in ("one", "one", "two"):
            sdk.chat.completions.create(model="x", messages=HELLO, extra_headers={"Idempotency-Key": name})
        first, again, other = rollout.calls
        assert first.name == again.name != other.name
        assert all(call.may_repeat for call in rollout.calls)


class TestStreams:
    def test_openais_sdk_reads_both_streams(self, gateway: Gateway, key: str) -> None:
        sdk = client(gateway, key)
        with sdk.chat.completions.stream(model="x", messages=HELLO) as stream:
            assert stream.get_final_completion().choices[0].message.content == "hi"
        with sdk.responses.stream(model="x", input="hello") as stream:
            assert stream.get_final_response().output_text == "hi"

    @pytest.mark.parametrize("api", ["chat", "responses"])
    def test_text_arrives_before_the_turn_is_finished_and_adds_up_to_the_answer(
        self, gateway: Gateway, key: str, rollout: StandIn, api: str
    ) -> None:
        rollout.result, rollout.partial = None, [Partial("so", ""), Partial("so it", "a b")]
        texts: dict[str, list[str]] = {"thought": [], "said": []}
        for kind, text in self._texts(client(gateway, key), api):
            texts[kind].append(text)
            if not rollout.futures[0].done() and texts["said"]:
                rollout.futures[0].set_result(replace(ANSWER, reasoning="so it", content="a b c"))
        assert "".join(texts["thought"]) == "so it"
        assert (texts["said"][0], "".join(texts["said"])) == ("a b", "a b c")

    @staticmethod
    def _texts(sdk: OpenAI, api: str) -> Iterator[tuple[str, str]]:
        if api == "chat":
            for chunk in sdk.chat.completions.create(model="x", messages=HELLO, stream=True):
                delta = chunk.choices[0].delta
                if getattr(delta, "reasoning_content", None):
                    yield "thought", delta.reasoning_content
                if delta.content:
                    yield "said", delta.content
            return
        with sdk.responses.stream(model="x", input="hello") as stream:
            for event in stream:
                if event.type == "response.reasoning_text.delta":
                    yield "thought", event.delta
                elif event.type == "response.output_text.delta":
                    yield "said", event.delta
            assert stream.get_final_response().output_text == "a b c"

    def test_a_turn_that_differs_from_what_was_streamed_is_an_error(
        self, gateway: Gateway, key: str, rollout: StandIn
    ) -> None:
        rollout.result, rollout.partial = None, [Partial("", "other")]
        with (
            client(gateway, key).chat.completions.create(model="x", messages=HELLO, stream=True) as stream,
            pytest.raises(openai.APIError, match="differs from what was streamed"),
        ):
            self._finish_after_text(stream, rollout)

    @staticmethod
    def _finish_after_text(stream: Any, rollout: StandIn) -> None:
        for chunk in stream:
            if chunk.choices[0].delta.content:
                rollout.futures[0].set_result(ANSWER)

    def test_a_refusal_after_the_first_event_is_an_error_event(
        self, gateway: Gateway, key: str, rollout: StandIn
    ) -> None:
        rollout.result = None
        with client(gateway, key).chat.completions.create(model="x", messages=HELLO, stream=True) as stream:
            rollout.futures[0].set_exception(Refused(400, "it does not fit", "context_length_exceeded"))
            with pytest.raises(openai.APIError, match="it does not fit"):
                list(stream)


class TestClientsThatGoAway:
    @pytest.mark.parametrize("path", ["chat/completions", "responses"])
    @pytest.mark.parametrize("stream", [False, True])
    def test_the_call_is_cancelled(
        self, gateway: Gateway, key: str, rollout: StandIn, path: str, stream: bool
    ) -> None:
        rollout.result = None
        body = httpx.Request("POST", "http://x", json={"messages": HELLO, "stream": stream}).content
        if path == "responses":
            body = httpx.Request("POST", "http://x", json={"input": "hello", "stream": stream}).content
        with socket.create_connection(("127.0.0.1", gateway.port), timeout=LIMIT) as connection:
            head = (
                f"POST /rollouts/{key}/v1/{path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            connection.sendall(head.encode() + body)
            assert rollout.asked.wait(LIMIT)
            if stream:
                assert b"200 OK" in connection.recv(4096)
        cancelled = threading.Event()
        rollout.futures[0].add_done_callback(lambda _: cancelled.set())
        assert cancelled.wait(LIMIT)
        assert rollout.futures[0].cancelled()

    def test_a_call_that_is_open_at_the_end_of_its_rollout_gets_410(
        self, gateway: Gateway, key: str, rollout: StandIn
    ) -> None:
        rollout.result = None
        answers: list[httpx.Response] = []
        asking = threading.Thread(
            target=lambda: answers.append(post(f"{gateway.base_url(key)}/chat/completions"))
        )
        asking.start()
        assert rollout.asked.wait(LIMIT)
        rollout.futures[0].cancel()
        asking.join(LIMIT)
        assert [answer.status_code for answer in answers] == [410]


class TestConnections:
    """Clients without a key, who do nothing or say something slowly."""

    @pytest.fixture
    def small(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
        """A gateway in a process that may open 400 files."""
        monkeypatch.setattr("lockstep.extras.agents.web.raise_file_limit", lambda: 400)
        # No connection is closed because it is idle for long.
        monkeypatch.setattr("lockstep.extras.agents.web.HEAD_LIMIT", 10.0 * LIMIT)
        made = Gateway(RunLimits("tiny", Sampling(max_tokens=8)))
        yield made
        made.close()

    def test_more_connections_than_there_are_files_leave_room_for_agents(
        self, small: Gateway, rollout: StandIn
    ) -> None:
        base = small.base_url(small.open(rollout))
        with ExitStack() as idle, httpx.Client(timeout=LIMIT) as kept:
            assert kept.post(f"{base}/chat/completions", json={"messages": HELLO}).status_code == 200
            connections = []
            for number in range(250):
                connection = idle.enter_context(
                    socket.create_connection(("127.0.0.1", small.port), timeout=LIMIT)
                )
                connections.append(connection)
                connection.sendall(b"GET /v1/models HTTP/1.1\r\n" if number % 2 else b"")
                if number % 50 == 0:
                    assert post(f"{base}/chat/completions").status_code == 200
            deadline = time.monotonic() + LIMIT
            while sum(map(is_open, connections)) > 200:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            # httpx opens another connection in place of the one that was closed.
            assert kept.post(f"{base}/chat/completions", json={"messages": HELLO}).status_code == 200

    def test_a_call_that_is_being_answered_is_not_closed_to_make_room(
        self, small: Gateway, rollout: StandIn
    ) -> None:
        rollout.result = None
        url = f"{small.base_url(small.open(rollout))}/chat/completions"
        answers: list[int] = []
        asking = threading.Thread(target=lambda: answers.append(post(url).status_code))
        asking.start()
        assert rollout.asked.wait(LIMIT)
        with ExitStack() as idle:
            for _ in range(220):
                idle.enter_context(socket.create_connection(("127.0.0.1", small.port), timeout=LIMIT))
            rollout.futures[0].set_result(ANSWER)
            asking.join(LIMIT)
        assert answers == [200]

    @pytest.mark.parametrize(
        "words",
        [[], [b"G"] * 1000, [b"GET / HTTP/1.1\r\n", *[b"a: b\r\n"] * 1000], [b"GET /v1/models "
                                                                             b"HTTP/1.1\r\nhost: x\r\n\r\n"]],
    )  # fmt: skip
    def test_a_connection_without_a_whole_request_is_closed_in_time(
        self, gateway: Gateway, words: list[bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("lockstep.extras.agents.web.HEAD_LIMIT", 0.5)
        with socket.create_connection(("127.0.0.1", gateway.port), timeout=0.05) as connection:
            deadline = time.monotonic() + LIMIT
            with suppress(ConnectionError):
                for word in itertools.chain(words, itertools.repeat(b"")):
                    assert time.monotonic() < deadline
                    connection.sendall(word)
                    with suppress(TimeoutError):
                        if not connection.recv(4096):
                            break

    def test_a_connection_whose_answers_nobody_reads_is_closed_in_time(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("lockstep.extras.agents.web.HEAD_LIMIT", 0.5)
        listening = socket.create_server

        def with_small_buffers(*words: Any, **more: Any) -> socket.socket:
            """Small buffers are full after few answers."""
            made = listening(*words, **more)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            return made

        monkeypatch.setattr(socket, "create_server", with_small_buffers)
        made = Gateway(RunLimits("tiny", Sampling(max_tokens=8)))
        asked = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" * 1000
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(LIMIT)
            connection.connect(("127.0.0.1", made.port))
            # The gateway reads no more requests than it answers. It closes the connection, and then nothing can be
            # sent.
            with pytest.raises(ConnectionError):
                connection.sendall(asked * 1000)
        made.close()

    def test_a_head_without_end_is_refused(self, gateway: Gateway) -> None:
        with (
            socket.create_connection(("127.0.0.1", gateway.port), timeout=LIMIT) as connection,
            suppress(ConnectionError),
        ):
            connection.sendall(b"GET / HTTP/1.1\r\n")
            for _ in range(100):
                connection.sendall(b"a: " + b"b" * 10_000 + b"\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 400")

    def test_a_body_that_does_not_come_is_refused(
        self, gateway: Gateway, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("lockstep.extras.agents.web.BODY_LIMIT", 0.2)
        with socket.create_connection(("127.0.0.1", gateway.port), timeout=LIMIT) as connection:
            head = f"POST /rollouts/{key}/v1/responses HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
            connection.sendall(head.encode())
            assert connection.recv(4096).startswith(b"HTTP/1.1 408")

    def test_an_error_that_nobody_thought_of_is_an_answer_and_an_event(
        self, gateway: Gateway, key: str, rollout: StandIn
    ) -> None:
        rollout.result = ZeroDivisionError("oops")
        for stream in (False, True):
            answer = post(
                f"{gateway.base_url(key)}/chat/completions", json={"messages": HELLO, "stream": stream}
            )
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
            assert "oops" not in answer.text
        rollout.result = None
        with client(gateway, key).chat.completions.create(model="x", messages=HELLO, stream=True) as stream:
            rollout.futures[-1].set_exception(ZeroDivisionError("oops"))
            with pytest.raises(openai.APIError, match="could not be made"):
                list(stream)
