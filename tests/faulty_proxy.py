"""A proxy between trainer and server that changes answers in the ways of broken networks and servers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from servers import HTTP

from lockstep.engines.servers.calls import NONCE_HEADER, PROOF_HEADER

GENERATE = "/inference/v1/generate"

# Gets the path of a call and returns the fault for it: None for no fault, else a name of `_Handler.fault_…`.
Rule = Callable[[str], str | None]


class FaultyProxy:
    """Passes calls on to `target`. `rule` and `target` may be set at any time. `calls` counts the calls by path.

    Attributes:
        late: the delay of a late answer in seconds.
    """

    late = 10.0

    def __init__(self, target: str) -> None:
        self.target = target
        self.rule: Rule = lambda path: None
        self.calls: dict[str, int] = {}
        # The path of every call when it begins, and the path with "!" when it has its answer.
        self.order: list[str] = []
        # Paths that must have begun before a path with the fault "slow" is answered.
        self.together: dict[str, set[str]] = {}
        # How many other calls of its path are answered before a call with the fault "last".
        self.others = 0
        self.answered: dict[str, int] = {}
        self.faults = 0
        self.lock = threading.Lock()
        self.held: tuple[threading.Event, list[bytes]] | None = None
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def once(self, fault: str, path: str = GENERATE, times: int = 1) -> None:
        """Apply the fault to the next call of a path, or to the next few calls, and not to later ones."""
        left = [fault] * times

        def rule(called: str) -> str | None:
            return left.pop() if left and called == path else None

        self.rule = rule

    def wait_until(self, seen: Callable[[], bool], limit: float = 60.0) -> None:
        """Wait until something can be seen here; if nothing is, the call is still answered, and the test notices it."""
        deadline = time.monotonic() + limit
        while not seen() and time.monotonic() < deadline:
            time.sleep(0.005)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def faulty_proxy(target: str) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(target)
    try:
        yield proxy
    finally:
        proxy.close()


class _Handler(BaseHTTPRequestHandler):
    owner: FaultyProxy
    proof: str | None = None

    def do_GET(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def log_message(self, *args: Any) -> None:
        pass

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0]
        with self.owner.lock:
            self.owner.calls[path] = self.owner.calls.get(path, 0) + 1
            self.owner.order.append(path)
            fault = self.owner.rule(path)
            self.owner.faults += fault is not None
        # The trainer may have closed the connection.
        with suppress(OSError):
            getattr(self, f"fault_{fault}")(body) if fault else self._answer(*self._forward(body))
        with self.owner.lock:
            self.owner.answered[path] = self.owner.answered.get(path, 0) + 1

    def _forward(self, body: bytes) -> tuple[int, bytes]:
        passed = ("authorization", "content-type", NONCE_HEADER)
        headers = {k: v for k, v in self.headers.items() if k.lower() in passed}
        found = HTTP.request(
            self.command, self.owner.target + self.path, content=body, headers=headers, timeout=120
        )
        # The answer keeps the server's proof, whatever this proxy makes of its body.
        self.proof = found.headers.get(PROOF_HEADER)
        return found.status_code, found.content

    def _answer(self, status: int, body: bytes, *, sent: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        if self.proof is not None:
            self.send_header(PROOF_HEADER, self.proof)
        self.end_headers()
        self.wfile.write(body[:sent])
        self.wfile.flush()

    def fault_cut(self, body: bytes) -> None:
        status, answer = self._forward(body)
        self._answer(status, answer, sent=len(answer) // 2)
        self.close_connection = True

    def fault_500(self, body: bytes) -> None:
        self._answer(500, b'{"error": "made up"}')

    def fault_503(self, body: bytes) -> None:
        self._answer(503, b"overloaded")

    def fault_late(self, body: bytes) -> None:
        answer = self._forward(body)
        time.sleep(self.owner.late)
        self._answer(*answer)

    def fault_last(self, body: bytes) -> None:
        """In time, and after the answers to calls that came later."""
        path, owner = self.path.partition("?")[0], self.owner
        before = owner.answered.get(path, 0)
        answer = self._forward(body)
        owner.wait_until(lambda: owner.answered.get(path, 0) >= before + owner.others)
        self._answer(*answer)

    def fault_slow(self, body: bytes) -> None:
        """Answered when the paths that go with it have begun; a call that wrongly does not wait has time to begin."""
        answer, path = self._forward(body), self.path.partition("?")[0]
        self.owner.wait_until(lambda: self.owner.together.get(path, set()) <= set(self.owner.order))
        time.sleep(0.1)
        with self.owner.lock:
            self.owner.order.append(path + "!")
        self._answer(*answer)

    def fault_asked_twice(self, body: bytes) -> None:
        first, proof = self._forward(body), self.proof
        # The server takes no call twice.
        assert self._forward(body)[0] == 401
        self.proof = proof
        self._answer(*first)

    def fault_body_twice(self, body: bytes) -> None:
        status, answer = self._forward(body)
        self._answer(status, answer + answer)

    def fault_truncated(self, body: bytes) -> None:
        status, answer = self._forward(body)
        self._answer(status, answer[: len(answer) // 2])

    def fault_empty(self, body: bytes) -> None:
        self._forward(body)
        self._answer(200, b"")

    def fault_token_lost(self, body: bytes) -> None:
        status, answer = self._forward(body)
        found = json.loads(answer)
        found["choices"][0]["token_ids"].pop()
        self._answer(status, json.dumps(found).encode())

    def fault_first_weights(self, body: bytes) -> None:
        """The stamp of a server that was restarted: it has received no weights yet."""
        status, answer = self._forward(body)
        found = json.loads(answer)
        for span in found["choices"][0]["weight_versions"]:
            span["version"] = "default"
        self._answer(status, json.dumps(found).encode())

    def fault_logprob_missing(self, body: bytes) -> None:
        status, answer = self._forward(body)
        found = json.loads(answer)
        found["choices"][0]["logprobs"]["content"][0]["logprob"] = -9999.0
        self._answer(status, json.dumps(found).encode())

    def fault_prompt_changed(self, body: bytes) -> None:
        asked = json.loads(body)
        asked["token_ids"] = [asked["token_ids"][0], *asked["token_ids"]]
        self._answer(*self._forward(json.dumps(asked).encode()))

    def fault_exchanged(self, body: bytes) -> None:
        """Give the first caller the answer to the second one, and the second caller the answer to the first one."""
        status, answer = self._forward(body)
        with self.owner.lock:
            first = self.owner.held is None
            if first:
                self.owner.held = (threading.Event(), [answer])
            event, answers = self.owner.held  # type: ignore[misc]
        if first:
            event.wait(30)
            self._answer(status, answers[1])
        else:
            answers.append(answer)
            self.owner.held = None
            event.set()
            self._answer(status, answers[0])
