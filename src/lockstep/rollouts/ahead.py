"""Generations that an engine samples while the trainer still learns from earlier ones.

Comes from: `training/generate/source.py`, which begins each generation some steps before it is learned from and pushes weights
meanwhile. Goes back there, generation by generation. A push lands in the middle of what is running: the tokens after it are the
new weights', keys and values included, and every token says which weights sampled it.
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
    """A generation on its way: its call in the engine, and what comes of it."""

    calls: list[Pending] = field(default_factory=list)
    started: threading.Event = field(default_factory=threading.Event)
    answers: Future[Answers] = field(default_factory=Future)


class GenerationsAhead:
    """Generations under way, by their number.

    Args:
        engine: a server, or several, which go on while the trainer works.
        limit: seconds that one may take, from its beginning and beside the others.
    """

    def __init__(self, engine: VLLMServer, limit: float) -> None:
        self.engine, self._limit = engine, limit
        self._gate = threading.Lock()
        self._running: dict[int, _Running] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._running

    @contextmanager
    def held(self) -> Iterator[None]:
        """While weights are pushed: no request is taken on. The engine keeps those that it has, and goes on with them after."""
        with self._gate:
            yield

    def begin(self, number: int, ask: Callable[[Generate], Answers]) -> None:
        """Begin a generation.

        Args:
            ask: gets what asks the engine, and gives the generation's answers. Called in a thread of its own.
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
            except BaseException as error:  # noqa: BLE001 - whoever takes the generation gets it
                running.answers.set_exception(error)
            finally:
                running.started.set()

        # A program that ends must not wait for it.
        threading.Thread(target=work, name=f"lockstep-generation-{number}", daemon=True).start()
        # In order: the engine serves first what was asked for first.
        if not running.started.wait(self._limit):
            raise LockstepError(f"generation {number} could not be begun within {self._limit:.0f} s")

    def at_once(self, requests: Sequence[GenerationRequest], on_answer: OnAnswer | None = None) -> Answers:
        """Answer requests that nothing was begun for, those of an evaluation: they wait in the engine behind what was begun."""
        return self.engine.submit(requests, on_answer, limit=self._limit).result()

    def take(self, number: int) -> Mapping[RequestKey, Completion]:
        """The answers of a generation, waited for; it is under way no longer once they are there.

        Raises:
            EngineLost: the engine was lost meanwhile.
            ProofError: the answers are not to what was asked.
            LockstepError: the engine was closed, or took longer than it may.
        """
        # Every call within has the limit itself, from when it was begun.
        limit = 2 * self._limit
        try:
            answers = self._running[number].answers.result(limit)
        except TimeoutError as error:
            raise LockstepError(f"generation {number} was not there after {limit:.0f} s") from error
        del self._running[number]
        return answers

    def forget_unfinished(self) -> None:
        """Give up what is not answered whole: the engine was lost, and knows nothing of it any more."""
        for number, running in list(self._running.items()):
            if not running.answers.done() or running.answers.exception() is not None:
                self._forget(number)

    def forget(self) -> None:
        """Give up everything; its requests end in the engine too."""
        for number in list(self._running):
            self._forget(number)

    def _forget(self, number: int) -> None:
        for call in self._running.pop(number).calls:
            call.cancel()
