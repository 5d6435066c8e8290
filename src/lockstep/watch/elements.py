"""Drawn elements of weights and gradients: how they are read, and proofs that they stay, or add up, as they must.

They are short windows at drawn places, read with one copy for all tensors. Of a sharded tensor, each rank reads the
elements that it holds. The others read as zeros, so that the sum over ranks is the whole.

When a checkpoint is written, weights and the optimizer's state are compared with those after the last step, and before
the first step of a resumed run with those that the checkpoint gave. Digests say what was in memory when they were made.

A hook on some drawn parameters keeps what each backward adds at drawn elements.

Proof `accumulation`.
Shows: before the first backward no gradient is left; at the end, the gradient of drawn elements is the sum of what
the backward passes of all ranks have added.
Does not show: other elements; that what a backward adds is right.
When: every step; the critic, and so many tensors in turn (at least 32) that each is compared within 10 steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from lockstep.devices import on_host, sent
from lockstep.errors import ProofError
from lockstep.shards.model import first_element, is_sharded, local_part

# Elements of a window, and windows of a tensor. A tensor with fewer elements is read whole.
WINDOW = 16
_WINDOWS = 2


class DrawnElements:
    """Windows in a list of flattened tensors: the index of each one's tensor, its first element, and its length."""

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
    def of(cls, tensors: Sequence[torch.Tensor], seed: tuple[int, ...]) -> DrawnElements:
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
    def around(cls, places: Sequence[tuple[int, int]], tensors: Sequence[torch.Tensor]) -> DrawnElements:
        """One window around each of some elements: (index of its tensor, its place there)."""
        known = sorted(places)
        owners = [i for i, _ in known]
        sizes = [tensors[i].numel() for i in owners]
        ends = [min(place + WINDOW // 2, n) for (_, place), n in zip(known, sizes, strict=True)]
        return cls(owners, [max(end - WINDOW, 0) for end in ends], [min(WINDOW, n) for n in sizes])

    def __len__(self) -> int:
        return len(self.owners)

    def of_tensor(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """(n,) values of the windows of one tensor, on its device and in its dtype."""
        return torch.take(tensor.detach(), self.places_in(index, tensor.device))

    def spread(self, of_tensors: Sequence[float]) -> torch.Tensor:
        """(N,) float64, for each element the value of its tensor."""
        return torch.tensor(of_tensors, dtype=torch.float64)[self.owners]

    def epsilons(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """(N,) float64, for each element the distance from 1 to the next number of its tensor's dtype."""
        return self.spread([torch.finfo(t.dtype).eps for t in tensors])

    def places_in(self, index: int, device: torch.device) -> torch.Tensor:
        """(n,) places of the elements in one flattened tensor."""
        return self._places_on(device)[self._tensors.index(index)]

    def _places_on(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """The places of each tensor. A device gets them once."""
        if device not in self._places_of:
            self._places_of[device] = sent(self._places, device).split(self._counts)
        return self._places_of[device]

    def read(self, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """(N,) float64 values on the host. A tensor that is None, and a part of another rank, reads as zeros."""
        return self.values(tensors).to("cpu", torch.float64)

    def values(self, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """(N,) what `read` gives, on the device of the tensors, in a dtype that holds all of theirs."""
        given = [tensors[index] for index in self._tensors]
        device = next((t.device for t in given if t is not None), torch.device("cpu"))
        pieces = [_elements(t, own) for t, own in zip(given, self._places_on(device), strict=True)]
        # torch.cat promotes mixed dtypes to one that holds all of them.
        return torch.cat(pieces) if pieces else torch.zeros(0)


def read_all(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What several calls of `DrawnElements.values` gave: float64, on the host, with one copy for each dtype."""
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


# Elements of a piece and pieces of a step, at least; and steps within which all pieces have their turn.
_PIECE, _PIECES, _TURN = 1 << 14, 256, 32
# A piece is searched by the norms of blocks of so many elements: these need no memory.
_BLOCK = 256


class LargestElements:
    """A largest element of each piece of the gradients: that of the block with the largest norm in the piece.

    The pieces of all tensors take turns, in a drawn order.

    Where a fault is in few elements, or few rows of an embedding have a gradient, drawn windows seldom meet them. Each
    rank looks at its own parts of sharded tensors.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], seed: tuple[int, ...]) -> None:
        sizes = [local_part(t).numel() for t in tensors]
        self._size = max(_PIECE, -(-sum(sizes) // (_PIECES * _TURN * _BLOCK)) * _BLOCK)
        order = np.random.default_rng(seed).permutation(len(sizes)).tolist()
        # The tensor of each piece, and its first element in this rank's part.
        self._pieces = [(i, start) for i in order for start in range(0, sizes[i], self._size)]
        self._at_once = max(_PIECES, -(-len(self._pieces) // _TURN))

    def of(
        self, gradients: Sequence[torch.Tensor | None], step: int
    ) -> tuple[list[tuple[int, int]], list[torch.Tensor]]:
        """The pieces of a step with a gradient: (index of its tensor, its first element), and the place of each one's
        largest element after that. The places are (n,) int64 tensors on the device. The host does not wait."""
        count = len(self._pieces)
        start = step * self._at_once % count if count > self._at_once else 0
        stop = start + self._at_once
        pieces, found = list[tuple[int, int]](), list[torch.Tensor]()
        for run in (self._pieces[start:stop], self._pieces[: max(stop - count, 0) if start else 0]):
            for index, own in groupby(run, key=itemgetter(0)):
                if (gradient := gradients[index]) is None:
                    continue
                starts = [first for _, first in own]
                part = local_part(gradient).reshape(-1)[starts[0] : starts[-1] + self._size]
                whole = len(part) // self._size * self._size
                if whole:
                    found.append(_largest(part[:whole].view(-1, self._size // _BLOCK, _BLOCK)))
                if whole < len(part):
                    found.append(part[whole:].abs().argmax()[None])
                pieces += [(index, first_element(gradient) + first) for first in starts]
        return pieces, found


def _largest(pieces: torch.Tensor) -> torch.Tensor:
    """(P,) int64 place of an element in each of (P, blocks, block) pieces."""
    blocks = torch.linalg.vector_norm(pieces, dim=2).argmax(1, keepdim=True)
    chosen = pieces.take_along_dim(blocks[:, :, None], 1)[:, 0]
    return blocks[:, 0] * pieces.shape[2] + chosen.abs().argmax(1)


# (N,) values of drawn elements, by what they are.
Elements = Mapping[str, torch.Tensor]


class LoadedState:
    """The weights and the optimizer's state as a checkpoint gave them."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trained: Mapping[str, torch.nn.Parameter],
        seed: tuple[int, ...],
    ) -> None:
        self._optimizer, self._names, self._parameters = optimizer, list(trained), list(trained.values())
        self._drawn = DrawnElements.of(self._parameters, seed)
        self._loaded = self._read()

    def check(self) -> None:
        """Compare the elements as they are now."""
        check_still(self._drawn, self._names, self._loaded, self._read(), "the checkpoint was loaded")

    def _read(self) -> dict[str, torch.Tensor]:
        """Weights, and of the state every number and every tensor of the shape of its parameter."""
        states = [self._optimizer.state.get(p, {}) for p in self._parameters]
        found = {"weight": self._drawn.read(self._parameters)}
        for key in sorted({key for state in states for key in state}):
            values = [state.get(key) for state in states]
            numbers = [_number(value) for value in values]
            tensors = [
                v if isinstance(v, torch.Tensor) and v.shape == p.shape and p.dim() else None
                for v, p in zip(values, self._parameters, strict=True)
            ]
            found[key] = self._drawn.read(tensors) + self._drawn.spread(numbers)
        return found


def check_still(
    drawn: DrawnElements, names: Sequence[str], before: Elements, now: Elements, since: str
) -> None:
    """Compare elements with what they were. `names` are of the tensors, `since` is the moment in words."""
    for what in sorted(before.keys() | now.keys()):
        if what in before and what in now:
            wrong = ~torch.isclose(before[what], now[what], rtol=0.0, atol=0.0, equal_nan=True)
            if not bool(wrong.any()):
                continue
            at = int(wrong.nonzero()[0])
            name, old, new = names[int(drawn.owners[at])], float(before[what][at]), float(now[what][at])
            found = f"of {name} is {new:.6g} and was {old:.6g}"
        else:
            found = "is there now" if what in now else "is gone"
        raise ProofError(
            "checkpoint",
            f"the weights or the optimizer's state have changed since {since}: {what} {found}",
            "a callback, or other code beside the optimizer step, has changed them",
            "let nothing change weights or optimizer.state between two steps, or before the first step of a "
            "resumed run",
        )


def _number(value: object) -> float:
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 and not value.dim() else 0.0
    return float(value) if isinstance(value, bool | int | float) else 0.0


# Least number of tensors with a hook, and the number of steps within which every tensor has one.
_HOOKED, _WITHIN = 32, 10


class AccumulationProof:
    """The proof of one optimizer step. Raises `ProofError` if a gradient of an earlier step is left.

    Args:
        gathered: gives the tensor that the backward passes of a sharded parameter add to, before the ranks' parts are
            summed.
        seed: draws tensors and elements. The tensors follow each other from step to step; the elements are drawn anew.
        step: number of steps before this one.
        always: names of tensors that are not left to the draw.
    """

    def __init__(
        self,
        trained: Mapping[str, torch.nn.Parameter],
        seed: int,
        step: int,
        always: Sequence[str] = (),
        gathered: Callable[[torch.Tensor], torch.Tensor] = lambda parameter: parameter,
    ) -> None:
        held = {name: local_part(p.grad).any() for name, p in trained.items() if p.grad is not None}
        for name, any_left in zip(held, on_host([*held.values()]), strict=True):
            if any_left:
                raise ProofError(
                    "accumulation",
                    f"before the first backward of the step, {name} holds a gradient",
                    "the gradients of the last step were not cleared; the next gradient would be the sum of both",
                    "let nothing call backward between two steps, and clear gradients after each optimizer step",
                )
        names = list(trained)
        size = max(_HOOKED, -(-len(names) // _WITHIN))
        order = np.random.default_rng((seed, 2)).permutation(len(names))
        chosen = [names[i] for i in np.roll(order, -step * size)[:size].tolist()]
        self.names = [name for name in names if name in {*chosen, *always}]
        self._parameters = [trained[name] for name in self.names]
        self._drawn = DrawnElements.of(self._parameters, (seed, step, 2))
        self._added: list[list[torch.Tensor]] = [[] for _ in self.names]
        self._hooked = [gathered(p) for p in self._parameters]
        self._handles = [p.register_hook(self._hook(i)) for i, p in enumerate(self._hooked)]

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def note(gradient: torch.Tensor) -> None:
            self._added[index].append(self._drawn.of_tensor(gradient, index))

        return note

    def end(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def added(self) -> list[Any]:
        """What this rank knows of the (N,) drawn elements. Ends the proof's hooks.

        Returns:
            The sum of what this rank's backward passes have added, the sum of its sizes, and the gradients that this
            rank holds (of sharded tensors, its part; the other elements are 0).
        """
        self.end()
        # A tensor that got no gradient has added 0.
        counts = np.bincount(self._drawn.owners.numpy(), minlength=len(self._added)).tolist()
        zero = torch.zeros(1, dtype=torch.float64)
        pairs = zip(self._added, counts, strict=True)
        added = [torch.stack(own) if own else zero.expand(1, n) for own, n in pairs]
        *pieces, self._found = read_all([*added, self._drawn.values([p.grad for p in self._parameters])])
        sums, sizes = [stacked.sum(0) for stacked in pieces], [stacked.abs().sum(0) for stacked in pieces]
        joined = [torch.cat(own).tolist() if own else [] for own in (sums, sizes)]
        return [*joined, self._found.tolist()]

    def check(self, added: Sequence[list[Any]]) -> None:
        """Compare the gradients with what the backward passes of all ranks have `added`."""
        sums, sizes = (torch.tensor([rank[k] for rank in added], dtype=torch.float64).sum(0) for k in (0, 1))
        parts = torch.tensor([rank[2] for rank in added], dtype=torch.float64)
        of_ranks = torch.tensor([is_sharded(p) for p in self._parameters])[self._drawn.owners]
        # A gradient that is not sharded is the same on every rank.
        found = torch.where(of_ranks, parts.sum(0), self._found)
        digits = torch.tensor([torch.finfo(p.dtype).eps for p in self._hooked], dtype=torch.float64)
        off = (found - sums).abs() - 8 * digits[self._drawn.owners] * sizes
        # A NaN is wrong too.
        wrong = ~(off <= 0)
        if not bool(wrong.any()):
            return
        worst = int(torch.where(wrong, (found - sums).abs().nan_to_num(torch.inf), -1.0).argmax())
        names = sorted({self.names[i] for i in self._drawn.owners[wrong].tolist()})
        raise ProofError(
            "accumulation",
            f"the gradient of {self.names[int(self._drawn.owners[worst])]} is {float(found[worst]):.6g} "
            f"where the backward passes of the step have added {float(sums[worst]):.6g} ({len(names)} of "
            f"{len(self.names)} compared tensors differ)",
            "gradients were cleared or scaled between two micro-batches, or were not summed over all ranks",
            "let nothing change .grad between the first backward of a step and its optimizer step",
        )
