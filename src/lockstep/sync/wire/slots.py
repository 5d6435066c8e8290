"""A segment of shared memory with two slots that the trainer fills and workers load from, and the counters that order their
turns.

It serves both ends of the shared memory. The counters are in front of the slots, so a whole push needs only one call
to each server. Every wait is bounded, and ends early if the other end is gone or has given up. For
`sync/wire/cuda_ipc.py` the segment has only the counters, and the one slot is a buffer on a GPU.
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

from lockstep.report.waits import waiting
from lockstep.sync.wire.chunks import Named, aligned, views

SLOTS = 2
_POLL_EVERY, _CHECK_PEER_EVERY = 0.0002, 0.25
# Indices of counters: number of filled chunks, number of the push, then per worker its number of loaded chunks.
_FILLED, _PUSH, _LOADED = 0, 1, 2
_GIVEN_UP = -1
_WORKER_LEFT = "a server's worker left the push before its end"
_FENCE = threading.Lock()


def segment_bytes(slot: int, workers: int) -> int:
    """Size in bytes of a segment whose slots hold `slot` bytes each."""
    return _header(workers) + SLOTS * slot


def _header(workers: int) -> int:
    return aligned(8 * (_LOADED + workers))


def _counters(memory: torch.Tensor, workers: int) -> Any:
    return memory[: _header(workers)].view(torch.int64).numpy()


class TrainerSlots:
    """The trainer's end of the slots.

    Args:
        memory: (bytes,) uint8, of size `segment_bytes`.
        slot: size of one slot in bytes.
        workers: number of workers that load every chunk.
        timeout: seconds that a slot may stay in use.
        buffer: (slot,) uint8, the only slot, outside the segment; None: the segment has `SLOTS` slots.
    """

    def __init__(
        self, memory: torch.Tensor, slot: int, workers: int, timeout: float, buffer: torch.Tensor | None = None
    ) -> None:
        self.slot, self.workers, self._timeout = slot, workers, timeout
        self._memory, self.counters = memory if buffer is None else buffer, _counters(memory, workers)
        self._first, self._slots = (_header(workers), SLOTS) if buffer is None else (0, 1)

    def begin_push(self) -> int:
        """Begin a push and return its number. The number is random, so no earlier call to a worker had the same one."""
        push = secrets.randbits(62)
        self.counters[:] = 0
        self.counters[_PUSH] = push
        return push

    def offset(self, number: int) -> int:
        """Offset in the segment, or in the buffer, at which a chunk begins, in bytes."""
        return self._first + number % self._slots * self.slot

    def wait_until_free(self, number: int, check: Callable[[], None]) -> torch.Tensor:
        """The slot for a chunk, as soon as every worker has loaded the slot's previous content.

        Args:
            check: raises if a worker will load no more.

        Raises:
            RuntimeError: a worker did not load the previous content within the time limit, or left the push.
        """

        def has_left() -> bool:
            check()
            return self.fewest_loaded() == _GIVEN_UP

        with waiting("the server to load the weights that are in shared memory", self._timeout):
            is_free = _wait_for(lambda: self.fewest_loaded() > number - self._slots, has_left, 0.0, self._timeout)
        if not is_free:
            late = f"a server did not load a chunk within {self._timeout:.0f} s"
            raise RuntimeError(_WORKER_LEFT if self.fewest_loaded() == _GIVEN_UP else late)
        start = self.offset(number)
        return self._memory[start : start + self.slot]

    def announce_filled(self, number: int) -> None:
        """Announce that a chunk is in its slot. On a GPU, this waits for the copies of this thread's stream."""
        _finish_copies(self._memory)
        _fence()
        self.counters[_FILLED] = number + 1

    def check_all_loaded(self, chunks: int) -> None:
        """Check that every worker has loaded all chunks.

        Raises:
            RuntimeError: a worker left the push.
        """
        if self.fewest_loaded() != chunks:
            raise RuntimeError(_WORKER_LEFT)

    def give_up(self) -> None:
        """Announce that no more chunks will come."""
        self.counters[_FILLED] = _GIVEN_UP

    def fewest_loaded(self) -> int:
        """How many chunks the slowest worker has loaded."""
        return int(self.counters[_LOADED : _LOADED + self.workers].min())


def worker_chunks(
    memory: torch.Tensor,
    handle: int,
    chunks: Sequence[Sequence[Sequence[object]]],
    *,
    push: int,
    worker: int,
    workers: int,
    timeout: float,
    buffer: torch.Tensor | None = None,
) -> Generator[list[Named], None, None]:
    """A worker's end of the slots: yield the chunks of one push as they are filled. Each is valid until the next is requested.

    The chunks end early and without an error if the trainer is gone, has given up, has begun another push, or fills no slot for
    `timeout` seconds. This is no error, because vLLM does not wait for a server's other workers after one of them raises. The
    trainer sees it in the worker's counter, and the acknowledgement then lists fewer tensors than were sent.

    Args:
        memory: (bytes,) the whole segment, uint8.
        handle: an open file of the segment. The trainer keeps the file locked as long as it lives.
        chunks: the tensors of each chunk (`chunks.TensorPlace`), with their places in the segment.
        push: number of the push.
        worker: index of this worker among `workers`, from 0.
        buffer: (bytes,) uint8, the slot that is outside the segment.
    """
    counters, slots = _counters(memory, workers), memory if buffer is None else buffer
    is_gone = partial(_is_gone, counters, push, handle)
    loaded = 0
    try:
        for number, placed in enumerate(chunks):
            is_filled = partial(_is_filled, counters, number)
            with waiting("the trainer to put weights into shared memory", timeout):
                has_come = _wait_for(is_filled, is_gone, _CHECK_PEER_EVERY, timeout)
            if not has_come or not _is_at(counters, push):
                return
            _fence()
            yield views(slots, placed)
            _finish_copies(slots)
            loaded = number + 1
            _publish(counters, push, worker, loaded)
    finally:
        if loaded < len(chunks):
            _publish(counters, push, worker, _GIVEN_UP)


def _finish_copies(slots: torch.Tensor) -> None:
    """Wait until what this thread has given to a GPU no longer writes to the slots, or reads from them."""
    if slots.is_cuda:
        torch.cuda.current_stream(slots.device).synchronize()


def _is_filled(counters: Any, number: int) -> bool:
    return int(counters[_FILLED]) > number or int(counters[_FILLED]) == _GIVEN_UP


def _is_at(counters: Any, push: int) -> bool:
    return int(counters[_FILLED]) != _GIVEN_UP and int(counters[_PUSH]) == push


def _is_gone(counters: Any, push: int, handle: int) -> bool:
    return not _is_at(counters, push) or is_unlocked(handle)


def _publish(counters: Any, push: int, worker: int, loaded: int) -> None:
    """Publish the number of chunks that a worker has loaded, unless the trainer is already at another push."""
    _fence()
    if int(counters[_PUSH]) == push:
        counters[_LOADED + worker] = loaded


class TrainerLock:
    """A lock on a segment that shows that its trainer lives. The kernel releases it when the trainer dies.

    Child processes that the trainer forks (for example data loaders) close it at once, so that none of them holds the lock of
    a dead trainer.

    Args:
        handle: an open file of the segment; `close` closes it.
    """

    def __init__(self, handle: int) -> None:
        self._handle: int | None = handle
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _OPEN_LOCKS.add(self)

    def close(self) -> None:
        """Release the lock: the trainer no longer uses the segment. May be called twice."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


_OPEN_LOCKS: weakref.WeakSet[TrainerLock] = weakref.WeakSet()


def _close_in_child() -> None:
    for held in list(_OPEN_LOCKS):
        held.close()


os.register_at_fork(after_in_child=_close_in_child)


def is_unlocked(handle: int) -> bool:
    """Whether no trainer holds the lock of a segment."""
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_for(ready: Callable[[], bool], is_gone: Callable[[], bool], every: float, limit: float) -> bool:
    """Wait until `ready()` is true. Returns False if `is_gone()` becomes true or `limit` seconds pass first.

    Args:
        every: seconds between two calls of `is_gone`.
    """
    start = last_check = time.monotonic()
    while not ready():
        now = time.monotonic()
        if now - last_check >= every:
            if is_gone():
                return False
            last_check = now
        if now - start > limit:
            return False
        time.sleep(_POLL_EVERY)
    return True


def _fence() -> None:
    """Memory fence: earlier writes become visible before later ones. Taking and releasing a lock does this on every processor."""
    for _ in range(2):
        with _FENCE:
            pass
