"""How often rounding sends a token of a mixture of experts to other experts.

`watch/gap_parts.py` asks for it when a gap in half precision is over its limit. Near a router's border the engine's
rounding may choose other experts than the trainer's, with equal weights. vLLM reports its experts only from its second model runner
(docs/internals/models-and-tokens.md#mixtures-of-experts). Therefore the trainer's own choices in two precisions are compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from lockstep.engines.protocol import Completion
from lockstep.models.adapters import causal_model
from lockstep.models.routers import chosen_experts, experts_per_token, has_routers
from lockstep.watch.rescoring import Precision, in_precision


def routing_differences(
    model: PreTrainedModel, completions: Sequence[Completion], precision: Precision
) -> float | None:
    """The share of (position, layer) pairs that a forward in `precision` routes to other experts than one without autocast.

    Returns:
        The share; None if the model has no routers, if both forwards compute in the same dtype, or if there are pictures.
    """
    inner = causal_model(model)
    same = precision.dtype_of(model) == inner.dtype
    if same or not has_routers(inner) or any(c.pictures is not None for c in completions):
        return None
    differing = pairs = 0
    for c in completions:
        ids = np.concatenate([c.prompt_ids, c.token_ids])[:-1]
        one, other = (experts_of(inner, ids.tolist(), how) for how in (precision, Precision()))
        differing += int((one != other).any(-1).sum())
        pairs += one.shape[0] * one.shape[1]
    return differing / max(pairs, 1)


@torch.no_grad()
def experts_of(model: PreTrainedModel, ids: Sequence[int], precision: Precision) -> torch.Tensor:
    """(L, T, K) ids of the experts to which the plain forward of one sequence routes its T positions.

    Args:
        model: a causal language model, without the wrapper of an adapter.
    """
    row, was_training = torch.tensor([list(ids)], device=model.device), model.training
    model.eval()
    try:
        with in_precision(model, precision):
            outputs = model.base_model(input_ids=row, use_cache=False, output_router_logits=True)
    finally:
        model.train(was_training)
    return chosen_experts(outputs.router_logits, experts_per_token(model))
