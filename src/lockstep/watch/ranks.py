"""Proof that all ranks train the same weights, and that shards are as they must be.

Proof `ranks`.
Shows: all trainer processes hold the same weights, byte for byte (only with several processes).
Does not show: that the engine holds them (the push shows this).
When: every generation; reads the weights once.

Proof `shards`.
Shows: before every push, optimizer step and checkpoint no layer is gathered, and no parameter was replaced (only with
shards).
Does not show: what a layer computed while it was gathered.
When: every push, step and checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from lockstep.contract.tensors import new_key, one_push
from lockstep.errors import ProofError
from lockstep.rollouts.ranks import Ranks
from lockstep.shards.model import sharded
from lockstep.weights.source import PlainSource


def check_same_weights(ranks: Ranks, modules: Sequence[torch.nn.Module], version: int) -> None:
    """Compare the digests of the trained modules on all ranks: a rank must learn from tokens of its own weights.

    A sharded module has one copy of its weights. There every rank proves that it is sharded (`ShardedModel.check`).
    """
    check_shards(ranks, modules, version)
    modules = [module for module in modules if sharded(module) is None]
    if ranks.count == 1 or not modules:
        return
    on_gpu = any(parameter.is_cuda for module in modules for parameter in module.parameters())
    key = ranks.share("key", new_key)[0] if on_gpu else None

    def own_digests() -> list[str]:
        with one_push(key, remembers=False):
            return [PlainSource(module).manifest(version).digest for module in modules]

    digests = ranks.share("weights", own_digests)
    odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if odd:
        raise ProofError(
            "ranks",
            f"at version {version} rank {odd[0]} holds other weights than rank 0",
            "the ranks were started from different models or checkpoints, or a gradient was not summed on one of them",
            "start every rank from the same model and checkpoint; otherwise this is a defect of Lockstep: report it",
        )


def check_shards(ranks: Ranks, modules: Sequence[torch.nn.Module], version: int) -> None:
    """Check, on every rank, that no sharded module is gathered, before weights are changed, pushed or saved."""
    for found in filter(None, map(sharded, modules)):
        ranks.share("shards", partial(found.check, version))
