"""What the proofs keep of the tokens of an optimizer step, or of a forward without gradient: sums over packs and ranks.

The gap is over tokens that these same weights sampled. The difference is over all tokens, older weights included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from lockstep.tokens.arrays import cut
from lockstep.training.batch.pack import Pack
from lockstep.training.batch.sequence import TrainingSequence, column, flat
from lockstep.training.events import Evidence
from lockstep.training.forward.scoring import TokenScores
from lockstep.training.methods.objective import Tally
from lockstep.training.step.update import Policy
from lockstep.training.step.update_sums import as_float64
from lockstep.watch.bets import TokenDraws
from lockstep.watch.draws import DrawStats, measure_draws
from lockstep.watch.gap import GapStats, Logps, measure_gap
from lockstep.watch.gap_explained import split_gap
from lockstep.watch.kept_sets import KeptSetStats
from lockstep.watch.rows_of_logits import DrawnRows
from lockstep.watch.tolerances import Tolerance


@dataclass(slots=True)
class TokenEvidence:
    """The sums.

    Attributes:
        kept_rows: collects drawn tokens of a micro-batch; None: nothing is compared with their rows of logits.
        gap: between the engine and the policy that it held, over tokens that were sampled by these same weights.
        difference: the same over all tokens.
        repeated: difference between the log-probs before the generation's first step and those of this step's forward, over the
            tokens that have both.
        draws: of the draws proof, over the tokens of the drawn rollouts.
        kept_sets: of the proof of kept ids, at drawn tokens.
    """

    kept_rows: DrawnRows | None = None
    gap: GapStats = field(default_factory=GapStats)
    difference: GapStats = field(default_factory=GapStats)
    repeated: GapStats = field(default_factory=GapStats)
    draws: DrawStats = field(default_factory=DrawStats)
    kept_sets: KeptSetStats = field(default_factory=KeptSetStats)

    def rows(self, pack: Pack, logps: Any, hidden: Any, *, before_steps: bool) -> None:
        """Keep drawn rows of a pack (`Evidence.rows`)."""
        if self.kept_rows is not None:
            self.kept_rows.add(pack, logps, hidden, before_steps=before_steps)

    def rows_compared(self, policy: Policy) -> None:
        """Compare the rows that were kept (`Evidence.rows_compared`)."""
        if self.kept_rows is not None:
            self.kept_sets = self.kept_sets + self.kept_rows.check(policy)

    @torch.no_grad()
    def tokens(
        self,
        sequences: Sequence[TrainingSequence],
        behaviour: Logps,
        before: Logps,
        now: Logps | None = None,
        scores: Sequence[tuple[Sequence[TrainingSequence], TokenScores]] = (),
    ) -> None:
        """Add tokens (`Evidence.tokens`)."""
        if now is not None:
            names, lengths = [s.name for s in sequences], [s.length for s in sequences]
            self.repeated = self.repeated + measure_gap(before, now, names, lengths)
        gap, difference = gap_of(sequences, behaviour, before)
        self.gap, self.difference = self.gap + gap, self.difference + difference
        for own, found in scores:
            self.draws = self.draws + draws_of(own, found)

    def data(self) -> dict[str, Any]:
        """The sums, as JSON types."""
        return {name: asdict(getattr(self, name)) for name in _SUMS}

    def add(self, data: Mapping[str, Any]) -> None:
        """Add the `data` of another rank."""
        for name, kind in _SUMS.items():
            setattr(self, name, getattr(self, name) + kind(**data[name]))

    def figures(self, tally: Tally, aside: int, limit: Tolerance) -> dict[str, float]:
        """The figures to log of an optimizer step: the gap with its parts, and the difference under TRL's names.

        Args:
            tally: of the step; it has how far the policy has moved since it sampled.
            aside: number of tokens that were left aside.
        """
        gap, difference, kept = self.gap, self.difference, self.kept_sets
        older = (difference.sum_abs - gap.sum_abs) / max(difference.tokens, 1)
        drift = tally.total("_drift") / max(tally.count("_drift"), 1)
        # Computed from the fresh tokens alone, so that a defect in a few of them is not diluted by older tokens.
        parts = split_gap(gap.mean_abs, older + drift, limit)
        return {
            "sampling/sampling_logp_difference/mean": difference.mean_abs,
            "sampling/sampling_logp_difference/max": difference.max_abs,
            "parity/mean_abs_gap": gap.mean_abs,
            "parity/max_abs_gap": gap.max_abs,
            "parity/k3": gap.k3,
            "parity/checked_tokens": gap.tokens,
            "parity/aside_tokens": aside,
            "sampling/tokens": difference.tokens + aside,
            **({"sampling/kept_mass": kept.mass / kept.measured} if kept.measured else {}),
            **parts.metrics(),
        }


_SUMS: dict[str, Any] = {
    "gap": GapStats,
    "difference": GapStats,
    "repeated": GapStats,
    "draws": DrawStats,
    "kept_sets": KeptSetStats,
}


def kept(evidence: Evidence) -> TokenEvidence:
    """The sums that this watch has made."""
    assert isinstance(evidence, TokenEvidence)
    return evidence


def gap_of(sequences: Sequence[TrainingSequence], behaviour: Logps, policy: Logps) -> tuple[GapStats, GapStats]:
    """The parity gap, over tokens that these same weights sampled, and the difference over all tokens.

    Args:
        behaviour: (N,) the engine's log-probs.
        policy: (N,) log-probs under the weights that the engine held in its last call.

    Raises:
        ProofError: a log-prob is not finite.
    """
    names, lengths = [s.name for s in sequences], [s.length for s in sequences]
    every = measure_gap(behaviour, policy, names, lengths)
    if sequences[0].fresh is None:
        return every, every
    behaviour, policy = as_float64(behaviour, policy)
    fresh = flat(sequences, "fresh")
    counts = [int(np.count_nonzero(part)) for part in cut(fresh, lengths)]
    return measure_gap(behaviour[fresh], policy[fresh], names, counts), every


def draws_of(sequences: Sequence[TrainingSequence], scores: TokenScores) -> DrawStats:
    """Statistics of the draws proof over the drawn rollouts; none if the forward gave no sums for it.

    Which tokens are bet on must not depend on the tokens. A rollout learns because of its reward, so those that are not drawn
    are left out, even if they went through the model.
    """
    if scores.draws is None:
        return DrawStats()
    columns = scores.logps, scores.entropies, scores.draws.variances, scores.draws.below, scores.draws.upto
    values = np.stack(as_float64(*columns))
    drawn = [s for s in sequences if s.drawn]
    if len(drawn) < len(sequences):
        values = values[:, np.repeat([s.drawn for s in sequences], [s.length for s in sequences])]
    fresh = None if sequences[0].fresh is None else flat(drawn, "fresh")
    return measure_draws(TokenDraws(*values), column(drawn, "behaviour_logps"), [s.length for s in drawn], fresh)
