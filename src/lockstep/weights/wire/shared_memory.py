"""Weights to servers on this machine through shared memory. The trainer copies them once, and workers load the copy.

A segment is a file in `/dev/shm` that only this user can open; its name is removed as soon as every server has opened
it. It has two slots: while the servers load from one, the trainer fills the other. The counters that order their turns
are in front of the slots, so a whole push needs only one call to each server. Every wait is bounded, and ends early if
the other end is gone or has given up. For CUDA IPC the segment has only the counters, and the one slot is a buffer on
a GPU.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from lockstep.contract.tensors import push_key
from lockstep.errors import InputError
from lockstep.progress import waiting
from lockstep.weights.source import meta_tensors, pieces
from lockstep.weights.wire.stream import (
    Changes,
    Named,
    Piece,
    TensorPlace,
    WeightReceiverCalls,
    aligned,
    arrived_pieces,
    check_pending,
    chunks,
    count_of,
    finish_all,
    layout,
    views,
    worker_ranks,
)

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
        self,
        memory: torch.Tensor,
        slot: int,
        workers: int,
        timeout: float,
        buffer: torch.Tensor | None = None,
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

        `check` raises if a worker will load no more.
        """

        def has_left() -> bool:
            check()
            return self.fewest_loaded() == _GIVEN_UP

        with waiting("the server to load the weights that are in shared memory", self._timeout):
            is_free = _wait_for(
                lambda: self.fewest_loaded() > number - self._slots, has_left, 0.0, self._timeout
            )
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
        """Check that every worker has loaded all chunks."""
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
    """A worker's end of the slots: yield the chunks of one push as they are filled.

    Each is valid until the next is requested.

    The chunks end early and without an error if the trainer is gone, has given up, has begun another push, or fills
    no slot for `timeout` seconds. This is no error, because vLLM does not wait for a server's other workers after one
    of them raises. The trainer sees it in the worker's counter, and the acknowledgement then lists fewer tensors than
    were sent.

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

    Child processes that the trainer forks (for example data loaders) close it at once, so that none of them holds the
    lock of a dead trainer.

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
    """Wait for `ready()`, `limit` seconds at most. Returns False then, or if `is_gone()`, asked `every` seconds."""
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
    """Let earlier writes become visible before later ones, as taking and releasing a lock does on every processor."""
    for _ in range(2):
        with _FENCE:
            pass


NAME = "shared_memory"
_FOLDER = Path("/dev/shm")
_PREFIX = "lockstep-"


class NoRoom(InputError):
    """The memory through which a push would be sent cannot be had. The push has not called any server yet."""


class SharedMemoryTransport:
    """The trainer's end of the transport, with two slots. A push may take `timeout` seconds.

    Each slot has `chunks.CHUNK_BYTES`, or the size of the largest tensor if that is larger.
    """

    _name = NAME
    # Whether the weights go through main memory.
    _to_host = True

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._slots: TrainerSlots | None = None
        self._lock: TrainerLock | None = None

    def send(self, tensors: Iterable[Named], servers: Sequence[WeightReceiverCalls], base: str = "") -> None:
        # A slot begins with the counts of its chunk. They say which tensors are in it.
        laid_out = [
            layout([("", torch.empty(len(c), dtype=torch.int64)), *c]) for c in chunks(meta_tensors(tensors))
        ]
        # One thread per server: the push cannot finish unless all servers take part at the same time.
        with ThreadPoolExecutor(len(servers), thread_name_prefix="lockstep-push") as pool:
            try:
                largest = max((size for _, size in laid_out), default=0)
                if self._slots is None or largest > self._slots.slot:
                    self._slots = self._open_segment(largest, servers, pool)
                self._send(tensors, base, [places for places, _ in laid_out], self._slots, servers, pool)
            except BaseException:
                # Never used again: a server may still load from the segment or write its counter there.
                self.forget()
                raise

    def _send(
        self,
        tensors: Iterable[Named],
        base: str,
        layouts: Sequence[Sequence[TensorPlace]],
        slots: TrainerSlots,
        servers: Sequence[WeightReceiverCalls],
        pool: Executor,
    ) -> None:
        placed = [
            [[*p[:3], p.offset + slots.offset(number)] for p in places]
            for number, places in enumerate(layouts)
        ]
        key = None if self._to_host else push_key()
        info = {
            "transport": self._name,
            "base": base,
            "chunks": placed,
            "push": slots.begin_push(),
            "size": slots.workers,
            "digest_key": "" if key is None else f"{key:x}",
        }
        pending = [
            pool.submit(server.update_weights, {**info, "rank": rank, "timeout": self._timeout})
            for server, rank in zip(servers, worker_ranks(servers, 0), strict=False)
        ]
        try:
            incoming = pieces(tensors, to_host=self._to_host)
            for number, places in enumerate(layouts):
                chunk = list(islice(incoming, len(places) - 1))
                slot = slots.wait_until_free(number, lambda: check_pending(pending))
                (_, counts), *targets = views(slot, places)
                counts.copy_(torch.tensor([count_of(piece) for _, piece in chunk], dtype=torch.int64))
                for (_, target), (_, piece) in zip(targets, chunk, strict=True):
                    # Here `Changes` are always empty: the workers have no copy to write changes into.
                    if not isinstance(piece, Changes):
                        _copy(target, piece)
                slots.announce_filled(number)
            # Read to the end, because an update describes its last tensors only then.
            assert next(incoming, None) is None
        except BaseException as error:
            slots.give_up()
            # No server reads the segment afterwards. A server's own error says more than the trainer's.
            wait(pending)
            if type(error) is RuntimeError:
                finish_all(pending)
            raise
        finish_all(pending)
        slots.check_all_loaded(len(layouts))

    def forget(self) -> None:
        self._slots = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def close(self) -> None:
        self.forget()

    def shared_buffer(self, size: int, servers: int) -> tuple[torch.Tensor | None, list[dict[str, Any]]]:
        """The only slot, if it is outside the segment, and what each server must be told to find it."""
        return None, [{} for _ in range(servers)]

    def _open_segment(
        self, largest: int, servers: Sequence[WeightReceiverCalls], pool: Executor
    ) -> TrainerSlots:
        self.forget()
        workers, (buffer, handles) = worker_ranks(servers, 0)[-1], self.shared_buffer(largest, len(servers))
        size = segment_bytes(largest if buffer is None else 0, workers)
        path = _FOLDER / f"{_PREFIX}{secrets.token_hex(16)}"
        try:
            self._lock = TrainerLock(new_file(path, size))
            memory = map_file(path, size)
            info = {"transport": self._name, "segment": path.name, "bytes": size}
            finish_all(
                [pool.submit(s.init_transfer, info | own) for s, own in zip(servers, handles, strict=True)]
            )
        finally:
            path.unlink(missing_ok=True)
        return TrainerSlots(memory, largest, workers, self._timeout, buffer)


class Segment:
    """The worker's end: the trainer's segment, mapped into memory, and its open file.

    Args:
        buffer: the slot that is outside the segment.

    Raises:
        ValueError: the name is not the name of a segment, or another user owns the file.
    """

    def __init__(self, name: str, size: int, buffer: torch.Tensor | None = None) -> None:
        self.buffer = buffer
        path = _trainer_file(name)
        if path.stat().st_size != size:
            raise ValueError(f"{name} is not the trainer's segment of {size} bytes")
        self.memory = map_file(path, size)
        self.handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)

    def pieces(
        self,
        chunks: Sequence[Sequence[Sequence[object]]],
        *,
        push: int,
        worker: int,
        workers: int,
        timeout: float,
    ) -> Generator[list[Piece], None, None]:
        """The pieces of one push, chunk by chunk, without the tensors left out; the arguments are `worker_chunks`'."""
        incoming = worker_chunks(
            self.memory,
            self.handle,
            chunks,
            push=push,
            worker=worker,
            workers=workers,
            timeout=timeout,
            buffer=self.buffer,
        )
        with contextlib.closing(incoming):
            for (_, counts), *places in incoming:
                yield arrived_pieces(counts.tolist(), places)

    @property
    def is_abandoned(self) -> bool:
        """Whether the trainer no longer uses the segment."""
        return is_unlocked(self.handle)

    def close(self) -> None:
        """Close the file. The memory, and the buffer, are released with the last view of them."""
        os.close(self.handle)
        self.buffer = None


def shares_memory(server: WeightReceiverCalls) -> bool:
    """Whether a server's workers see the same shared memory as this process. It is tested with a small file."""
    secret = secrets.token_hex(16)
    path = _FOLDER / f"{_PREFIX}{secrets.token_hex(16)}"
    try:
        with os.fdopen(_open_private(path), "w", encoding="utf-8") as file:
            file.write(secret)
        return all(found == {"read": secret} for found in server.workers("lockstep_sees", path.name))
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)


def read_test_file(name: str) -> str | None:
    """The worker's answer to `shares_memory`: the content of this user's small file, or None if there is none."""
    try:
        return _trainer_file(name).read_text(encoding="utf-8")[:64]
    except (OSError, ValueError):
        return None


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor; in main memory by this thread alone, because the other cores load the previous chunk meanwhile."""
    if source.device.type == target.device.type == "cpu":
        raw = source.detach().contiguous().flatten().view(torch.uint8)
        target.flatten().view(torch.uint8).numpy()[:] = raw.numpy()
    else:
        target.copy_(source)


def _trainer_file(name: str) -> Path:
    """The path of a file that a trainer made and this user owns. Another name is refused."""
    path = _FOLDER / name
    if (
        not name.startswith(_PREFIX)
        or not name.removeprefix(_PREFIX).isalnum()
        or path.stat().st_uid != os.geteuid()
    ):
        raise ValueError(f"{name!r} is not a trainer's file")
    return path


def new_file(path: Path, size: int) -> int:
    """An open file descriptor of a new file of `size` bytes that only this user can open."""
    handle = _open_private(path)
    try:
        # `ftruncate` would not reserve the memory. If there is too little, the first write would kill this process.
        os.posix_fallocate(handle, 0, size)
    except OSError as error:
        os.close(handle)
        raise NoRoom(
            f"shared memory has no room for {size >> 20} MiB ({error.strerror}): give it more (docker run "
            "--shm-size), or set vllm_weight_transport to gloo"
        ) from error
    return handle


def map_file(path: Path, size: int) -> torch.Tensor:
    """(size,) uint8: a file that is mapped into this process, and shared with others that map it."""
    storage = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=size)
    return torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[arg-type]


def _open_private(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
