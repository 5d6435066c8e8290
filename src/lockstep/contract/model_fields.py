"""The fields of a model's config that describe its computation. The handshake compares them.

Trainer and engine each read the fields from the config that they loaded themselves. Paths and names are not compared: they differ
between machines, and they do not describe the computation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# Fields that do not change what a model computes, or that only say where it came from.
NOT_COMPARED = {
    "_attn_implementation_internal",
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "id2label",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "router_aux_loss_coef",
    "sep_token_id",
    "torch_dtype",
    "transformers_version",
    "unk_token_id",
    "use_cache",
}

# Values that say the same as a field that is not there.
_DEFAULTS = {"sliding_window": 0, "partial_rotary_factor": 1.0}
_NONE = object()


def model_fields(config: Any) -> dict[str, Any]:
    """The fields of a transformers config that describe the model's computation, as JSON types."""
    fields = {k: v for k, v in config.to_dict().items() if k not in NOT_COMPARED and "dropout" not in k}
    return json.loads(json.dumps(fields, default=str, sort_keys=True))


def one_spelling(value: Any) -> Any:
    """A config's fields in one spelling, so that two programs that mean the same have the same.

    A field with None is one that is not there, also inside `rope_parameters`. A window of 0 is none (transformers writes it for
    Qwen2-MoE, vLLM replaces it). A rotary factor of 1.0 is the default.

    Args:
        value: the result of `model_fields`, or a part of it.
    """
    if isinstance(value, list):
        return [one_spelling(part) for part in value]
    if not isinstance(value, Mapping):
        return value
    fields = {name: one_spelling(part) for name, part in value.items()}
    return {
        name: part
        for name, part in fields.items()
        if part is not None and _DEFAULTS.get(name.rpartition(".")[2], _NONE) != part
    }


def fields_of_parts(text: Any, whole: Any) -> dict[str, Any]:
    """`model_fields` of a model's language part, and of its vision tower if it has one.

    Args:
        text: config of the language part.
        whole: config of the whole model. For a model without pictures this is `text` itself.
    """
    tower = getattr(whole, "vision_config", None)
    vision = {} if tower is None else {f"vision_config.{name}": value for name, value in model_fields(tower).items()}
    return model_fields(text) | vision
