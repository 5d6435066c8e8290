"""The distribution of a request, computed from its definition in float64, independently of the engines' code.

Only the masks of grammars come from our own code, because both sides use the same library for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lockstep.contract.sampling import Sampling


def shaped(
    logits: torch.Tensor,
    sampling: Sampling,
    prompt: Sequence[int],
    output: Sequence[int],
    end_ids: Sequence[int],
    grammar_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """(V,) logits after everything that depends on the ids alone, divided by the temperature."""
    scores = logits.clone().double()
    allowed = set(range(len(scores)))
    if grammar_mask is not None:
        allowed = {i for i in allowed if int(grammar_mask[i // 32]) >> (i % 32) & 1}
    if sampling.allowed_token_ids is not None:
        allowed &= set(sampling.allowed_token_ids)
    for word in sampling.bad_words:
        if tuple(word[:-1]) == tuple(output[len(output) - len(word) + 1 :]):
            allowed.discard(word[-1])
    if len(output) < sampling.min_tokens and (allowed - set(end_ids) or grammar_mask is None):
        allowed -= set(end_ids)
    for token, bias in sampling.logit_bias:
        scores[token] += bias
    for token in {*prompt, *output} if sampling.repetition_penalty != 1.0 else ():
        factor = sampling.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token in output:
        scores[token] -= sampling.frequency_penalty
    for token in set(output):
        scores[token] -= sampling.presence_penalty
    forbidden = sorted(set(range(len(scores))) - allowed)
    scores[forbidden] = -torch.inf
    return scores / sampling.temperature


def kept_set(scores: torch.Tensor, sampling: Sampling, slack: float = 0.0) -> set[int]:
    """Ids that min-p, top-k and top-p keep, in this order.

    Args:
        scores: (V,) from `shaped`.
        slack: a positive value keeps more and a negative one keeps less, by about this share of a probability. Ids
            whose probabilities differ by less count as equally likely. With a positive value each of them may come
            first, with a negative one last.
    """
    probabilities = scores.softmax(-1)
    keep = probabilities > 0
    if sampling.min_p:
        keep &= probabilities >= sampling.min_p * (1 - slack) * probabilities.max()
    if sampling.top_k and sampling.top_k < int(keep.sum()):
        kth = probabilities[keep].sort(descending=True).values[sampling.top_k - 1]
        keep &= probabilities >= kth * (1 - slack)
    if sampling.top_p < 1:
        mass = torch.where(keep, probabilities, 0.0) / probabilities[keep].sum()
        rising = mass.sort().values
        # The mass of the ids that come before each id.
        from_here = rising.flip(0).cumsum(0).flip(0)
        likelier = torch.searchsorted(rising, mass * (1 + slack), right=slack >= 0)
        before = torch.cat([from_here, rising.new_zeros(1)])[likelier]
        if slack < 0:
            before -= mass
        keep &= before < sampling.top_p + slack
    return set(keep.nonzero()[:, 0].tolist())


def logprob(scores: torch.Tensor, kept: Sequence[int], token: int) -> float:
    """Log-prob of a token among the kept ids."""
    return float(scores[token] - scores[list(kept)].logsumexp(-1))
