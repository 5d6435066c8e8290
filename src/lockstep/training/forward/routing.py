"""Reads how the routers of a mixture of experts distribute the positions of a pack, and checks what a model's auxiliary loss is.

`routing_of` is called after a forward. The trainers call `check_routers` before training.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from lockstep.algorithms.router_balance import Routing, Shares, balance_loss
from lockstep.errors import InputError
from lockstep.models.routers import experts_per_token
from lockstep.training.batch.pack import Pack

# By how much the two losses may differ. In half precision a model rounds its routers' probabilities to few digits.
_CLOSE, _CLOSE_IN_HALF = 1e-4, 0.02
# Number of tokens of the check.
_TOKENS = 32


def routing_of(model: PreTrainedModel, logits: Sequence[torch.Tensor], pack: Pack) -> Routing:
    """The routing of a pack, in which each position counts once per sequence that goes through it.

    Args:
        model: a causal language model, without the wrapper of an adapter.
        logits: of each router, as the model's forward returns them.

    Raises:
        InputError: gradients are on, and no router gets one.
    """
    if torch.is_grad_enabled() and not any(layer.requires_grad for layer in logits):
        raise InputError(
            "the auxiliary loss reaches no router of this model: either gradient checkpointing is re-entrant (set "
            'gradient_checkpointing_kwargs={"use_reentrant": false}), or nothing before a router is trained (set '
            "router_aux_loss_coef=0)"
        )
    return Routing.of(logits, pack.copies, experts_per_token(model))


@torch.no_grad()
def check_routers(model: PreTrainedModel) -> None:
    """Check on a few tokens that the auxiliary loss of a model is the one that is computed here.

    Args:
        model: a causal language model, without the wrapper of an adapter.

    Raises:
        InputError: the model returns no logits of its routers, or computes another loss from them.
    """
    ids = torch.arange(_TOKENS, device=model.device)[None] % model.get_input_embeddings().weight.shape[0]
    was_training = model.training
    model.eval()
    try:
        outputs = model(input_ids=ids, use_cache=False, output_router_logits=True)
    finally:
        model.train(was_training)
    own, logits = getattr(outputs, "aux_loss", None), getattr(outputs, "router_logits", None)
    # A family may route in several parts, whose rows are not tokens (Doge).
    if logits and own is not None and all(layer.numel() == _TOKENS * logits[0].shape[-1] for layer in logits):
        routing = Routing.of(logits, torch.ones_like(ids[0]), experts_per_token(model))
        found = balance_loss(routing, Shares.of([routing.counts()]))
        close = _CLOSE_IN_HALF if logits[0].dtype.itemsize == 2 else _CLOSE
        if abs(float(found) - float(own)) <= close * abs(float(own)):
            return
    raise InputError(
        f"the auxiliary loss of {type(model).__name__}'s routers is not the usual one of a mixture of experts, and is not "
        "supported; set router_aux_loss_coef=0 to train without it"
    )
