"""The log-prob of a token under a sampling distribution, from raw logits, written a second time in float64.

The order of the steps is vLLM's: allowed ids, bias, repetition penalty, frequency and presence penalty, temperature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


def logprob(
    logits: np.ndarray,
    token: int,
    temperature: float,
    *,
    kept: Sequence[int] | None = None,
    allowed: Sequence[int] | None = None,
    bias: Mapping[int, float] | None = None,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    prompt: Sequence[int] = (),
    before: Sequence[int] = (),
) -> float:
    """The log-prob of one token.

    Args:
        logits: (V,) the logits that the model gives.
        kept: ids that the filters (top-k, top-p, min-p) kept; None: there are no filters.
        allowed: the only ids that may be sampled; None: all.
        bias: numbers that are added to the logits, by id.
        repetition: repetition penalty for ids in `prompt` and `before`. It divides positive logits and multiplies negative ones.
        presence: presence penalty, subtracted once from the logit of each id in `before`.
        frequency: frequency penalty, subtracted from the logit of each id as often as the id is in `before`.
        prompt: ids of the prompt.
        before: ids of the completion before the token.
    """
    scores = np.array(logits, np.float64)
    for place, value in (bias or {}).items():
        scores[place] += value
    if repetition != 1.0:
        seen = np.unique(np.array([*prompt, *before], np.int64))
        scores[seen] = np.where(scores[seen] < 0, scores[seen] * repetition, scores[seen] / repetition)
    if presence or frequency:
        ids, counts = np.unique(np.array(before, np.int64), return_counts=True)
        scores[ids] -= frequency * counts + presence
    scores /= temperature
    support = kept if kept is not None else allowed
    candidates = scores if support is None else scores[np.array(support, np.int64)]
    top = candidates.max()
    return float(scores[token] - top - np.log(np.exp(candidates - top).sum()))
