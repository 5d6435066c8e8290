"""Takes what flows back to the log-probs of packs, and compares it with the method's formula (`watch/loss_gradient.py`).

`training/step/update.py` makes one object per micro-batch, shows it every pack before its loss, and lets it compare after the last
backward. So what a comparison costs at each call is spent once per micro-batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lockstep.tokens.arrays import cut
from lockstep.training.methods.objective import Objective, TokenBatch
from lockstep.training.step.update_sums import as_float64
from lockstep.watch.loss_gradient import Tokens, by_logps, by_values, check
from lockstep.whose_code import is_lockstep


class LossGradient:
    """The gradients of the log-probs and values of a micro-batch. Objectives of the user's own are not compared."""

    def __init__(self, objective: Objective[Any]) -> None:
        self._objective = objective
        self._method = objective.definition if is_lockstep(type(objective)) else None
        self._watched: list[tuple[TokenBatch, dict[str, torch.Tensor]]] = []

    def watch(self, batch: TokenBatch) -> None:
        """Keep the gradients of a pack. Call it before the loss of the pack is computed."""
        if self._method is None:
            return
        found: dict[str, torch.Tensor] = {}
        for name, tensor in (("logps", batch.logps), ("values", _values(batch))):
            if tensor is not None and tensor.requires_grad:
                tensor.register_hook(lambda gradient, name=name: found.__setitem__(name, gradient))
        self._watched.append((batch, found))

    def check(self) -> None:
        """Compare, after the backward of every pack.

        Raises:
            ProofError: a gradient is not what the method's formula gives.
        """
        if self._method is None or not self._watched:
            return
        beta, config = self._beta(), self._objective.config
        # One copy from the device per pack, for everything that is compared.
        packs = [self._columns(batch, found, beta) for batch, found in self._watched]
        hosts = [as_float64(*columns.values()) for columns in packs]
        rollouts = [s for batch, _ in self._watched for s in batch.rollouts]
        lengths = [n for batch, _ in self._watched for n in batch.pack.sizes]
        parts = {
            name: cut(np.concatenate(rows), lengths)
            for name, rows in zip(packs[0], zip(*hosts, strict=True), strict=True)
        }
        slopes = parts.pop("slopes"), parts.pop("slopes of values", None)
        names, sizes = [s.name for s in rollouts], [len(batch.logps) for batch, _ in self._watched]
        completions = [
            Tokens(name=s.name, weight=s.weight, pair=s.unit, **{name: own[i] for name, own in parts.items()})
            for i, s in enumerate(rollouts)
        ]
        check("log-prob", names, by_logps(self._method, completions, config, beta), slopes[0], sizes)
        if slopes[1] is not None:
            check("value", names, by_values(completions, config), slopes[1], sizes)

    def _beta(self) -> float:
        """The weight of the reference model in the loss; 0 where the KL is in the reward or not used."""
        objective, config = self._objective, self._objective.config
        if self._method == "online_dpo":
            return config.beta_of(objective.epoch)
        return config.beta if objective.uses_reference and not objective.kl_in_reward else 0.0

    @staticmethod
    def _columns(batch: TokenBatch, found: dict[str, torch.Tensor], beta: float) -> dict[str, torch.Tensor]:
        """What the formulas need of a pack, by the fields of `Tokens`, and the gradients that were found."""
        zeros = torch.zeros_like(batch.logps)
        columns = {
            "logps": batch.logps.detach(),
            "old_logps": batch.old_logps,
            "behaviour": batch.behaviour_logps,
            "advantages": batch.advantages,
            "kept": batch.kept(),
            "slopes": found.get("logps", zeros),
        }
        if beta:
            columns["ref_logps"] = batch.pack.column("ref_logps")
        values = _values(batch)
        if values is not None:
            columns |= {
                "values": values,
                "old_values": batch.pack.column("values"),
                "returns": batch.pack.column("returns"),
                "slopes of values": found.get("values", zeros),
            }
        return columns


def _values(batch: TokenBatch) -> torch.Tensor | None:
    """The critic's values; None if the method's loss does not use them, because there are no returns."""
    return batch.values if batch.sequences[0].returns is not None else None
