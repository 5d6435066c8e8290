"""Estimators of KL(policy ‖ reference) from the log-probs of tokens that the policy sampled.

The three estimators are Schulman's (http://joschu.net/blog/kl-approx.html). For tokens sampled from the policy, the mean of
k1 and of k3 is the divergence, and the mean gradient of k2 is the divergence's gradient. (The mean gradient of k1 is zero;
that of k3 is the gradient of KL(reference ‖ policy).) GRPO adds k3 to its loss (arXiv 2402.03300, equation 4).

Each takes (N,) log-probs under the policy and under the reference model, and returns (N,) nats, differentiable in both.
"""

from __future__ import annotations

from typing import Any

import torch


def k1(logps: torch.Tensor, ref_logps: torch.Tensor) -> torch.Tensor:
    """(N,) log ratio policy / reference: unbiased, of either sign, with high variance."""
    return logps - ref_logps


def k2(logps: torch.Tensor, ref_logps: torch.Tensor) -> torch.Tensor:
    """(N,) half the squared log ratio: never negative, biased, with low variance."""
    return 0.5 * (logps - ref_logps).square()


def k3(logps: torch.Tensor, ref_logps: torch.Tensor) -> torch.Tensor:
    """(N,) ratio − 1 − log ratio, for the ratio reference / policy: unbiased and never negative."""
    return _ExpMinusLinear.apply(ref_logps - logps)


class _ExpMinusLinear(torch.autograd.Function):
    """exp(d) − 1 − d, and its derivative exp(d) − 1.

    PyTorch would compute the derivative as a difference of numbers near 1. Where policy and reference are close, only rounding
    would be left of it.
    """

    @staticmethod
    def forward(ctx: Any, difference: torch.Tensor) -> torch.Tensor:
        slope = torch.expm1(difference)
        ctx.save_for_backward(slope)
        return slope - difference

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_result: torch.Tensor) -> torch.Tensor:
        (slope,) = ctx.saved_tensors
        return of_result * slope
