"""Applies what some model families do to the output head's logits.

It is a factor (Cohere, Falcon-H1), a divisor (Granite), or a soft cap (Gemma 2, RecurrentGemma, xLSTM).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedConfig


def _capped(logits: torch.Tensor, cap: float) -> torch.Tensor:
    return torch.tanh(logits / cap) * cap


# Key: the field of a text model's config that has the number. Value: what the family computes with it.
_TRANSFORMS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "logit_scale": lambda logits, factor: logits * factor,
    "logits_scaling": lambda logits, divisor: logits / divisor,
    "lm_head_multiplier": lambda logits, factor: logits * factor,
    "final_logit_softcapping": _capped,
    "logits_soft_cap": _capped,
    "output_logit_soft_cap": _capped,
}


def changes_logits(config: PreTrainedConfig) -> bool:
    """Whether the family of a text model's config changes the head's logits at all."""
    return any(getattr(config, name, None) is not None for name in _TRANSFORMS)


def transformed_logits(config: PreTrainedConfig, logits: torch.Tensor) -> torch.Tensor:
    """(…, V) the logits that the model's own forward gives.

    Args:
        config: the text model's config.
        logits: (…, V) the logits of the output head.
    """
    for name, transform in _TRANSFORMS.items():
        if (number := getattr(config, name, None)) is not None:
            logits = transform(logits, number)
    return logits
