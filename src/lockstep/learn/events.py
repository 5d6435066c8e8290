"""All that the loop, the forwards and the backwards know of proofs: the events of a run, and one question.

A run has one `Watch`. There is none by default and no switch. An event is called when something has happened, or just
before. A proof that fails raises `ProofError` there, and what would follow does not happen. The methods below stand in
the order of a run. Every event up to `stepping` comes before the optimizer changes a weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from lockstep.learn.pack import Pack
from lockstep.learn.sequence import TrainingSequence
from lockstep.rollouts.group import Prompt, RolloutGroup

if TYPE_CHECKING:
    from lockstep.learn.generation import AllScores, Generation
    from lockstep.learn.methods.objective import Scores, TokenBatch
    from lockstep.learn.scoring import TokenScores
    from lockstep.learn.update import Policy, StepSums


class Evidence(Protocol):
    """What proofs keep of the tokens that go through the model: sums, which are added over packs and ranks."""

    def rows(self, pack: Pack, logps: torch.Tensor, hidden: torch.Tensor, *, before_steps: bool) -> None:
        """Keep the hidden states of a few random tokens of a pack. Whole rows of logits are too large to keep.

        Args:
            logps: (N,) log-probs of the pack's tokens, as the loss uses them.
            hidden: (rows, length, width) last hidden states of the forward.
            before_steps: whether the policy has not changed since it sampled the tokens that are `fresh`.
        """

    def tokens(
        self,
        sequences: Sequence[TrainingSequence],
        behaviour: Any,
        before: Any,
        now: Any = None,
        scores: Sequence[tuple[Sequence[TrainingSequence], TokenScores]] = (),
    ) -> None:
        """Take the log-probs of N tokens, each (N,).

        Args:
            behaviour: those of the engine.
            before: those of the policy that the engine held.
            now: those of this forward; None: this forward gave `before`.
            scores: what the forward of each pack gave, for the proof that tokens are draws.
        """

    def rows_compared(self, policy: Policy) -> None:
        """Compare the rows that were kept, while the weights are still those of their forward."""

    def data(self) -> dict[str, Any]:
        """The whole content, as JSON types."""

    def add(self, data: Mapping[str, Any]) -> None:
        """Add the `data` of another rank."""


class LossWatch(Protocol):
    """The events of a loss and its backward, in a run or outside. Every rank calls them, except `summed`."""

    def evidence(self) -> Evidence:
        """New, empty sums."""

    def referenced(
        self,
        scorer: Policy,
        scores: Scores,
        sequences: Sequence[TrainingSequence],
        groups: Sequence[RolloutGroup],
        version: int,
    ) -> None:
        """A reference model, as `scorer`, has scored sequences of groups, while the policy was `version`."""

    def micro_batch(
        self, index: int, sequences: Sequence[TrainingSequence], moving: Sequence[TrainingSequence]
    ) -> list[list[TrainingSequence]]:
        """A micro-batch will be learned from.

        Args:
            index: of the micro-batch within its generation, over all ranks.
            moving: the sequences with a gradient.

        Returns:
            Those with a gradient, in lists that share no pack.
        """

    def forward(self, batch: TokenBatch, *, learned: bool) -> None:
        """The forward of a pack is through, and its loss and backward, if it is `learned` from."""

    def backward(self, batch: TokenBatch, scores: TokenScores) -> AbstractContextManager[None]:
        """A context for the loss and the backward of a pack."""

    def learned(self) -> None:
        """Every backward of a micro-batch is through."""

    def aside(self, sequences: Sequence[TrainingSequence]) -> None:
        """These sequences of a micro-batch have no gradient."""

    def compared(self, policy: Policy, evidence: Evidence) -> None:
        """Every pack of a micro-batch is through."""

    def summing(self) -> None:
        """Every backward of a step is through on this rank."""

    def summed(self, total: StepSums) -> None:
        """The sums of a step over all ranks. Only the rank that holds the engine calls."""

    def accumulated(self) -> None:
        """The gradients of a step are the sums over all ranks."""


class Watch(LossWatch, Protocol):
    """All events of a run."""

    # ---- a generation -----------------------------------------------------------------------------------------------

    def began(self) -> None:
        """Training begins. What an earlier training left is forgotten."""

    def pushing(self, version: int) -> None:
        """The weights will be pushed as `version`."""

    def scored(self, groups: Sequence[RolloutGroup]) -> None:
        """Rollouts have their rewards."""

    def taken(self, groups: Sequence[RolloutGroup], prompts: Sequence[Prompt], number: int) -> None:
        """Scored rollouts were taken as generation `number`, of these prompts."""

    def prepared(
        self, generation: Generation, scored: AllScores | None, sequences: Sequence[TrainingSequence]
    ) -> None:
        """A generation is ready.

        Args:
            scored: the policy's scores before the first step; None: the first forward of a step gives them.
            sequences: those of the generation, with what the method needs, before their advantages.
        """

    def evaluated(
        self,
        groups: Sequence[RolloutGroup],
        prompts: Sequence[Prompt],
        scored: AllScores,
        digest: Any,
        count: int,
    ) -> dict[str, float]:
        """An evaluation has its rollouts. Returns figures to log.

        Args:
            scored: the policy's scores of some of them, or of all.
            digest: gives the digest of the evaluation set's rows, on the rank that holds the engine.
            count: completions per row.
        """

    # ---- an optimizer step ------------------------------------------------------------------------------------------

    def beginning(
        self, policy: Policy, generation: Generation, step: int, *, moved: bool, plain: bool
    ) -> None:
        """The first forward of a step will come.

        Args:
            generation: with the step's sequences as they will be learned from.
            moved: whether the policy has changed since the generation was prepared.
            plain: whether scores alone have a gradient; else the loss of routers has one too.
        """

    def figures(self, total: StepSums) -> dict[str, float]:
        """What proofs log of a step. Every rank calls."""

    def clipped(self, norm: float) -> None:
        """The gradients were clipped, and had this norm."""

    def stepping(self) -> None:
        """The optimizer will change the weights."""

    def stepped(self) -> None:
        """The optimizer has changed the weights."""

    def saving(self) -> None:
        """A checkpoint will be written."""
