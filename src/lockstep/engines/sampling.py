"""Turns a model's logits into the distribution that a request samples from, in vLLM's order of steps.

The transformers engine uses it, one row at a time. It uses transformers' own logits processors where they exist.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lockstep.engines.protocol import Sampling


def processed_logprobs(
    logits: torch.Tensor, sampling: Sampling, prompt_ids: Sequence[int], output_ids: Sequence[int]
) -> torch.Tensor:
    """Log-probs of the sampling distribution: penalties first, then temperature, min-p, top-k and top-p.

    Args:
        logits: (V,) raw logits of the next token.
        sampling: the request's settings.
        prompt_ids: ids before the completion. Only the repetition penalty uses them.
        output_ids: ids sampled so far.

    Returns:
        (V,) float32 log-probs, −inf outside the support.
    """
    scores = logits.float().unsqueeze(0)
    ids = torch.tensor([[*prompt_ids, *output_ids]], dtype=torch.long, device=logits.device)
    if sampling.repetition_penalty != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(ids, scores)
    if (sampling.frequency_penalty or sampling.presence_penalty) and output_ids:
        counts = torch.bincount(ids[0, len(prompt_ids) :], minlength=scores.shape[1]).float()
        scores = scores - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
    if sampling.temperature != 1.0:
        scores = TemperatureLogitsWarper(sampling.temperature)(ids, scores)
    if sampling.min_p > 0.0:
        scores = MinPLogitsWarper(sampling.min_p)(ids, scores)
    if sampling.top_k > 0:
        scores = TopKLogitsWarper(sampling.top_k)(ids, scores)
    if sampling.top_p < 1.0:
        scores = TopPLogitsWarper(sampling.top_p)(ids, scores)
    return scores[0].log_softmax(-1)
