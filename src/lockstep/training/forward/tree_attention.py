"""Attention within a pack, computed only where its tree lets tokens see each other.

Comes from: a pack's `ends`, by way of `training/forward/scoring.py`. Goes to: every attention layer of the model, through
transformers' own registry of attention functions. The result is that of a dense mask, which is never made.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from lockstep.errors import InputError
from lockstep.training.forward.block_attention import TreeAttention

# The name under which transformers finds it.
TREE = "lockstep_tree"


def adopt_tree_attention(model: PreTrainedModel) -> None:
    """Let a model that attends by 'sdpa' take a `tree` as well; without one it attends as before."""
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(TREE)


def tree_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    tree: TreeAttention | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers.

    Args:
        query, key, value: (1, heads, T, width); keys and values may have fewer heads.
        attention_mask: used where there is no `tree`; beside one it is `no_mask`.

    Returns:
        (1, T, heads, width), and no weights.

    Raises:
        InputError: the layer adds to its attention what a tree cannot carry.
    """
    if tree is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    check_nothing_added(module, attention_mask, kwargs)
    scale = kwargs.get("scaling")
    if query.device.type != "cpu":
        found = tree(query, key, value, scale)
    else:
        # The half-precision backward of a CPU takes twice as long as that of float32.
        with torch.autocast("cpu", enabled=False):
            found = tree(_wide(query), _wide(key), _wide(value), scale).to(value.dtype)
    return found.transpose(1, 2).contiguous(), None


def _wide(part: torch.Tensor) -> torch.Tensor:
    return part.to(torch.promote_types(part.dtype, torch.float32))


def no_mask(device: torch.device) -> torch.Tensor:
    """What a model is given as its mask beside a `tree`, so that it makes none: (1, 1, 0, 0) bool.

    A layer that used it would fail: it fits no scores.
    """
    return torch.empty(1, 1, 0, 0, dtype=torch.bool, device=device)


def check_nothing_added(module: torch.nn.Module, attention_mask: torch.Tensor | None, kwargs: dict[str, Any]) -> None:
    """Check that a layer attends by the pack's tree and by nothing else.

    Raises:
        InputError: it has a bias or a mask of its own, or dropout.
    """
    own = "a bias of its own" if kwargs.get("position_bias") is not None else ""
    own = own or ("dropout" if kwargs.get("dropout") else "")
    own = own or ("a mask of its own" if attention_mask is None or attention_mask.numel() else "")
    if own:
        raise InputError(
            f"{type(module).__name__} gives its attention {own}, which packed sequences cannot be trained with; "
            "use another model, or set its dropout to 0"
        )


AttentionInterface.register(TREE, tree_attention_forward)
AttentionMaskInterface.register(TREE, sdpa_mask)
