"""Vision-language models: which families Lockstep can show pictures, and how such a model is loaded.

`models/policy.py` and the transformers engine load models through `model_class`. `images/` reads the pictures for them.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

# Families whose log-probs with pictures were compared between vLLM and the trainer (docs/images.md).
FAMILIES = ("qwen2_5_vl",)


def reads_pictures(config: PreTrainedConfig) -> bool:
    """Whether Lockstep can show pictures to models with this config."""
    return config.model_type in FAMILIES


def model_class(config: PreTrainedConfig) -> Any:
    """The class of transformers whose `from_pretrained` loads a policy with this config."""
    return AutoModelForImageTextToText if reads_pictures(config) else AutoModelForCausalLM
