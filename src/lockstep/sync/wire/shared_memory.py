"""Sends weights to servers on this machine through shared memory. The trainer copies them once, and workers load from this copy.

A segment has two slots. While the servers load from one slot, the trainer fills the other (`sync/wire/slots.py`). The segment is a
file in `/dev/shm` that only this user can open. Its name is removed as soon as every server has opened it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from lockstep.contract.tensors import push_key
from lockstep.errors import InputError
from lockstep.sync.source import meta_tensors, pieces
from lockstep.sync.wire.chunks import Named, TensorPlace, chunks, layout, views
from lockstep.sync.wire.deltas import Changes, Piece, arrived_pieces, count_of
from lockstep.sync.wire.receivers import WeightReceiverCalls, check_pending, finish_all, worker_ranks
from lockstep.sync.wire.slots import TrainerLock, TrainerSlots, is_unlocked, segment_bytes, worker_chunks

NAME = "shared_memory"
_FOLDER = Path("/dev/shm")
_PREFIX = "lockstep-"


class NoRoom(InputError):
    """The memory through which a push would be sent cannot be had. The push has not called any server yet."""


class SharedMemoryTransport:
    """The trainer's end of the transport. It holds two slots, each of `chunks.CHUNK_BYTES`, or of the largest tensor if that
    is larger.

    Args:
        timeout: seconds that a push may take.
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
        laid_out = [layout([("", torch.empty(len(c), dtype=torch.int64)), *c]) for c in chunks(meta_tensors(tensors))]
        # One thread per server: the push cannot finish unless all servers take part at the same time.
        with ThreadPoolExecutor(len(servers), thread_name_prefix="lockstep-push") as pool:
            try:
                largest = max((size for _, size in laid_out), default=0)
                if self._slots is None or largest > self._slots.slot:
                    self._slots = self._open_segment(largest, servers, pool)
                self._send(tensors, base, [places for places, _ in laid_out], self._slots, servers, pool)
            except BaseException:
                # A server may still load from the segment or write its counter there. Therefore the segment is never used again.
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
        placed = [[[*p[:3], p.offset + slots.offset(number)] for p in places] for number, places in enumerate(layouts)]
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
                    # Here `Changes` are always empty, because the workers have no copy into which changes could be written.
                    if not isinstance(piece, Changes):
                        _copy(target, piece)
                slots.announce_filled(number)
            # Read to the end, because an update describes its last tensors only then.
            assert next(incoming, None) is None
        except BaseException as error:
            slots.give_up()
            # Wait until no server reads the segment any more. A server's own error tells more than the error in the trainer.
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

    def _open_segment(self, largest: int, servers: Sequence[WeightReceiverCalls], pool: Executor) -> TrainerSlots:
        self.forget()
        workers, (buffer, handles) = worker_ranks(servers, 0)[-1], self.shared_buffer(largest, len(servers))
        size = segment_bytes(largest if buffer is None else 0, workers)
        path = _FOLDER / f"{_PREFIX}{secrets.token_hex(16)}"
        try:
            self._lock = TrainerLock(new_file(path, size))
            memory = map_file(path, size)
            info = {"transport": self._name, "segment": path.name, "bytes": size}
            finish_all([pool.submit(s.init_transfer, info | own) for s, own in zip(servers, handles, strict=True)])
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
        self, chunks: Sequence[Sequence[Sequence[object]]], *, push: int, worker: int, workers: int, timeout: float
    ) -> Generator[list[Piece], None, None]:
        """The pieces of one push, chunk by chunk, without the tensors that were left out. The arguments are those of
        `slots.worker_chunks`."""
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
    """The worker's answer to `shares_memory`: the content of a small file of this user, or None if there is no such file."""
    try:
        return _trainer_file(name).read_text(encoding="utf-8")[:64]
    except (OSError, ValueError):
        return None


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor. In main memory only this thread copies, because the other cores load the previous chunk at the same time."""
    if source.device.type == target.device.type == "cpu":
        raw = source.detach().contiguous().flatten().view(torch.uint8)
        target.flatten().view(torch.uint8).numpy()[:] = raw.numpy()
    else:
        target.copy_(source)


def _trainer_file(name: str) -> Path:
    """The path of a file that a trainer made and this user owns.

    Raises:
        ValueError: the name is not the name of such a file, or another user owns it.
    """
    path = _FOLDER / name
    if not name.startswith(_PREFIX) or not name.removeprefix(_PREFIX).isalnum() or path.stat().st_uid != os.geteuid():
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
            f"shared memory has no room for {size >> 20} MiB ({error.strerror}): give it more (docker run --shm-size), or "
            "set vllm_weight_transport to gloo"
        ) from error
    return handle


def map_file(path: Path, size: int) -> torch.Tensor:
    """(size,) uint8: a file that is mapped into this process, and shared with others that map it."""
    storage = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=size)
    return torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[arg-type]


def _open_private(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
