"""Settings of CUDA that hold for the whole process."""

from __future__ import annotations

import torch


def cuda_rounds_float32() -> bool:
    """Whether CUDA multiplies float32 numbers in fewer bits (TF32).

    `torch.get_float32_matmul_precision` raises an error after `tf32: true`, with which transformers uses PyTorch's newer setting.
    """
    return torch.backends.cuda.matmul.fp32_precision not in ("none", "ieee")


def prepare_cuda() -> None:
    """Choose two settings in which PyTorch's defaults do not fit. Without a GPU they have no effect.

    - cuDNN does not compute attention. It makes a plan for each new shape, and packs have new shapes: on an H200 a pack then took
      23 to 135 times as long (docs/internals/speed.md). vLLM switches it off too.
    - Convolutions multiply float32 numbers as matrix products do. PyTorch rounds them (TF32) in convolutions only, such as a
      vision tower's patch embedding. An engine that computes this embedding as a product does not round.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    if not cuda_rounds_float32():
        torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]
