"""A stream of tensors cut into chunks that fit a buffer, and one chunk laid out in memory.

Used by both ends of every wire: the sender lays tensors out, the engine's worker finds them again. Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from lockstep.engines.tensor_specs import dtype_name

CHUNK_BYTES = 64 << 20
# Every dtype may start here, and so may a cache line.
ALIGNMENT = 64

Named = tuple[str, torch.Tensor]


class Placed(NamedTuple):
    """One tensor of a chunk, as it goes over the wire: JSON types only."""

    name: str
    dtype: str
    shape: list[int]
    offset: int


def chunks(tensors: Iterable[Named], limit: int = CHUNK_BYTES) -> Iterator[list[Named]]:
    """Consecutive tensors whose bytes fit `limit`; a larger tensor is a chunk of its own."""
    held: list[Named] = []
    used = 0
    for name, tensor in tensors:
        size = aligned(tensor.nbytes)
        if held and used + size > limit:
            yield held
            held, used = [], 0
        held.append((name, tensor))
        used += size
    if held:
        yield held


def layout(chunk: Sequence[Named]) -> tuple[list[Placed], int]:
    """Where each tensor of a chunk lies in a buffer, and how many bytes the buffer needs."""
    placed, offset = [], 0
    for name, tensor in chunk:
        placed.append(Placed(name, dtype_name(tensor.dtype), list(tensor.shape), offset))
        offset += aligned(tensor.nbytes)
    return placed, offset


def views(buffer: torch.Tensor, placed: Iterable[Sequence[object]]) -> list[Named]:
    """The tensors of a chunk as views of a uint8 buffer.

    Raises:
        ValueError: a tensor does not lie within the buffer.
    """
    found = []
    for name, dtype, shape, offset in (Placed(*entry) for entry in placed):  # type: ignore[arg-type]
        kind, size = getattr(torch, dtype), _bytes(dtype, shape)
        if offset < 0 or offset + size > buffer.numel():
            raise ValueError(f"{name} lies outside the buffer of {buffer.numel()} bytes")
        found.append((name, buffer[offset : offset + size].view(kind).view(shape)))
    return found


def end_of(placed: Iterable[Sequence[object]]) -> int:
    """Bytes that a buffer needs for a chunk."""
    entries = [Placed(*entry) for entry in placed]  # type: ignore[arg-type]
    return max((entry.offset + _bytes(entry.dtype, entry.shape) for entry in entries), default=0)


def _bytes(dtype: str, shape: Sequence[int]) -> int:
    return math.prod(shape) * getattr(torch, dtype).itemsize


def aligned(size: int) -> int:
    """Bytes from the start of a tensor to where the next may start."""
    return -(-size // ALIGNMENT) * ALIGNMENT
