"""Distributes requests over one or more vLLM servers, limits how many are open at a time, and converts the answers.

`engines/vllm_server.py` uses it, and checks requests before and answers after. The coroutines run in the thread of `CallLoop`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from lockstep.engines.protocol import Completion, GenerationRequest, OnAnswer
from lockstep.engines.server_calls import ServerCalls
from lockstep.engines.server_messages import (
    INITIAL_WEIGHTS,
    completion_from,
    generation_body,
    scores_from,
    scoring_body,
    stamps_of,
)
from lockstep.errors import EngineLost

T = TypeVar("T")

_GENERATE = "/inference/v1/generate"
# Largest number of requests that one server gets at a time. More requests would only wait inside the server.
_OPEN_REQUESTS = 256


class ServerRequests:
    """Requests to servers that hold the same weights.

    Args:
        stamps: weight version of each stamp that the servers use; grows with every push.
        recover: the `recover` of every `EngineLost` that is raised here.
    """

    def __init__(self, servers: Sequence[ServerCalls], stamps: Mapping[str, int], recover: Callable[[], None]) -> None:
        self._servers, self._stamps, self._recover = servers, stamps, recover
        # Tokens that each server may still have to sample. Only the thread of the calls changes it.
        self._open = [0] * len(servers)
        self._gates = [asyncio.Semaphore(_OPEN_REQUESTS) for _ in servers]
        # Scoring requests do not wait for generation requests.
        self._scoring_gates = [asyncio.Semaphore(_OPEN_REQUESTS) for _ in servers]

    async def generate(
        self, requests: Sequence[GenerationRequest], on_answer: OnAnswer | None, limit: float
    ) -> list[Completion]:
        """Completions of requests, each from the server to which it is routed now.

        Args:
            limit: seconds for all requests together.

        Raises:
            EngineLost: a server did not answer, or not in time.
        """
        routed = self.routed(requests)
        # Count all requests at once, so that the next batch is routed with this load in view.
        for request, server in routed:
            self._open[server] += request.sampling.max_tokens
        unanswered = dict(enumerate(routed))

        async def sample(number: int) -> Completion:
            try:
                return await self._sample(*routed[number], on_answer, limit)
            finally:
                self._strike_off(unanswered, number)

        try:
            return await self._all([sample(number) for number in range(len(routed))], limit)
        finally:
            for number in list(unanswered):
                self._strike_off(unanswered, number)

    def _strike_off(self, unanswered: dict[int, tuple[GenerationRequest, int]], number: int) -> None:
        """Remove a request from its server's load: once, however the request ended."""
        if number in unanswered:
            request, server = unanswered.pop(number)
            self._open[server] -= request.sampling.max_tokens

    def score(
        self, sequences: Sequence[tuple[int, ...]], stamp: str, limit: float
    ) -> Coroutine[Any, Any, list[tuple[float, ...]]]:
        """Log-probs of every id of each sequence, except the first id. The sequences are distributed over all servers.

        Args:
            stamp: stamp of the weights that must have computed the log-probs.

        Raises:
            EngineLost: a server did not answer, or not in time.
        """
        calls = [self._score(ids, i % len(self._servers), stamp, limit) for i, ids in enumerate(sequences)]
        return self._all(calls, limit)

    def routed(self, requests: Sequence[GenerationRequest]) -> list[tuple[GenerationRequest, int]]:
        """Each request with the index of its server. All samples of a prompt go to the server that had the smallest load."""
        load = list(self._open)
        place: dict[bytes, int] = {}
        routed = []
        for request in requests:
            server = place.setdefault(request.prompt_ids.tobytes(), min(range(len(load)), key=load.__getitem__))
            load[server] += request.sampling.max_tokens
            routed.append((request, server))
        return routed

    async def _all(self, calls: Sequence[Coroutine[Any, Any, T]], limit: float) -> list[T]:
        """Run calls together. The first failure cancels all of them, which also ends their requests in the server."""
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

    async def _sample(
        self, request: GenerationRequest, server: int, on_answer: OnAnswer | None, limit: float
    ) -> Completion:
        name = _name(str(request.key))
        answer = await self._post(server, generation_body(request, name), self._gates[server], limit)
        completion = completion_from(answer, request, name, self._stamps)
        if on_answer is not None:
            on_answer(completion)
        return completion

    async def _score(self, ids: tuple[int, ...], server: int, stamp: str, limit: float) -> tuple[float, ...]:
        name = _name("score")
        body = scoring_body(ids, name, first=self._servers[server].takes_priorities)
        answer = await self._post(server, body, self._scoring_gates[server], limit)
        return scores_from(answer, ids, name, {stamp: self._stamps[stamp]})

    async def _post(self, server: int, body: dict[str, Any], gate: asyncio.Semaphore, limit: float) -> Any:
        async with gate:
            answer = await self._servers[server].ask("POST", _GENERATE, body, limit=limit)
        url = self._servers[server].url
        if answer is None:
            raise EngineLost(f"the server at {url} sent an empty answer", self._recover)
        if INITIAL_WEIGHTS in stamps_of(answer):
            raise EngineLost(f"the server at {url} was restarted with its first weights", self._recover)
        return answer


def _name(purpose: str) -> str:
    """A new request id, so that a late answer to an earlier call cannot be mistaken for the answer to this one."""
    return f"{purpose}/{secrets.token_hex(8)}"
