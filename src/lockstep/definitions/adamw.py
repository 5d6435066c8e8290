"""AdamW (arXiv 1711.05101, algorithm 2), in float64. `watch/update.py` compares the optimizer's results with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Moments:
    """The state of AdamW for N elements.

    Attributes:
        first, second: (N,) float64 running means of the gradient and of its square.
        steps: (N,) float64 number of steps that each element has taken.
    """

    first: torch.Tensor
    second: torch.Tensor
    steps: torch.Tensor


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings for N elements, each (N,) float64: learning rate, the decay factors of the two means, epsilon, weight decay."""

    rate: torch.Tensor
    beta1: torch.Tensor
    beta2: torch.Tensor
    epsilon: torch.Tensor
    decay: torch.Tensor


def adamw(
    value: torch.Tensor, gradient: torch.Tensor, moments: Moments, settings: Settings
) -> tuple[torch.Tensor, Moments, torch.Tensor]:
    """One optimizer step for N elements.

    Args:
        value, gradient: (N,) float64 values of the elements before the step, and their gradients.

    Returns:
        (N,) new values, the new moments, and (N,) a scale for rounding errors: the change if all terms had the same sign. In a
        lower precision, the rounding error of the change is proportional to this scale.
    """
    s = settings
    steps = moments.steps + 1
    first = s.beta1 * moments.first + (1 - s.beta1) * gradient
    second = s.beta2 * moments.second + (1 - s.beta2) * gradient**2
    unbiased_first = first / (1 - s.beta1**steps)
    unbiased_second = second / (1 - s.beta2**steps)
    divisor = unbiased_second.sqrt() + s.epsilon
    new = value - s.rate * (unbiased_first / divisor + s.decay * value)
    terms = (s.beta1 * moments.first.abs() + (1 - s.beta1) * gradient.abs()) / (1 - s.beta1**steps)
    return new, Moments(first, second, steps), s.rate * (terms / divisor + s.decay * value.abs())
