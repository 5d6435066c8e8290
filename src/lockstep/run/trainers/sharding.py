"""Shards the models of a run over its ranks, where the user's configuration asks for it (FSDP2, DeepSpeed ZeRO-3).

It happens after everything has been read from the whole models, and before the optimizer is made.
"""

from __future__ import annotations

import logging
from functools import partial

import torch
from transformers import PreTrainedModel

from lockstep.config.run import OnlineConfig
from lockstep.errors import InputError
from lockstep.learn.policy import Reference
from lockstep.learn.scoring import plays_learning
from lockstep.models.adapters import causal_model
from lockstep.models.parameters import expert_names
from lockstep.models.quantised import is_quantised
from lockstep.rollouts.ranks import Ranks
from lockstep.shards.fsdp import FsdpWeights
from lockstep.shards.model import Shard, ShardedModel
from lockstep.watch.ranks import check_same_weights

_logger = logging.getLogger(__name__)


def shard_models(
    ranks: Ranks,
    policy: PreTrainedModel,
    reference: Reference | None,
    args: OnlineConfig,
    *,
    plain_rows: bool,
    images: bool,
) -> None:
    """Shard the policy, and a reference model of its own, in place. Every rank calls this with equal models."""
    if not torch.distributed.is_initialized():
        raise InputError(
            f"{args.sharded_by} is asked for, and this is a single process: start it with torchrun or accelerate launch"
        )
    _refuse(policy, args, images=images)
    inner, passes = causal_model(policy), ranks.share_passes()
    check_same_weights(ranks, [policy], 0)
    autocast = args.precision.autocast
    shard: Shard = FsdpWeights if args.zero is None else args.zero.weights
    shards = ShardedModel(inner, passes, args.device, autocast, shard)
    cast = partial(torch.autocast, args.device.type, autocast, enabled=autocast is not None)
    shards.learn = plays_learning(inner, shards, cast, plain_rows=plain_rows)
    if reference is not None and reference.own is not None:
        ShardedModel(reference.own, passes, args.device, autocast, shard)
    if ranks.owner:
        whole = sum(p.numel() for p in inner.parameters())
        _logger.info(
            f"the policy is sharded over {ranks.count} ranks ({shards.weights.title}); rank 0 holds "
            f"{shards.elements:,} of {whole:,} weights"
        )


# Optimizers of torch, whose state is sharded with the weights.
_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "rmsprop", "adagrad")


def _refuse(policy: PreTrainedModel, args: OnlineConfig, *, images: bool) -> None:
    optimizer = str(getattr(args.optim, "value", args.optim))
    for name, refused in {
        # A rank whose pack has no picture would not compute the vision tower.
        "an image": images,
        "a mixture of experts": bool(expert_names(policy)),
        "a model in 4 bits": any(is_quantised(p) for p in policy.parameters()),
        "sync_ref_model=True": getattr(args, "sync_ref_model", False),
        "load_best_model_at_end=True": args.load_best_model_at_end,
        f"optim={optimizer}": optimizer not in _OPTIMIZERS,
    }.items():
        if refused:
            raise InputError(
                f"{name} is not supported with {args.sharded_by} yet; leave one of the two out "
                "(docs/guides/sharding.md)"
            )
