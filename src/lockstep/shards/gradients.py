"""The norm of gradients of which some are sharded, and their clipping. The gradients of a step are clipped with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from lockstep.report.waits import waiting
from lockstep.shards.parts import is_sharded, local_part
from lockstep.shards.passes import PASS_LIMIT, Passes


@torch.no_grad()
def clip_sharded(parameters: Sequence[torch.nn.Parameter], max_norm: float, passes: Passes) -> torch.Tensor:
    """Clip the gradients of all parameters together to a norm, as `torch.nn.utils.clip_grad_norm_` does. Every rank calls.

    Args:
        parameters: sharded ones, and others that are the same on every rank.
        max_norm: the largest norm. Infinity changes nothing.

    Returns:
        The norm of the whole gradient before, as a scalar.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    # A gradient that every rank has counts once.
    own = [local_part(g) for g in gradients if is_sharded(g) or passes.rank == 0]
    norms = torch._foreach_norm([g for g in own if g.numel()])
    device = gradients[0].device if gradients else torch.device("cpu")
    wide = torch.float64 if device.type == "cpu" else torch.float32
    square = torch.stack([n.to(device, wide) for n in norms]).square().sum() if norms else torch.zeros((), dtype=wide)
    square = square.to(device)
    with waiting("the gradients of every rank", PASS_LIMIT, verb=f"rank {passes.rank} waits for "):
        dist.all_reduce(square, group=passes.group)
    norm = square.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    parts = [part for part in map(local_part, gradients) if part.numel()]
    torch._foreach_mul_(parts, scale)
    return norm
