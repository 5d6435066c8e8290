"""Cuts a stream of tensors into chunks that fit a buffer, and lays out one chunk in memory.

It serves both ends of every transport: the sender lays the tensors out, and the worker reads them back. Its functions
are pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

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
    """Group consecutive tensors into chunks of at most `limit` bytes. A tensor larger than `limit` is a chunk by itself."""
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
    """The tensors of a chunk as views of a uint8 buffer.

    Raises:
        ValueError: an entry is no place of a tensor, or the tensor is not within the buffer.
    """
    found = []
    for name, dtype, shape, offset in map(_place, placed):
        size = _bytes(dtype, shape)
        if offset + size > buffer.numel():
            raise ValueError(f"{name} is outside the buffer of {buffer.numel()} bytes")
        found.append((name, buffer[offset : offset + size].view(getattr(torch, dtype)).view(shape)))
    return found


def buffer_bytes(placed: Iterable[Sequence[object]]) -> int:
    """The number of bytes that a buffer needs for a chunk.

    Raises:
        ValueError: an entry is no place of a tensor.
    """
    return max((place.offset + _bytes(place.dtype, place.shape) for place in map(_place, placed)), default=0)


def _place(entry: Sequence[object]) -> TensorPlace:
    """The place that an entry of another process describes.

    Raises:
        ValueError: it describes none.
    """
    if len(entry) == len(TensorPlace._fields):
        name, dtype, shape, offset = entry
        sizes = [*shape, offset] if isinstance(shape, (list, tuple)) else [-1]
        is_place = isinstance(name, str) and isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in sizes)
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
