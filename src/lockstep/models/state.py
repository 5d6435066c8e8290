"""Tells whether a model keeps a state from token to token, as Mamba, linear attention and convolutions do.

The next state depends on every token before it, padding included, and no mask takes a token out again. Engines and the trainer ask
here before they share prompts, pad them or cache them.
"""

from __future__ import annotations

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

# The fields in which configs list the kinds of their layers.
_KINDS = ("layer_types", "layers_block_type", "block_types")
_WITHOUT_STATE = ("mlp", "moe")


def keeps_state(config: PreTrainedConfig) -> bool:
    """Whether a model with this config has a layer with a state, of any kind.

    The kinds of the layers say so in families that transformers does not call stateful, such as LFM2 and MiniMax.
    """
    text = config.get_text_config()
    kinds = {kind for field in _KINDS for kind in getattr(text, field, None) or ()}
    if any(kind == "linear_attention" or not _is_stateless(kind) for kind in kinds):
        return True
    known = type(text) in MODEL_FOR_CAUSAL_LM_MAPPING
    return known and bool(getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(text)], "_is_stateful", False))


def _is_stateless(kind: str) -> bool:
    return kind.endswith("attention") or kind in _WITHOUT_STATE
