"""RMS norms in plain PyTorch.

The CPU wheel's kernels read rows of a view as if they lay beside each other, and may cut bits off.

References: `stand_ins.py`.
"""

from __future__ import annotations

import torch

_KEPT: list[torch.library.Library] = []


def patch() -> None:
    library = torch.library.Library("_C", "IMPL")
    library.impl("rms_norm", rms_norm, "CUDA")
    library.impl("fused_add_rms_norm", fused_add_rms_norm, "CUDA")
    _KEPT.append(library)


def rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> None:
    """`out` = x / its root mean square × weight, of each row in float32, rounded before and after the weight."""
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)
    out.copy_(normed if weight is None else normed * weight)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, epsilon: float
) -> None:
    """`residual` becomes the sum of both, and `x` the norm of that sum."""
    residual.add_(x)
    rms_norm(x, residual, weight, epsilon)
