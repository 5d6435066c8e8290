"""Completions laid end to end: which token belongs to which.

All of `lockstep.algorithms` works on flat (N,) tensors, the tokens of B completions one after the other, so that a result does
not depend on how a batch was packed or padded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class Segments:
    """Where B completions lie among N flat tokens.

    Attributes:
        lengths: (B,) int64 tokens of each completion, in their order; 0 for one that has none. Their sum is N.
    """

    lengths: torch.Tensor

    @cached_property
    def ids(self) -> torch.Tensor:
        """(N,) int64 index of each token's completion."""
        return torch.repeat_interleave(self.lengths)

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """(B,) sums over each completion of (N,) values, added up in their dtype; 0 for a completion without tokens.

        Raises:
            RuntimeError: there are not as many values as tokens.
        """
        return values.new_zeros(len(self.lengths)).index_add(0, self.ids, values)

    def means(self, values: torch.Tensor) -> torch.Tensor:
        """(B,) means over each completion of (N,) values; 0 for a completion without tokens."""
        return self.sums(values) / self.lengths.clamp(min=1)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """(N,) the (B,) value of each token's completion."""
        return values.index_select(0, self.ids)
