"""The figures of an optimizer step: sums over its packs, parts and ranks, and how a pack is added to them.

`training/step/update.py` adds every pack after its forward. `run/loop.py` proves the sums, and logs their metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.algorithms.corrections import effective_sample_size
from lockstep.algorithms.tally import Tally
from lockstep.to_device import on_host
from lockstep.tokens.arrays import cut
from lockstep.training.batch.sequence import TrainingSequence, column, flat
from lockstep.training.forward.scoring import TokenScores
from lockstep.training.methods.objective import TokenBatch
from lockstep.watch.bets import TokenDraws
from lockstep.watch.draws import DrawStats, measure_draws
from lockstep.watch.gap import GapStats, Logps, measure_gap
from lockstep.watch.gap_parts import split_gap
from lockstep.watch.kept_sets import KeptSetStats
from lockstep.watch.tolerances import Tolerance

Reals64 = NDArray[np.float64]


@dataclass(slots=True)
class UpdateSums:
    """Sums over the tokens of an optimizer step. The sums of its parts and of its ranks can be added.

    Attributes:
        loss: the step's loss so far.
        gap: parity gap between the engine and the policy that it held, over tokens that were sampled by these same weights.
        difference: the same over all tokens, so that it includes the effect of older weights.
        repeated: difference between the log-probs before the generation's first step and those of this step's forward, over the
            tokens that have both.
        draws: of the draws proof, over the tokens of the drawn rollouts that went through the model in this step.
        kept_sets: of the proof of kept ids, at drawn tokens.
        aside: number of tokens that were left aside.
        tally: values to log. `_drift` is |log-prob now − at sampling time| of the policy, over the tokens that went through
            the model in this step. It is 0 if the policy has not changed since.
        logps: sequences and (N,) log-probs of each pack whose tokens no pass has scored before. They stay on this rank.
    """

    loss: float = 0.0
    gap: GapStats = field(default_factory=GapStats)
    difference: GapStats = field(default_factory=GapStats)
    repeated: GapStats = field(default_factory=GapStats)
    draws: DrawStats = field(default_factory=DrawStats)
    kept_sets: KeptSetStats = field(default_factory=KeptSetStats)
    aside: int = 0
    tally: Tally = field(default_factory=Tally)
    logps: list[tuple[Sequence[TrainingSequence], torch.Tensor]] = field(default_factory=list)

    def data(self) -> dict[str, Any]:
        """The whole content but `logps`, as JSON types."""
        return {
            "loss": self.loss,
            "gap": asdict(self.gap),
            "difference": asdict(self.difference),
            "repeated": asdict(self.repeated),
            "draws": asdict(self.draws),
            "kept_sets": asdict(self.kept_sets),
            "aside": self.aside,
            "tally": self.tally.data(),
        }

    @classmethod
    def of(cls, parts: Sequence[dict[str, Any]]) -> UpdateSums:
        """The sum of the `data` of several ranks."""
        total = cls()
        for data in parts:
            total.loss += data["loss"]
            total.gap = total.gap + GapStats(**data["gap"])
            total.difference = total.difference + GapStats(**data["difference"])
            total.repeated = total.repeated + GapStats(**data["repeated"])
            total.draws = total.draws + DrawStats(**data["draws"])
            total.kept_sets = total.kept_sets + KeptSetStats(**data["kept_sets"])
            total.aside += data["aside"]
            total.tally.add(data["tally"])
        return total

    def metrics(self, limit: Tolerance) -> dict[str, float]:
        """The update's metrics under TRL's names, and the parity gap with its parts."""
        figures = self.tally.figures()
        weights, squares = self.tally.total(_RATIO), self.tally.total(_SQUARES)
        older = (self.difference.sum_abs - self.gap.sum_abs) / max(self.difference.tokens, 1)
        drift = self.tally.total("_drift") / max(self.tally.count("_drift"), 1)
        # Computed from the fresh tokens alone, so that a defect in a few of them is not diluted by older tokens.
        parts = split_gap(self.gap.mean_abs, older + drift, limit)
        return {
            **figures,
            "sampling/effective_sample_size": effective_sample_size(weights, squares, int(self.tally.count(_RATIO))),
            "sampling/sampling_logp_difference/mean": self.difference.mean_abs,
            "sampling/sampling_logp_difference/max": self.difference.max_abs,
            "parity/mean_abs_gap": self.gap.mean_abs,
            "parity/max_abs_gap": self.gap.max_abs,
            "parity/k3": self.gap.k3,
            "parity/checked_tokens": self.gap.tokens,
            "parity/aside_tokens": self.aside,
            "sampling/tokens": self.difference.tokens + self.aside,
            **parts.metrics(),
        }


_RATIO, _SQUARES = "sampling/importance_sampling_ratio/mean", "_squared_ratios"


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


@torch.no_grad()
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


def measure(packs: Sequence[tuple[TokenBatch, TokenScores]], sums: UpdateSums, stands_for: float = 1.0) -> None:
    """Log the figures that every method has, for every token that went through the model, learned from or not.

    Args:
        packs: those of a micro-batch, with their scores.
        stands_for: how many tokens each of these stands for in means: more than one, if others like it were left aside.
    """
    if not packs:
        return
    hosts = [as_float64(b.behaviour_logps, b.old_logps, b.entropies, b.logps) for b, _ in packs]
    behaviour, old_logps, entropies, logps = (np.concatenate(parts) for parts in zip(*hosts, strict=True))
    sequences = [s for batch, _ in packs for s in batch.sequences]
    sums.tally.mean("_drift", float(np.abs(logps - old_logps).sum()), len(logps))
    if sequences[0].old_logps is not None:
        names, lengths = [s.name for s in sequences], [s.length for s in sequences]
        sums.repeated = sums.repeated + measure_gap(old_logps, logps, names, lengths)
    else:
        sums.logps += [(batch.sequences, batch.old_logps) for batch, _ in packs]
    _note(sequences, behaviour, old_logps, entropies, sums, stands_for)
    for batch, scores in packs:
        if batch.support is not None:
            sums.tally.mean("sampling/forced_share", (batch.support == 1).float(), weight=stands_for)
        sums.draws = sums.draws + draws_of(batch.sequences, scores)


def measure_scored(sequences: Sequence[TrainingSequence], sums: UpdateSums) -> None:
    """Log the same figures for sequences that were scored before the first step and are not scored again."""
    if sequences:
        names = "behaviour_logps", "old_logps", "entropies"
        behaviour, old_logps, entropies = (flat(sequences, name).astype(np.float64) for name in names)
        _note(sequences, behaviour, old_logps, entropies, sums)


def _note(
    sequences: Sequence[TrainingSequence],
    behaviour: Reals64,
    old_logps: Reals64,
    entropies: Reals64,
    sums: UpdateSums,
    stands_for: float = 1.0,
) -> None:
    tally, count = sums.tally, len(behaviour)
    gap, difference = gap_of(sequences, behaviour, old_logps)
    sums.gap, sums.difference = sums.gap + gap, sums.difference + difference
    ratios = np.exp(old_logps - behaviour)
    tally.mean(_RATIO, float(ratios.sum()), count, weight=stands_for)
    tally.mean(_SQUARES, float(ratios @ ratios), count, weight=stands_for)
    tally.low("sampling/importance_sampling_ratio/min", float(ratios.min()))
    tally.high("sampling/importance_sampling_ratio/max", float(ratios.max()))
    tally.mean("entropy", float(entropies.sum()), count, weight=stands_for)


def as_float64(*columns: Logps) -> list[Reals64]:
    """(N,) values of several columns in float64, on the host. Tensors on another device are copied together."""
    tensors = iter(on_host([column for column in columns if isinstance(column, torch.Tensor)]))
    return [
        next(tensors).double().numpy() if isinstance(column, torch.Tensor) else column.astype(np.float64)
        for column in columns
    ]
