"""One evaluation: push, sample, score and prove, as for a generation of training. Nothing is learned.

`run/trainers/evaluation.py` gives the prompts of an evaluation set. It gets scored groups, the method's loss on them, and the
figures of their proof.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lockstep.rollouts.group import Prompt, RolloutGroup
from lockstep.run.loop import TrainingLoop
from lockstep.training.generate.proofs.evaluation import check_evaluated, drawn_sequences
from lockstep.training.generate.proofs.rows import check_rows
from lockstep.training.step.generation import branches_of, sequences_of
from lockstep.training.step.loss_alone import loss_alone, needs_scores


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
    loop.ranks.on_owner("evaluated rows", lambda: check_evaluated(groups, digest(), count))
    check_rows(groups, {p.prompt_id: p for p in prompts}, loop.source.decode, (seed, version))
    every, policy = sequences_of(groups, version), loop.policy()
    sequences = every if needs_scores(loop.objective) else drawn_sequences(every, version, seed)
    scored = loop.preparation.scores(policy, sequences)
    names = {sequence.name for sequence in sequences}
    drawn = [c for c in branches_of(groups) if str(c.key) in names and len(c.sampled_places)]
    loop.ranks.on_owner(
        "evaluation",
        lambda: loop.source.proofs.check_evaluation(scored.gap, scored.draws, scored.kept_sets, drawn, version),
    )
    sampled = sum(len(c.sampled_places) for c in branches_of(groups))
    learned = loss_alone(loop.preparation, loop.objective, policy, groups, version, every, scored) if every else {}
    return groups, {
        **learned,
        "parity/mean_abs_gap": scored.gap.mean_abs,
        "parity/max_abs_gap": scored.gap.max_abs,
        "parity/draws_z": scored.draws.z,
        "parity/checked_tokens": scored.gap.tokens,
        "parity/checked_share": scored.gap.tokens / sampled if sampled else 1.0,
    }
