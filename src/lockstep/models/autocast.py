"""The dtype in which autocast multiplies where it is asked: in attention, in the output head, in the proof of engines in 8 bits."""

from __future__ import annotations

import torch


def autocast_dtype(device: str, otherwise: torch.dtype) -> torch.dtype:
    """Autocast's dtype on a kind of device (`torch.device.type`), or `otherwise` if autocast is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else otherwise
