"""The dtypes of a forward: of the whole, of the output head, and of autocast where it is asked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Precision:
    """The precision in which the trainer computes a forward.

    Attributes:
        autocast: dtype of autocast; None: the weights' own dtype.
        head: dtype in which the output head computes; None: the dtype of the rest of the model.
    """

    autocast: torch.dtype | None = None
    head: torch.dtype | None = None

    def dtype_of(self, model: PreTrainedModel) -> torch.dtype:
        """The dtype in which a forward of the model computes."""
        return self.autocast or model.dtype


def autocast_dtype(device: str, otherwise: torch.dtype) -> torch.dtype:
    """Autocast's dtype on a kind of device (`torch.device.type`), or `otherwise` if autocast is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else otherwise


def head_dtype(head: torch.nn.Module, otherwise: torch.dtype) -> torch.dtype:
    """The dtype in which an output head takes hidden states: that of its weights, or `otherwise` inside autocast.

    A model that adds its layers up in float32 (Mamba) has float32 hidden states beside weights in half precision. Its own forward
    casts them too. The codes of a quantised head have no dtype of numbers.
    """
    weight: torch.Tensor = head.weight  # type: ignore[assignment]
    inside = torch.is_autocast_enabled(weight.device.type)
    return otherwise if inside or not weight.is_floating_point() else weight.dtype
