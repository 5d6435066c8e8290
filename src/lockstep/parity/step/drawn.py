"""Drawn elements of many tensors: short windows at drawn places, read with one copy for all tensors.

`parity/step/update.py` and `parity/step/accumulation.py` read parameters, gradients and the state of optimizers with it. Of a
sharded tensor, each rank reads the elements that it holds. The others read as zeros, so that the sum over ranks is the whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lockstep.shards.parts import first_element, local_part

# Elements of a window, and windows of a tensor. A tensor with fewer elements is read whole.
WINDOW = 16
_WINDOWS = 2


class Drawn:
    """Windows in a list of tensors.

    Args:
        owners: index of each window's tensor.
        starts: first element of each window, in the flattened tensor.
        lengths: number of elements of each window.
    """

    def __init__(self, owners: Sequence[int], starts: Sequence[int], lengths: Sequence[int]) -> None:
        self._windows = list(zip(owners, starts, lengths, strict=True))
        # (N,) index of the tensor of each element.
        self.owners = torch.tensor(np.repeat(np.array(owners, np.int64), lengths))

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], seed: tuple[int, ...]) -> Drawn:
        """Windows at places that a seed draws."""
        sizes = np.array([t.numel() for t in tensors], np.int64)
        draws = np.random.default_rng(seed).random((len(sizes), _WINDOWS))
        owners, starts, lengths = [], [], []
        for index, (size, row) in enumerate(zip(sizes.tolist(), draws.tolist(), strict=True)):
            few = size <= _WINDOWS * WINDOW
            for draw in row[:1] if few else row:
                owners.append(index)
                starts.append(0 if few else int(draw * (size - WINDOW + 1)))
                lengths.append(size if few else WINDOW)
        return cls(owners, starts, lengths)

    @classmethod
    def around(cls, places: dict[int, int], tensors: Sequence[torch.Tensor]) -> Drawn:
        """One window around a given element of each of some tensors."""
        owners = list(places)
        sizes = [tensors[i].numel() for i in owners]
        starts = [max(min(places[i] - WINDOW // 2, n - WINDOW), 0) for i, n in zip(owners, sizes, strict=True)]
        return cls(owners, starts, [min(WINDOW, n) for n in sizes])

    def __len__(self) -> int:
        return len(self.owners)

    def views(self, tensor: torch.Tensor, index: int) -> list[torch.Tensor]:
        """The windows of one tensor, without a copy where the tensor is contiguous."""
        flat = tensor.detach().reshape(-1)
        return [flat[start : start + length] for owner, start, length in self._windows if owner == index]

    def read(self, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """(N,) float64 values of the windows, on the host. A tensor that is None, and a part of another rank, reads as zeros."""
        flat = [None if t is None else local_part(t).detach().reshape(-1) for t in tensors]
        firsts = [0 if t is None else first_element(t) for t in tensors]
        empty = torch.zeros(0, device=next((t.device for t in flat if t is not None), None))
        pieces = [
            empty.new_zeros(length) if (own := flat[owner]) is None else _window(own, start - firsts[owner], length)
            for owner, start, length in self._windows
        ]
        # torch.cat promotes mixed dtypes to one that holds all of them.
        return (torch.cat(pieces) if pieces else empty).to("cpu", torch.float64)


def _window(own: torch.Tensor, start: int, length: int) -> torch.Tensor:
    """A window of a flattened tensor, or of a part of it: then elements outside the part are zeros."""
    low, high = max(start, 0), min(start + length, len(own))
    if high - low == length:
        return own[start : start + length]
    found = own.new_zeros(length)
    if low < high:
        found[low - start : high - start] = own[low:high]
    return found
