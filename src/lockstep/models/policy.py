"""The trained model, loaded in one place.

Comes from: the string of `models/resolve.py`. Goes to: the trainer, which owns it.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lockstep.errors import InputError


def load_policy(path: str, model_init_kwargs: dict[str, Any] | None = None) -> PreTrainedModel:
    """Causal language model in float32 unless `model_init_kwargs` names another `dtype` (TRL's convention).

    Raises:
        InputError: the directory or id holds no causal language model, or its weights are quantised.
    """
    kwargs = {"dtype": torch.float32, "attn_implementation": "sdpa", **(model_init_kwargs or {})}
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=kwargs.get("trust_remote_code", False))
        if getattr(config, "quantization_config", None) is not None:
            raise InputError(f"model {path} is quantised; training needs its full-precision weights")
        return AutoModelForCausalLM.from_pretrained(path, **kwargs)
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"cannot load a causal language model from {path}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
