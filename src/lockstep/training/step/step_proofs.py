"""The proofs of one optimizer step that look at every pack: what enters its loss, and its forward.

`run/loop.py` makes them at the beginning of a step, and `training/step/update.py` calls them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from transformers import PreTrainedModel

from lockstep.engines.protocol import Completion
from lockstep.training.batch.pack import Pack
from lockstep.training.batch.sequence import TrainingSequence
from lockstep.training.forward.scoring import TokenScores
from lockstep.training.methods.objective import TokenBatch
from lockstep.training.step.checked_part import CheckedPart
from lockstep.training.step.expected import check_batch, check_still
from lockstep.training.step.learned import check_aside, check_entering
from lockstep.watch.advantages import AdvantageProof
from lockstep.watch.custody import SampledTokens
from lockstep.watch.distributions import Distribution
from lockstep.watch.forward import check_plain
from lockstep.watch.rescoring import Precision

if TYPE_CHECKING:
    from lockstep.training.step.update import Policy


@dataclass(frozen=True, slots=True)
class PlainForward:
    """One drawn completion of a step, which is also scored by a plain forward (`watch/forward.py`)."""

    completion: Completion
    distribution: Distribution
    precision: Precision

    def check(self, model: PreTrainedModel, batch: TokenBatch) -> None:
        """Compare, if the pack has the completion.

        Raises:
            ProofError: the pack's log-probs are others.
        """
        start = 0
        for s in batch.sequences:
            if s.name == str(self.completion.key):
                own = batch.logps[start : start + s.length]
                check_plain(model, self.completion, own, self.distribution, self.precision)
            start += s.length


def drawn_forward(
    completions: Sequence[Completion],
    names: Sequence[str],
    policy: Policy,
    precision: Precision,
    seed: tuple[int, ...],
) -> PlainForward | None:
    """Draw the completion of a step; None if the step learns from none.

    Args:
        completions: those of the generation, as the engine answered them.
        names: the completions that the step learns from.
    """
    if not names or policy.rules is None:
        return None
    name = names[int(np.random.default_rng(seed).integers(len(names)))]
    (found,) = [c for c in completions if str(c.key) == name]
    return PlainForward(found, policy.rules.distribution, precision)


@dataclass(frozen=True, slots=True)
class StepProofs:
    """The proofs of a step.

    Attributes:
        expected: the advantages and weights that enter the loss; None: the method has no definition.
        sampled: the tokens that enter the loss; None: nothing is compared, as where a loss is computed outside a run.
        again: a completion whose forward is repeated; None: other proofs cover every token of this forward.
        part: the part of the step whose gradient is checked; None: none is checked at this step.
    """

    expected: AdvantageProof | None = None
    sampled: SampledTokens | None = None
    again: PlainForward | None = None
    part: CheckedPart | None = None

    def cuts(self, sequences: Sequence[TrainingSequence]) -> list[list[TrainingSequence]]:
        """The sequences of a micro-batch with a gradient, cut so that a checked part has packs of its own."""
        return [list(sequences)] if self.part is None else self.part.split(sequences)

    def watched(self, pack: Pack, scores: TokenScores) -> AbstractContextManager[None]:
        """A context for the loss and the backward of a pack."""
        return nullcontext() if self.part is None else self.part.watch(pack, scores)

    def check_part(self, part: int, sequences: Sequence[TrainingSequence]) -> None:
        """Check that a micro-batch has its own completions.

        Raises:
            ProofError: as in `SampledTokens.check_part`.
        """
        if self.sampled is not None:
            self.sampled.check_part(part, [s.name for s in sequences])

    def check_tokens(self, batch: TokenBatch) -> None:
        """Check the tokens of a pack after its forward.

        Raises:
            ProofError: as in `SampledTokens.check`.
        """
        if self.sampled is not None:
            check_entering(self.sampled, batch)

    def check_loss(self, batch: TokenBatch) -> None:
        """Check a pack just before its loss.

        Raises:
            ProofError: its tokens, advantages or weights are others than they must be.
        """
        self.check_tokens(batch)
        if self.expected is not None:
            check_batch(self.expected, batch)

    def repeats(self, batch: TokenBatch) -> bool:
        """Whether `check_forward` compares a completion of a pack."""
        return self.again is not None and str(self.again.completion.key) in [s.name for s in batch.sequences]

    def check_forward(self, model: PreTrainedModel, batch: TokenBatch) -> None:
        """Check the forward of a pack, after its backward.

        Raises:
            ProofError: as in `PlainForward.check`.
        """
        if self.again is not None:
            self.again.check(model, batch)

    def check_aside(self, sequences: Sequence[TrainingSequence]) -> None:
        """Check sequences that have no gradient.

        Raises:
            ProofError: as for those with a gradient. Tokens that still go through the model are checked there.
        """
        if self.expected is not None:
            check_still(self.expected, sequences)
        if self.sampled is not None:
            check_aside(self.sampled, [s for s in sequences if s.entropies is not None or s.aside])


# For a loss that is computed outside a run.
NO_PROOFS = StepProofs()
