"""Completions laid end to end, and which token belongs to which completion.

All of `lockstep.algorithms` works on flat (N,) tensors: the tokens of B completions one after the other. So a result
does not depend on how a batch was packed or padded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class Segments:
    """The positions of B completions among N flat tokens.

    Attributes:
        lengths: (B,) int64 number of tokens of each completion, in order; may be 0. The sum is N.
        total: N; None: it is read from the lengths, for which the host waits.
    """

    lengths: torch.Tensor
    total: int | None = None

    @cached_property
    def ids(self) -> torch.Tensor:
        """(N,) int64 index of each token's completion."""
        return torch.repeat_interleave(self.lengths, output_size=self.total)

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """(B,) sum of (N,) values over each completion, in the dtype of the values; 0 for a completion without tokens.

        Raises:
            RuntimeError: the number of values differs from the number of tokens.
        """
        return values.new_zeros(len(self.lengths)).index_add(0, self.ids, values)

    def sums_of_rows(self, values: torch.Tensor) -> torch.Tensor:
        """(R, B) `sums` of each row of (R, N) values."""
        return values.new_zeros(len(values), len(self.lengths)).index_add(1, self.ids, values)

    def means(self, values: torch.Tensor) -> torch.Tensor:
        """(B,) mean of (N,) values over each completion; 0 for a completion without tokens."""
        return self.sums(values) / self.lengths.clamp(min=1)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """(N,) per token, the value of its completion, from (B,) values."""
        return values.index_select(0, self.ids)
