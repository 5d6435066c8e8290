"""The dtype in which autocast multiplies where it is asked: in attention, in the output head, in the proof of engines in 8 bits."""

from __future__ import annotations

import torch


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
