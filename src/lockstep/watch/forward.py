"""Proof of the forward that the loss is computed from, at every step of a generation.

At a generation's first step the policy is the one that scored the tokens before. At later steps it has moved. The plain
forward is under the run's sampling distribution, without packing and shared prefixes.

Proof `forward`.
Shows: at a generation's first step, every log-prob in the loss is that of the scoring pass; at later steps, and in
generations with stale tokens, those of one drawn completion per rank are those of a plain forward with the weights of
that step.
Does not show: at later steps, a fault in completions that are not drawn.
When: every step that the gap does not cover completely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedModel

from lockstep.contract.distribution import Distribution
from lockstep.contract.protocol import Completion
from lockstep.errors import ProofError
from lockstep.models.autocast import Precision
from lockstep.training.methods.objective import TokenBatch
from lockstep.watch.gap import GapStats, over_limits
from lockstep.watch.rescoring import sampled_logps
from lockstep.watch.tolerances import Tolerance, own_limit

if TYPE_CHECKING:
    from lockstep.training.step.update import Policy


_CAUSE = (
    "the forward of the loss computes something else than the forward that scored the tokens: another temperature, prompt, mask "
    "or order of positions, or weights that changed in between"
)
_FIX = (
    "let nothing change the model or the run's sampling settings during training; otherwise report it with this message"
)


def check_repeated(difference: GapStats, limit: Tolerance, version: int) -> None:
    """Compare the log-probs of a generation's first step with those of the scoring pass, for the same policy.

    Args:
        difference: over all tokens of the step that were scored before it.
        limit: for two forwards in the trainer's precision.

    Raises:
        ProofError: they differ by more than rounding.
    """
    if over := over_limits(difference, limit):
        raise ProofError(
            "forward",
            f"at the first step of the generation of version {version}, {difference.tokens} tokens have other log-probs than in "
            f"the scoring pass with the same weights: {', '.join(over)} nats, worst in request {difference.worst}",
            _CAUSE,
            _FIX,
        )


def check_plain(
    model: PreTrainedModel,
    completion: Completion,
    logps: torch.Tensor,
    distribution: Distribution,
    precision: Precision,
) -> None:
    """Score one completion with a plain forward of the current weights, and compare.

    Args:
        logps: (S,) log-probs of its sampled tokens in the forward of the loss.

    Raises:
        ProofError: they differ by more than rounding.
    """
    limit = own_limit(precision, model)
    gap = (sampled_logps(model, completion, distribution, precision).cpu() - logps.detach().cpu()).abs()
    mean, largest = float(gap.mean()), float(gap.max())
    # Few tokens: the limit on the mean of many would be too narrow.
    if not (mean <= limit.mean_of(len(gap)) and largest <= limit.largest(len(gap))):
        raise ProofError(
            "forward",
            f"the loss uses log-probs of completion {completion.key} that differ from a plain forward with the same weights by "
            f"{mean:.2g} nats on average and {largest:.2g} at most, over {len(gap)} tokens",
            _CAUSE,
            _FIX,
        )


@dataclass(frozen=True, slots=True)
class PlainForward:
    """One drawn completion of a step, which is also scored by a plain forward."""

    completion: Completion
    distribution: Distribution
    precision: Precision

    def is_in(self, batch: TokenBatch) -> bool:
        """Whether a pack has the completion."""
        return str(self.completion.key) in [s.name for s in batch.sequences]

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
