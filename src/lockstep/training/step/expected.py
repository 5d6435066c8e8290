"""A generation as plain values for the proof of advantages (`watch/advantages.py`).

`training/step/generation.py` makes the proof when it has made a generation. `training/step/update.py` compares each micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lockstep.rollouts.group import RolloutGroup
from lockstep.training.batch.sequence import TrainingSequence, rollouts_of
from lockstep.training.methods.objective import Objective, TokenBatch
from lockstep.watch.advantages import AdvantageProof, Scored
from lockstep.whose_code import is_lockstep


def check_batch(proof: AdvantageProof, batch: TokenBatch) -> None:
    """Compare a pack just before its loss.

    Raises:
        ProofError: as in `AdvantageProof.check`.
    """
    both = torch.stack([batch.advantages.detach(), batch.weights.detach()]).cpu().numpy()
    proof.check([s.name for s in batch.sequences], [s.length for s in batch.sequences], both[0], both[1])


def check_still(proof: AdvantageProof, sequences: Sequence[TrainingSequence]) -> None:
    """Compare sequences that have no gradient.

    Raises:
        ProofError: as in `AdvantageProof.check`.
    """
    for s in sequences:
        proof.check([s.name], [s.length], s.advantages, np.full(s.length, s.weight))


def advantage_proof(
    objective: Objective[Any], groups: Sequence[RolloutGroup], sequences: Sequence[TrainingSequence]
) -> AdvantageProof | None:
    """The proof of a generation; None for an objective without a definition.

    Args:
        sequences: those of the groups, with the log-probs that the method needs, before their advantages.
    """
    # A class of the user's own may compute other advantages.
    if objective.definition is None or not is_lockstep(type(objective)):
        return None
    found = {own[0].rollout or own[0].name: own for own in rollouts_of(sequences)}
    completions = []
    for group in groups:
        for rollout in group.rollouts:
            own = found.get(str(rollout.key), [])

            def column(name: str, own: list[TrainingSequence] = own) -> list[float] | None:
                parts = [getattr(s, name) for s in own]
                return None if any(p is None for p in parts) else [float(v) for p in parts for v in p]

            completions.append(
                Scored(
                    name=str(rollout.key),
                    prompt=group.prompt.prompt_id,
                    branches=[(s.name, s.length) for s in own],
                    scores=list(rollout.scores.values()),
                    reward=rollout.reward,
                    failed=rollout.failed is not None,
                    cut=rollout.finish_reason == "length",
                    old_logps=column("old_logps") if objective.kl_in_reward else None,
                    ref_logps=column("ref_logps") if objective.kl_in_reward else None,
                    values=column("values"),
                )
            )
    return AdvantageProof(objective.definition, completions, objective.config)
