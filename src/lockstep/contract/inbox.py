"""The inbox of an engine: a queue through which requests reach the engine, and completions come back one by one.

Requests come from the thread of the driver's event loop. The engine takes them in its own thread whenever it can, also
between two of its steps. It answers each request as soon as its completion is finished. The inbox matches answers to
requests by key, and checks each answer with `contract/answers.py` before it hands the completion over. When the engine
asks for requests, its thread also does what programs have handed to it (`Errands`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from lockstep.call_loop import Pending
from lockstep.contract.answers import check_answer, missing_answers, second_answer, unexpected_answer
from lockstep.contract.protocol import Completion, GenerationRequest, OnAnswer, RequestKey
from lockstep.errors import LockstepError
from lockstep.report.waits import waiting


class Errands:
    """Work that programs hand to the thread in which their engine is served, because it belongs into that thread.

    Python lets only the main thread handle signals, and many objects, such as a connection to SQLite, belong to the
    thread that made them. Therefore plain tools and environments run in the thread that calls the engine, as reward
    functions do. That thread does the work between two steps of the engine, in the order in which it came. Any thread
    hands it in.

    Attributes:
        changed: notified about each piece of work. An inbox waits on it for requests and for work together.
        seconds: how long all work has taken so far.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.seconds = 0.0
        self._waiting: deque[tuple[Callable[[], Any], Future[Any]]] = deque()

    def ask(self, work: Callable[[], Any]) -> Future[Any]:
        """Hand in a piece of work. If the caller cancels the returned future first, it is not done."""
        found: Future[Any] = Future()
        with self.changed:
            self._waiting.append((work, found))
            self.changed.notify_all()
        return found

    @property
    def waiting(self) -> bool:
        """Whether there is work."""
        return bool(self._waiting)

    def do_next(self) -> bool:
        """Do one piece of work in this thread. False: there is none.

        Raises:
            KeyboardInterrupt: it came while the work was done. Every other error goes to the caller who handed the work in.
        """
        try:
            work, found = self._waiting.popleft()
        except IndexError:
            return False
        if not found.set_running_or_notify_cancel():
            return True
        began = time.monotonic()
        try:
            found.set_result(work())
        except KeyboardInterrupt:
            found.set_exception(LockstepError("the run was interrupted during this call"))
            raise
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            found.set_exception(error)
        finally:
            self.seconds += time.monotonic() - began
        return True

    def do_during(self, call: Pending[Any, Any], patience: float) -> None:
        """Do all work until a call has ended, or until there is no work for `patience` seconds."""
        call.when_done(self._wake)
        while not call.done():
            with self.changed:
                if not self.changed.wait_for(lambda: self._waiting or call.done(), patience):
                    return
            self.do_next()

    def _wake(self, _: object) -> None:
        with self.changed:
            self.changed.notify_all()


Answer = Future[Completion]
# A function that is called with the ids that are sampled so far. It must copy what it keeps, and it must not block.
Progress = Callable[[Sequence[int]], None]
CheckAnswer = Callable[[GenerationRequest, Completion], None]


class Inbox:
    """The requests of one generation.

    Args:
        limit: seconds that one request may take in the engine; None: the engine's own limit.
        patience: seconds that the engine waits without any request before it raises; None: the engine's own limit.
        gate: a lock that is held while the engine takes requests. A push of weights holds the same lock, so that no request starts
            during the push.
        settle: returns when the programs that wait for answers have reacted to all answers that were given so far.
        waits_for: returns the names of the programs that have not ended, for an error message.
        on_answer: called with each completion before it is handed over, from the thread that answers.
        check: a further check of an answer against its request, after the checks of `contract/answers.py`. It raises an error.
        order: sort key of the requests that the engine takes together; None: they keep the order in which they came.
        errands: what programs hand to the engine's thread; None: nothing.
        busy: whether a program waits for something else that has a time limit of its own. Then nobody's patience ends.

    Attributes:
        begun: set when the engine has taken the first requests, or when there will be none.
    """

    def __init__(
        self,
        *,
        limit: float | None = None,
        patience: float | None = None,
        gate: AbstractContextManager[object] | None = None,
        settle: Callable[[], None] = lambda: None,
        waits_for: Callable[[], str] = lambda: "the caller",
        on_answer: OnAnswer | None = None,
        check: CheckAnswer | None = None,
        order: Callable[[GenerationRequest], int] | None = None,
        errands: Errands | None = None,
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._order, self._check = order, check
        self._errands, self._busy = errands or Errands(), busy
        self.limit, self._patience, self._on_answer = limit, patience, on_answer
        self._gate = gate if gate is not None else nullcontext()
        self._settle, self._waits_for = settle, waits_for
        self.begun = threading.Event()
        self._changed = self._errands.changed
        # Requests that wait for the engine, and requests that the engine has taken, in the order in which they came.
        self._waiting: dict[RequestKey, tuple[GenerationRequest, Answer]] = {}
        self._taken: dict[RequestKey, tuple[GenerationRequest, Answer]] = {}
        self._progress: dict[RequestKey, Progress] = {}
        self._given_up: set[RequestKey] = set()
        self._answered: set[RequestKey] = set()
        self._closed = False
        self._error: BaseException | None = None

    # ---- for the programs that make requests ------------------------------------------------------------------------

    def ask(self, request: GenerationRequest, progress: Progress | None = None) -> Answer:
        """Put a request into the inbox. If the caller cancels the returned future, the engine gives the request up.

        Args:
            progress: called from the engine's thread while the request is sampled, if the engine reports progress.

        Raises:
            LockstepError: the inbox is closed.
        """
        answer: Answer = Future()
        with self._changed:
            if self._closed or self._error is not None:
                raise LockstepError(f"request {request.key} was made after its generation had ended")
            self._waiting[request.key] = (request, answer)
            if progress is not None:
                self._progress[request.key] = progress
            self._changed.notify_all()
        answer.add_done_callback(lambda done: self._give_up(request.key) if done.cancelled() else None)
        return answer

    def close(self) -> None:
        """No further request will come. The engine returns when it has answered all requests."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def stop(self, error: BaseException) -> None:
        """End the generation: the engine drops all of its requests and raises this error. Only the first call counts."""
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()
        self.begun.set()

    def settle(self) -> None:
        """Wait until the programs that got answers have made their next requests, if these depend on nothing but the answers.

        An engine calls it after it has given answers and before its next step, so that the same answers lead to the same batches.
        """
        self._settle()

    def _give_up(self, key: RequestKey) -> None:
        with self._changed:
            self._progress.pop(key, None)
            if self._waiting.pop(key, None) is None and self._taken.pop(key, None) is not None:
                self._given_up.add(key)
            self._changed.notify_all()

    # ---- for the engine ---------------------------------------------------------------------------------------------

    @contextmanager
    def taken(self, working: int | None, wait: float) -> Iterator[list[GenerationRequest] | None]:
        """The requests that came since the last call, in order; None if all requests are answered and no more will come.

        Args:
            working: number of requests that the engine is working on. If it is 0, the call waits for the next request. None:
                servers work on the requests, and the call waits for a new request, a request that was given up, or the end.
            wait: seconds to wait for a request while no other request is open, if the inbox has no `patience` of its own.

        Raises:
            ProofError: the engine has dropped a request: it works on fewer requests than it has taken and not yet answered.
            LockstepError: no request came in time, or the generation was stopped.
        """
        did_some = True
        while did_some:
            did_some = self._error is None and self._errands.do_next()
            with self._changed:
                if working is not None and len(self._taken) > working and self._error is None:
                    raise missing_answers(self._taken.keys(), len(self._taken) + len(self._answered))
                if working or self._has_news():
                    break
                if not did_some:
                    limit = self._patience or wait
                    # While the engine works on requests, their own calls say so.
                    idle = not (self._taken or self._waiting)
                    with waiting("a program of a rollout to ask the engine", limit) if idle else nullcontext():
                        did_some = self._await(limit)
        with self._gate:
            with self._changed:
                if self._error is not None:
                    raise self._error
                requests = [request for request, _ in self._waiting.values()]
                if self._order is not None:
                    requests.sort(key=self._order)
                self._taken |= self._waiting
                self._waiting.clear()
                ended = self._closed and not self._taken
            yield None if ended else requests
        if requests or ended:
            self.begun.set()

    def _has_news(self) -> bool:
        """Whether the engine has something to do, or the generation has ended."""
        return bool(self._waiting or self._given_up or self._error or (self._closed and not self._taken))

    def _await(self, wait: float) -> bool:
        """Wait until there is news for the engine. True: there is none, but work that a program has handed in."""
        deadline = time.monotonic() + wait
        while not self._has_news():
            if self._errands.waiting:
                return True
            self._changed.wait(max(deadline - time.monotonic(), 0.0))
            if self._taken or self._busy():
                # The time limits of the open requests, or of what the programs wait for, bound this wait.
                deadline = time.monotonic() + wait
            elif time.monotonic() >= deadline and not (self._waiting or self._error or self._closed):
                raise LockstepError(
                    f"the engine got no request for {wait:.0f} s, and {self._waits_for()} has not ended: something other than "
                    "the engine takes longer than the time limit"
                )
        return False

    def now(self) -> float:
        """Seconds of a clock that stands still while the engine's thread works for programs: for the limits of requests."""
        return time.monotonic() - self._errands.seconds

    def given_up(self) -> list[RequestKey]:
        """Requests that the engine has taken and that nobody waits for any more. Each is reported once."""
        with self._changed:
            keys = list(self._given_up)
            self._given_up.clear()
            return keys

    def failed(self, key: RequestKey, error: BaseException) -> None:
        """End the generation with this error, if somebody still waits for the request."""
        with self._changed:
            if key in self._taken:
                self.stop(error)

    def is_watched(self, key: RequestKey) -> bool:
        """Whether this request has a `progress` function."""
        return key in self._progress

    def progressed(self, key: RequestKey, token_ids: Sequence[int]) -> None:
        """Report the ids that are sampled so far for a watched request. An engine may leave these reports out."""
        progress = self._progress.get(key)
        if progress is not None and key in self._taken:
            progress(token_ids)

    def answer(self, completion: Completion, versions: Collection[int], vocab_size: int | None = None) -> None:
        """Hand a completion over.

        Args:
            versions: weight versions that may have sampled its tokens, in the order of their commits.
            vocab_size: number of logits of the model; None if the engine does not know it.

        Raises:
            ProofError: the completion does not match an open request, or the inbox's own check fails.
        """
        key = completion.key
        with self._changed:
            if key in self._given_up:
                self._given_up.discard(key)
                return
            if key not in self._taken:
                raise second_answer(key) if key in self._answered else unexpected_answer(key)
            request, answer = self._taken[key]
            check_answer(request, completion, versions, vocab_size)
            if self._check is not None:
                self._check(request, completion)
            if completion.pictures is not request.pictures:
                # The digests are equal. The trainer must learn from the pixels that it has read itself.
                completion = replace(completion, pictures=request.pictures)
            del self._taken[key]
            self._progress.pop(key, None)
            self._answered.add(key)
            self._changed.notify_all()
        if self._on_answer is not None:
            self._on_answer(completion)
        try:
            answer.set_result(completion)
        except InvalidStateError:
            # The future was cancelled between the check and this line.
            return


def answer_all(
    serve: Callable[[Inbox], None], requests: Sequence[GenerationRequest], on_answer: OnAnswer | None = None
) -> dict[RequestKey, Completion]:
    """`Engine.generate`, by a call of `Engine.serve`. The requests are already checked."""
    inbox = Inbox(on_answer=on_answer)
    answers = {request.key: inbox.ask(request) for request in requests}
    inbox.close()
    serve(inbox)
    return {key: answer.result() for key, answer in answers.items()}
