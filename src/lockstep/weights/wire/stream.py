"""A push as a stream: its chunks, what changed in them, and what a transport asks of the receivers.

A stream of tensors is cut into chunks that fit a buffer. The sender lays the tensors of a chunk out in memory, and the
worker reads them back; these functions are pure.

What changed in a tensor are the places of the elements that differ, and their new values, as bytes. The trainer
compares a tensor with its copy of what a server holds. The server's worker keeps a copy of each tensor
(`ReceivedWeights`), and writes the new values into it. The values themselves are sent, because adding differences
would round.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from lockstep.contract.tensors import dtype_name

CHUNK_BYTES = 64 << 20
# Tensors of every dtype, and cache lines, may start at a multiple of this many bytes.
ALIGNMENT = 64

Named = tuple[str, torch.Tensor]


class TensorPlace(NamedTuple):
    """The place of one tensor in a chunk. It is sent as JSON."""

    name: str
    dtype: str
    shape: list[int]
    offset: int


def chunks(tensors: Iterable[Named], limit: int = CHUNK_BYTES) -> Iterator[list[Named]]:
    """Group consecutive tensors into chunks of at most `limit` bytes. A larger tensor is a chunk by itself."""
    group: list[Named] = []
    used = 0
    for name, tensor in tensors:
        size = aligned(tensor.nbytes)
        if group and used + size > limit:
            yield group
            group, used = [], 0
        group.append((name, tensor))
        used += size
    if group:
        yield group


def layout(chunk: Sequence[Named]) -> tuple[list[TensorPlace], int]:
    """The place of each tensor of a chunk in a buffer, and the number of bytes that the buffer needs."""
    placed, offset = [], 0
    for name, tensor in chunk:
        placed.append(TensorPlace(name, dtype_name(tensor.dtype), list(tensor.shape), offset))
        offset += aligned(tensor.nbytes)
    return placed, offset


def views(buffer: torch.Tensor, placed: Iterable[Sequence[object]]) -> list[Named]:
    """The tensors of a chunk as views of a uint8 buffer."""
    found = []
    for name, dtype, shape, offset in map(_place, placed):
        size = _bytes(dtype, shape)
        if offset + size > buffer.numel():
            raise ValueError(f"{name} is outside the buffer of {buffer.numel()} bytes")
        found.append((name, buffer[offset : offset + size].view(getattr(torch, dtype)).view(shape)))
    return found


def buffer_bytes(placed: Iterable[Sequence[object]]) -> int:
    """The number of bytes that a buffer needs for a chunk."""
    return max((place.offset + _bytes(place.dtype, place.shape) for place in map(_place, placed)), default=0)


def _place(entry: Sequence[object]) -> TensorPlace:
    """The place that an entry of another process describes. An entry that describes none is refused."""
    if len(entry) == len(TensorPlace._fields):
        name, dtype, shape, offset = entry
        sizes = [*shape, offset] if isinstance(shape, (list, tuple)) else [-1]
        is_place = (
            isinstance(name, str) and isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in sizes)
        )
        if is_place and isinstance(getattr(torch, str(dtype), None), torch.dtype) and offset % ALIGNMENT == 0:  # type: ignore[operator]
            return TensorPlace(*entry)  # type: ignore[arg-type]
    raise ValueError(
        f"{list(entry)!s:.200} is no place of a tensor: a name, a dtype, sizes, and a multiple of {ALIGNMENT}"
    )


def _bytes(dtype: str, shape: Sequence[int]) -> int:
    return math.prod(shape) * getattr(torch, dtype).itemsize


def aligned(size: int) -> int:
    """`size` rounded up to the next offset at which a tensor may start, in bytes."""
    return -(-size // ALIGNMENT) * ALIGNMENT


# The entry in the counts of a chunk for a tensor that is sent as a whole.
WHOLE = -1
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GAP_BYTES, LARGEST_GAP = 2, 0xFFFF
# Words of eight bytes that are compared at a time.
WORDS_AT_A_TIME = 1 << 20
# Matches the beginning of a tensor's name up to the part that engines fuse: one layer's attention, or one layer's MLP.
_PART_OF_A_LAYER = re.compile(r"(.*?\.\d+\.[^.]+)\.")


class Changes(NamedTuple):
    """The elements of one tensor that get new values.

    Attributes:
        elements: number of elements in `raw`.
        raw: (bytes,) uint8: the new values in the tensor's dtype, then one gap of 16 bits per element. A gap is the
            distance from the previous place; the first gap is counted from −1. If a distance does not fit into 16
            bits, unchanged elements in between are sent too.
    """

    elements: int
    raw: torch.Tensor


Piece = tuple[str, "torch.Tensor | Changes"]
NO_CHANGES = Changes(0, torch.empty(0, dtype=torch.uint8))


def changes_between(old: torch.Tensor, new: torch.Tensor) -> tuple[int, Changes | None]:
    """The number of elements of contiguous tensors on the host that differ, and the changes that turn `old` into `new`.

    Instead of the changes None, if the whole tensor has no more bytes.
    """
    bits = BITS[new.dtype.itemsize]
    before, after = (tensor.flatten().view(bits).numpy() for tensor in (old, new))
    places = _differing(before, after)
    if not len(places):
        return 0, NO_CHANGES
    sent_places = _with_bridges(places)
    if new.dtype.itemsize < _GAP_BYTES or changes_bytes(len(sent_places), new.dtype) >= new.nbytes:
        return len(places), None
    gaps = np.diff(sent_places, prepend=-1).astype(np.uint16)
    raw = np.concatenate([after[sent_places].view(np.uint8), gaps.view(np.uint8)])
    return len(places), Changes(len(sent_places), torch.from_numpy(raw))


def apply_changes(tensor: torch.Tensor, changes: Changes) -> None:
    """Write the new values into a contiguous tensor in main memory. Changes that do not fit it are refused."""
    size = changes.elements * tensor.dtype.itemsize
    if changes.raw.numel() != changes_bytes(changes.elements, tensor.dtype):
        raise ValueError(
            f"{changes.elements} changes in {changes.raw.numel()} bytes do not fit a tensor of {tensor.dtype}"
        )
    raw = changes.raw.numpy()
    places = np.cumsum(raw[size:].view(np.uint16), dtype=np.int64) - 1
    if changes.elements and not 0 <= places[0] <= places[-1] < tensor.numel():
        raise ValueError(
            f"changes up to element {places[-1]} do not fit a tensor of {tensor.numel()} elements"
        )
    held = tensor.view(-1).view(BITS[tensor.dtype.itemsize]).numpy()
    held[places] = raw[:size].view(held.dtype)


def changes_bytes(count: int, dtype: torch.dtype) -> int:
    """Size in bytes of `count` changes of a tensor."""
    return count * (dtype.itemsize + _GAP_BYTES)


def piece_bytes(count: int, tensor: torch.Tensor) -> int:
    """Size in bytes of what is sent of a tensor. `count` is the tensor's entry in the counts of its chunk."""
    return tensor.nbytes if count == WHOLE else changes_bytes(count, tensor.dtype)


def count_of(piece: torch.Tensor | Changes) -> int:
    """The entry of a piece in the counts of its chunk."""
    return piece.elements if isinstance(piece, Changes) else WHOLE


def raw_bytes(piece: torch.Tensor | Changes, device: torch.device) -> torch.Tensor:
    """The bytes of a piece as they are sent: uint8, on `device`."""
    if isinstance(piece, Changes):
        return piece.raw.to(device)
    return piece.detach().contiguous().to(device).flatten().view(torch.uint8)


def arrived_pieces(counts: Sequence[int], places: Sequence[Named]) -> list[Piece]:
    """The pieces of a chunk whose bytes have arrived. Tensors of which nothing was sent are left out.

    Args:
        counts: one entry per tensor of the chunk.
        places: the memory of each tensor of the chunk. Changes are at the beginning of it.
    """
    found: list[Piece] = []
    for count, (name, place) in zip(counts, places, strict=True):
        if count == WHOLE:
            found.append((name, place))
        elif count:
            raw = place.flatten().view(torch.uint8)[: changes_bytes(count, place.dtype)]
            found.append((name, Changes(count, raw)))
    return found


def part_of(name: str) -> str:
    """The part of the model that a tensor belongs to. An engine may fuse tensors of one part, and loads all or none.

    Tensors of one layer belong to the layer's next lower module (`model.layers.3.self_attn`), others to their own
    module.
    """
    found = _PART_OF_A_LAYER.match(name)
    return found[1] if found else name.rpartition(".")[0]


class ReceivedWeights:
    """A worker's copy of the tensors that it has received, in main memory. Changes are written into this copy."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._changed_parts: set[str] = set()

    def clear(self) -> None:
        """Free the memory of the copy."""
        self._tensors.clear()
        self._changed_parts.clear()

    def take(self, pieces: Iterable[Piece]) -> bool:
        """Write pieces into the copy. Returns False if something changed in a tensor that the copy does not have."""
        for name, piece in pieces:
            self._changed_parts.add(part_of(name))
            if not isinstance(piece, Changes):
                self._tensors[name] = piece.clone()
            elif name in self._tensors:
                apply_changes(self._tensors[name], piece)
            else:
                return False
        return True

    def to_load(self) -> list[Named]:
        """All tensors of the parts in which something changed since the last call."""
        changed_parts, self._changed_parts = self._changed_parts, set()
        return [(name, tensor) for name, tensor in self._tensors.items() if part_of(name) in changed_parts]


def available_bytes() -> int:
    """Bytes of free main memory of this machine or container; 0 if the system does not tell (only Linux does)."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    available = next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 0)
    try:
        cgroup = Path("/sys/fs/cgroup")
        limit = int((cgroup / "memory.max").read_text(encoding="utf-8")) - int(
            (cgroup / "memory.current").read_text(encoding="utf-8")
        )
    except (OSError, ValueError):
        return available
    return max(0, min(available, limit))


def _differing(before: npt.NDArray, after: npt.NDArray) -> npt.NDArray[np.int64]:
    """Places at which two arrays of integers differ: words of 8 bytes first, then the elements of those that differ."""
    per_word = 8 // after.itemsize
    whole = len(after) // per_word * per_word
    old, new = before[:whole].view(np.int64), after[:whole].view(np.int64)
    found = [np.flatnonzero(before[whole:] != after[whole:]) + whole]
    for start in reversed(range(0, len(new), WORDS_AT_A_TIME)):
        words = (
            np.flatnonzero(old[start : start + WORDS_AT_A_TIME] != new[start : start + WORDS_AT_A_TIME])
            + start
        )
        elements = np.flatnonzero(old[words].view(after.dtype) != new[words].view(after.dtype))
        found.append(words[elements // per_word] * per_word + elements % per_word)
    return np.concatenate(found[::-1])


def _with_bridges(places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The places, and additional places in between wherever two places are too far apart for one gap."""
    previous = np.concatenate([[-1], places[:-1]])
    far = np.flatnonzero(places - previous > LARGEST_GAP)
    if not len(far):
        return places
    bridges = [
        previous[i] + LARGEST_GAP * np.arange(1, math.ceil((places[i] - previous[i]) / LARGEST_GAP))
        for i in far
    ]
    return np.sort(np.concatenate([places, *bridges]))


T = TypeVar("T")


def finish_all(pending: Sequence[Future[T]]) -> list[T]:
    """The results of calls to several servers. An error is raised only after all calls have ended.

    Therefore no server still reads memory when the caller changes it.
    """
    wait(pending)
    return [future.result() for future in pending]


def check_pending(pending: Sequence[Future[None]]) -> None:
    """If a call has already failed, raise its error without waiting for the other calls."""
    for future in pending:
        if future.done() and (error := future.exception()) is not None:
            raise error


def worker_ranks(servers: Sequence[WeightReceiverCalls], first: int) -> list[int]:
    """Rank of each server's first worker, from `first` on, and as the last entry the rank after the last worker."""
    return list(accumulate((server.world_size for server in servers), initial=first))


class WeightReceiverCalls(Protocol):
    """The calls that a transport may make to one server.

    Attributes:
        url: base URL of the server.
        world_size: number of workers that share the server's model. Each of them receives every byte.
        available_bytes: free main memory of the worker's machine when the trainer connected, in bytes.
    """

    url: str
    world_size: int
    available_bytes: int

    def init_transfer(self, info: dict[str, Any]) -> None:
        """Tell the server's workers how the bytes will arrive."""

    def update_weights(self, info: dict[str, Any]) -> None:
        """Let the workers receive the chunks of a push. Returns when all chunks have been loaded."""

    def workers(self, method: str, *args: str) -> list[Any]:
        """Call a method of the workers that run the model. Returns their JSON answers."""
