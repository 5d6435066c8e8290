"""Drawn elements of weights and of the optimizer's state that must not change for a while.

When a checkpoint is written, they are compared with those after the last step: the digests of a checkpoint are made of
what is in memory then. Before the first step of a resumed run they are compared with those that the checkpoint gave,
whose digests were compared when it was loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lockstep.errors import ProofError
from lockstep.watch.windows import Drawn

# (N,) values of drawn elements, by what they are.
Elements = Mapping[str, torch.Tensor]


class LoadedState:
    """The weights and the optimizer's state as a checkpoint gave them.

    Args:
        trained: the trained parameters, by name.
        seed: draws the elements.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, trained: Mapping[str, torch.nn.Parameter], seed: tuple[int, ...]
    ) -> None:
        self._optimizer, self._names, self._parameters = optimizer, list(trained), list(trained.values())
        self._drawn = Drawn.of(self._parameters, seed)
        self._loaded = self._read()

    def check(self) -> None:
        """Compare the elements as they are now.

        Raises:
            ProofError: one has changed.
        """
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
            found[key] = self._drawn.read(tensors) + torch.tensor(numbers, dtype=torch.float64)[self._drawn.owners]
        return found


def check_still(drawn: Drawn, names: Sequence[str], before: Elements, now: Elements, since: str) -> None:
    """Compare elements with what they were.

    Args:
        names: of the tensors from which the elements are drawn.
        since: the moment since which they must be the same, in words.

    Raises:
        ProofError: an element has changed.
    """
    for what in sorted(before.keys() | now.keys()):
        if what in before and what in now:
            wrong = ~torch.isclose(before[what], now[what], rtol=0.0, atol=0.0, equal_nan=True)
            if not bool(wrong.any()):
                continue
            at = int(wrong.nonzero()[0])
            found = (
                f"of {names[int(drawn.owners[at])]} is {float(now[what][at]):.6g} and was {float(before[what][at]):.6g}"
            )
        else:
            found = "is there now" if what in now else "is gone"
        raise ProofError(
            "checkpoint",
            f"the weights or the optimizer's state have changed since {since}: {what} {found}",
            "a callback, or other code beside the optimizer step, has changed them",
            "let nothing change weights or optimizer.state between two steps, or before the first step of a resumed run",
        )


def _number(value: object) -> float:
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 and not value.dim() else 0.0
    return float(value) if isinstance(value, bool | int | float) else 0.0
