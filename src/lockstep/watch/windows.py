"""Drawn elements of many tensors: short windows at drawn places, read with one copy for all tensors.

Parameters, gradients and the state of optimizers are read with it. Of a sharded tensor, each rank reads the elements
that it holds. The others read as zeros, so that the sum over ranks is the whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lockstep.shards.parts import first_element, is_sharded, local_part
from lockstep.to_device import on_host, sent

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
        of_windows, sizes = np.array(owners, np.int64), np.array(lengths, np.int64)
        # (N,) index of the tensor of each element.
        self.owners = torch.from_numpy(np.repeat(of_windows, sizes))
        within = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        # (N,) place of each element in its flattened tensor.
        self._places = torch.from_numpy(np.repeat(np.array(starts, np.int64), sizes) + within)
        tensors, first = np.unique(of_windows, return_index=True)
        self._tensors: list[int] = tensors.tolist()
        # Number of elements of each of these tensors, whose windows follow each other, and their places.
        self._counts: list[int] = np.add.reduceat(sizes, first).tolist() if len(tensors) else []
        self._places_of: dict[torch.device, tuple[torch.Tensor, ...]] = {}

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

    def of_tensor(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """(n,) values of the windows of one tensor, on its device and in its dtype."""
        at = self._tensors.index(index)
        return torch.take(tensor.detach(), self._places_on(tensor.device)[at])

    def _places_on(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """The places of each tensor. A device gets them once."""
        if device not in self._places_of:
            self._places_of[device] = sent(self._places, device).split(self._counts)
        return self._places_of[device]

    def read(self, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """(N,) float64 values of the windows, on the host. A tensor that is None, and a part of another rank, reads as zeros."""
        return self.values(tensors).to("cpu", torch.float64)

    def values(self, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """(N,) what `read` gives, on the device of the tensors, in a dtype that holds all of theirs."""
        given = [tensors[index] for index in self._tensors]
        device = next((t.device for t in given if t is not None), torch.device("cpu"))
        pieces = [_elements(t, own) for t, own in zip(given, self._places_on(device), strict=True)]
        # torch.cat promotes mixed dtypes to one that holds all of them.
        return torch.cat(pieces) if pieces else torch.zeros(0)


def read_all(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What several calls of `Drawn.values` gave: float64, on the host, with one copy for each dtype."""
    return [found.double() for found in on_host(values)]


def _elements(tensor: torch.Tensor | None, places: torch.Tensor) -> torch.Tensor:
    """Elements of a flattened tensor."""
    if tensor is None:
        return torch.zeros(len(places), device=places.device)
    if not is_sharded(tensor):
        return torch.take(tensor.detach(), places)
    own, local = local_part(tensor).reshape(-1), places - first_element(tensor)
    found = own.new_zeros(len(places))
    here = (local >= 0) & (local < len(own))
    found[here] = own[local[here]]
    return found
