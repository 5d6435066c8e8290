"""The auxiliary loss of the routers of a mixture of experts, over a whole optimizer step.

There is one object per step. Each pack's share is added to the loss. The loss multiplies how often an expert is chosen
with how probable it is, both over all rows of the step. How often each expert is chosen must be known before the first
backward. If the step is more than one pack, a forward without gradient counts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from lockstep.algorithms.router_balance import Routing, Shares, balance_loss
from lockstep.rollouts.across_ranks.ranks import Ranks
from lockstep.training.batch.sequence import TrainingSequence
from lockstep.training.methods.objective import Objective, Tally

if TYPE_CHECKING:
    from lockstep.training.step.update import Policy


class RouterLoss:
    """The loss of one step.

    Args:
        coefficient: its weight in the step's loss.
        whole: the choices of the whole step, over all ranks; None: the step is one pack.
    """

    def __init__(self, coefficient: float, whole: Shares | None) -> None:
        self._coefficient, self._whole = coefficient, whole

    def share(self, routing: Routing, tally: Tally) -> torch.Tensor:
        """A pack's share of the step's loss; a scalar with gradient. The loss without its weight is logged."""
        whole = self._whole if self._whole is not None else Shares.of([routing.counts()])
        loss = balance_loss(routing, whole)
        # The counts of all packs add up to 1, so the logged mean is the sum of the shares.
        tally.later(loss, lambda value: tally.mean("aux_loss", float(value), routing.rows / whole.rows))
        return self._coefficient * loss


def router_loss(
    objective: Objective[Any], policy: Policy, batches: Sequence[Sequence[TrainingSequence]], ranks: Ranks
) -> RouterLoss | None:
    """The auxiliary loss of the step that begins; None if the run has none. Every rank calls this.

    Args:
        batches: the micro-batches of the step on this rank.
    """
    if not objective.router_coefficient:
        return None
    moving = [[s for s in batch if objective.has_gradient(s)] for batch in batches]
    packs = [pack for batch in moving for pack in policy.packs(batch, objective.config)]
    if ranks.count == 1 and len(packs) < 2:
        return RouterLoss(objective.router_coefficient, None)
    parts = ranks.share("routers", lambda: [policy.route(pack).counts() for pack in packs])
    found = [part for own in parts for part in own]
    return RouterLoss(objective.router_coefficient, Shares.of(found) if found else None)
