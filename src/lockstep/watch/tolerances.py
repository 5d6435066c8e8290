"""All limits of all proofs, by the dtypes on both sides, with the measurements behind them.

Measured on vLLM 0.32.0's CPU build with SmolLM2-135M-Instruct and with tiny random models of three families: `make
false-alarms` (500 syncs; 500 steps of each family in fp32 and in bf16) and `lockstep verify`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from lockstep.devices import rounds_products
from lockstep.models.arithmetic import Precision

# Probability that the largest gap of a step without a fault is over its limit, if the tail is as modelled. Then one
# in a thousand runs of a thousand steps stops without a fault.
FALSE_ALARM = 1e-6
# Measured tails reach 1.1 to 1.3 times as far as an exponential distribution with the same scale.
_REACH = 1.5
# How many times the largest gap of a run's earlier steps is still allowed. Measured: 2.5 (tiny llama in bf16, 2.8
# after 1.1 nats).
_BEYOND = 3.0


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Limits on the parity gap of one step, in nats.

    Attributes:
        mean: limit on the mean of |g|.
        tail: scale of the tail of |g|: the increase of the largest |g| if the number of tokens is multiplied by e.
        k3: limit on mean(exp(−g) − 1 + g).
        widest: the scale of the dtypes, where `tail` was measured in a run; 0: `tail` is that of the dtypes.
        seen: the largest |g| of the run's steps so far, in nats.
        slope: limit on the slope of the signed gap on log p + entropy (`GapSlope`).
    """

    mean: float
    tail: float
    k3: float
    widest: float = 0.0
    seen: float = 0.0
    slope: float = 0.02

    @property
    def is_coarse(self) -> bool:
        """Whether a side computes in less than fp32. Then the mean over a few tokens says little."""
        return self.mean > _SINGLE.mean

    def largest(self, tokens: int) -> float:
        """Limit on the largest |g| of `tokens` tokens, in nats.

        The largest of n draws of an exponential distribution of scale s exceeds s × (log n + log 1/α) with
        probability at most α. A gap of a few times the largest one so far is not a fault: in half precision,
        attention that is almost hard rounds to another token once in 10^5 times, so the true tail is longer than the
        model of it. The limit of the dtypes still holds.
        """
        scales = _REACH * (math.log(max(tokens, 1)) - math.log(FALSE_ALARM))
        return max(scales * self.tail, min(_BEYOND * self.seen, scales * self.widest))

    def mean_of(self, tokens: int) -> float:
        """Limit on the mean of few roundings, in nats. They are at most as large as gaps.

        The mean of n draws of an exponential distribution of scale s exceeds s × (1 + x) with probability at most
        exp(−n × (x − log(1 + x))) (Chernoff's bound). This is α if x − log(1 + x) = −log α / n.
        """
        wanted = -math.log(FALSE_ALARM) / max(tokens, 1)
        low, high = 0.0, 2 * wanted + 2 * math.sqrt(wanted)
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (middle, high) if middle - math.log1p(middle) < wanted else (low, middle)
        return _REACH * self.tail * (1 + high)


# fp32 on both sides: steps of the recipe mean 6e-6 to 2e-5, max 1.4e-4, k3 2e-9; canary over 500 syncs mean 1.4e-5,
# max 1.3e-4. Tails of tiny random models: 4e-6. With a tied head that missed one update: mean 0.22 to 0.33.
_SINGLE = Tolerance(mean=1e-4, tail=3e-5, k3=1e-6)
# bf16 in the engine, against bf16 autocast or fp32: mean 0.034 to 0.056, max 0.14 to 0.52, k3 1e-3 to 4e-3; the
# canary, whose tokens are unlikely: mean 0.075, max 0.47, k3 6e-3. Tails: SmolLM2-135M 0.043; tiny random models:
# qwen3 0.024, qwen2 0.10, llama 0.14. The last two do not normalise queries, so their attention is almost hard;
# llama's largest of 276,637 tokens is 2.3.
_HALF = Tolerance(mean=0.15, tail=0.15, k3=0.02)
# float32 whose products CUDA rounds to 11 bits (TF32), where bf16 has 8.
_ROUNDED = Tolerance(mean=0.02, tail=0.02, k3=4e-4)


def tolerance(engine: torch.dtype, trainer: torch.dtype) -> Tolerance:
    """Limits for an engine dtype and the dtype in which the trainer computes its forward."""
    if not {engine, trainer} <= {torch.float32, torch.float64}:
        return _HALF
    return _ROUNDED if rounds_products(engine, trainer) else _SINGLE


def probe_limit(engine: torch.dtype) -> float:
    """Limit on the largest difference of a module's outputs, minus their own rounding, ÷ their rms."""
    # Largest values over 500 syncs of every module: fp32 1.7e-5; bf16 2e-7, because its rounding is already
    # subtracted. TF32 on an H100: 8.6e-4.
    return 1e-4 if engine in (torch.float32, torch.float64) and not rounds_products(engine) else 0.01


def output_rounding(engine: torch.dtype) -> float:
    """Relative rounding of a single output. If very large, it can exceed the limit, which is relative to the rms."""
    # bf16 has 8 bits of precision: half a unit is 2^-9, and some kernels round twice.
    return 2.0**-20 if engine in (torch.float32, torch.float64) else 2.0**-7


def gradient_limit(trainer: torch.dtype) -> float:
    """Limit on the distance of the backward's gradient from a float64 forward's slope, in sizes of the gradient."""
    # Measured: fp32 3e-7 to 7e-6 on four tiny families, 4e-3 on SmolLM2-135M with text, and 0.05 once in training.
    # bf16 0.01 to 0.02, and 0.10 with almost hard attention (qwen2). Half of attention's gradient: 0.4 to 0.7.
    if trainer not in (torch.float32, torch.float64):
        return 0.4
    # Products in TF32 have 11 bits. Not measured here.
    return 0.1 if rounds_products(trainer) else 0.05


def own_limit(precision: Precision, model: PreTrainedModel) -> Tolerance:
    """Limits on the difference of two forwards of the trainer."""
    dtype = precision.dtype_of(model)
    return tolerance(dtype, dtype)
