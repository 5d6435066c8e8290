"""The gap between the engine's and the trainer's log-prob of the same token at the same weights.

Comes from: completions (behaviour log-probs) and the policy's forward in `training/`. Goes to: the optimizer step, which
is not taken before `check_gap` has passed, and the receipt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lockstep.errors import ProofError
from lockstep.parity.tolerances import Tolerance


@dataclass(frozen=True, slots=True)
class GapStats:
    """Sums over tokens, so that the parts of a step add up.

    Attributes:
        tokens: number of tokens compared.
        sum_abs: sum of |g|, in nats, with g = behaviour log-prob − policy log-prob.
        max_abs: largest |g|.
        sum_k3: sum of exp(−g) − 1 + g.
        worst: name of the request with the largest |g|.
    """

    tokens: int = 0
    sum_abs: float = 0.0
    max_abs: float = 0.0
    sum_k3: float = 0.0
    worst: str = ""

    @property
    def mean_abs(self) -> float:
        return self.sum_abs / self.tokens if self.tokens else 0.0

    @property
    def k3(self) -> float:
        return self.sum_k3 / self.tokens if self.tokens else 0.0

    def __add__(self, other: GapStats) -> GapStats:
        larger = self if self.max_abs >= other.max_abs else other
        return GapStats(
            self.tokens + other.tokens,
            self.sum_abs + other.sum_abs,
            larger.max_abs,
            self.sum_k3 + other.sum_k3,
            larger.worst,
        )


def measure_gap(
    behaviour: torch.Tensor, policy: torch.Tensor, names: Sequence[str], lengths: Sequence[int]
) -> GapStats:
    """Gap statistics of the N tokens of several requests, one request after the other.

    Args:
        behaviour: (N,) the engine's log-probs.
        policy: (N,) the trainer's log-probs of the same tokens.
        names: of the requests, to say which one has the worst token.
        lengths: tokens of each request; their sum is N.

    Raises:
        ProofError: a log-prob of either side is not finite.
        ValueError: there are not as many log-probs on each side as the requests have tokens.
    """
    if not len(behaviour) == len(policy) == sum(lengths) or len(names) != len(lengths):
        raise ValueError(
            f"{len(behaviour)} behaviour log-probs, {len(policy)} policy log-probs, {len(names)} requests of "
            f"{sum(lengths)} tokens"
        )
    if len(behaviour) == 0:
        return GapStats()
    gap = behaviour.double() - policy.detach().double()
    finite = torch.isfinite(gap)
    if not bool(finite.all()):
        first = _owner(int((~finite).nonzero()[0]), names, lengths)
        raise ProofError(
            "gap",
            f"a log-prob of request {first} is not finite on one side",
            "the policy's weights have overflowed, or the trainer gives a sampled token no probability",
            "look at grad_norm and learning_rate of the steps before; start again from the last checkpoint",
        )
    worst = int(gap.abs().argmax())
    return GapStats(
        len(gap),
        float(gap.abs().sum()),
        float(gap.abs().max()),
        float((torch.exp(-gap) - 1 + gap).sum()),
        _owner(worst, names, lengths),
    )


def _owner(token: int, names: Sequence[str], lengths: Sequence[int]) -> str:
    """Name of the request that a token belongs to."""
    return names[int(np.searchsorted(np.cumsum(lengths), token, side="right"))]


def check_count(stats: GapStats, expected_tokens: int, version: int) -> None:
    """Check that every sampled token was compared.

    Raises:
        ProofError: it was not.
    """
    if stats.tokens != expected_tokens:
        raise ProofError(
            "gap",
            f"{stats.tokens} tokens were compared at version {version}, {expected_tokens} were sampled",
            "the training batch does not hold what the engine sampled",
            "this is a defect of Lockstep: report it with this message",
        )


def over_limits(stats: GapStats, limit: Tolerance) -> list[str]:
    """The limits that a gap exceeds, with its figures; empty if it passes."""
    figures = (
        ("mean_abs_gap", stats.mean_abs, limit.mean),
        ("max_abs_gap", stats.max_abs, limit.max),
        ("k3", stats.k3, limit.k3),
    )
    # Not `value > bound`: NaN must fail.
    return [f"{name} {value:.3g} > {bound:.3g}" for name, value, bound in figures if not value <= bound]


class PooledGap:
    """A gap over steps that may have few tokens each: the largest is held to its limit at once, the means once they are many."""

    # From here on means and k3 of bf16's rounding are as steady as a whole step's.
    enough = 256

    def __init__(self) -> None:
        self._gap = GapStats()

    def add(self, stats: GapStats, limit: Tolerance) -> GapStats:
        """Take in a step's gap.

        Returns:
            What is to be held to `limit`: over its limits, or not.
        """
        pooled = self._gap + stats
        if pooled.tokens >= self.enough or not stats.max_abs <= limit.max:
            self._gap = GapStats()
            return pooled
        self._gap = pooled
        return GapStats()


def gap_error(stats: GapStats, limit: Tolerance, version: int, parts: str, cause: str, fix: str) -> ProofError:
    """The error for a gap over its limits, with where it comes from (`parity/decomposition.py`)."""
    return ProofError(
        "gap",
        f"at version {version}, over {stats.tokens} sampled tokens: {', '.join(over_limits(stats, limit))} nats "
        f"(mean {stats.mean_abs:.3g}, max {stats.max_abs:.3g} in request {stats.worst}, k3 {stats.k3:.3g}); of a sample: {parts}",
        cause,
        f"{fix}. Do not raise the tolerance before the cause is known: the step would be taken on wrong data",
    )
