"""How precisely a device multiplies: the dtype of autocast, and whether CUDA rounds float32 numbers first (TF32)."""

from __future__ import annotations

import torch


def autocast_dtype(device: str, otherwise: torch.dtype) -> torch.dtype:
    """Autocast's dtype on a kind of device (`torch.device.type`), or `otherwise` if autocast is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else otherwise


def cuda_rounds_float32() -> bool:
    """Whether CUDA multiplies float32 numbers in fewer bits (TF32).

    `torch.get_float32_matmul_precision` raises an error after `tf32: true`, with which transformers uses PyTorch's newer setting.
    """
    return torch.backends.cuda.matmul.fp32_precision not in ("none", "ieee")


def convolve_exactly() -> None:
    """Let CUDA's convolutions multiply float32 numbers as its matrix products do.

    PyTorch's default rounds them (TF32) in convolutions only, such as a vision tower's patch embedding. An engine that computes this
    embedding as a product does not round.
    """
    if not cuda_rounds_float32():
        torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]
