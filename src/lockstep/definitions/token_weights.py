"""The weight of each token in the loss of an optimizer step, for every way in which the papers average, with plain Python numbers.

The weights that enter the loss are compared with these.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def token_weights(lengths: Sequence[int], average: str, limit: int) -> list[float]:
    """The weight of one token of each completion of a step.

    Args:
        lengths: tokens of each completion; 0 if it is left out. It still counts in the number of completions.
        average: `completions`: over the tokens of a completion, then over completions (GRPO). `tokens`: over all tokens (DAPO).
            `limit`: a sum over tokens, divided by completions × `limit` (Dr. GRPO). `sums`: a sum over tokens, averaged over
            completions (LUSPO). `whole`: a completion has one loss, averaged over completions (RLOO). `pairs`: a pair has one
            loss, averaged over pairs (DPO).
        limit: the largest number of tokens of a completion.
    """
    count, total = len(lengths), max(sum(lengths), 1)
    weight = {
        "completions": lambda n: 1 / (max(n, 1) * count),
        "tokens": lambda n: 1 / total,
        "limit": lambda n: 1 / (count * limit),
        "sums": lambda n: 1 / count,
        "whole": lambda n: 1 / count,
        "pairs": lambda n: 2 / count,
    }[average]
    return [weight(n) if n else 0.0 for n in lengths]


def prompt_weights(lengths: Sequence[int], prompts: Sequence[Hashable]) -> list[float]:
    """The weight of one token of each completion, if the loss is a mean over the tokens of each prompt, then over prompts.

    This is ScaleRL's average (arXiv 2510.13786).

    Args:
        lengths: tokens of each completion; 0 if it is left out.
        prompts: the prompt of each completion.
    """
    tokens: dict[Hashable, int] = {}
    for length, prompt in zip(lengths, prompts, strict=True):
        tokens[prompt] = tokens.get(prompt, 0) + length
    return [1 / (tokens[p] * len(tokens)) if n else 0.0 for n, p in zip(lengths, prompts, strict=True)]
