"""The trainer's log-probs of given tokens, one plain sequence at a time: no packing, no shared prefixes.

It is a second way to compute the same numbers, for proofs that must not depend on the fast path: the canary, the
decomposition of a gap, and `lockstep verify`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from lockstep.engines.protocol import Sampling
from lockstep.engines.sampling import processed_logprobs
from lockstep.models.adapters import causal_model, head_name
from lockstep.models.logits import transformed_logits
from lockstep.sync.adapters import weights_of
from lockstep.tokens.arrays import Ids

# Largest size of one tensor of float32 logits, in bytes. Up to three such tensors exist at the same time.
LOGITS_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Precision:
    """The precision in which the trainer computes a forward.

    Attributes:
        autocast: dtype of autocast; None: the weights' own dtype.
        head: dtype in which the output head computes; None: the dtype of the rest of the model.
    """

    autocast: torch.dtype | None = None
    head: torch.dtype | None = None


@torch.no_grad()
def sequence_logits(model: PreTrainedModel, ids: Sequence[int], precision: Precision = Precision()) -> torch.Tensor:
    """(len(ids), V) float32 logits of one sequence, in evaluation mode. They are in one tensor, without a limit on its size."""
    return torch.cat(list(_logit_chunks(model, ids, 0, precision)))


@torch.no_grad()
def completion_logps(
    model: PreTrainedModel,
    prompt_ids: Sequence[int] | Ids,
    token_ids: Sequence[int] | Ids,
    sampling: Sampling,
    precision: Precision = Precision(),
) -> torch.Tensor:
    """(len(token_ids),) log-probs of a completion under the distribution that `sampling` describes.

    The log-prob is −inf for a token that the sampling settings exclude. No tensor of logits is larger than `LOGITS_BYTES`, for
    any length of the completion.
    """
    prompt, tokens = np.asarray(prompt_ids).tolist(), np.asarray(token_ids).tolist()
    scores: list[torch.Tensor] = []
    for logits in _logit_chunks(model, [*prompt, *tokens[:-1]], len(prompt) - 1, precision):
        for row in logits.cpu():
            position = len(scores)
            logps = processed_logprobs(row, sampling, prompt, tokens[:position])
            # This is a copy, because a view would keep the whole row in memory.
            scores.append(logps[tokens[position]].clone())
    return torch.stack(scores)


def _logit_chunks(
    model: PreTrainedModel, ids: Sequence[int], first: int, precision: Precision
) -> Iterator[torch.Tensor]:
    """(rows, V) float32 logits of the positions from `first` to the end, a few rows at a time."""
    inner = causal_model(model)
    row = torch.tensor([list(ids)], device=inner.device)
    was_training = model.training
    model.eval()
    try:
        with _autocast(inner, precision):
            hidden = inner.base_model(input_ids=row, use_cache=False).last_hidden_state[0, first:]
        product = _head_product(model, precision)
        vocabulary = inner.get_output_embeddings().weight.shape[0]
        for rows in hidden.split(max(1, LOGITS_BYTES // (4 * vocabulary))):
            with _autocast(inner, precision):
                logits = product(rows)
            yield transformed_logits(inner.config.get_text_config(), logits).float()
    finally:
        model.train(was_training)


def _autocast(model: PreTrainedModel, precision: Precision) -> AbstractContextManager[Any]:
    return torch.autocast(model.device.type, precision.autocast) if precision.autocast else nullcontext()


def _head_product(model: PreTrainedModel, precision: Precision) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that computes (rows, V) logits from (rows, width) hidden states."""
    if precision.head is None:
        return causal_model(model).get_output_embeddings()
    source, name = weights_of(model), head_name(model)
    weight, beside = source.tensor(name).to(precision.head), name.removesuffix("weight") + "bias"
    bias = source.tensor(beside).to(precision.head) if beside in source.names else None

    def product(hidden: torch.Tensor) -> torch.Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return torch.nn.functional.linear(hidden.to(weight.dtype), weight, bias)

    return product
