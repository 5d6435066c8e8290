"""Figures of an optimizer step that are collected in parts, over packs and ranks: means (as sum and count) and extremes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lockstep.to_device import on_host

Use = Callable[[np.ndarray[Any, np.dtype[np.float64]]], None]


class Tally:
    """Named means, minima and maxima. Values on another device are read together, when the first figure is asked for."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}
        self._lows: dict[str, float] = {}
        self._highs: dict[str, float] = {}
        self._later: list[tuple[torch.Tensor, Use]] = []

    def later(self, values: torch.Tensor, use: Use) -> None:
        """Call a function with float64 values on the host: now, or for values on another device before a figure is read.

        Args:
            values: any shape.
            use: gets a NumPy array of the same shape.
        """
        values = values.detach().double()
        if values.device.type == "cpu":
            use(values.numpy())
        else:
            self._later.append((values, use))

    def _settle(self) -> None:
        """Read all values that are on another device, with one copy."""
        due, self._later = self._later, []
        for values, (_, use) in zip(on_host([values for values, _ in due]), due, strict=True):
            use(values.numpy())

    def mean(self, name: str, values: torch.Tensor | float, count: float = 1, *, weight: float = 1.0) -> None:
        """Add values to a mean.

        Args:
            values: a tensor of values, or the sum of `count` values.
            weight: of each value.
        """
        if isinstance(values, torch.Tensor):
            size = values.numel()
            self.later(values.double().sum(), lambda total: self.mean(name, float(total), size, weight=weight))
            return
        held = self._sums.setdefault(name, [0.0, 0.0])
        held[0] += weight * values
        held[1] += weight * count

    def low(self, name: str, values: torch.Tensor | float) -> None:
        """Include values, or the smallest of them, in a minimum."""
        least = float(values.min()) if isinstance(values, torch.Tensor) else values
        self._lows[name] = _extreme(min, self._lows.get(name), least)

    def high(self, name: str, values: torch.Tensor | float) -> None:
        """Include values, or the largest of them, in a maximum."""
        most = float(values.max()) if isinstance(values, torch.Tensor) else values
        self._highs[name] = _extreme(max, self._highs.get(name), most)

    def total(self, name: str) -> float:
        """The sum behind a mean; 0 if nothing was added."""
        self._settle()
        return self._sums.get(name, [0.0, 0.0])[0]

    def count(self, name: str) -> float:
        """The count behind a mean; 0 if nothing was added."""
        self._settle()
        return self._sums.get(name, [0.0, 0.0])[1]

    def figures(self) -> dict[str, float]:
        """Every mean and extreme to log, by name. Means of nothing are left out, and so are names that begin with `_`."""
        self._settle()
        means = {name: total / count for name, (total, count) in self._sums.items() if count}
        return {name: value for name, value in (means | self._lows | self._highs).items() if not name.startswith("_")}

    def add(self, data: dict[str, Any]) -> None:
        """Add the content of another tally, as its `data` returns it."""
        for name, (total, count) in data["sums"].items():
            self.mean(name, total, count)
        for name, value in data["lows"].items():
            self._lows[name] = _extreme(min, self._lows.get(name), value)
        for name, value in data["highs"].items():
            self._highs[name] = _extreme(max, self._highs.get(name), value)

    def data(self) -> dict[str, Any]:
        """The whole content, as JSON types."""
        self._settle()
        return {"sums": self._sums, "lows": self._lows, "highs": self._highs}


def _extreme(choose: Callable[..., float], held: float | None, value: float) -> float:
    """The smaller or larger of two values. A NaN stays."""
    if held is None or math.isnan(value):
        return value
    return held if math.isnan(held) else choose(held, value)
