"""The optimizer's learning rates and its settings, written a second time.

Schedules are formulas of the step, or of the metrics of evaluations. The settings are read from a config before
anything else uses it. The names of optimizers, and the rule for weight decay, are those of `transformers.Trainer`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


def rate_factor(schedule: str, step: int, warmup: int, total: int) -> float | None:
    """The factor by which a schedule multiplies the learning rate.

    Args:
        schedule: its name in transformers: `constant`, `constant_with_warmup`, `linear` or `cosine`.
        step: number of optimizer steps before this one.
        warmup: steps of linear warm-up from 0. `constant` has none.
        total: steps of the run.

    Returns:
        The factor; None if this function does not know the schedule.
    """
    if schedule == "constant":
        return 1.0
    if schedule not in ("constant_with_warmup", "linear", "cosine"):
        return None
    if step < warmup:
        return step / warmup
    if schedule == "constant_with_warmup":
        return 1.0
    done = min((step - warmup) / max(total - warmup, 1), 1.0)
    return 1.0 - done if schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2


class PlateauSchedule:
    """The rates of `reduce_lr_on_plateau`, from the metrics that it was given.

    After each metric: if more than `patience` metrics in a row were not better than the best one before, every rate is
    multiplied by `factor`. The next `cooldown` metrics do not count as such. A rate stays at or above its `min_lr`,
    and stays as it is if it would change by `eps` or less.

    Args:
        settings: arguments of torch's `ReduceLROnPlateau`; those that are missing have torch's defaults.
        rates: the rates before the first metric, one per group of the optimizer.
        best, bad, waiting: what earlier metrics have left: the best of them, how many since were not better, and how
            many of the following do not count. None for `best`: there were none.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        rates: Sequence[float],
        *,
        best: float | None = None,
        bad: int = 0,
        waiting: int = 0,
    ) -> None:
        known = {"mode": "min", "factor": 0.1, "patience": 10, "threshold": 1e-4, "threshold_mode": "rel"}
        self._of = {**known, "cooldown": 0, "min_lr": 0.0, "eps": 1e-8, **settings}
        self.rates = list(rates)
        self._best, self._bad, self._waiting = best, bad, waiting

    def after(self, metric: float) -> None:
        """Take a metric. `rates` are then those of the following steps."""
        of = self._of
        if self._is_better(metric):
            self._best, self._bad = metric, 0
        else:
            self._bad += 1
        if self._waiting > 0:
            self._waiting, self._bad = self._waiting - 1, 0
        if self._bad <= of["patience"]:
            return
        self._bad, self._waiting = 0, of["cooldown"]
        lowest = of["min_lr"] if isinstance(of["min_lr"], list | tuple) else [of["min_lr"]] * len(self.rates)
        for index, rate in enumerate(self.rates):
            lower = max(rate * of["factor"], lowest[index])
            if rate - lower > of["eps"]:
                self.rates[index] = lower

    def _is_better(self, metric: float) -> bool:
        if math.isnan(metric):
            return False
        if self._best is None or math.isinf(self._best):
            # An infinite best is that of a scheduler that has seen no metric.
            return not math.isinf(metric) or (metric < 0) == (self._of["mode"] == "min")
        sign = -1.0 if self._of["mode"] == "min" else 1.0
        margin = sign * self._of["threshold"]
        limit = self._best * (1 + margin) if self._of["threshold_mode"] == "rel" else self._best + margin
        return sign * (metric - limit) > 0


ADAMW = (
    "adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused", "adamw_torch_4bit",
    "adamw_torch_8bit", "adamw_anyprecision", "adamw_bnb_8bit", "adamw_8bit", "paged_adamw_32bit",
    "paged_adamw_8bit",
)  # fmt: skip
LION = ("lion_8bit", "lion_32bit", "paged_lion_32bit", "paged_lion_8bit")
# Of these the config gives the weight decay. Their other settings come from `optim_args`, or are constants.
OTHERS = (
    "sgd", "adafactor", "adagrad", "rmsprop", "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit",
    "ademamix", "ademamix_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit",
)  # fmt: skip
# Fields of the config, and the setting of the optimizer that each of them gives.
SETTING_OF = {
    "adam_beta1": "betas",
    "adam_beta2": "betas",
    "adam_epsilon": "eps",
    "weight_decay": "weight_decay",
    "learning_rate": "initial_lr",
    "value_learning_rate": "initial_lr",
}


@dataclass(frozen=True, slots=True)
class OptimizerFields:
    """What a config says about the optimizer.

    Attributes:
        settings: settings of every tensor, by the names in the groups of an optimizer.
        decay: weight decay of the tensors that have one; None: the config does not decide it for this optimizer.
        rate: learning rate before the schedule.
        head_rate: the same, of a value head. A value head has no weight decay.
    """

    settings: Mapping[str, Any]
    decay: float | None
    rate: float
    head_rate: float

    def of(self, name: str, *, in_layer_norm: bool = False, in_head: bool = False) -> dict[str, Any]:
        """The settings of one tensor.

        Args:
            name: name of the parameter in its model.
            in_layer_norm: whether it is in a `torch.nn.LayerNorm`.
            in_head: whether it belongs to the value head.
        """
        found = {**self.settings, "initial_lr": self.head_rate if in_head else self.rate}
        if self.decay is not None:
            decays = not in_head and not in_layer_norm and has_decay(name)
            found["weight_decay"] = self.decay if decays else 0.0
        return found


def optimizer_fields(fields: Mapping[str, Any]) -> OptimizerFields:
    """What a config's fields, by name, say about the optimizer."""
    optimizer = str(getattr(fields["optim"], "value", fields["optim"]))
    settings: dict[str, Any] = {}
    if optimizer in ADAMW or optimizer in LION:
        settings["betas"] = [float(fields["adam_beta1"]), float(fields["adam_beta2"])]
    if optimizer in ADAMW:
        settings["eps"] = float(fields["adam_epsilon"])
    if optimizer in ("adamw_torch", "adamw_torch_fused"):
        settings |= {"amsgrad": False, "maximize": False}
    decay = float(fields["weight_decay"]) if optimizer in (*ADAMW, *LION, *OTHERS) else None
    rate, given = float(fields["learning_rate"]), fields.get("value_learning_rate")
    return OptimizerFields(settings, decay, rate, 10 * rate if given is None else float(given))


def has_decay(name: str) -> bool:
    """Whether a parameter has a weight decay, by its name: biases and the weights of norms have none."""
    lower = name.lower()
    if any(part in lower for part in ("bias", "layernorm", "rmsnorm")):
        return False
    return not any(part == "norm" or part.endswith("_norm") for part in lower.split("."))
