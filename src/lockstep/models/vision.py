"""Vision-language models: the families to which Lockstep can show pictures, and the class that loads such a model.

The policy and the transformers engine are loaded through `model_class`. `images/` reads the pictures for them.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

# Families whose log-probs with pictures were compared between vLLM and the trainer (docs/internals/images.md).
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3")
# The families among them that cut a picture into tiles of one size. The others cut it into patches, in any number.
_IN_TILES = ("smolvlm", "idefics3")


def reads_pictures(config: PreTrainedConfig) -> bool:
    """Whether Lockstep can show pictures to models with this config."""
    return config.model_type in FAMILIES


def reads_tiles(config: PreTrainedConfig) -> bool:
    """Whether a family that reads pictures cuts them into tiles of one size."""
    return config.model_type in _IN_TILES


def vision_parts(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The modules that turn pixels into inputs of the language model: vision tower and projector. Empty if there are none."""
    if not reads_pictures(model.config):
        return []
    trunk: Any = model.base_model
    return [trunk.vision_model, trunk.connector] if reads_tiles(model.config) else [trunk.visual]


def model_class(config: PreTrainedConfig) -> Any:
    """The class of transformers whose `from_pretrained` loads a policy with this config."""
    return AutoModelForImageTextToText if reads_pictures(config) else AutoModelForCausalLM
