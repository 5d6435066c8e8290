"""A forward without gradient over whole sequences: before a generation's first step, for a reference model, and for evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.errors import InputError
from lockstep.tokens.arrays import cut, joined, reals
from lockstep.training.batch.sequence import TrainingSequence
from lockstep.training.config.online_config import OnlineConfig
from lockstep.training.events import Evidence
from lockstep.training.methods.objective import Scores
from lockstep.training.step.update import Policy

_KINDS = ("logps", "entropies", "values")


@dataclass(frozen=True, slots=True)
class AllScores:
    """Results of a forward without gradient for whole sequences, by request name."""

    logps: Scores
    entropies: Scores
    values: Scores
    evidence: Evidence

    def beside(self, sequence: TrainingSequence) -> TrainingSequence:
        """A sequence with its scores, as the scores of the policy before the generation's first step."""
        name = sequence.name
        return sequence.but(old_logps=self.logps[name], entropies=self.entropies[name], values=self.values.get(name))

    def data(self) -> dict[str, Any]:
        """The whole content, as JSON types and arrays. The scores of each kind are one array."""
        return {
            "evidence": self.evidence.data(),
            **{
                kind: {
                    "names": list(scores),
                    "lengths": [len(values) for values in scores.values()],
                    "values": joined([*scores.values()]) if scores else reals([]),
                }
                for kind, scores in zip(_KINDS, (self.logps, self.entropies, self.values), strict=True)
            },
        }

    @classmethod
    def merged(cls, parts: Sequence[dict[str, Any]], evidence: Evidence) -> AllScores:
        """The scores of all ranks, from the `data` of each rank. `evidence` is empty."""
        logps, entropies, critic_values = (
            {
                name: found
                for part in (whole[kind] for whole in parts)
                for name, found in zip(part["names"], cut(part["values"], part["lengths"]), strict=True)
            }
            for kind in _KINDS
        )
        for part in parts:
            evidence.add(part["evidence"])
        return cls(logps, entropies, critic_values, evidence)


@torch.no_grad()
def score_all(
    policy: Policy,
    sequences: Sequence[TrainingSequence],
    config: OnlineConfig,
    evidence: Evidence,
    *,
    measure: bool = True,
) -> AllScores:
    """Score sequences.

    Args:
        evidence: empty; what the proofs keep.
        measure: whether to measure the gap to the engine's log-probs, and the draws. False for weights that the engine did not
            sample with: those of a reference model, or of a policy that has moved since.

    Raises:
        ProofError: a log-prob of the policy is not finite, or a proof of drawn tokens fails.
        InputError: a log-prob is not finite, and it is not measured.
    """
    logps: Scores = {}
    entropies: Scores = {}
    critic_values: Scores = {}
    for pack in policy.packs(sequences, config):
        scores = policy.score(pack, config, evidence, before_steps=measure)
        lengths = [s.length for s in pack.sequences]
        if measure:
            found = [(pack.sequences, scores)]
            evidence.tokens(pack.sequences, pack.column("behaviour_logps"), scores.logps, scores=found)
        elif not bool(torch.isfinite(scores.logps).all()):
            raise InputError(
                "the reference model, or the policy after an optimizer step, gives a sampled token no finite log-prob; look at its "
                "weights and dtype, and at grad_norm"
            )
        for by_name, values in (
            (logps, scores.logps),
            (entropies, scores.entropies),
            (critic_values, scores.values),
        ):
            if values is not None:
                parts = cut(reals(values.cpu().numpy()), lengths)
                by_name.update((s.name, part) for s, part in zip(pack.sequences, parts, strict=True))
    evidence.rows_compared(policy)
    return AllScores(logps, entropies, critic_values, evidence)
