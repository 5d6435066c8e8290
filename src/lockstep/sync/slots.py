"""A segment of shared memory as two slots that a trainer fills and workers load from, and the counters by which they take turns.

Used by both ends of `sync/shared_memory.py`. The counters lie in front of the slots, so that a whole push is one call to a server.
Every wait is bounded, and ends early where the other end is gone or has given up.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import torch

from lockstep.sync.chunks import Named, aligned, views

SLOTS = 2
_LOOK_EVERY, _LOOK_FOR_PEER_EVERY = 0.0002, 0.25
# Places of counters: how many chunks have been filled, in which push, and from the third on how many each worker has taken.
_FILLED, _PUSH, _TAKEN = 0, 1, 2
_GIVEN_UP = -1
_LEFT = "a server's worker left the push before its end"
_FENCE = threading.Lock()


def segment_bytes(slot: int, workers: int) -> int:
    """Size of a segment whose slots hold so many bytes each."""
    return _header(workers) + SLOTS * slot


def _header(workers: int) -> int:
    return aligned(8 * (_TAKEN + workers))


def _counters(memory: torch.Tensor, workers: int) -> Any:
    return memory[: _header(workers)].view(torch.int64).numpy()


class FilledSlots:
    """The trainer's end.

    Args:
        memory: (bytes,) uint8, of `segment_bytes`.
        slot: bytes of a slot.
        workers: how many load every chunk.
        timeout: seconds that a slot may stay taken.
    """

    def __init__(self, memory: torch.Tensor, slot: int, workers: int, timeout: float) -> None:
        self.slot, self.workers, self._timeout = slot, workers, timeout
        self._memory, self._counters = memory, _counters(memory, workers)

    def begin(self) -> int:
        """Begin a push, of a number that no call to a worker has named before."""
        push = secrets.randbits(62)
        self._counters[:] = 0
        self._counters[_PUSH] = push
        return push

    def offset(self, number: int) -> int:
        """Where in the segment a chunk begins."""
        return _header(self.workers) + number % SLOTS * self.slot

    def free(self, number: int, check: Callable[[], None]) -> torch.Tensor:
        """The slot of a chunk, once every worker has loaded what was in it before.

        Args:
            check: raises where a worker will load no more.

        Raises:
            RuntimeError: a worker did not take what was in it within the time limit, or left the push.
        """

        def is_left() -> bool:
            check()
            return self._least_taken() == _GIVEN_UP

        if not _comes(lambda: self._least_taken() > number - SLOTS, is_left, 0.0, self._timeout):
            late = f"a server did not load a chunk within {self._timeout:.0f} s"
            raise RuntimeError(_LEFT if self._least_taken() == _GIVEN_UP else late)
        start = self.offset(number)
        return self._memory[start : start + self.slot]

    def filled(self, number: int) -> None:
        """Say that a chunk lies in its slot."""
        _fence()
        self._counters[_FILLED] = number + 1

    def end(self, chunks: int) -> None:
        """See that every worker has taken all that there was.

        Raises:
            RuntimeError: one left the push.
        """
        if self._least_taken() != chunks:
            raise RuntimeError(_LEFT)

    def give_up(self) -> None:
        """Say that nothing more will come."""
        self._counters[_FILLED] = _GIVEN_UP

    def _least_taken(self) -> int:
        return int(self._counters[_TAKEN : _TAKEN + self.workers].min())


def taken_chunks(
    memory: torch.Tensor,
    handle: int,
    chunks: Sequence[Sequence[Sequence[object]]],
    *,
    push: int,
    worker: int,
    workers: int,
    timeout: float,
) -> Generator[list[Named], None, None]:
    """A worker's end: the chunks of one push as they are filled, each valid until the next is asked for.

    They end early, without an error, where the trainer is gone, has given up, is at another push, or fills nothing for `timeout`
    seconds: vLLM does not hear the other workers of a server out when one of them fails, and the trainer is told by the
    counter of this one. What arrived is then less than was sent.

    Args:
        memory: the whole segment, uint8.
        handle: an open file of the segment, which its trainer keeps locked for as long as it lives.
        chunks: what each holds (`chunks.Placed`), by its place in the segment.
        push: its number.
        worker: which of `workers` this is, from 0.
    """
    counters = _counters(memory, workers)
    is_gone = partial(_is_gone, counters, push, handle)
    taken = 0
    try:
        for number, placed in enumerate(chunks):
            is_filled = partial(_is_filled, counters, number)
            if not _comes(is_filled, is_gone, _LOOK_FOR_PEER_EVERY, timeout) or not _is_at(counters, push):
                return
            _fence()
            yield views(memory, placed)
            taken = number + 1
            _tell(counters, push, worker, taken)
    finally:
        if taken < len(chunks):
            _tell(counters, push, worker, _GIVEN_UP)


def _is_filled(counters: Any, number: int) -> bool:
    return int(counters[_FILLED]) > number or int(counters[_FILLED]) == _GIVEN_UP


def _is_at(counters: Any, push: int) -> bool:
    return int(counters[_FILLED]) != _GIVEN_UP and int(counters[_PUSH]) == push


def _is_gone(counters: Any, push: int, handle: int) -> bool:
    return not _is_at(counters, push) or _is_unlocked(handle)


def _tell(counters: Any, push: int, worker: int, taken: int) -> None:
    """What a worker has taken, for the trainer that sent it: another push is none of its business."""
    _fence()
    if int(counters[_PUSH]) == push:
        counters[_TAKEN + worker] = taken


class TrainerLock:
    """Marks a segment as one whose trainer lives: until it is closed, which the kernel does when the trainer dies.

    Children that the trainer forks (data loaders, say) let go of it at once, so that none keeps it for a trainer that is dead.

    Args:
        handle: an open file of the segment, closed with this.
    """

    def __init__(self, handle: int) -> None:
        self._handle: int | None = handle
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _HELD.add(self)

    def close(self) -> None:
        """Say that the trainer has done with the segment; may be called twice."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


_HELD: weakref.WeakSet[TrainerLock] = weakref.WeakSet()


def _let_go() -> None:
    for held in list(_HELD):
        held.close()


os.register_at_fork(after_in_child=_let_go)


def _is_unlocked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _comes(ready: Callable[[], bool], is_gone: Callable[[], bool], every: float, limit: float) -> bool:
    """Wait for something: whether it came within so many seconds, and before whoever it comes from was gone.

    Args:
        every: seconds between looks at the other end.
    """
    start = looked = time.monotonic()
    while not ready():
        now = time.monotonic()
        if now - looked >= every:
            if is_gone():
                return False
            looked = now
        if now - start > limit:
            return False
        time.sleep(_LOOK_EVERY)
    return True


def _fence() -> None:
    """Order what lies before in memory before what comes after: leaving a lock and taking it again does, on every processor."""
    for _ in range(2):
        with _FENCE:
            pass
