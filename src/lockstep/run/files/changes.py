"""Numbers of the loss that a user changes at the trainer while a run exists: `trainer.beta = 0.02`.

Attributes of the trainer make the changes. Each has a line in the receipt, and a checkpoint keeps them, so that a
resumed run goes on with the same numbers. The loss and its proofs read them from the config at every step.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from lockstep.errors import InputError
from lockstep.rollouts.scores.rewards import RewardScorer, Scorer
from lockstep.training.config.checks import check_number
from lockstep.training.methods.objective import Objective
from lockstep.watch.settings import SettingsProof


class Changes:
    """The changes of a run.

    Args:
        scorer: gives rollouts their rewards.
        settings: the proof of what the user has asked for; it asks for the new weights from then on.

    Attributes:
        made: the changes that a resumed run must make again, by field of the config.
        weights: (K,) weights of the K rewards, which a user may write into; empty with a judge.
    """

    def __init__(self, objective: Objective, scorer: Scorer, settings: SettingsProof) -> None:
        self._objective, self._scorer, self._settings = objective, scorer, settings
        self.made: dict[str, Any] = {}
        self.weights = torch.tensor(self._used_weights, dtype=torch.float32)

    @property
    def _used_weights(self) -> list[float]:
        return list(self._scorer.weights) if isinstance(self._scorer, RewardScorer) else []

    @property
    def weights_differ(self) -> bool:
        """Whether a user has written into the weights since they were taken."""
        return self.weights.tolist() != torch.tensor(self._used_weights, dtype=torch.float32).tolist()

    def make(self, field: str, value: Any) -> Any:
        """Change a field. Returns its earlier value.

        Raises:
            InputError: the run cannot use the value.
        """
        before: Any
        made: Any
        if field == "reward_weights":
            before, made = self._used_weights, self._reweigh(value)
        else:
            made = _number(type(self._objective.config), field, value)
            before = self._entropy_coef(made) if field == "entropy_coef" else self._set(field, made)
        if made != before:
            self.made[field] = made
        return before

    def state(self) -> dict[str, Any]:
        """The changes, in JSON types."""
        return self.made

    def load_state(self, state: dict[str, Any]) -> None:
        """Make the changes of a checkpoint again."""
        for field, value in state.items():
            # The adaptive coefficient is a part of the objective's own state.
            if field != "entropy_coef" or not self._objective.config.use_adaptive_entropy:
                self.make(field, value)
        self.made = dict(state)

    def _set(self, field: str, value: float) -> Any:
        objective, config = self._objective, self._objective.config
        before = getattr(config, field)
        if field == "beta":
            if isinstance(before, list):
                raise InputError(
                    "trainer.beta cannot be changed: Online DPO has one beta per epoch; set beta in the config"
                )
            if not objective.uses_reference or value == 0.0:
                raise InputError(
                    f"trainer.beta={value:g}: whether there is a reference model is decided when the trainer is made, and beta was "
                    f"{before:g} then; set beta in the config"
                )
        setattr(config, field, value)
        return before

    def _entropy_coef(self, value: float) -> float:
        if not self._objective.entropy_gradient:
            raise InputError(
                f"trainer.entropy_coef={value:g}: the run was made without an entropy bonus; set entropy_coef or "
                "use_adaptive_entropy in the config"
            )
        return self._objective.set_entropy_coef(value)  # type: ignore[attr-defined]

    def _reweigh(self, value: Any) -> list[float]:
        try:
            weights = [float(weight) for weight in value]
        except (TypeError, ValueError) as error:
            raise InputError(f"reward_weights={value!r:.80}; it must be a list of numbers") from error
        count = len(self._used_weights)
        if not weights or len(weights) != count or not all(map(math.isfinite, weights)):
            raise InputError(
                f"reward_weights={weights}; this run takes one finite number for each of its {count} rewards"
            )
        assert isinstance(self._scorer, RewardScorer)
        self._scorer.weights[:] = weights
        self._objective.config.reward_weights = weights
        self.weights = torch.tensor(weights, dtype=torch.float32)
        self._settings.wanted = replace(self._settings.wanted, reward_weights=tuple(weights))
        return weights


def _number(kind: type, field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{field}={value!r:.80}; it must be a number")
    check_number(kind, field, value)
    return float(value)
