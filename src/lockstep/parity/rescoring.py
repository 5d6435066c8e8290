"""The trainer's log-probs of given tokens, one plain sequence at a time: no packing, no shared prefixes, no chunks.

A second way to the same numbers, for proofs that must not lean on the fast path: the canary, the decomposition of a gap, and
`lockstep verify`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from lockstep.engines.protocol import Sampling
from lockstep.engines.sampling import processed_logprobs
from lockstep.models.adapters import causal_model, head_name
from lockstep.sync.adapters import weights_of
from lockstep.tokens.arrays import Ids


@dataclass(frozen=True, slots=True)
class Precision:
    """How the trainer computes a forward.

    Attributes:
        autocast: dtype of autocast, or None to compute in the weights' own dtype.
        head: dtype of the output head's product, or None for that of the trunk.
    """

    autocast: torch.dtype | None = None
    head: torch.dtype | None = None


@torch.no_grad()
def sequence_logits(model: PreTrainedModel, ids: Sequence[int], precision: Precision = Precision()) -> torch.Tensor:
    """(len(ids), V) float32 logits of one sequence, in evaluation mode."""
    inner = causal_model(model)
    row = torch.tensor([list(ids)], device=inner.device)
    was_training = model.training
    model.eval()
    try:
        with torch.autocast(inner.device.type, precision.autocast) if precision.autocast else nullcontext():
            hidden = inner.base_model(input_ids=row, use_cache=False).last_hidden_state[0]
            if precision.head is None:
                return inner.get_output_embeddings()(hidden).float()
        source, name = weights_of(model), head_name(model)
        weight, beside = source.tensor(name).to(precision.head), name.removesuffix("weight") + "bias"
        bias = source.tensor(beside).to(precision.head) if beside in source.names else None
        return torch.nn.functional.linear(hidden.to(precision.head), weight, bias).float()
    finally:
        model.train(was_training)


def completion_logps(
    model: PreTrainedModel,
    prompt_ids: Sequence[int] | Ids,
    token_ids: Sequence[int] | Ids,
    sampling: Sampling,
    precision: Precision = Precision(),
) -> torch.Tensor:
    """(len(token_ids),) log-probs of a completion under the distribution that `sampling` describes.

    −inf for a token that the settings leave no probability.
    """
    prompt, tokens = np.asarray(prompt_ids).tolist(), np.asarray(token_ids).tolist()
    logits = sequence_logits(model, [*prompt, *tokens[:-1]], precision)[len(prompt) - 1 :].cpu()
    scores = [
        processed_logprobs(row, sampling, prompt, tokens[:position])[tokens[position]]
        for position, row in enumerate(logits)
    ]
    return torch.stack(scores)
