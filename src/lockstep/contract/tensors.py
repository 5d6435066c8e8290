"""Tensors as both ends of a push describe them: name, dtype, shape, and a digest of all bytes.

The trainer describes the tensors that are sent, and each engine describes the tensors that arrive. A push compares the
two descriptions. There are two kinds of digests, and each digest tells its kind:

- xxh3, of bytes in main memory. It reads 540 MB in 0.02 s on two cores, so that it can cover every byte of every push.
- The keyed digest of a GPU, for tensors that go from GPU to GPU. Their bytes do not come to main memory. Every push
  draws a key, and the digest contains it: digests of two keys are never equal.

A digest finds faults. It does not find forgeries: whoever can change the weights on purpose can also change the
program. Within one process the engine may receive the same memory that the trainer sends. Inside `one_push`, such
memory is read only once. Memory that was copied, converted or changed in between is read again.

The keyed digest is arithmetic on integers, so that a CPU and a GPU give the same number: a tree of sums of products.

- The bytes of a tensor, in row-major order, are words of 32 bits. Zeros fill the last row of `_ROW` words.
- Each row becomes two numbers of 64 bits. Each is the sum over the row of word x multiplier, modulo 2^64. The two
  numbers use different multipliers, and every place of a row has its own.
- The numbers of all rows are the words of the next level, which has other multipliers, until one row is left.
- A digest of name, dtype and shape is added.

SHAKE-256 makes the multipliers from the key. Whatever a change of a tensor is, multipliers drawn at random miss it
with a chance of at most 2^-64 (docs/internals/sync.md has the argument).
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from lockstep.devices import Written, read_after, sent, written_so_far
from lockstep.errors import LockstepError

# 32-bit words per row, and levels of rows. Each level has 1/1024 of the words of the one below: four are enough for
# 16 TiB.
_ROW, _LEVELS = 4096, 4
# Two numbers of 64 bits per row.
_LANES = 2
# Bytes of a tensor that are multiplied at a time. Their products take four times this memory.
CHUNK = 8 << 20
KEY_BITS = 128


_drawn: set[int] = set()


def new_key() -> int:
    """A random key that this process has not had before.

    Raises:
        LockstepError: the system's source of randomness repeats itself.
    """
    key = secrets.randbits(KEY_BITS)
    if key in _drawn:
        raise LockstepError(
            "this machine has drawn the same random key of 128 bits twice, so that its source of randomness "
            "repeats itself: restart the machine or the container, and do not restore a process from a "
            "snapshot"
        )
    _drawn.add(key)
    return key


def key_for(tensors: Iterable[torch.Tensor]) -> int | None:
    """A new key if one of these tensors lies on a GPU; None: they lie in main memory, where xxh3 is faster."""
    return new_key() if any(tensor.is_cuda for tensor in tensors) else None


def device_digests(named: Sequence[Named], key: int) -> torch.Tensor:
    """The digests of tensors that lie on one device.

    Nothing waits for the device: the digests are computed in the order of the caller's stream. Beside a contiguous
    tensor they take at most 48 MB of memory. Other tensors are copied first.

    Args:
        named: names and tensors of one device, of any dtype and shape.
        key: from 0 to 2^128 - 1. Digests are comparable only under one key.

    Returns:
        (tensors, 2) int64 on the device.
    """
    if not named:
        return torch.empty(0, _LANES, dtype=torch.int64)
    device = named[0][1].device
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    multipliers = _on_device(key, device, stream)
    with torch.no_grad():
        contents = torch.stack([_content(tensor.detach(), multipliers) for _, tensor in named])
        return contents + sent(torch.tensor([_outline(n, t, key) for n, t in named]), device)


def digest_texts(digests: torch.Tensor) -> list[str]:
    """Digests as hex texts. They come to the host in one copy."""
    return [row.tobytes().hex() for row in digests.cpu().numpy()]


def _content(tensor: torch.Tensor, multipliers: torch.Tensor) -> torch.Tensor:
    """(2,) int64: the digest of the bytes alone."""
    words = tensor.contiguous().flatten().view(torch.uint8)
    for level in multipliers:
        parts = [_row_sums(part, level) for part in words.split(CHUNK)]
        rows = parts[0] if len(parts) == 1 else torch.cat(parts)
        if len(rows) == 1:
            return rows[0]
        words = rows.flatten().view(torch.uint8)
    raise ValueError(f"a tensor of {tensor.nbytes} bytes is too large for a digest")


def _row_sums(part: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
    """(rows, 2) int64 of bytes; the last row may be short."""
    row_bytes = 4 * _ROW
    missing = -len(part) % row_bytes if len(part) else row_bytes
    if missing:
        part = torch.nn.functional.pad(part, (0, missing))
    elif part.storage_offset() % 4 or part.data_ptr() % 4:
        # A view that begins in the middle of a word.
        part = part.clone()
    return (part.view(torch.int32).view(-1, 1, _ROW) * level).sum(-1)


def _outline(name: str, tensor: torch.Tensor, key: int) -> list[int]:
    outline, secret = [name, str(tensor.dtype), list(tensor.shape)], key.to_bytes(KEY_BITS // 8, "little")
    digest = hashlib.blake2b(json.dumps(outline).encode(), digest_size=8 * _LANES, key=secret)
    return np.frombuffer(digest.digest(), dtype="<i8").tolist()


@lru_cache(maxsize=4)
def _on_device(key: int, device: torch.device, stream: int) -> torch.Tensor:
    """(levels, 2, row) int64: the multipliers. Another stream gets its own copy: it does not wait for this one."""
    found = hashlib.shake_256(key.to_bytes(KEY_BITS // 8, "little")).digest(8 * _LEVELS * _LANES * _ROW)
    return sent(torch.frombuffer(bytearray(found), dtype=torch.int64).view(_LEVELS, _LANES, _ROW), device)


# Two threads, because xxhash releases the interpreter lock while it reads.
_POOL = ThreadPoolExecutor(2, thread_name_prefix="lockstep-digest")

# Bytes of a group of tensors. The tensors of a group are digested while the caller uses them. A group of this size
# keeps both threads busy. It also bounds the memory of tensors that are made only for the push.
GROUP_BYTES = 16 << 20

# Bytes of a GPU's tensor that are on the host at a time, per thread.
_PINNED_BYTES = 32 << 20
_OF_THREAD = threading.local()

Named = tuple[str, torch.Tensor]
_Outline = tuple[str, str, tuple[int, ...]]
_Digest = Callable[[], str]


class TensorSpec(NamedTuple):
    """One tensor of a push: its checkpoint name, dtype as sent, shape, and the digest of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """An engine's acknowledgement of one load.

    Attributes:
        tensors: descriptions of the tensors that the engine now holds, computed from the arrived tensors themselves.
            The tensors of this load come first, in order; the tensors of earlier loads follow.
        untouched: parameters of the engine into which no tensor was written.
        unknown_base: whether the load changes weights that the engine does not hold. The engine has then loaded
            nothing.
        unstored: names of tensors that arrived and were written into no parameter of this worker.
        server: URL of the server that acknowledges; empty if the engine does not consist of several servers.
        others: the acknowledgements of the other servers, and of the other workers of each server.
    """

    tensors: tuple[TensorSpec, ...]
    untouched: tuple[str, ...]
    server: str = ""
    others: tuple[LoadedWeights, ...] = ()
    unknown_base: bool = False
    unstored: tuple[str, ...] = ()


class _Push:
    """What one push has digested.

    Attributes:
        key: the key of its digests; None: they are xxh3.
        known: the digests of tensors that stay alive; None: none are kept.
    """

    def __init__(self, key: int | None = None, *, remembers: bool = False) -> None:
        self.key = key
        self.known: dict[object, _Digest] | None = {} if remembers else None
        self.devices = _OnDevices()


class _OnDevices:
    """Digests that devices compute. The first that is asked for brings all to the host, in one copy per device."""

    def __init__(self) -> None:
        self._waiting: list[tuple[torch.Tensor, list[int], Written]] = []
        self._texts: dict[int, str] = {}
        self._count = 0

    def begin(self, named: Sequence[Named], key: int) -> list[_Digest]:
        """Begin the digests of tensors on one device."""
        numbers = list(range(self._count, self._count + len(named)))
        self._count += len(named)
        digests = device_digests(named, key)
        # Another stream may be the current one when the digests are asked for.
        self._waiting.append((digests, numbers, written_so_far([digests])))
        return [lambda number=number: f"{self._text(number)}-{key:0{KEY_BITS // 4}x}" for number in numbers]  # type: ignore[misc]

    def _text(self, number: int) -> str:
        if number not in self._texts:
            waiting, self._waiting = self._waiting, []
            for device in {digests.device for digests, _, _ in waiting}:
                own = [
                    (read_after(w, torch.Tensor.detach, d), numbers)
                    for d, numbers, w in waiting
                    if d.device == device
                ]
                texts = digest_texts(torch.cat([digests for digests, _ in own]))
                self._texts |= dict(zip([n for _, numbers in own for n in numbers], texts, strict=True))
        return self._texts[number]


_this_push: ContextVar[_Push | None] = ContextVar("this_push", default=None)


@contextmanager
def one_push(key: int | None = None, *, remembers: bool = True) -> Iterator[None]:
    """A push: trainer and engine, if they are in one process, describe each of its tensors once, in the same way.

    Args:
        key: the key of the digests; None: they are xxh3.
        remembers: whether memory that was already digested is not read again, unless it was written to. Only for
            tensors that stay alive: the memory of a tensor that is made only for the push may be given to the next one.
    """
    token = _this_push.set(_Push(key, remembers=remembers))
    try:
        yield
    finally:
        _this_push.reset(token)


def push_key() -> int | None:
    """The key of the push that this thread makes; None: its digests are xxh3."""
    push = _this_push.get()
    return None if push is None else push.key


def digest_under(key: int | None) -> None:
    """Give the further digests of this push another key; None: they are xxh3, of tensors in main memory."""
    if (push := _this_push.get()) is not None:
        push.key = key


def tensor_specs(
    named: Sequence[Named], like: Mapping[str, TensorSpec] | None = None
) -> tuple[TensorSpec, ...]:
    """Name, dtype, shape and byte digest of each tensor.

    Args:
        like: earlier descriptions, by name. A tensor gets a digest of the same kind and key as its own there.
    """
    return begin_specs(named, like)()


def digests_of(named: Mapping[str, torch.Tensor], key: int | None) -> dict[str, str]:
    """The byte digest of each tensor, by name, under a key; None: xxh3, of bytes in main memory."""
    with one_push(key, remembers=False):
        return {spec.name: spec.digest for spec in tensor_specs(list(named.items()))}


class Begun:
    """Descriptions that are computed in the background."""

    def __init__(
        self, outlines: Sequence[_Outline], digests: Sequence[_Digest], on_host: Sequence[_Digest]
    ) -> None:
        # No reference to the tensors, because the caller may free them before it asks for the digests.
        self._outlines, self._digests, self._on_host = outlines, digests, on_host

    def settle(self) -> None:
        """Wait until nothing reads the tensors in main memory. A GPU reads its own in the order of the stream."""
        for digest in self._on_host:
            digest()

    def __call__(self) -> tuple[TensorSpec, ...]:
        """Wait for the descriptions."""
        return tuple(
            TensorSpec(*o, digest()) for o, digest in zip(self._outlines, self._digests, strict=True)
        )


def begin_specs(
    named: Sequence[Named],
    like: Mapping[str, TensorSpec] | None = None,
    *,
    copied: Sequence[torch.Tensor] | None = None,
) -> Begun:
    """Begin `tensor_specs` in the background.

    Tensors in main memory must not change until the result was called. What is done to tensors of a GPU afterwards,
    on the same stream, does not change their digests.

    Args:
        copied: the tensors of which `named` are copies, if they are copies.
    """
    push = _this_push.get() or _Push()
    known = {} if push.known is None else push.known
    keys = [push.key if like is None or name not in like else key_of(like[name].digest) for name, _ in named]
    memory = [t for _, t in named] if copied is None else copied
    names = ["" if key is None else name for key, (name, _) in zip(keys, named, strict=True)]
    identities = list(zip(keys, names, map(_identity, memory), strict=True))
    on_devices: dict[tuple[int, torch.device], dict[object, Named]] = {}
    for identity, key, (name, tensor) in zip(identities, keys, named, strict=True):
        if identity in known:
            continue
        if key is not None:
            on_devices.setdefault((key, tensor.device), {})[identity] = name, tensor
        elif tensor.device.type == "cpu":
            known[identity] = _POOL.submit(tensor_digest, tensor).result
        else:
            # At once, in the order of this thread's stream. Another thread has another stream.
            known[identity] = partial(str, tensor_digest(tensor))
    for (key, _), own in on_devices.items():
        known |= zip(own, push.devices.begin(list(own.values()), key), strict=True)
    outlines = [(name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in named]
    digests = [known[identity] for identity in identities]
    on_host = [digest for digest, key in zip(digests, keys, strict=True) if key is None]
    return Begun(outlines, digests, on_host)


def described(
    tensors: Iterable[Named],
    specs: list[TensorSpec | Begun],
    *,
    to_host: bool = False,
    like: Mapping[str, TensorSpec] | None = None,
) -> Iterator[Named]:
    """Yield the same tensors, and append their descriptions to `specs`, some of them still being made (`finished`).

    `specs` is complete when the iterator ends. The iterator reads up to `GROUP_BYTES` ahead.

    Args:
        to_host: yield tensors of a GPU as copies in main memory. The copies are digested.
        like: earlier descriptions, by name. A tensor gets a digest of the same kind and key as its own there.
    """
    held: list[Named] = []
    for name, tensor in tensors:
        held.append((name, tensor))
        if sum(t.nbytes for _, t in held) >= GROUP_BYTES:
            yield from _described(held, specs, to_host, like)
    yield from _described(held, specs, to_host, like)


def finished(specs: Iterable[TensorSpec | Begun]) -> tuple[TensorSpec, ...]:
    """Wait for the descriptions that are still being made."""
    return tuple(spec for each in specs for spec in (each() if isinstance(each, Begun) else (each,)))


def _described(
    held: list[Named], specs: list[TensorSpec | Begun], to_host: bool, like: Mapping[str, TensorSpec] | None
) -> Iterator[Named]:
    """Yield the tensors of a list and empty the list. The tensors are digested while they are used."""
    group = [(name, host_copy(tensor)) for name, tensor in held] if to_host else list(held)
    begun = begin_specs(group, like, copied=[tensor for _, tensor in held])
    specs.append(begun)
    held.clear()
    group.reverse()
    while group:
        yield group.pop()
    begun.settle()


def digest_of_all(specs: tuple[TensorSpec, ...]) -> str:
    """Hex digest of a whole set of weights.

    Equal digests mean equal names, dtypes, shapes and bytes, in the same order. If all tensors have digests of one key,
    the key is a part of it (`key_of`).
    """
    digest = hashlib.blake2b(json.dumps(specs).encode(), digest_size=16).hexdigest()
    keys = {spec.digest.partition("-")[2] for spec in specs}
    return "-".join(filter(None, (digest, *keys))) if len(keys) == 1 else digest


def key_of(digest: str) -> int | None:
    """The key of a digest; None: it is one of xxh3, or of tensors with several keys."""
    key = digest.partition("-")[2]
    return int(key, 16) if key else None


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def tensor_digest(tensor: torch.Tensor) -> str:
    """Hex xxh3-128 of a tensor's elements in row-major order."""
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    if not flat.is_cuda:
        return xxhash.xxh3_128_hexdigest(flat.cpu().numpy().data)
    found, buffer = xxhash.xxh3_128(), _pinned()
    for part in flat.split(len(buffer)):
        found.update(buffer[: len(part)].copy_(part).numpy().data)
    return found.hexdigest()


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a GPU's tensor in main memory. A tensor that is there already is returned itself."""
    if not tensor.is_cuda:
        return tensor
    flat, buffer = tensor.detach().contiguous().flatten().view(torch.uint8), _pinned()
    host = torch.empty(len(flat), dtype=torch.uint8)
    for part, target in zip(flat.split(len(buffer)), host.split(len(buffer)), strict=True):
        target.copy_(buffer[: len(part)].copy_(part))
    return host.view(tensor.dtype).view(tensor.shape)


def _pinned() -> torch.Tensor:
    """This thread's buffer for bytes of a GPU, which come eight times as fast into pinned memory."""
    if not hasattr(_OF_THREAD, "buffer"):
        _OF_THREAD.buffer = torch.empty(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    return _OF_THREAD.buffer


def _identity(tensor: torch.Tensor) -> object:
    """A key for `one_push`. Two keys are equal only for the same view of the same memory without a write in between.

    Autograd's version counter shows writes. Inference tensors have no counter, so that their keys are never equal.
    """
    writes = object() if tensor.is_inference() else tensor._version
    return (tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride(), writes)


class HeldWeights:
    """An engine's own record of the tensors that it has loaded, each described from the arrived tensor itself.

    It allows pushes that contain only the tensors that changed. It has every tensor of a version, whether the last
    push or an earlier one has sent it.

    Attributes:
        digest: digest of all tensors; empty during an update, and after an update that did not end.
    """

    def __init__(self) -> None:
        self.digest = ""
        self._earlier_digest = ""
        self._specs: dict[str, TensorSpec] = {}
        self._written: set[str] = set()
        self._arrived: list[TensorSpec] = []
        self._now: set[str] = set()
        self._stored: set[str] = set()
        self._refused = False

    @property
    def written_now(self) -> set[str]:
        """The engine's parameters that this update has written."""
        return self._now

    def open(self) -> None:
        """Begin an update. Until it ends, the engine holds nothing that a later update may build on."""
        self._earlier_digest, self.digest = self.digest, ""
        self._arrived, self._now, self._refused = [], set(), False

    def forget(self) -> None:
        """Forget all tensors, because the engine has lost them. The next update must have all tensors."""
        self.digest = self._earlier_digest = ""
        self._specs.clear()
        self._written.clear()
        self._stored.clear()

    def accepts_base(self, base: str) -> bool:
        """Whether the engine holds the weights that this update changes. Otherwise the update must not be loaded.

        Args:
            base: digest of the weights that the update changes. Empty: the update has all tensors, and the record
                begins anew.
        """
        if not base:
            self._specs.clear()
            self._written.clear()
            self._stored.clear()
        self._refused = bool(base) and base != self._earlier_digest
        return not self._refused

    def refuse(self) -> None:
        """End the update without loading the rest: the engine lacks something that the update needs."""
        self._refused = True

    def add(self, specs: Sequence[TensorSpec], written: Iterable[str], stored: Iterable[str]) -> None:
        """Record tensors that were loaded.

        Args:
            written: the engine's parameters that the tensors were written into.
            stored: names of the tensors that were written into a parameter.
        """
        self._arrived += specs
        self._now.update(written)
        self._stored.update(stored)

    def close(self, parameters: Iterable[str], half_loaded: tuple[str, ...] = ()) -> LoadedWeights:
        """End the update. Returns the tensors that arrived in it, and those that the engine holds from earlier updates.

        Args:
            parameters: all parameters of the engine.
            half_loaded: names of layers that received only some of their elements.
        """
        if self._refused:
            return LoadedWeights((), (), unknown_base=True)
        arrived = {spec.name: spec for spec in self._arrived}
        kept = tuple(spec for name, spec in self._specs.items() if name not in arrived)
        self._specs |= arrived
        self._written |= self._now
        missing = tuple(name for name in parameters if name not in self._written)
        unstored = tuple(name for name in self._specs if name not in self._stored)
        self.digest = digest_of_all(tuple(self._specs.values()))
        return LoadedWeights((*self._arrived, *kept), missing + half_loaded, unstored=unstored)
