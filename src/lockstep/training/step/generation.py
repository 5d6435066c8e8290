"""One generation, split into the micro-batches that learn from it. Pure functions of scored groups and the method.

The groups come from `rollouts/`. `training/step/update.py` takes the micro-batches one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from lockstep.engines.protocol import Completion
from lockstep.parity.gap import GapStats
from lockstep.report.phases import PhaseClock
from lockstep.rollouts.group import RolloutGroup
from lockstep.rollouts.ranks import Ranks
from lockstep.tokens.arrays import flags
from lockstep.training.batch.sequence import TrainingSequence
from lockstep.training.forward.reference import Reference
from lockstep.training.methods.objective import Objective, Scores
from lockstep.training.step.distributed import share_of
from lockstep.training.step.update import AllScores, Policy, score_all


@dataclass(frozen=True, slots=True)
class Generation:
    """Scored groups and the sequences to learn from.

    Attributes:
        version: weight version that the engine held when the generation was taken. Without staleness it sampled every token.
        groups: the rollouts, by prompt.
        micro_batches: lists of sequences, in the order of groups and samples. The micro-batches of one optimizer step are
            adjacent, and within a step so are those of one rank.
    """

    version: int
    groups: tuple[RolloutGroup, ...]
    micro_batches: tuple[tuple[TrainingSequence, ...], ...]

    @property
    def completions(self) -> list[Completion]:
        """Every completion, as the engine answered it."""
        return [rollout.completion for group in self.groups for rollout in group.rollouts]

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the engine sampled, counted in the engine's answers and not in the training sequences."""
        return sum(len(c.sampled_versions) for c in self.completions)

    @property
    def fresh_tokens(self) -> int:
        """Number of tokens that were sampled by the weights of `version`."""
        return sum(int(np.count_nonzero(c.sampled_versions == self.version)) for c in self.completions)

    @property
    def prompt_ids(self) -> tuple[str, ...]:
        return tuple(group.prompt.prompt_id for group in self.groups)

    def step(self, index: int, size: int) -> list[TrainingSequence]:
        """Sequences of one optimizer step of this generation. `size` is the step's number of micro-batches over all ranks."""
        return [s for batch in self.micro_batches[index * size : (index + 1) * size] for s in batch]

    def with_step(self, index: int, size: int, sequences: Sequence[TrainingSequence]) -> Generation:
        """A copy of the generation in which the sequences of one optimizer step are replaced by others with the same names."""
        by_name = {s.name: s for s in sequences}
        first, end = index * size, (index + 1) * size
        batches = tuple(
            tuple(by_name[s.name] for s in batch) if first <= i < end else batch
            for i, batch in enumerate(self.micro_batches)
        )
        return replace(self, micro_batches=batches)

    def changed(self, change: Callable[[TrainingSequence], TrainingSequence]) -> Generation:
        """A copy of the generation in which each sequence is replaced by `change(sequence)`."""
        batches = tuple(tuple(change(s) for s in batch) for batch in self.micro_batches)
        return replace(self, micro_batches=batches)


def sequences_of(groups: Sequence[RolloutGroup], version: int) -> list[TrainingSequence]:
    """One sequence per rollout, in the order of groups and samples, without advantages and weights yet.

    Args:
        version: weight version that will learn from them first.
    """
    completions = [rollout.completion for group in groups for rollout in group.rollouts]
    stale = any((c.sampled_versions != version).any() for c in completions)
    return [
        TrainingSequence(
            name=str(c.key),
            prompt_ids=c.prompt_ids,
            completion_ids=c.token_ids,
            behaviour_logps=c.sampled_logprobs,
            sampled=c.sampled,
            fresh=flags(c.sampled_versions == version) if stale else None,
        )
        for c in completions
    ]


def prepare_generation(
    groups: Sequence[RolloutGroup],
    objective: Objective,
    version: int,
    sequences: Sequence[TrainingSequence] | None = None,
) -> Generation:
    """Advantages, loss weights and micro-batches of a generation.

    Weights are normalised over each whole optimizer step, for any number of micro-batches and ranks.

    Args:
        sequences: the sequences of the groups, with the log-probs that the method needs; None: made from the groups.
    """
    config = objective.config
    advantaged = objective.with_advantages(groups, sequences_of(groups, version) if sequences is None else sequences)
    masked = [objective.is_masked(rollout) for group in groups for rollout in group.rollouts]
    places = torch.tensor([place for place, group in enumerate(groups) for _ in group.rollouts])
    counted = torch.tensor([not objective.filtered(group) for group in groups])[places]
    kept = torch.tensor([0 if out else s.length for s, out in zip(advantaged, masked, strict=True)])
    weights = torch.zeros(len(advantaged))
    for start in range(0, len(advantaged), config.completions_per_step):
        step = torch.arange(start, min(start + config.completions_per_step, len(advantaged)))
        step = step[counted[step]]
        if len(step):
            weights[step] = torch.where(kept[step] > 0, objective.sequence_weights(kept[step], places[step]), 0.0)
    weighted = [replace(s, weight=weight) for s, weight in zip(advantaged, weights.tolist(), strict=True)]
    size = config.completions_per_micro_batch
    batches = tuple(tuple(weighted[i : i + size]) for i in range(0, len(weighted), size))
    return Generation(version, tuple(groups), batches)


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
