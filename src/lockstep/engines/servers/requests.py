"""How requests are distributed over one or more vLLM servers, and how many of them may be open.

Requests and answers go through an inbox (`contract/inbox.py`), which checks the answers. The coroutines run in the
thread of a `CallLoop`.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from lockstep.contract.adapters import UsedAdapter
from lockstep.contract.inbox import Inbox
from lockstep.contract.protocol import Completion, GenerationRequest, RequestKey
from lockstep.engines.servers.calls import ServerCalls
from lockstep.engines.servers.messages import (
    INITIAL_WEIGHTS,
    SentPictures,
    check_encoded,
    completion_from,
    generation_body,
    may_leave_none,
    pictures_body,
    scores_from,
    scoring_body,
    stamps_of,
)
from lockstep.engines.vllm.port.requests import check_sent
from lockstep.errors import EngineLost, LockstepError
from lockstep.threads import CLOSED, CallLoop, Pending

T = TypeVar("T")

_GENERATE = "/inference/v1/generate"
# Largest number of open requests per server. Further requests would only wait inside the server.
_OPEN_REQUESTS = 256
# Number of rollouts whose server is remembered, for errors.
_REMEMBERED = 65_536
# The server of each rollout and of each prompt of one generation.
Routes = dict[tuple[str, int] | bytes, ServerCalls]
Versions = Callable[[], Collection[int]]


class _Load:
    """The load of one server. Only the thread of the calls changes it. `tokens` may still have to be sampled."""

    def __init__(self) -> None:
        self.tokens = 0
        self.gate = asyncio.Semaphore(_OPEN_REQUESTS)
        # Scoring requests do not wait for generation requests.
        self.scoring_gate = asyncio.Semaphore(_OPEN_REQUESTS)
        self.pictures = SentPictures()


class ServerRequests:
    """Requests to servers that hold the same weights.

    Args:
        servers: the servers. The list may change at any time.
        stamps: weight version of each stamp that the servers use. Every push adds an entry.
        recover: the `recover` of every `EngineLost` that is raised here.
        used_adapter: gives the adapter of a request, if there is one. The servers keep it until the context ends.
    """

    def __init__(
        self,
        servers: Sequence[ServerCalls],
        stamps: Mapping[str, int],
        recover: Callable[[], None],
        used_adapter: Callable[[], AbstractContextManager[UsedAdapter | None]],
    ) -> None:
        self._servers, self._stamps = servers, stamps
        self._recover, self._used_adapter = recover, used_adapter
        self._loads: WeakKeyDictionary[ServerCalls, _Load] = WeakKeyDictionary()
        # URL of the server of each of the last rollouts (the first two fields of `RequestKey`), for errors.
        self.answered: dict[tuple[str, int], str] = {}

    def serve(
        self,
        inbox: Inbox,
        loop: CallLoop,
        begin: Callable[[GenerationRequest], Versions],
        timeout: float,
        vocab_size: int,
    ) -> None:
        """Send each request of an inbox in a separate call, until the inbox is closed.

        Args:
            begin: checks a request before it is sent. Returns a function. When the completion has arrived, this
                function returns the weight versions that may have sampled it.
            timeout: seconds for one request, if the inbox has no limit of its own.
            vocab_size: number of logits of the model.

        Raises:
            EngineLost: a server did not answer, or not in time.
            ProofError: an answer does not match its request.
        """
        routes: Routes = {}
        calls: dict[RequestKey, Pending[None, None]] = {}
        try:
            while True:
                with inbox.taken(None, timeout) as requests:
                    if requests is None:
                        return
                    for request in requests:
                        call = self._answer(
                            request, routes, inbox, begin(request), inbox.limit or timeout, vocab_size
                        )
                        calls[request.key] = loop.start(call, lambda found: found)
                for key in inbox.given_up():
                    calls[key].cancel()
        finally:
            # When a call is cancelled, the server drops its request.
            for pending in calls.values():
                pending.cancel()
            for pending in calls.values():
                pending.wait()

    async def _answer(
        self,
        request: GenerationRequest,
        routes: Routes,
        inbox: Inbox,
        versions: Versions,
        limit: float,
        vocab_size: int,
    ) -> None:
        server = self.route(request, routes)
        load = self.load(server)
        load.tokens += request.sampling.max_tokens
        try:
            completion = await asyncio.wait_for(self.sample_one(request, server, limit), limit)
            inbox.answer(completion, versions(), vocab_size)
        except TimeoutError:
            what = f"the server at {server.url} did not finish request {request.key} within {limit:.0f} s"
            inbox.failed(
                request.key,
                EngineLost(
                    f"{what}; raise vllm_server_timeout or lower max_completion_length", self._recover
                ),
            )
        except asyncio.CancelledError:
            inbox.failed(request.key, LockstepError(CLOSED))
            raise
        except BaseException as error:  # noqa: BLE001 - raised by `serve`
            inbox.failed(request.key, error)
        finally:
            load.tokens -= request.sampling.max_tokens

    def load(self, server: ServerCalls) -> _Load:
        """The load of a server."""
        if (load := self._loads.get(server)) is None:
            load = self._loads[server] = _Load()
        return load

    def route(self, request: GenerationRequest, routes: Routes) -> ServerCalls:
        """Choose the server of a request.

        All requests of a rollout and all samples of a prompt go to the same server, because it has their prefix in
        its cache. A new prompt, and a prompt whose server has left, goes to the server that has the fewest tokens
        still to sample.
        """
        rollout, prompt = request.key[:2], request.prompt_ids.tobytes()
        servers = tuple(self._servers)
        server = routes.get(rollout, routes.get(prompt))
        if server is None or server not in servers:
            server = min(servers, key=lambda one: self.load(one).tokens)
        routes[rollout] = routes[prompt] = server
        self.answered.pop(rollout, None)
        self.answered[rollout] = server.url
        if len(self.answered) > _REMEMBERED:
            del self.answered[next(iter(self.answered))]
        return server

    def score(
        self, sequences: Sequence[tuple[int, ...]], stamp: str, limit: float
    ) -> Coroutine[Any, Any, list[tuple[float, ...]]]:
        """Log-probs of every id of each sequence, except the first id, by the weights with this stamp.

        The sequences are distributed evenly over the servers.
        """
        servers = tuple(self._servers)
        calls = [
            self.score_one(ids, servers[i % len(servers)], stamp, limit) for i, ids in enumerate(sequences)
        ]
        return self._all(calls, limit)

    async def _all(self, calls: Sequence[Coroutine[Any, Any, T]], limit: float) -> list[T]:
        """Run calls at the same time. The first failure cancels all of them, and the servers drop their requests."""
        tasks = [asyncio.ensure_future(call) for call in calls]
        if not tasks:
            return []
        try:
            done, waiting = await asyncio.wait(tasks, timeout=limit, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            if waiting:
                raise EngineLost(
                    f"the server did not finish {len(waiting)} of {len(tasks)} requests within {limit:.0f} s; raise "
                    "vllm_server_timeout or lower max_completion_length",
                    self._recover,
                )
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def sample_one(self, request: GenerationRequest, server: ServerCalls, limit: float) -> Completion:
        """The answer of one server to a request, after the pictures that the server does not hold yet."""
        name = _name(str(request.key))
        body = generation_body(request, name)
        check_sent(request, body["sampling_params"])
        async with self.load(server).gate:
            await self._send_pictures(request, server, limit)
            with self._used_adapter() as used:
                try:
                    answer = await self.post(server, body, limit, used)
                except EngineLost as lost:
                    names = may_leave_none(request.sampling) if lost.refused else ""
                    if not names:
                        raise
                    why = f"{lost}; vLLM answers so where {names} leave no token to sample"
                    raise EngineLost(why, lost.recover, refused=True) from lost
        return completion_from(answer, request, name, self._stamps if used is None else used.versions)

    async def _send_pictures(self, request: GenerationRequest, server: ServerCalls, limit: float) -> None:
        """Send the pictures of a request that the server does not hold yet, and check what its workers have encoded."""
        if not request.pictures:
            return
        sent, pieces = self.load(server).pictures, request.pictures.in_pieces
        async with sent.one_at_a_time(pieces):
            if missing := sent.missing(pieces, server.picture_cache):
                body = pictures_body(request, missing, _name("pictures"), first=server.takes_priorities)
                await self.post(server, body, limit)
                digests = json.dumps([picture.digest for picture in missing])
                check_encoded(missing, await server.ask_workers("lockstep_pictures", digests), server.url)
            sent.use(pieces, server.picture_cache)

    def forget_pictures(self) -> None:
        """Send every picture again before its next use, because a server may have been started again."""
        for server in tuple(self._servers):
            self.load(server).pictures.forget()

    async def score_one(
        self, ids: tuple[int, ...], server: ServerCalls, stamp: str, limit: float
    ) -> tuple[float, ...]:
        """Log-probs of every id of a sequence from one server, except of the first id."""
        name = _name("score")
        body = scoring_body(ids, name, first=server.takes_priorities)
        async with self.load(server).scoring_gate:
            with self._used_adapter() as used:
                answer = await self.post(server, body, limit, used)
        return scores_from(answer, ids, name, {stamp: self._stamps[stamp]} if used is None else used.versions)

    async def post(
        self, server: ServerCalls, body: dict[str, Any], limit: float, used: UsedAdapter | None = None
    ) -> Any:
        if used is not None:
            body = body | {"model": used.name}
        answer = await server.ask("POST", _GENERATE, body, limit=limit)
        if answer is None:
            raise EngineLost(f"the server at {server.url} sent an empty answer", self._recover)
        if INITIAL_WEIGHTS in stamps_of(answer):
            raise EngineLost(
                f"the server at {server.url} was restarted with its first weights", self._recover
            )
        return answer


def _name(purpose: str) -> str:
    """A new request id. A late answer to an earlier call then cannot be taken for the answer to this call."""
    return f"{purpose}/{secrets.token_hex(8)}"
