"""GRPO's entropy bonus, with a fixed or an adaptive weight. Its state belongs to one run and is saved in checkpoints.

It uses the entropies of a step's tokens, pack by pack. The loss of GRPO contains it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lockstep.training.batch.sequence import TrainingSequence
from lockstep.training.methods.grpo_config import GRPOConfig
from lockstep.training.methods.objective import Tally

_NAME = "_bonus"


class EntropyBonus:
    """Coefficient × mean entropy over the tokens of an optimizer step that the policy learns from.

    After each step, an adaptive coefficient rises if the step's mean entropy is at or below the target, and falls otherwise,
    within its bounds. It is applied only if the last step's entropy was at or below the target (TRL 1.16's controller).

    Attributes:
        coefficient: the weight, as the last step has left it.
    """

    def __init__(self, config: GRPOConfig) -> None:
        self.used = config.entropy_coef != 0.0 or config.use_adaptive_entropy
        self._config = config
        self.coefficient = config.entropy_coef
        self._last_entropy = float("inf")
        self._tokens = 0

    def begin_step(self, sequences: Sequence[TrainingSequence]) -> None:
        """Count the step's tokens, over all ranks, that the policy learns from."""
        self._tokens = sum(
            int(np.count_nonzero(s.kept)) if s.kept is not None else s.length for s in sequences if s.weight != 0.0
        )

    def share(self, entropies: torch.Tensor, kept: torch.Tensor, tally: Tally) -> torch.Tensor:
        """A pack's share of the bonus; a scalar.

        Args:
            entropies: (N,) with gradient.
            kept: (N,) 1 for tokens that the policy learns from, else 0.
        """
        learned = entropies * kept
        both = torch.stack([learned.detach().sum(), kept.sum().to(learned.dtype)])
        tally.later(both, lambda sums: tally.mean(_NAME, float(sums[0]), int(sums[1])))
        low = self._last_entropy <= self._config.entropy_target
        coefficient = self.coefficient if low or not self._config.use_adaptive_entropy else 0.0
        return coefficient * learned.sum() / max(self._tokens, 1)

    def finish_step(self, tally: Tally) -> float:
        """Update the coefficient with the step's entropies over all ranks, and return it."""
        config, tokens = self._config, tally.count(_NAME)
        if config.use_adaptive_entropy and tokens:
            self._last_entropy = tally.total(_NAME) / tokens
            up = self._last_entropy <= config.entropy_target
            moved = self.coefficient + (config.entropy_coef_delta if up else -config.entropy_coef_delta)
            self.coefficient = min(max(moved, config.entropy_coef_min), config.entropy_coef_max)
        return self.coefficient

    def state(self) -> dict[str, float]:
        """The state for a checkpoint; empty if the coefficient is fixed."""
        if not self._config.use_adaptive_entropy:
            return {}
        return {"entropy_coef": self.coefficient, "last_entropy": self._last_entropy}

    def load_state(self, state: dict[str, float]) -> None:
        """Continue from a checkpoint's state."""
        self.coefficient = state.get("entropy_coef", self.coefficient)
        self._last_entropy = state.get("last_entropy", self._last_entropy)
