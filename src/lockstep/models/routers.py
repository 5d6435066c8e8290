"""The routers of a mixture of experts: the experts that they choose for each position.

The auxiliary loss needs how often each one is chosen, and a parity gap is explained by the choices in two precisions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel


def has_routers(model: PreTrainedModel) -> bool:
    """Whether a causal language model, without the wrapper of an adapter, can return the logits of routers."""
    return hasattr(model.config.get_text_config(), "output_router_logits")


def experts_per_token(model: PreTrainedModel) -> int:
    """The number of experts per token, as the model's own auxiliary loss counts them."""
    found = getattr(model, "num_experts_per_tok", None)
    return int(model.config.get_text_config().num_experts_per_tok if found is None else found)


def chosen_experts(logits: Sequence[torch.Tensor], top_k: int) -> torch.Tensor:
    """(L, T, K) ids of the experts of T positions in L layers, ascending for each position.

    Args:
        logits: per layer, (T, E) or (B, T / B, E) logits of the router.
    """
    layers = [layer.reshape(-1, layer.shape[-1]).float().softmax(-1).topk(top_k, dim=-1).indices for layer in logits]
    return torch.stack(layers).sort(-1).values
