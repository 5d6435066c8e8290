"""What changed in a tensor, as bytes: the places of the elements that differ, and their new values. Nothing is rounded.

The trainer compares a tensor with its copy of what a server holds, and the transports send the result. The server's
worker keeps a copy of each tensor (`ReceivedWeights`), and writes the new values into it. The new values themselves
are sent, because adding differences would round.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lockstep.sync.wire.chunks import Named

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
        raw: (bytes,) uint8: the new values in the tensor's dtype, then one gap of 16 bits per element. A gap is the distance from
            the previous place; the first gap is counted from −1. If a distance does not fit into 16 bits, unchanged elements in
            between are sent too.
    """

    elements: int
    raw: torch.Tensor


Piece = tuple[str, "torch.Tensor | Changes"]
NO_CHANGES = Changes(0, torch.empty(0, dtype=torch.uint8))


def changes_between(old: torch.Tensor, new: torch.Tensor) -> tuple[int, Changes | None]:
    """The changes that turn `old` into `new`, bit for bit.

    Args:
        old, new: contiguous tensors in main memory, of the same shape and dtype.

    Returns:
        The number of elements that differ, and the changes. Instead of the changes None, if the whole tensor has no more bytes.
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
    """Write the new values into a contiguous tensor in main memory.

    Raises:
        ValueError: the changes do not fit the tensor.
    """
    size = changes.elements * tensor.dtype.itemsize
    if changes.raw.numel() != changes_bytes(changes.elements, tensor.dtype):
        raise ValueError(
            f"{changes.elements} changes in {changes.raw.numel()} bytes do not fit a tensor of {tensor.dtype}"
        )
    raw = changes.raw.numpy()
    places = np.cumsum(raw[size:].view(np.uint16), dtype=np.int64) - 1
    if changes.elements and not 0 <= places[0] <= places[-1] < tensor.numel():
        raise ValueError(f"changes up to element {places[-1]} do not fit a tensor of {tensor.numel()} elements")
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
    """The part of the model that a tensor belongs to. An engine may fuse tensors of one part, and loads all of them or none.

    Tensors of one layer belong to the layer's next lower module (`model.layers.3.self_attn`), others to their own module.
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
    """Bytes of main memory that are free on this machine, or in this container; 0 if the system does not tell (only Linux does)."""
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
    """Places at which two arrays of integers differ. It compares words of 8 bytes, then the elements of the words that differ."""
    per_word = 8 // after.itemsize
    whole = len(after) // per_word * per_word
    old, new = before[:whole].view(np.int64), after[:whole].view(np.int64)
    found = [np.flatnonzero(before[whole:] != after[whole:]) + whole]
    for start in reversed(range(0, len(new), WORDS_AT_A_TIME)):
        words = np.flatnonzero(old[start : start + WORDS_AT_A_TIME] != new[start : start + WORDS_AT_A_TIME]) + start
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
        previous[i] + LARGEST_GAP * np.arange(1, math.ceil((places[i] - previous[i]) / LARGEST_GAP)) for i in far
    ]
    return np.sort(np.concatenate([places, *bridges]))
