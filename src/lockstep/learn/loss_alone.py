"""The loss of a method on scored groups without a gradient: what one optimizer step on all of them would have.

The policy has not moved since it sampled, so every ratio to the sampling policy is 1. Therefore a method that needs
neither a reference model nor entropies nor values needs no forward for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lockstep.learn.generation import AllScores, Preparation, prepare_generation
from lockstep.learn.methods.objective import Objective, Scores, Tally, TokenBatch
from lockstep.learn.scoring import TokenScores
from lockstep.learn.sequence import TrainingSequence
from lockstep.learn.update import Policy
from lockstep.rollouts.group import RolloutGroup


def needs_scores(objective: Objective[Any]) -> bool:
    """Whether the loss of tokens that the policy has just sampled depends on more than their advantages."""
    return objective.uses_reference or objective.scores_first or objective.entropy_gradient


@torch.no_grad()
def loss_alone(
    preparation: Preparation,
    objective: Objective[Any],
    policy: Policy,
    groups: Sequence[RolloutGroup],
    version: int,
    sequences: Sequence[TrainingSequence],
    scored: AllScores,
) -> dict[str, float]:
    """`loss`, and the figures that the method logs beside it, by name. Every rank calls this.

    The loss has no weights for the difference between engine and trainer, and no auxiliary loss of routers.

    Args:
        version: weight version that sampled the groups.
        scored: scores of the policy, of all sequences; not used unless `needs_scores`.
    """
    # Where log-probs do not matter, some sequences have no scores. Those of the engine stand for all.
    known = needs_scores(objective)
    ready = [_with_scores(s, scored) if known else s.but(old_logps=s.behaviour_logps) for s in sequences]
    if objective.kl_in_reward:
        logps = preparation.reference_logps(policy, ready, groups, version)
        ready = [s.but(ref_logps=logps[s.name]) for s in ready]
    rollouts = sum(len(group.rollouts) for group in groups)
    generation = prepare_generation(groups, objective, version, ready, per_step=rollouts)
    if objective.uses_reference and not objective.kl_in_reward:
        generation = preparation.with_reference(policy, generation)

    def entropies(asked: Sequence[TrainingSequence]) -> Scores:
        return {s.name: s.entropies for s in asked if s.entropies is not None}

    whole = [s for batch in generation.micro_batches for s in batch]
    learned = [s for s in objective.prepare_step(whole, entropies) if objective.has_gradient(s)]
    tally, loss = Tally(), 0.0
    for pack in policy.packs(learned, objective.config):
        first, own = pack.sequences[0], pack.column("old_logps")
        scores = TokenScores(
            own,
            torch.zeros_like(own) if first.entropies is None else pack.column("entropies"),
            None if first.values is None else pack.column("values"),
        )
        loss += float(objective.loss(TokenBatch.of(pack, scores), tally))
    return {**tally.figures(), "loss": loss}


def _with_scores(sequence: TrainingSequence, scored: AllScores) -> TrainingSequence:
    """A sequence whose log-probs are the policy's own, also in the place of the engine's."""
    found = scored.beside(sequence)
    return found.but(behaviour_logps=found.old_logps)
