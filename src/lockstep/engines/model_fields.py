"""What a model's config says of its computation, as both sides of the handshake compare it.

Read from the config that each program loaded for itself: a path or a name says less, and differs between machines.
"""

from __future__ import annotations

import json
from typing import Any

# Fields of a model's config that do not change what it computes, or that say where it came from.
_NOT_COMPARED = {
    "_attn_implementation_internal",
    "_name_or_path",
    "architectures",
    "chunk_size_feed_forward",
    "dtype",
    "id2label",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    # The trainer writes it (tokens/tokenizer.py); the engine keeps what it loaded.
    "pad_token_id",
    "problem_type",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


def model_fields(config: Any) -> dict[str, Any]:
    """What a transformers config says of the model's computation, as JSON types."""
    fields = {k: v for k, v in config.to_dict().items() if k not in _NOT_COMPARED and "dropout" not in k}
    return json.loads(json.dumps(fields, default=str, sort_keys=True))
