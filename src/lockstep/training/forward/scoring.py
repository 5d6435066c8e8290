"""Computes the policy's log-probs of sampled tokens. A whole (tokens × vocabulary) matrix is never in memory.

The packs come from `training/batch/pack.py`. The loss and `parity/gap.py` use the scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from lockstep.errors import InputError, LockstepError
from lockstep.models.adapters import causal_model
from lockstep.models.policy import fp32_head_product
from lockstep.training.batch.pack import Pack
from lockstep.training.forward.block_attention import TreeAttention
from lockstep.training.forward.flex_attention import FLEX, block_mask
from lockstep.training.forward.recomputation import products_kept
from lockstep.training.forward.token_logps import token_logps
from lockstep.training.forward.tree_attention import TREE, no_mask


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Scores of a pack's N tokens.

    Attributes:
        logps: (N,) float32 natural-log probabilities under the sampling distribution, with gradient.
        entropies: (N,) float32 entropy of that distribution in nats, with gradient only if it was requested.
        values: (N,) float32 the critic's value before each token, with gradient, if there is a critic.
    """

    logps: torch.Tensor
    entropies: torch.Tensor
    values: torch.Tensor | None = None


def check_scorable(model: PreTrainedModel) -> None:
    """Refuse models for which this module would compute wrong log-probs.

    Raises:
        InputError: the model transforms its logits after the head, or its attention cannot use a tree.
    """
    config = model.config.get_text_config()
    for name in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if getattr(config, name, None) not in (None, 1.0):
            raise InputError(f"the model's config has {name}={getattr(config, name)}, which is not supported yet")
    if not _keeps_state(model) and config._attn_implementation not in ("sdpa", TREE, FLEX):
        # The other implementations add a boolean mask to the scores, or cannot take a mask.
        raise InputError(f"attn_implementation is {config._attn_implementation!r}; packed batches need 'sdpa'")


def why_plain_rows(model: PreTrainedModel, max_length: int) -> str | None:
    """The reason why a model cannot attend within a tree of tokens and gets one row per sequence. None: it can.

    A layer that uses a state instead of a mask, or that makes a mask itself, would see other branches.
    """
    config = model.config.get_text_config()
    if _keeps_state(model):
        return "it keeps a state from token to token"
    kinds = set(getattr(config, "layer_types", None) or ())
    if odd := sorted(kinds - {"full_attention", "sliding_attention"}):
        return f"it has layers of kind {', '.join(odd)}"
    window = getattr(config, "sliding_window", None)
    if (not kinds or "sliding_attention" in kinds) and window is not None and window < max_length:
        return f"it attends within {window} tokens, and sequences may have {max_length}"
    return None


def _keeps_state(model: PreTrainedModel) -> bool:
    return bool(getattr(model, "_is_stateful", False))


def score_pack(
    model: PreTrainedModel,
    pack: Pack,
    temperature: float,
    chunk_size: int,
    *,
    entropy_gradient: bool = False,
    fp32_head: bool = False,
    critic: torch.nn.Module | None = None,
) -> TokenScores:
    """Log-prob and entropy of every scored token of a pack.

    Args:
        model: a causal language model, with or without an adapter. Its head computes only the positions that predict.
        temperature: divides the logits. It is the temperature of sampling.
        chunk_size: rows of logits in memory at a time. Memory grows with it; results do not depend on it.
        entropy_gradient: whether entropies are part of the loss.
        fp32_head: whether the head computes in float32, outside autocast.
        critic: maps hidden states (rows, width) to values (rows, 1).

    Raises:
        InputError: a layer adds a bias, a mask or dropout to its attention.
    """
    inner = causal_model(model)
    with products_kept(inner):
        hidden = inner.base_model(
            input_ids=pack.input_ids, use_cache=False, **_who_sees_whom(inner, pack)
        ).last_hidden_state.flatten(0, 1)
    # Tokens of equal branches share a predictor. The head computes each predictor once.
    rows, place = torch.unique(pack.predictors, return_inverse=True)
    selected = hidden[rows]
    head = inner.get_output_embeddings()
    product = partial(fp32_head_product, head) if fp32_head else head
    logps, entropies = token_logps(
        product,
        selected,
        place,
        pack.targets,
        temperature=temperature,
        chunk_size=chunk_size,
        entropy_gradient=entropy_gradient,
    )
    values = _values(critic, selected)[place] if critic is not None else None
    return TokenScores(logps, entropies[place], values)


def _who_sees_whom(model: PreTrainedModel, pack: Pack) -> dict[str, Any]:
    """The arguments by which the model's layers know the structure of a pack.

    Raises:
        LockstepError: the model's attention cannot use a tree, because it was not replaced.
    """
    if pack.ends is None:
        # Padding comes after the scored tokens, so causal attention hides it. Each row counts its own positions.
        return {"attention_mask": None}
    kind, device = model.config.get_text_config()._attn_implementation, pack.input_ids.device
    if kind not in (TREE, FLEX):
        raise LockstepError(f"attention is {kind!r}, which takes no tree: call adopt_tree_attention(model) first")
    tree = block_mask(pack.ends, device) if kind == FLEX else TreeAttention.of(pack.ends, device, model.dtype)
    return {"attention_mask": no_mask(device), "position_ids": pack.position_ids, "tree": tree}


def _values(critic: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """One value per row. The critic computes in its own dtype, outside autocast, for any dtype of the model."""
    with torch.autocast(hidden.device.type, enabled=False):
        values = critic(hidden.to(next(critic.parameters()).dtype))[:, 0]
    return values.to(torch.promote_types(values.dtype, torch.float32))
