"""HTTP calls to one vLLM server. Each call carries the key and has a time limit. No call is ever repeated.

Used by `engines/vllm_server.py`. After a failed call the state of the server is unknown, so the caller starts again from the
beginning.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import ipaddress
import json
import ssl
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

import httpx

from lockstep.engines.vllm_arguments import SERVER_BACKEND, WORKER_EXTENSION
from lockstep.errors import EngineLost, InputError, LockstepError

T = TypeVar("T")
R = TypeVar("R")
# Number of characters of an answer that an error message shows.
_SHOWN = 300
# The only path that a guarded server answers without its key.
HEALTH = "/health"


class CallLoop:
    """A thread that runs every call, so that one time limit covers a whole call, from any calling thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="lockstep-calls", daemon=True)
        self._thread.start()

    def start(self, call: Coroutine[Any, Any, T], check: Callable[[T], R]) -> Pending[T, R]:
        """Begin a call.

        Args:
            check: turns the answer into the result. It runs in the thread that waits for the result.

        Raises:
            LockstepError: the engine is already closed.
        """
        if self._closed:
            call.close()
            raise LockstepError(_CLOSED)
        return Pending(asyncio.run_coroutine_threadsafe(call, self._loop), check)

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a call and wait for its result.

        Raises:
            LockstepError: the engine was closed before or during the call.
        """
        return self.start(call, lambda found: found).result()

    def close(self) -> None:
        """Cancel every call, and end the thread. May be called twice."""
        if self._closed:
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(_end_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


_CLOSED = "the engine was closed while it was being used"


class Pending(Generic[T, R]):
    """A call in progress.

    Args:
        future: the future of the call.
        check: turns the answer into the result.
    """

    def __init__(self, future: concurrent.futures.Future[T], check: Callable[[T], R]) -> None:
        self._future, self._check = future, check

    def result(self) -> R:
        """Wait for the result. If the wait is interrupted, the call is cancelled.

        Raises:
            LockstepError: the engine was closed during the call, or the call was cancelled.
        """
        try:
            found = self._future.result()
        except concurrent.futures.CancelledError as error:
            raise LockstepError(_CLOSED) from error
        except BaseException:
            self._future.cancel()
            raise
        return self._check(found)

    def done(self) -> bool:
        """Whether the call has ended, with or without an error."""
        return self._future.done()

    def wait(self) -> None:
        """Wait until the call has ended, with or without an error."""
        concurrent.futures.wait([self._future])

    def cancel(self) -> None:
        """Cancel the call. Its requests end in the server too."""
        self._future.cancel()


async def _end_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class ServerCalls:
    """The calls to one server.

    Args:
        url: base URL of the server.
        key: sent with every call except `/health`; None for a server without a guard.
        timeout: seconds that one call may take, from first to last byte.
        loop: the thread that runs the calls.
        recover: the `recover` of every `EngineLost` that is raised here.
    """

    def __init__(self, url: str, key: str | None, timeout: float, loop: CallLoop, recover: Callable[[], None]) -> None:
        self.url = url.rstrip("/")
        self.timeout = timeout
        # Set after the first answer of the server: workers that share its model, and whether requests may have priorities.
        self.world_size = 1
        self.takes_priorities = False
        # The start of an update, if one is in progress. Weights are sent only after it.
        self.beginning: concurrent.futures.Future[Any] | None = None
        self._loop = loop
        self._recover = recover
        self._key = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.AsyncClient(
            base_url=self.url,
            # The server may close a kept connection just when it is used, and such a call must not be repeated.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            timeout=timeout,
            # No proxy is used between trainer and engine. OpenSSL finds the certificates (SSL_CERT_FILE).
            trust_env=False,
            verify=ssl.create_default_context(),
        )

    async def ask(self, method: str, path: str, body: Any = None, *, limit: float | None = None, **query: Any) -> Any:
        """Make one call. Returns the JSON of its answer, or None if the answer is empty.

        Raises:
            EngineLost: there was no answer within the limit, the answer was cut short, or its status is 5xx.
            InputError: the server does not accept the key, or does not know the path.
            LockstepError: the server refuses the call.
        """
        limit = self.timeout if limit is None else limit
        try:
            # `/health` needs no key. Another program may answer there while the server is away, and it must not see the key.
            headers = {} if path == HEALTH else self._key
            call = self._client.request(method, path, json=body, params=query, headers=headers, timeout=limit)
            answer = await asyncio.wait_for(call, limit)
            answer_text = answer.text
        except (TimeoutError, httpx.TimeoutException) as error:
            raise self._lost(path, f"did not answer within {limit:.0f} s") from error
        except httpx.HTTPError as error:
            raise self._lost(path, f"cannot be reached ({type(error).__name__}: {error})") from error
        if answer.status_code >= 500:
            raise self._lost(path, f"answered {answer.status_code}: {answer_text[:_SHOWN]}", refused=True)
        self._check(answer, path)
        if not answer_text:
            return None
        try:
            return json.loads(answer_text)
        except ValueError as error:
            raise self._lost(path, f"sent a broken answer: {answer_text[:_SHOWN]!r}") from error

    def call(self, method: str, path: str, body: Any = None, *, limit: float | None = None, **query: Any) -> Any:
        """Make the call of `ask`, and wait for it."""
        return self._loop.run(self.ask(method, path, body, limit=limit, **query))

    def begin(self, method: str, path: str, **query: Any) -> Pending[Any, Any]:
        """Start the call of `ask`, to be waited for later."""
        return self._loop.start(self.ask(method, path, **query), lambda found: found)

    def together(self, *calls: Callable[[], Coroutine[Any, Any, Any]]) -> list[Any]:
        """Make independent calls at the same time. All of them have ended before the first error is raised."""

        async def all_ended() -> list[Any]:
            return await asyncio.gather(*(call() for call in calls), return_exceptions=True)

        answers = self._loop.run(all_ended())
        for error in answers:
            if isinstance(error, BaseException):
                raise error
        return answers

    def init_transfer(self, info: dict[str, Any]) -> None:
        self.call("POST", "/init_weight_transfer_engine", {"init_info": info})

    def update_weights(self, info: dict[str, Any]) -> None:
        if self.beginning is not None:
            self.beginning.result()
        self.call("POST", "/update_weights", {"update_info": info})

    def workers(self, method: str, *args: str) -> list[Any]:
        """Make the call of `ask_workers`, and wait for it."""
        return self._loop.run(self.ask_workers(method, *args))

    async def ask_workers(self, method: str, *args: str) -> list[Any]:
        """Call a method of every worker of the server at once (`sync/vllm_worker.py`). Returns their JSON answers, by rank.

        Raises:
            EngineLost: there is no answer, for example because the workers do not have the method.
        """
        answer = await self.ask("POST", "/collective_rpc", {"method": method, "args": list(args)})
        results = answer.get("results") if isinstance(answer, dict) else None
        if not results:
            raise self._lost("/collective_rpc", f"gave no result of {method}")
        return list(results)

    def weight_version(self) -> str:
        """The stamp of the weights that the server holds.

        Raises:
            EngineLost: the server does not report it.
        """
        answer = self.call("GET", "/weight_info")
        if not isinstance(answer, dict) or "weight_version" not in answer:
            raise self._lost("/weight_info", "did not say which weights it holds")
        return str(answer["weight_version"])

    def ailment(self, limit: float) -> str | None:
        """Why the server does not report within the limit that it is healthy; None if it does."""
        try:
            self.call("GET", HEALTH, limit=limit)
        except EngineLost as lost:
            return str(lost)
        return None

    def _check(self, answer: httpx.Response, path: str) -> None:
        if answer.status_code == 401:
            raise InputError(
                f"the server at {self.url} does not accept the key: set LOCKSTEP_SERVER_KEY or vllm_server_key_file to the "
                "key that 'lockstep serve' printed"
            )
        if answer.status_code in (403, 404):
            # vLLM knows paths that it was not told to open, and refuses them.
            raise InputError(f"the server at {self.url} has no {path}, or does not open it. {HOW_TO_START}")
        if answer.status_code >= 300:
            raise LockstepError(
                f"the server at {self.url} refused {path} with status {answer.status_code}: {answer.text[:_SHOWN]}"
            )

    def _lost(self, path: str, what: str, *, refused: bool = False) -> EngineLost:
        return EngineLost(f"the server at {self.url} {what} (at {path})", self._recover, refused=refused)


def server_urls(base_url: str | None, host: str, port: int) -> list[str]:
    """Base URL of each server: from a comma-separated list, or from host and port if there is no list."""
    if not base_url:
        # TRL's default host 0.0.0.0 is an address to listen on. A server that listens on it is reached at 127.0.0.1.
        return [f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"]
    return [url.strip().rstrip("/") for url in base_url.split(",")]


def is_local(host: str) -> bool:
    """Whether a host name reaches only this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


HOW_TO_START = (
    "Start it with 'lockstep serve MODEL'; a server started otherwise needs the environment variable VLLM_SERVER_DEV_MODE=1, "
    f"lockstep installed beside vLLM, and the arguments --enable-scale-out --worker-extension-cls {WORKER_EXTENSION} "
    f'--weight-transfer-config \'{{"backend": "{SERVER_BACKEND}"}}\' --logprobs-mode '
    "processed_logprobs --no-async-scheduling --no-enable-chunked-prefill --generation-config vllm"
)
