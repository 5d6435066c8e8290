"""HTTP calls to one vLLM server, each with a time limit and with the key, none of them ever repeated.

Used by `engines/vllm_server.py`. What a failed call left behind in the server is not known; the caller starts anew instead.
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
_SHOWN = 300
# The one path that a guarded server answers without its key.
HEALTH = "/health"


class CallLoop:
    """A thread that runs every call, so that calls have one whole time limit, wherever the caller stands."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="lockstep-calls", daemon=True)
        self._thread.start()

    def start(self, call: Coroutine[Any, Any, T], check: Callable[[T], R]) -> Pending[T, R]:
        """Begin a call.

        Args:
            check: what is made of its answer, in the thread that waits for it.

        Raises:
            LockstepError: the engine was closed before.
        """
        if self._closed:
            call.close()
            raise LockstepError(_CLOSED)
        return Pending(asyncio.run_coroutine_threadsafe(call, self._loop), check)

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Wait for a call's result.

        Raises:
            LockstepError: the engine was closed, before or meanwhile.
        """
        return self.start(call, lambda found: found).result()

    def close(self) -> None:
        """End every call, whoever waits for it, and the thread; may be called twice."""
        if self._closed:
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(_end_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


_CLOSED = "the engine was closed while it was being used"


class Pending(Generic[T, R]):
    """A call under way.

    Args:
        future: of the call.
        check: what is made of its answer.
    """

    def __init__(self, future: concurrent.futures.Future[T], check: Callable[[T], R]) -> None:
        self._future, self._check = future, check

    def result(self) -> R:
        """What the call gives, waited for; whoever leaves the wait ends the call.

        Raises:
            LockstepError: the engine was closed meanwhile, or the call was given up.
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
        """Whether it has ended, well or not."""
        return self._future.done()

    def wait(self) -> None:
        """Wait until it has ended, well or not."""
        concurrent.futures.wait([self._future])

    def cancel(self) -> None:
        """Give the call up; its requests end in the server too."""
        self._future.cancel()


async def _end_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class ServerCalls:
    """One server.

    Args:
        url: its base URL.
        key: shown with every call; None for a server without a guard.
        timeout: seconds that one call may take, from first to last byte.
        recover: what an `EngineLost` offers.
    """

    def __init__(self, url: str, key: str | None, timeout: float, loop: CallLoop, recover: Callable[[], None]) -> None:
        self.url = url.rstrip("/")
        self.timeout = timeout
        # Known once the server has introduced itself: workers that share its model, and whether requests may have priorities.
        self.world_size = 1
        self.takes_priorities = False
        # An update that is being begun: no weights are sent before.
        self.beginning: concurrent.futures.Future[Any] | None = None
        self._loop = loop
        self._recover = recover
        self._key = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.AsyncClient(
            base_url=self.url,
            # A kept connection may be closed by the server just as it is used, and such a call must not be repeated.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            timeout=timeout,
            # No proxy between a trainer and its engine; certificates as OpenSSL finds them (SSL_CERT_FILE).
            trust_env=False,
            verify=ssl.create_default_context(),
        )

    async def ask(self, method: str, path: str, body: Any = None, *, limit: float | None = None, **query: Any) -> Any:
        """One call; the JSON of its answer, None where it is empty.

        Raises:
            EngineLost: no answer within the limit, an answer cut short, or one with status 5xx.
            InputError: the server does not know the key, or the path.
            LockstepError: the server refuses what was asked.
        """
        limit = self.timeout if limit is None else limit
        try:
            # Health is open to all: whoever stands there while the server is away need not see the key.
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
        """`ask`, waited for."""
        return self._loop.run(self.ask(method, path, body, limit=limit, **query))

    def begin(self, method: str, path: str, **query: Any) -> Pending[Any, Any]:
        """`ask`, to be waited for later."""
        return self._loop.start(self.ask(method, path, **query), lambda found: found)

    def together(self, *calls: Callable[[], Coroutine[Any, Any, Any]]) -> list[Any]:
        """Calls that do not need one another, made at once; every one has ended before the first error is raised."""

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
        """`ask_workers`, waited for."""
        return self._loop.run(self.ask_workers(method, *args))

    async def ask_workers(self, method: str, *args: str) -> list[Any]:
        """Call a method of every worker of the server (`sync/vllm_worker.py`) at once; their JSON answers, by rank.

        Raises:
            EngineLost: no answer; the server's workers do not have the method, for one.
        """
        answer = await self.ask("POST", "/collective_rpc", {"method": method, "args": list(args)})
        results = answer.get("results") if isinstance(answer, dict) else None
        if not results:
            raise self._lost("/collective_rpc", f"gave no result of {method}")
        return list(results)

    def weight_version(self) -> str:
        """The stamp of the weights that the server holds.

        Raises:
            EngineLost: it does not say.
        """
        answer = self.call("GET", "/weight_info")
        if not isinstance(answer, dict) or "weight_version" not in answer:
            raise self._lost("/weight_info", "did not say which weights it holds")
        return str(answer["weight_version"])

    def ailment(self, limit: float) -> str | None:
        """Why the server does not say within the limit that it serves; None if it does."""
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
            # vLLM has the paths that it was not told to open, and refuses them.
            raise InputError(f"the server at {self.url} has no {path}, or does not open it. {HOW_TO_START}")
        if answer.status_code >= 300:
            raise LockstepError(
                f"the server at {self.url} refused {path} with status {answer.status_code}: {answer.text[:_SHOWN]}"
            )

    def _lost(self, path: str, what: str, *, refused: bool = False) -> EngineLost:
        return EngineLost(f"the server at {self.url} {what} (at {path})", self._recover, refused=refused)


def server_urls(base_url: str | None, host: str, port: int) -> list[str]:
    """Base URL of each server, from a list separated by commas or, without one, from host and port."""
    if not base_url:
        # TRL's default host is an address to listen at; a server that listens there is reached at this one.
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
