"""Measures the size of the largest tensor that a piece of code makes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.learn.attention import blocks as block_attention


class Largest(TorchDispatchMode):
    """Records the largest number of elements of any result of an operation, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.lockstep.attend.default:
            *parts, number, scale = args
            with self:
                return block_attention.attend(*parts, block_attention.TREES[number], scale)
        found = func(*args, **(kwargs or {}))
        results = found if isinstance(found, tuple | list) else (found,)
        sizes = [part.numel() for part in results if isinstance(part, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return found
