"""The gradients of one pack through a tiny model, whole or sharded. Used by: `shards.py`, `test_shards.py`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from tiny import make_model

from lockstep.learn.attention.tree import adopt_tree_attention
from lockstep.learn.pack import pack_sequences
from lockstep.learn.scoring import in_passes, score_pack
from lockstep.learn.sequence import TrainingSequence
from lockstep.shards.model import sharded


def gradients(shard: Callable[[Any], Any] | None = None) -> dict[str, torch.Tensor]:
    """The gradients, gathered, on the host. Each rank has the same pack, and ranks average."""
    model = make_model()
    adopt_tree_attention(model)
    shards = shard(model) if shard else None
    one = TrainingSequence("a/0", [3, 7], [4, 1, 5], [0.0] * 3)  # type: ignore[arg-type]
    (pack,) = pack_sequences([one], 64)
    compute = partial(score_pack, model, pack.to(torch.device("cuda" if shard else "cpu")), 1.0, 2)
    with shards.learning() if shards else nullcontext():
        own = sharded(model)
        (compute() if own is None else in_passes(own, compute)).logps.sum().backward()
    return {name: _whole(p.grad).cpu() for name, p in model.named_parameters()}


def _whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
