"""Prepares a generation for learning: log-probs of policy and reference model, advantages, weights.

It takes scored groups and gives the trainer's loop a `Generation`. Every rank scores its share and gets everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lockstep.parity.gap import GapStats
from lockstep.report.phases import PhaseClock
from lockstep.rollouts.group import RolloutGroup
from lockstep.rollouts.ranks import Ranks
from lockstep.training.batch.sequence import TrainingSequence
from lockstep.training.forward.reference import Reference
from lockstep.training.methods.objective import Objective, Scores
from lockstep.training.step.distributed import share_of
from lockstep.training.step.generation import Generation, prepare_generation, sequences_of
from lockstep.training.step.update import AllScores, Policy, score_all


class Preparation:
    """Makes generations from scored groups.

    Args:
        reference: the reference model; None if the method uses none.
    """

    def __init__(self, objective: Objective, reference: Reference | None, clock: PhaseClock, ranks: Ranks) -> None:
        self._objective, self._reference = objective, reference
        self._config, self._clock, self._ranks = objective.config, clock, ranks

    def generation(
        self, policy: Policy, groups: Sequence[RolloutGroup], version: int
    ) -> tuple[Generation, GapStats | None]:
        """A generation to learn from. Every rank calls this.

        Args:
            policy: the current policy, before the generation's first step.
            version: its weight version, which the engine holds.

        Returns:
            The generation, and the parity gap over its tokens; None if they need not be scored yet.

        Raises:
            ProofError: a log-prob is not finite.
        """
        sequences, found = sequences_of(groups, version), None
        if self._objective.scores_first or not self._config.single_update:
            found = self._policy_scores(policy, sequences)
            sequences = [found.beside(s) for s in sequences]
        if self._objective.kl_in_reward:
            logps = self._reference_logps(policy, sequences)
            sequences = [replace(s, ref_logps=logps[s.name]) for s in sequences]
        generation = prepare_generation(groups, self._objective, version, sequences)
        if self._objective.uses_reference and not self._objective.kl_in_reward:
            generation = self._with_reference(policy, generation)
        if self._config.single_update:
            generation = generation.changed(self._to_be_scored)
        return generation, found.gap if found is not None else None

    def step(self, policy: Policy, sequences: Sequence[TrainingSequence], *, moved: bool) -> list[TrainingSequence]:
        """Sequences of one optimizer step, over all ranks, just before its first forward. Every rank calls this.

        Args:
            moved: whether the policy has changed since the generation was prepared.
        """

        def entropies(asked: Sequence[TrainingSequence]) -> Scores:
            if moved:
                return self._policy_scores(policy, asked).entropies
            return {s.name: s.entropies for s in asked if s.entropies is not None}

        return self._objective.prepare_step(sequences, entropies)

    def _with_reference(self, policy: Policy, generation: Generation) -> Generation:
        """The generation with the reference model's log-probs, for the sequences whose loss uses them."""
        learned = [s for batch in generation.micro_batches for s in batch if self._objective.has_gradient(s)]
        logps = self._reference_logps(policy, learned)
        return generation.changed(lambda s: replace(s, ref_logps=logps.get(s.name)))

    def _reference_logps(self, policy: Policy, sequences: Sequence[TrainingSequence]) -> Scores:
        assert self._reference is not None
        with self._clock.phase("reference"), self._reference.model() as model:
            return self._score(replace(policy, model=model, critic=None), sequences, measure=False).logps

    def _to_be_scored(self, sequence: TrainingSequence) -> TrainingSequence:
        """Drop old log-probs of a sequence with a gradient: the policy stays the same until the step, whose forward gives them."""
        return replace(sequence, old_logps=None) if self._objective.has_gradient(sequence) else sequence

    def _policy_scores(self, policy: Policy, sequences: Sequence[TrainingSequence]) -> AllScores:
        """Scores of sequences under the current policy."""
        with self._clock.phase("verify"):
            return self._score(policy, sequences, measure=True)

    def _score(self, policy: Policy, sequences: Sequence[TrainingSequence], *, measure: bool) -> AllScores:
        def own() -> AllScores:
            return score_all(policy, share_of(sequences, self._ranks), self._config, measure=measure)

        if self._ranks.count == 1:
            return own()
        return AllScores.merged(self._ranks.share("scores", lambda: own().data()))
