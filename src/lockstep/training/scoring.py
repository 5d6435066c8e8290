"""The policy's log-probs of sampled tokens, without ever holding a (tokens × vocabulary) matrix.

Comes from: `training/packing.py`. Goes to: the loss, and to `parity/gap.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from lockstep.errors import InputError
from lockstep.models.adapters import causal_model
from lockstep.models.policy import fp32_head_product
from lockstep.training.packing import Pack


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Scores of a pack's N tokens.

    Attributes:
        logps: (N,) float32 natural-log probabilities under the distribution that was sampled, with gradient.
        entropies: (N,) float32 entropy of that distribution in nats, with gradient only where it was asked for.
        values: (N,) float32 a critic's value of the text before each token, with gradient, where there is a critic.
    """

    logps: torch.Tensor
    entropies: torch.Tensor
    values: torch.Tensor | None = None


def check_scorable(model: PreTrainedModel, max_length: int) -> None:
    """Refuse models whose log-probs this module would get wrong.

    Raises:
        InputError: the model transforms its logits after the head, or attends within a window shorter than the sequences.
    """
    config = model.config.get_text_config()
    for name in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if getattr(config, name, None) not in (None, 1.0):
            raise InputError(f"the model's config has {name}={getattr(config, name)}, which is not supported yet")
    if config._attn_implementation != "sdpa":
        # The others add a boolean mask to the scores, or cannot take one.
        raise InputError(f"attn_implementation is {config._attn_implementation!r}; packed batches need 'sdpa'")
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and set(kinds) - {"full_attention", "sliding_attention"}:
        raise InputError(f"the model has layers of kind {sorted(set(kinds))}, which packed batches do not support")
    window = getattr(config, "sliding_window", None)
    slides = kinds is None or "sliding_attention" in kinds
    if slides and window is not None and window < max_length:
        raise InputError(
            f"the model attends within {window} tokens, sequences may have {max_length}: not supported yet"
        )


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
        model: a causal language model, adapted or not; its trunk sees the whole pack, its head only the predicting positions.
        temperature: divides the logits, as it did when the tokens were sampled.
        chunk_size: rows of logits held at a time; memory grows with it, results do not change.
        entropy_gradient: entropies are part of the loss.
        fp32_head: the head's product is in float32, past autocast.
        critic: maps hidden states (rows, width) to values (rows, 1).
    """
    inner = causal_model(model)
    hidden = inner.base_model(
        input_ids=pack.input_ids,
        position_ids=pack.position_ids,
        attention_mask=pack.attention_mask,
        use_cache=False,
    ).last_hidden_state[0]
    # Tokens of equal branches share a predictor: each is put through the head once for all of them.
    rows, place = torch.unique(pack.predictors, return_inverse=True)
    selected = hidden[rows]
    head = inner.get_output_embeddings()
    product = partial(fp32_head_product, head) if fp32_head else head
    logps, entropies = [], []
    for start in range(0, len(rows), chunk_size):
        inside = (place >= start) & (place < start + chunk_size)
        arguments = (
            product,
            selected[start : start + chunk_size],
            place[inside] - start,
            pack.targets[inside],
            temperature,
            entropy_gradient,
        )
        if torch.is_grad_enabled():
            # The chunk's logits are computed again in the backward pass instead of being kept.
            logp, entropy = checkpoint(_score_rows, *arguments, use_reentrant=False)
        else:
            logp, entropy = _score_rows(*arguments)
        logps.append((inside.nonzero()[:, 0], logp))
        entropies.append(entropy)
    order = torch.cat([index for index, _ in logps])
    by_chunk = torch.cat([logp for _, logp in logps])
    values = _values(critic, selected)[place] if critic is not None else None
    return TokenScores(by_chunk[order.argsort()], torch.cat(entropies)[place], values)


def _values(critic: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """One value a row; the critic keeps its own dtype, whatever the model was loaded in, and past autocast."""
    with torch.autocast(hidden.device.type, enabled=False):
        values = critic(hidden.to(next(critic.parameters()).dtype))[:, 0]
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _score_rows(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    rows: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    entropy_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of `targets` at `rows` of a chunk, and the entropy of each row of the chunk."""
    logits = head(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1.0:
        logits = logits / temperature
    normaliser = logits.logsumexp(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        probabilities = torch.exp(logits - normaliser[:, None])
        entropy = normaliser - (probabilities * logits).sum(-1)
    return logits[rows, targets] - normaliser[rows], entropy
