"""Turns a model's logits into the distribution that a request samples from, in vLLM's order of steps.

It serves the transformers engine and the proofs that score again, one row at a time. Where transformers has a logits
processor for a step, this module uses it. The order of steps is the order in vLLM's class `Sampler` (0.32.0):

1. grammar, 2. allowed ids, 3. bad words, 4. minimum length, 5. logit bias, 6. penalties: repetition, then frequency and presence,
7. temperature, 8. min-p, 9. top-k, 10. top-p.

Steps 1 to 6 depend on the ids alone (`shaped_logits`). Steps 8 to 10 depend on the logits (`filtered`).
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

from lockstep.contract.grammars import apply_mask
from lockstep.contract.sampling import Sampling


def processed_logprobs(
    logits: torch.Tensor,
    sampling: Sampling,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    *,
    end_ids: Sequence[int] = (),
    grammar_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Log-probs of the sampling distribution.

    Args:
        logits: (V,) raw logits of the next token.
        sampling: the request's settings.
        prompt_ids: ids before the completion. Only the repetition penalty uses them.
        output_ids: ids sampled so far.
        end_ids: ids that end a completion. Only the minimum length uses them.
        grammar_mask: (1, ⌈V / 32⌉) int32 mask of the ids that the request's grammar allows next (`contract/grammars.py`).

    Returns:
        (V,) float32 log-probs, −inf outside the support.
    """
    scores = shaped_logits(logits, sampling, prompt_ids, output_ids, end_ids=end_ids, grammar_mask=grammar_mask)
    if sampling.temperature != 1.0:
        scores = TemperatureLogitsWarper(sampling.temperature)(None, scores)
    return filtered(scores, sampling)[0].log_softmax(-1)


def shaped_logits(
    logits: torch.Tensor,
    sampling: Sampling,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    *,
    end_ids: Sequence[int] = (),
    grammar_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """(1, V) float32 logits after all steps that depend on the ids alone. The arguments are those of `processed_logprobs`."""
    scores = logits.to(torch.float32, copy=True).unsqueeze(0)
    if grammar_mask is not None:
        apply_mask(scores, grammar_mask)
    if sampling.allowed_token_ids is not None:
        others = torch.ones(scores.shape[1], dtype=torch.bool, device=scores.device)
        others[list(sampling.allowed_token_ids)] = False
        scores[:, others] = -torch.inf
    scores[:, banned_ids(sampling, output_ids)] = -torch.inf
    if len(output_ids) < sampling.min_tokens:
        _forbid_end(scores, end_ids, with_grammar=grammar_mask is not None)
    if sampling.logit_bias:
        places, values = zip(*sampling.logit_bias, strict=True)
        scores[:, list(places)] += torch.tensor(values, dtype=torch.float32, device=scores.device)
    return _penalised(scores, sampling, prompt_ids, output_ids)


def banned_ids(sampling: Sampling, output_ids: Sequence[int]) -> list[int]:
    """Ids that would now complete one of the bad words. Only ids of the completion count; ids of the prompt do not."""
    banned = []
    for word in sampling.bad_words:
        prefix_length = len(word) - 1
        if list(output_ids[len(output_ids) - prefix_length :]) == list(word[:-1]):
            banned.append(word[-1])
    return banned


def filtered(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Apply min-p, top-k and top-p to logits.

    Args:
        scores: (rows, V) logits, already divided by the temperature.

    Returns:
        (rows, V) logits, −inf at the ids that a filter removes.
    """
    if sampling.min_p > 0.0:
        scores = MinPLogitsWarper(sampling.min_p)(None, scores)
    if sampling.top_k > 0:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1.0:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    return scores


def _forbid_end(scores: torch.Tensor, end_ids: Sequence[int], *, with_grammar: bool) -> None:
    """Exclude the end tokens. If a grammar allows nothing else, they stay allowed, as in vLLM."""
    ids = list(end_ids)
    before = scores[:, ids]
    scores[:, ids] = -torch.inf
    if with_grammar and bool(torch.isneginf(scores).all()):
        scores[:, ids] = before


def _penalised(
    scores: torch.Tensor, sampling: Sampling, prompt_ids: Sequence[int], output_ids: Sequence[int]
) -> torch.Tensor:
    if sampling.repetition_penalty != 1.0:
        ids = torch.tensor([[*prompt_ids, *output_ids]], dtype=torch.long, device=scores.device)
        scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(ids, scores)
    if (sampling.frequency_penalty or sampling.presence_penalty) and len(output_ids):
        output = torch.tensor([*output_ids], dtype=torch.long, device=scores.device)
        counts = torch.bincount(output, minlength=scores.shape[1]).float()
        scores = scores - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
    return scores
