"""The figures of an optimizer step: sums over its packs, parts and ranks, and how a pack is added to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.algorithms.corrections import effective_sample_size
from lockstep.to_device import on_host
from lockstep.training.batch.sequence import TrainingSequence, flat
from lockstep.training.events import Evidence
from lockstep.training.forward.scoring import TokenScores
from lockstep.training.methods.objective import Tally, TokenBatch

Reals64 = NDArray[np.float64]


@dataclass(slots=True)
class UpdateSums:
    """Sums over the tokens of an optimizer step. The sums of its parts and of its ranks can be added.

    Attributes:
        evidence: what the proofs keep.
        loss: the step's loss so far.
        aside: number of tokens that were left aside.
        tally: values to log. `_drift` is |log-prob now − at sampling time| of the policy, over the tokens that went through
            the model in this step. It is 0 if the policy has not changed since.
        logps: sequences and (N,) log-probs of each pack whose tokens no pass has scored before. They stay on this rank.
    """

    evidence: Evidence
    loss: float = 0.0
    aside: int = 0
    tally: Tally = field(default_factory=Tally)
    logps: list[tuple[Sequence[TrainingSequence], torch.Tensor]] = field(default_factory=list)

    def data(self) -> dict[str, Any]:
        """The whole content but `logps`, as JSON types."""
        return {
            "evidence": self.evidence.data(),
            "loss": self.loss,
            "aside": self.aside,
            "tally": self.tally.data(),
        }

    @classmethod
    def of(cls, parts: Sequence[dict[str, Any]], evidence: Evidence) -> UpdateSums:
        """The sum of the `data` of several ranks. `evidence` is empty."""
        total = cls(evidence)
        for data in parts:
            total.evidence.add(data["evidence"])
            total.loss += data["loss"]
            total.aside += data["aside"]
            total.tally.add(data["tally"])
        return total

    def metrics(self) -> dict[str, float]:
        """The update's metrics under TRL's names."""
        weights, squares = self.tally.total(_RATIO), self.tally.total(_SQUARES)
        size = effective_sample_size(weights, squares, int(self.tally.count(_RATIO)))
        return {**self.tally.figures(), "sampling/effective_sample_size": size}


_RATIO, _SQUARES = "sampling/importance_sampling_ratio/mean", "_squared_ratios"


@torch.no_grad()
def measure(packs: Sequence[tuple[TokenBatch, TokenScores]], sums: UpdateSums, stands_for: float = 1.0) -> None:
    """Log the figures that every method has, for every token that went through the model, learned from or not.

    Args:
        packs: those of a micro-batch, with their scores.
        stands_for: how many tokens each of these stands for in means: more than one, if others like it were left aside.

    Raises:
        ProofError: a log-prob is not finite.
    """
    if not packs:
        return
    hosts = [as_float64(b.behaviour_logps, b.old_logps, b.entropies, b.logps) for b, _ in packs]
    behaviour, old_logps, entropies, logps = (np.concatenate(parts) for parts in zip(*hosts, strict=True))
    sequences = [s for batch, _ in packs for s in batch.sequences]
    sums.tally.mean("_drift", float(np.abs(logps - old_logps).sum()), len(logps))
    scored_before = sequences[0].old_logps is not None
    if not scored_before:
        sums.logps += [(batch.sequences, batch.old_logps) for batch, _ in packs]
    found = [(batch.sequences, scores) for batch, scores in packs]
    sums.evidence.tokens(sequences, behaviour, old_logps, logps if scored_before else None, found)
    _note(behaviour, old_logps, entropies, sums, stands_for)
    for batch, _ in packs:
        if batch.support is not None:
            sums.tally.mean("sampling/forced_share", (batch.support == 1).float(), weight=stands_for)


def measure_scored(sequences: Sequence[TrainingSequence], sums: UpdateSums) -> None:
    """Log the same figures for sequences that were scored before the first step and are not scored again."""
    if sequences:
        names = "behaviour_logps", "old_logps", "entropies"
        behaviour, old_logps, entropies = (flat(sequences, name).astype(np.float64) for name in names)
        sums.evidence.tokens(sequences, behaviour, old_logps)
        _note(behaviour, old_logps, entropies, sums)


def _note(
    behaviour: Reals64, old_logps: Reals64, entropies: Reals64, sums: UpdateSums, stands_for: float = 1.0
) -> None:
    tally, count = sums.tally, len(behaviour)
    ratios = np.exp(old_logps - behaviour)
    tally.mean(_RATIO, float(ratios.sum()), count, weight=stands_for)
    tally.mean(_SQUARES, float(ratios @ ratios), count, weight=stands_for)
    tally.low("sampling/importance_sampling_ratio/min", float(ratios.min()))
    tally.high("sampling/importance_sampling_ratio/max", float(ratios.max()))
    tally.mean("entropy", float(entropies.sum()), count, weight=stands_for)


def as_float64(*columns: Reals64 | NDArray[np.float32] | torch.Tensor) -> list[Reals64]:
    """(N,) values of several columns in float64, on the host. Tensors on another device are copied together."""
    tensors = iter(on_host([column for column in columns if isinstance(column, torch.Tensor)]))
    return [
        next(tensors).double().numpy() if isinstance(column, torch.Tensor) else column.astype(np.float64)
        for column in columns
    ]
