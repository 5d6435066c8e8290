"""GRPO's entropy bonus, of a fixed weight or one that follows the entropy; its state is of one run and kept in checkpoints.

Comes from: the entropies of a step's tokens, pack by pack. Goes to: the loss of `training/methods/grpo.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lockstep.algorithms.tally import Tally
from lockstep.training.batch.sequence import TrainingSequence
from lockstep.training.methods.grpo_config import GRPOConfig

_NAME = "_bonus"


class EntropyBonus:
    """Coefficient × mean entropy over the tokens of an optimizer step that are learned from.

    An adaptive coefficient goes up after a step whose mean entropy is at or below the target, else down, within its bounds; it is
    applied only while the last step's entropy was at or below the target (TRL 1.16's controller).
    """

    def __init__(self, config: GRPOConfig) -> None:
        self.used = config.entropy_coef != 0.0 or config.use_adaptive_entropy
        self._config = config
        self._coefficient = config.entropy_coef
        self._last_entropy = float("inf")
        self._tokens = 0

    def begin_step(self, sequences: Sequence[TrainingSequence]) -> None:
        """Count the step's tokens that are learned from, over all ranks."""
        self._tokens = sum(
            int(np.count_nonzero(s.kept)) if s.kept is not None else s.length for s in sequences if s.weight != 0.0
        )

    def share(self, entropies: torch.Tensor, kept: torch.Tensor, tally: Tally) -> torch.Tensor:
        """A pack's share of the bonus; a scalar.

        Args:
            entropies: (N,) with gradient.
            kept: (N,) 1 for the tokens that are learned from, else 0.
        """
        learned = entropies * kept
        tally.mean(_NAME, float(learned.detach().sum()), int(kept.sum()))
        low = self._last_entropy <= self._config.entropy_target
        coefficient = self._coefficient if low or not self._config.use_adaptive_entropy else 0.0
        return coefficient * learned.sum() / max(self._tokens, 1)

    def finish_step(self, tally: Tally) -> float:
        """Told the step's entropies over all ranks; gives the coefficient as it is now."""
        config, tokens = self._config, tally.count(_NAME)
        if config.use_adaptive_entropy and tokens:
            self._last_entropy = tally.total(_NAME) / tokens
            up = self._last_entropy <= config.entropy_target
            moved = self._coefficient + (config.entropy_coef_delta if up else -config.entropy_coef_delta)
            self._coefficient = min(max(moved, config.entropy_coef_min), config.entropy_coef_max)
        return self._coefficient

    def state(self) -> dict[str, float]:
        """What a checkpoint must hold; nothing where the coefficient is fixed."""
        if not self._config.use_adaptive_entropy:
            return {}
        return {"entropy_coef": self._coefficient, "last_entropy": self._last_entropy}

    def load_state(self, state: dict[str, float]) -> None:
        """Go on from what a checkpoint holds."""
        self._coefficient = state.get("entropy_coef", self._coefficient)
        self._last_entropy = state.get("last_entropy", self._last_entropy)
