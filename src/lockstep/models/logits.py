"""How some model families change the output head's logits: a factor (Cohere), a divisor (Granite), a soft cap (Gemma 2)."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig


def transformed_logits(config: PreTrainedConfig, logits: torch.Tensor) -> torch.Tensor:
    """(…, V) logits of the output head as the model's own forward gives them.

    Args:
        config: the text model's config.
    """
    if (factor := getattr(config, "logit_scale", None)) is not None:
        logits = logits * factor
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        logits = logits / divisor
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits
