"""Several trainer processes: each one's share of the work, and the sum of their gradients.

The loss of a micro-batch is its share of the whole step's loss over all ranks. So gradients are summed and never
averaged. The model is not wrapped: one sum before the optimizer replaces the averaging of a wrapper. The gradients of
a sharded model are summed by each backward (`shards/model.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lockstep.progress import waiting
from lockstep.rollouts.ranks import Ranks
from lockstep.shards.model import is_sharded

T = TypeVar("T")
# Number of elements that are summed in one call.
_BUCKET = 1 << 24


def leave_unwrapped(accelerator: Any) -> None:
    """Let accelerate place the model without DistributedDataParallel, whose reducer expects one backward per step."""
    # torchrun with one process makes a group too.
    if dist.is_initialized():
        accelerator.prepare_model = partial(accelerator.prepare_model, evaluation_mode=True)


def share_of(items: Sequence[T], ranks: Ranks) -> list[T]:
    """This rank's part of a list. The part is contiguous, so that sequences with a shared prompt stay together."""
    size = -(-len(items) // ranks.count)
    return list(items[ranks.rank * size : (ranks.rank + 1) * size])


def sum_gradients(parameters: Sequence[torch.nn.Parameter], ranks: Ranks) -> None:
    """Replace every gradient by its sum over ranks. Every rank must call this with the same parameters."""
    if ranks.count == 1:
        return
    for bucket in _buckets([p.grad for p in parameters if p.grad is not None and not is_sharded(p)]):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        with waiting("the gradients of every rank, until ddp_timeout", verb=f"rank {ranks.rank} waits for "):
            dist.all_reduce(flat)
        for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))


def _buckets(gradients: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group gradients of one dtype up to the size of a bucket. A larger gradient is a bucket by itself."""
    buckets: list[list[torch.Tensor]] = []
    held = 0
    for gradient in gradients:
        if not buckets or held + gradient.numel() > _BUCKET or gradient.dtype != buckets[-1][0].dtype:
            buckets.append([])
            held = 0
        buckets[-1].append(gradient)
        held += gradient.numel()
    return buckets
