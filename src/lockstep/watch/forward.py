"""Proof of the forward that the loss is computed from, at every step of a generation.

At a generation's first step the policy is the one that scored the tokens before, so every log-prob must be the same again. At
later steps the policy has moved. Then one drawn completion is scored by a plain forward with the weights of that step, under the
run's sampling distribution, without packing and shared prefixes. `training/step/step_proofs.py` and `run/loop.py` call it.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from lockstep.engines.protocol import Completion
from lockstep.errors import ProofError
from lockstep.watch.distributions import Distribution
from lockstep.watch.gap import GapStats, over_limits
from lockstep.watch.rescoring import Precision, sampled_logps
from lockstep.watch.tolerances import Tolerance

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
    limit = precision.own_limit(model)
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
