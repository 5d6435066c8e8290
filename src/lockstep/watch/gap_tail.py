"""The limit on the largest gap of a step, computed from the gaps of the run's earlier steps.

It takes the gap of every step that has passed (`watch/gap.py`) and the limits of the dtypes (`watch/tolerances.py`). The
result is the limit for the next step. The limit depends on the model: in bf16, the largest gaps of SmolLM2-135M are a third of the
largest gaps of a random model without normalised queries. One fixed limit would be too strict for the random model, or would miss
faults of SmolLM2-135M.
"""

from __future__ import annotations

from dataclasses import replace

from lockstep.watch.gap import GapStats
from lockstep.watch.tolerances import Tolerance

# Weight of the prior: the estimate starts as if this many tokens with the dtypes' widest tail had been measured.
_PRIOR_TOKENS = 32


class GapTail:
    """Lowers a limit on the largest gap to fit the tail of the run's gaps. It never raises the limit.

    The tail is modelled as an exponential distribution. Its scale follows from the third and fourth moments: E|g|⁴ ÷ (4 E|g|³).
    High moments depend mainly on the tail. Tokens without a gap (the model is certain of them) do not change the quotient. The
    limit stays above a multiple of the largest gap so far (`Tolerance.largest`).

    Args:
        limit: the limit of the dtypes. It may be set anew before a step: with an engine in 8 bits it depends on the tokens.
    """

    def __init__(self, limit: Tolerance) -> None:
        self.outer = limit
        self._passed = GapStats()

    @property
    def limit(self) -> Tolerance:
        """The limit on the next step."""
        prior = self.outer.tail
        fourths = self._passed.sum_fourths + 24 * _PRIOR_TOKENS * prior**4
        cubes = self._passed.sum_cubes + 6 * _PRIOR_TOKENS * prior**3
        tail = min(prior, fourths / (4 * cubes))
        return replace(self.outer, tail=tail, widest=prior, seen=self._passed.max_abs)

    def passed(self, stats: GapStats) -> None:
        """Add the gap of a step that is within its limits to the estimate."""
        self._passed = self._passed + stats
