"""Takes what flows back to the log-probs of a pack, and compares it with the method's formula (`parity/step/gradient.py`).

`training/step/update.py` makes one object per pack before its loss, and calls it after the backward.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lockstep.parity.step.gradient import Tokens, by_logps, by_values, check
from lockstep.training.methods.objective import Objective, TokenBatch


class LossGradient:
    """The gradients of a pack's log-probs and values. Objectives of the user's own are not compared.

    Args:
        batch: the pack, before its loss is computed.
    """

    def __init__(self, objective: Objective[Any], batch: TokenBatch) -> None:
        self._objective, self._batch = objective, batch
        self._found: dict[str, torch.Tensor] = {}
        # Without returns the method's loss does not use the value head.
        self._values = batch.values if batch.sequences[0].returns is not None else None
        self._method = objective.definition if type(objective).__module__.startswith("lockstep.") else None
        if self._method is not None:
            for name, tensor in (("log-prob", batch.logps), ("value", self._values)):
                if tensor is not None and tensor.requires_grad:
                    tensor.register_hook(lambda gradient, name=name: self._found.__setitem__(name, gradient))

    def check(self) -> None:
        """Compare, after the backward.

        Raises:
            ProofError: a gradient is not what the method's formula gives.
        """
        if self._method is None:
            return
        completions, names = self._completions(), [s.name for s in self._batch.rollouts]
        zeros = torch.zeros_like(self._batch.logps)
        found = self._cut(self._found.get("log-prob", zeros))
        check("log-prob", names, by_logps(self._method, completions, self._objective.config, self._beta()), found)
        if self._values is not None:
            found = self._cut(self._found.get("value", zeros))
            check("value", names, by_values(completions, self._objective.config), found)

    def _beta(self) -> float:
        """The weight of the reference model in the loss; 0 where the KL is in the reward or not used."""
        objective, config = self._objective, self._objective.config
        if self._method == "online_dpo":
            return config.beta_of(objective.epoch)
        return config.beta if objective.uses_reference and not objective.kl_in_reward else 0.0

    def _completions(self) -> list[Tokens]:
        batch = self._batch
        columns = {
            "logps": batch.logps,
            "old_logps": batch.old_logps,
            "behaviour": batch.behaviour_logps,
            "advantages": batch.advantages,
            "kept": batch.kept(),
        }
        if self._beta():
            columns["ref_logps"] = batch.pack.column("ref_logps")
        if self._values is not None:
            columns |= {
                "values": self._values,
                "old_values": batch.pack.column("values"),
                "returns": batch.pack.column("returns"),
            }
        table = torch.stack([column.detach().to(torch.float64) for column in columns.values()])
        parts = {name: self._cut(row) for name, row in zip(columns, table.cpu(), strict=True)}
        return [
            Tokens(name=s.name, weight=s.weight, pair=s.unit, **{name: own[i] for name, own in parts.items()})
            for i, s in enumerate(batch.rollouts)
        ]

    def _cut(self, values: torch.Tensor) -> list[np.ndarray]:
        """The values of each rollout."""
        ends = self._batch.segments.lengths.cumsum(0).tolist()
        return np.split(values.detach().to("cpu", torch.float64).numpy(), ends[:-1])
