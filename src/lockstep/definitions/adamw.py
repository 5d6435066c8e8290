"""AdamW (arXiv 1711.05101, algorithm 2), in float64. `parity/step/update.py` compares the optimizer's results with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Moments:
    """What AdamW keeps of N elements.

    Attributes:
        first, second: (N,) float64 running means of the gradient and of its square.
        steps: (N,) float64 number of steps that each element has taken.
    """

    first: torch.Tensor
    second: torch.Tensor
    steps: torch.Tensor


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of N elements, each (N,) float64: learning rate, the two decays of the means, epsilon, weight decay."""

    rate: torch.Tensor
    beta1: torch.Tensor
    beta2: torch.Tensor
    epsilon: torch.Tensor
    decay: torch.Tensor


def adamw(
    value: torch.Tensor, gradient: torch.Tensor, moments: Moments, settings: Settings
) -> tuple[torch.Tensor, Moments, torch.Tensor]:
    """One step of N elements.

    Args:
        value, gradient: (N,) float64, before the step.

    Returns:
        (N,) new values, the new moments, and (N,) the largest change that the terms of the sums allow. Rounding errors of
        another precision are proportional to it.
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
