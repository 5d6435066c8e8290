"""One evaluation: push, sample, score and prove, as for a generation of training. Nothing is learned.

The prompts are those of an evaluation set. The result has scored groups, the method's loss on them, and the figures of
their proof.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lockstep.rollouts.group import Prompt, RolloutGroup
from lockstep.run.loop import TrainingLoop
from lockstep.training.step.generation import sequences_of
from lockstep.training.step.loss_alone import loss_alone, needs_scores
from lockstep.watch.rewards import drawn_sequences


def evaluate(
    loop: TrainingLoop, prompts: Sequence[Prompt], digest: Callable[[], str]
) -> tuple[list[RolloutGroup], dict[str, float]]:
    """Scored rollouts of an evaluation set, by the policy as it is, their loss and the figures of their proof. Every rank calls.

    Args:
        digest: gives the digest of the set's rows (`data_digest`). The rank that holds the engine calls it.

    Raises:
        ProofError: trainer and engine do not agree, or other rows were evaluated.
    """
    count, version, seed = loop.config.group_size_eval, loop.state().global_step, loop.config.seed
    groups = loop.rollout_in_parts(prompts, count)
    every, policy = sequences_of(groups, version), loop.policy()
    sequences = every if needs_scores(loop.objective) else drawn_sequences(every, version, seed)
    scored = loop.preparation.scores(policy, sequences)
    proven = loop.watch.evaluated(groups, prompts, scored, digest, count)
    learned = loss_alone(loop.preparation, loop.objective, policy, groups, version, every, scored) if every else {}
    return groups, learned | proven
