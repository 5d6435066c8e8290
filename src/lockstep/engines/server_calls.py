"""HTTP calls to one vLLM server, each with a time limit and with the key, none of them ever repeated.

Used by `engines/vllm_server.py`. What a failed call left behind in the server is not known; the caller starts anew instead.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import httpx

from lockstep.errors import EngineLost, InputError, LockstepError

T = TypeVar("T")
_SHOWN = 300


class CallLoop:
    """A thread that runs every call, so that calls have one whole time limit, wherever the caller stands."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="lockstep-calls", daemon=True).start()

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Wait for a call's result."""
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)


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
        # Workers that share its model; known once the server has introduced itself.
        self.world_size = 1
        self._loop = loop
        self._recover = recover
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            # A kept connection may be closed by the server just as it is used, and such a call must not be repeated.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            timeout=timeout,
            # No proxy between a trainer and its engine.
            trust_env=False,
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
            answer = await asyncio.wait_for(self._client.request(method, path, json=body, params=query), limit)
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

    def init_transfer(self, info: dict[str, Any]) -> None:
        self.call("POST", "/init_weight_transfer_engine", {"init_info": info})

    def update_weights(self, info: dict[str, Any]) -> None:
        self.call("POST", "/update_weights", {"update_info": info})

    def workers(self, method: str, *args: str) -> list[Any]:
        """Call a method of every worker of the server (`sync/vllm_worker.py`) at once; their JSON answers, by rank.

        Raises:
            EngineLost: no answer; the server's workers do not have the method, for one.
        """
        answer = self.call("POST", "/collective_rpc", {"method": method, "args": list(args)})
        results = answer.get("results") if isinstance(answer, dict) else None
        if not results:
            raise self._lost("/collective_rpc", f"gave no result of {method}")
        return list(results)

    def healthy(self, limit: float) -> bool:
        """Whether the server says within the limit that it serves."""
        try:
            self.call("GET", "/health", limit=limit)
        except LockstepError:
            return False
        return True

    def close(self) -> None:
        self._loop.run(self._client.aclose())

    def _check(self, answer: httpx.Response, path: str) -> None:
        if answer.status_code in (401, 403):
            raise InputError(
                f"the server at {self.url} does not accept the key: set LOCKSTEP_SERVER_KEY or vllm_server_key_file to the "
                "key that 'lockstep serve' printed"
            )
        if answer.status_code == 404:
            raise InputError(f"the server at {self.url} has no {path}. {HOW_TO_START}")
        if answer.status_code >= 300:
            raise LockstepError(
                f"the server at {self.url} refused {path} with status {answer.status_code}: {answer.text[:_SHOWN]}"
            )

    def _lost(self, path: str, what: str, *, refused: bool = False) -> EngineLost:
        return EngineLost(f"the server at {self.url} {what} (at {path})", self._recover, refused=refused)


HOW_TO_START = (
    "Start it with 'lockstep serve MODEL'; a server started otherwise needs the environment variable VLLM_SERVER_DEV_MODE=1, "
    "lockstep installed beside vLLM, and the arguments --enable-scale-out --worker-extension-cls "
    'lockstep.sync.vllm_worker.LockstepWorker --weight-transfer-config \'{"backend": "lockstep"}\' --logprobs-mode '
    "processed_logprobs --no-async-scheduling --no-enable-chunked-prefill --generation-config vllm"
)
