"""Copies between the host and a device: to the device without waiting, from the device many at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def sent(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """The tensor on a device.

    A tensor of the host goes to a GPU from pinned memory, in the order of the stream. PyTorch keeps that memory until the copy has
    ended. A plain copy would let the host wait until the GPU has done all of its work.
    """
    to_gpu = torch.device(device).type == "cuda" and tensor.device.type == "cpu"
    # PyTorch cannot pin a tensor whose elements share memory, as those of `expand` do.
    return tensor.contiguous().pin_memory().to(device, non_blocking=True) if to_gpu else tensor.to(device)


def on_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors on the host, in their shapes and dtypes, without gradients. Those of one dtype are copied together."""
    held: dict[int, torch.Tensor] = {i: t.detach() for i, t in enumerate(tensors) if t.device.type == "cpu"}
    away = [i for i in range(len(tensors)) if i not in held]
    for dtype in {tensors[i].dtype for i in away}:
        own = [i for i in away if tensors[i].dtype == dtype]
        flat = torch.cat([tensors[i].detach().flatten() for i in own]).cpu()
        parts = flat.split([tensors[i].numel() for i in own])
        held |= {i: part.view(tensors[i].shape) for i, part in zip(own, parts, strict=True)}
    return [held[i] for i in range(len(tensors))]
