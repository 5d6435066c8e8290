"""Proof that a step's gradient is the sum of what its backward passes add: nothing is left over, and nothing is cleared.

A hook on some drawn parameters keeps what each backward adds at drawn elements.

Proof `accumulation`.
Shows: before the first backward no gradient is left; at the end, the gradient of drawn elements is the sum of what
the backward passes of all ranks have added.
Does not show: other elements; that what a backward adds is right.
When: every step; the critic, and so many tensors in turn (at least 32) that each is compared within 10 steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lockstep.errors import ProofError
from lockstep.shards.parts import is_sharded, local_part
from lockstep.to_device import on_host
from lockstep.watch.windows import Drawn, read_all

# Least number of tensors with a hook, and the number of steps within which every tensor has one.
_HOOKED, _WITHIN = 32, 10


class AccumulationProof:
    """The proof of one optimizer step.

    Args:
        trained: the trained parameters by name.
        gathered: gives the tensor that the backward passes of a sharded parameter add to, before the ranks' parts are summed.
        seed: draws the tensors and elements. The tensors follow each other from step to step; the elements are drawn anew.
        step: number of steps before this one.
        always: names of tensors that are not left to the draw.

    Attributes:
        names: names of the tensors whose gradients are compared at this step.

    Raises:
        ProofError: a gradient of an earlier step is left.
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
        self._drawn = Drawn.of(self._parameters, (seed, step, 2))
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
            The sum of what the backward passes of this rank have added, the sum of its sizes, and the gradients that this rank
            holds (of sharded tensors, its part; the other elements are 0).
        """
        self.end()
        # A tensor that got no gradient has added 0.
        counts = np.bincount(self._drawn.owners.numpy(), minlength=len(self._added)).tolist()
        zero = torch.zeros(1, dtype=torch.float64)
        added = [torch.stack(own) if own else zero.expand(1, n) for own, n in zip(self._added, counts, strict=True)]
        *pieces, self._found = read_all([*added, self._drawn.values([p.grad for p in self._parameters])])
        sums, sizes = [stacked.sum(0) for stacked in pieces], [stacked.abs().sum(0) for stacked in pieces]
        return [*(torch.cat(parts).tolist() if parts else [] for parts in (sums, sizes)), self._found.tolist()]

    def check(self, added: Sequence[list[Any]]) -> None:
        """Compare the gradients with what all backward passes have added.

        Args:
            added: `added` of every rank.

        Raises:
            ProofError: they differ.
        """
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
            f"the gradient of {self.names[int(self._drawn.owners[worst])]} is {float(found[worst]):.6g} where the backward passes "
            f"of the step have added {float(sums[worst]):.6g} ({len(names)} of {len(self.names)} compared tensors differ)",
            "gradients were cleared or scaled between two micro-batches, or were not summed over all ranks",
            "let nothing change .grad between the first backward of a step and its optimizer step",
        )
