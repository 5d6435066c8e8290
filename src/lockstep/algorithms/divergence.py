"""Estimators of KL(policy ‖ reference) from the log-probs of tokens that the policy sampled.

The three are Schulman's (http://joschu.net/blog/kl-approx.html). With tokens from the policy, k1 and k3 have the divergence as
their mean, and k2 has the divergence's gradient as the mean of its own. (The mean gradient of k1 is zero; that of k3 is the
gradient of KL(reference ‖ policy).) GRPO adds k3 to its loss (arXiv 2402.03300, equation 4).

Each takes (N,) log-probs under the policy and under the reference, and returns (N,) nats, differentiable in both.
"""

from __future__ import annotations

import torch


def k1(logps: torch.Tensor, ref_logps: torch.Tensor) -> torch.Tensor:
    """(N,) log ratio policy / reference: unbiased, of either sign, of high variance."""
    return logps - ref_logps


def k2(logps: torch.Tensor, ref_logps: torch.Tensor) -> torch.Tensor:
    """(N,) half the squared log ratio: never negative, biased, of low variance."""
    return 0.5 * (logps - ref_logps).square()


def k3(logps: torch.Tensor, ref_logps: torch.Tensor) -> torch.Tensor:
    """(N,) reference / policy − 1 − its logarithm: unbiased and never negative."""
    difference = ref_logps - logps
    # exp(x) − 1 in one call keeps the digits where policy and reference are close.
    return torch.expm1(difference) - difference
