"""Generations that an engine samples while the trainer still learns from earlier ones.

`training/generate/source.py` begins each generation some optimizer steps before it is used, pushes weights in the meantime,
and takes the generations one by one. A push can happen in the middle of a running generation. The new weights then sample all
later tokens, with keys and values that they computed themselves. Every token carries the weight version that sampled it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

from lockstep.engines.protocol import Completion, GenerationRequest, OnAnswer, RequestKey
from lockstep.engines.server_calls import Pending
from lockstep.engines.vllm_server import VLLMServer
from lockstep.errors import LockstepError
from lockstep.rollouts.interruptions import Generate

Answers = dict[RequestKey, Completion]


@dataclass(slots=True)
class _Running:
    """A running generation: its calls in the engine, and its future answers."""

    calls: list[Pending] = field(default_factory=list)
    started: threading.Event = field(default_factory=threading.Event)
    answers: Future[Answers] = field(default_factory=Future)


class GenerationsAhead:
    """The generations that are running, by their number.

    Args:
        engine: one or several servers, which sample while the trainer works.
        limit: seconds that one generation may take from its beginning, beside the others.
    """

    def __init__(self, engine: VLLMServer, limit: float) -> None:
        self.engine, self._limit = engine, limit
        self._gate = threading.Lock()
        self._running: dict[int, _Running] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._running

    @contextmanager
    def held(self) -> Iterator[None]:
        """While weights are pushed: start no new request. The engine keeps its running requests and continues them afterwards."""
        with self._gate:
            yield

    def begin(self, number: int, ask: Callable[[Generate], Answers]) -> None:
        """Begin a generation.

        Args:
            ask: receives a function that sends requests to the engine, and returns the generation's answers. It runs in its
                own thread.
        """
        running = self._running[number] = _Running()

        def generate(requests: Sequence[GenerationRequest], on_answer: OnAnswer | None = None) -> Answers:
            with self._gate:
                if self._running.get(number) is not running:
                    raise LockstepError(f"generation {number} was given up")
                call = self.engine.submit(requests, on_answer, limit=self._limit)
                running.calls.append(call)
            running.started.set()
            return call.result()

        def work() -> None:
            try:
                running.answers.set_result(ask(generate))
            except BaseException as error:  # noqa: BLE001 - `take` raises it
                running.answers.set_exception(error)
            finally:
                running.started.set()

        # A daemon thread, so that a program that ends does not wait for it.
        threading.Thread(target=work, name=f"lockstep-generation-{number}", daemon=True).start()
        # Generations start in order, because the engine serves requests in the order in which it gets them.
        if not running.started.wait(self._limit):
            raise LockstepError(f"generation {number} could not be begun within {self._limit:.0f} s")

    def at_once(self, requests: Sequence[GenerationRequest], on_answer: OnAnswer | None = None) -> Answers:
        """Answer requests of an evaluation. In the engine they wait behind the generations that were begun before."""
        return self.engine.submit(requests, on_answer, limit=self._limit).result()

    def take(self, number: int) -> Mapping[RequestKey, Completion]:
        """Wait for the answers of a generation. Afterwards the generation no longer counts as running.

        Raises:
            EngineLost: the engine was lost in the meantime.
            ProofError: the answers do not match the requests.
            LockstepError: the engine was closed, or exceeded the time limit.
        """
        # Every call inside the generation has this limit itself, from its own start.
        limit = 2 * self._limit
        try:
            answers = self._running[number].answers.result(limit)
        except TimeoutError as error:
            raise LockstepError(f"generation {number} was not there after {limit:.0f} s") from error
        del self._running[number]
        return answers

    def forget_unfinished(self) -> None:
        """Drop generations that are not completely answered: the engine was lost, and no longer knows them."""
        for number, running in list(self._running.items()):
            if not running.answers.done() or running.answers.exception() is not None:
                self._forget(number)

    def forget(self) -> None:
        """Drop all generations, and cancel their requests in the engine."""
        for number in list(self._running):
            self._forget(number)

    def _forget(self, number: int) -> None:
        for call in self._running.pop(number).calls:
            call.cancel()
