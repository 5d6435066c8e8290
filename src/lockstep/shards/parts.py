"""The part of a tensor that this rank holds. A tensor that is not sharded is its own part.

Proofs and digests read parameters, gradients and optimizer state through these functions. Only `collected` communicates.
"""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist

from lockstep.report.waits import waiting

# The rank that holds the engine, and gets whole tensors.
OWNER = 0
Part = TypeVar("Part", bound=torch.Tensor | None)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is sharded over ranks (a `DTensor`)."""
    return hasattr(tensor, "device_mesh")


def local_part(tensor: Part) -> Part:
    """The part that this rank holds, in the tensor's own memory. It may be empty. None stays None."""
    if tensor is None or not is_sharded(tensor):
        return tensor
    return tensor.detach().to_local()  # type: ignore[attr-defined]


def first_element(tensor: torch.Tensor) -> int:
    """The place of the first element of this rank's part in the flattened tensor. Parts are cut along the first dimension."""
    if not is_sharded(tensor):
        return 0
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    rows = -(-tensor.shape[0] // mesh.size())
    return min(mesh.get_local_rank() * rows, tensor.shape[0]) * (tensor.numel() // max(tensor.shape[0], 1))


def collected(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor as a whole, in new memory, on the owner. The other ranks get their own part. Every rank calls."""
    mesh, part, shape = tensor.device_mesh, local_part(tensor), tensor.shape  # type: ignore[attr-defined]
    rows = -(-shape[0] // mesh.size())
    mine = part.contiguous()
    if mine.shape[0] < rows:
        mine = torch.cat([mine, mine.new_zeros(rows - mine.shape[0], *shape[1:])])
    whole = mine.new_empty(mesh.size() * rows, *shape[1:]) if mesh.get_local_rank() == OWNER else None
    parts = None if whole is None else list(whole.split(rows))
    with waiting("every rank's part of a tensor", verb=f"rank {mesh.get_local_rank()} waits for "):
        dist.gather(mine, parts, dst=OWNER, group=mesh.get_group())
    return part if whole is None else whole[: shape[0]]
