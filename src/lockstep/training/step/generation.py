"""One generation, split into the micro-batches that learn from it. Pure functions of scored groups and the method.

The groups come from `rollouts/`. `training/step/update.py` takes the micro-batches one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from lockstep.engines.protocol import Completion
from lockstep.rollouts.group import RolloutGroup
from lockstep.tokens.arrays import flags
from lockstep.training.batch.sequence import TrainingSequence
from lockstep.training.methods.objective import Objective


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
