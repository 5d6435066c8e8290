"""How large the largest gap of a run's step may be, from the gaps of the run's steps before it.

Comes from: the gap of every step that has passed (`parity/gap.py`) and the dtypes' own limits (`parity/tolerances.py`). Goes to:
the next step's limit. Models differ: bf16's largest gaps of SmolLM2-135M are a third of those of a random model without
normalised queries, so one number for all would be too strict for one or would let the other's faults pass.
"""

from __future__ import annotations

from dataclasses import replace

from lockstep.parity.gap import GapStats
from lockstep.parity.tolerances import Tolerance

# Before the first step, as if this many tokens with the dtypes' widest tail had been seen: they are outweighed by evidence.
_PRIOR_TOKENS = 32


class GapTail:
    """Narrows a limit on the largest gap to a run's own tail; never widens it.

    The tail is that of an exponential distribution, whose scale follows from its third and fourth moments: E|g|⁴ ÷ (4 E|g|³).
    High moments weigh the tail, and tokens without a gap (those that the model is sure of) change nothing in their quotient.

    Args:
        limit: the dtypes' own.
    """

    def __init__(self, limit: Tolerance) -> None:
        self._limit = limit
        self._passed = GapStats()

    @property
    def limit(self) -> Tolerance:
        """The limit on the next step."""
        prior = self._limit.tail
        fourths = self._passed.sum_fourths + 24 * _PRIOR_TOKENS * prior**4
        cubes = self._passed.sum_cubes + 6 * _PRIOR_TOKENS * prior**3
        return replace(self._limit, tail=min(prior, fourths / (4 * cubes)))

    def passed(self, stats: GapStats) -> None:
        """Learn from a step whose gap is within its limits."""
        self._passed = self._passed + stats
