"""Weights to servers on this machine through shared memory: one copy by the trainer, none by the wire.

Two slots of one segment: while the servers load from one, the trainer fills the other and says so, so that they go on without a
pause; a slot is filled again when every server has loaded what was in it. The segment is a file in `/dev/shm` that
only this user can open, and has no name any more once every server has opened it.
"""

from __future__ import annotations

import os
import secrets
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch

from lockstep.engines.transport import WeightReceiverCalls, finish_all
from lockstep.errors import InputError
from lockstep.sync.chunks import Named, chunks, layout, views
from lockstep.sync.source import outline

NAME = "shared_memory"
_FOLDER = Path("/dev/shm")
_PREFIX = "lockstep-"
_SLOTS = 2


class SharedMemoryTransport:
    """The trainer's end. Holds two chunks of memory, each at most `chunks.CHUNK_BYTES` or one tensor."""

    def __init__(self) -> None:
        self._segment: torch.Tensor | None = None
        self._slot = 0
        self._pool = ThreadPoolExecutor(16, thread_name_prefix="lockstep-push")

    def send(self, tensors: Iterable[Named], servers: Sequence[WeightReceiverCalls]) -> None:
        laid_out = [layout(chunk) for chunk in chunks(outline(tensors))]
        largest = max((size for _, size in laid_out), default=0)
        if self._segment is None or largest > self._slot:
            self._open(largest, servers)
        segment = self._segment
        assert segment is not None
        # What each slot is being loaded from, the slot that was filled last at the end.
        loading: deque[list[Future[None]]] = deque([[] for _ in range(_SLOTS)])
        try:
            for number, (chunk, (placed, size)) in enumerate(zip(chunks(tensors), laid_out, strict=True)):
                finish_all(loading.popleft())
                base = (number % _SLOTS) * self._slot
                for (_, target), (_, source) in zip(views(segment[base : base + size], placed), chunk, strict=True):
                    _copy(target, source)
                info = {"transport": NAME, "tensors": [[*p[:3], p.offset + base] for p in placed]}
                loading.append([self._pool.submit(server.update_weights, info) for server in servers])
        finally:
            # Whatever went wrong: no server reads on when this returns.
            wait([future for slot in loading for future in slot])
        for slot in loading:
            finish_all(slot)

    def forget(self) -> None:
        self._segment = None

    def close(self) -> None:
        self.forget()
        self._pool.shutdown(wait=False)

    def _open(self, largest: int, servers: Sequence[WeightReceiverCalls]) -> None:
        self._slot = largest
        path = _FOLDER / f"{_PREFIX}{secrets.token_hex(16)}"
        try:
            segment = _made(path, _SLOTS * largest)
            info = {"transport": NAME, "segment": path.name, "bytes": _SLOTS * largest}
            finish_all([self._pool.submit(server.init_transfer, info) for server in servers])
        finally:
            path.unlink(missing_ok=True)
        self._segment = segment


def open_segment(name: str, size: int) -> torch.Tensor:
    """The worker's end: a uint8 view of the trainer's segment.

    Raises:
        ValueError: the name is not that of a segment, or its owner is another user.
    """
    path = _own_file(name)
    if path.stat().st_size != size:
        raise ValueError(f"{name} is not the trainer's segment of {size} bytes")
    return _mapped(path, size)


def sees_this_memory(server: WeightReceiverCalls) -> bool:
    """Whether a server's workers open the same shared memory as this process: shown by a file, not inferred from names."""
    secret = secrets.token_hex(16)
    path = _FOLDER / f"{_PREFIX}{secrets.token_hex(16)}"
    handle = _private(path)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(secret)
        return all(found == {"read": secret} for found in server.workers("lockstep_sees", path.name))
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)


def read_mark(name: str) -> str | None:
    """The worker's answer to `sees_this_memory`: what a small file of this user holds; None where there is none."""
    try:
        return _own_file(name).read_text()[:64]
    except (OSError, ValueError):
        return None


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy on this thread alone where both lie in main memory: the other cores are loading the chunk before."""
    if source.device.type == "cpu":
        raw = source.detach().contiguous().flatten().view(torch.uint8)
        target.flatten().view(torch.uint8).numpy()[:] = raw.numpy()
    else:
        target.copy_(source)


def _own_file(name: str) -> Path:
    """A file of this user's that a trainer made.

    Raises:
        ValueError: the name is not that of one, or its owner is another user.
    """
    path = _FOLDER / name
    if not name.startswith(_PREFIX) or not name.removeprefix(_PREFIX).isalnum() or path.stat().st_uid != os.geteuid():
        raise ValueError(f"{name!r} is not a trainer's file")
    return path


def _made(path: Path, size: int) -> torch.Tensor:
    handle = _private(path)
    try:
        # Not `ftruncate`, which promises memory that is not there: the first write would kill this process.
        os.posix_fallocate(handle, 0, size)
    except OSError as error:
        raise InputError(
            f"shared memory has no room for {size >> 20} MiB ({error.strerror}): give it more (docker run --shm-size), or "
            "set vllm_weight_transport to gloo"
        ) from error
    finally:
        os.close(handle)
    return _mapped(path, size)


def _mapped(path: Path, size: int) -> torch.Tensor:
    storage = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=size)
    return torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[arg-type]


def _private(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
