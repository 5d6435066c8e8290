"""Reads from the fields of a config how the optimizer must be set, a second time.

It is read when a trainer gets its config, before anything else uses the config. The optimizer is compared with it. The
names of optimizers, and the rule for weight decay, are those of `transformers.Trainer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ADAMW = (
    "adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused", "adamw_torch_4bit", "adamw_torch_8bit",
    "adamw_anyprecision", "adamw_bnb_8bit", "adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit",
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
    """What a config's fields say about the optimizer.

    Args:
        fields: the values of all fields by name.
    """
    optimizer = str(getattr(fields["optim"], "value", fields["optim"]))
    settings: dict[str, Any] = {}
    if optimizer in ADAMW or optimizer in LION:
        settings["betas"] = [float(fields["adam_beta1"]), float(fields["adam_beta2"])]
    if optimizer in ADAMW:
        settings["eps"] = float(fields["adam_epsilon"])
    if optimizer in ("adamw_torch", "adamw_torch_fused"):
        settings |= {"amsgrad": False, "maximize": False}
    known = optimizer in (*ADAMW, *LION, *OTHERS)
    rate, given = float(fields["learning_rate"]), fields.get("value_learning_rate")
    return OptimizerFields(
        settings,
        float(fields["weight_decay"]) if known else None,
        rate,
        10 * rate if given is None else float(given),
    )


def has_decay(name: str) -> bool:
    """Whether a parameter has a weight decay, by its name: biases and the weights of norms have none."""
    lower = name.lower()
    if any(part in lower for part in ("bias", "layernorm", "rmsnorm")):
        return False
    return not any(part == "norm" or part.endswith("_norm") for part in lower.split("."))
