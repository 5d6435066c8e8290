"""The parity gap: the difference between the engine's and the trainer's log-prob of the same token at the same weights.

The optimizer step is taken only if the gap is within its limits. The gap goes into the receipt.

Proof `gap`.
Shows: the policy gives every token that it learns from, and every token of the drawn rollouts, the log-prob that the
engine reported, and no such token is missing; with `max_staleness`, this holds for every token that the current
weights have sampled (docs/reference/methods.md#generations-ahead).
Does not show: a difference below rounding (`version` detects a sync that was skipped); tokens without a gradient in
rollouts that were not drawn (docs/internals/proof.md#groups-without-a-gradient); in half precision, a wrong mean in
fewer than 256 tokens, and another temperature of at most 2 % in 512.
When: every step, before the optimizer; in half precision the means once 256 tokens have come together, and the signed
gap's slope once there are 512 tokens of 24 prompts.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.errors import ProofError
from lockstep.watch.tolerances import Tolerance

# Log-probs on any device, or on the host.
Logps = torch.Tensor | NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class GapStats:
    """Sums over tokens, in nats, with g = behaviour log-prob − policy log-prob. The sums of parts can be added.

    Attributes:
        sum_k3: sum of exp(−g) − 1 + g.
        worst: name of the request with the largest |g|.
        sum_cubes, sum_fourths: sums of |g|³ and g⁴: how fast the tail of the distribution falls (`GapTail`).
    """

    tokens: int = 0
    sum_abs: float = 0.0
    max_abs: float = 0.0
    sum_k3: float = 0.0
    worst: str = ""
    sum_cubes: float = 0.0
    sum_fourths: float = 0.0

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
            self.sum_cubes + other.sum_cubes,
            self.sum_fourths + other.sum_fourths,
        )


def measure_gap(behaviour: Logps, policy: Logps, names: Sequence[str], lengths: Sequence[int]) -> GapStats:
    """Gap statistics of the N tokens of several requests, one request after the other.

    Args:
        behaviour, policy: (N,) log-probs of the engine and the trainer.
        lengths: number of tokens of each request; they add up to N.

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
    # numpy: a pack has few tokens, and torch takes several times as long to start an operation.
    gap = _host(behaviour) - _host(policy)
    size = np.abs(gap)
    total = float(size.sum())
    if not math.isfinite(total):
        first = _owner(int((~np.isfinite(gap)).argmax()), names, lengths)
        raise ProofError(
            "gap",
            f"a log-prob of request {first} is not finite on one side",
            "the policy's weights have overflowed, or the trainer gives a sampled token no probability",
            "look at grad_norm and learning_rate of the steps before; start again from the last checkpoint",
        )
    worst, squares = int(size.argmax()), gap * gap
    # A gap of hundreds of nats gives infinity, which every limit refuses.
    with np.errstate(over="ignore"):
        k3 = float((np.exp(-gap) - 1 + gap).sum())
    return GapStats(
        len(gap),
        total,
        float(size[worst]),
        k3,
        _owner(worst, names, lengths),
        float(squares @ size),
        float(squares @ squares),
    )


def _host(logps: Logps) -> NDArray[np.float64]:
    if isinstance(logps, torch.Tensor):
        logps = logps.detach().double().cpu().numpy()
    return np.asarray(logps, np.float64)


def _owner(token: int, names: Sequence[str], lengths: Sequence[int]) -> str:
    """Name of the request that a token belongs to."""
    return names[bisect.bisect_right(list(itertools.accumulate(lengths)), token)]


def check_count(stats: GapStats, expected_tokens: int, version: int) -> None:
    """Check that every sampled token was compared."""
    if stats.tokens != expected_tokens:
        raise ProofError(
            "gap",
            f"{stats.tokens} tokens were compared at version {version}, {expected_tokens} were sampled",
            "the training batch does not hold the tokens that the engine sampled",
            "this is a defect of Lockstep: report it with this message",
        )


class GapBounds(NamedTuple):
    """What the figures of a gap are compared with, in nats."""

    mean_abs: float
    max_abs: float
    k3: float


def bounds(stats: GapStats, limit: Tolerance) -> GapBounds:
    """The limits on the figures of this gap.

    One token may have the largest allowed gap. So each limit on a mean grows by the worst token's part of the mean.
    """
    largest, tokens = limit.largest(stats.tokens), max(stats.tokens, 1)
    worst = min(stats.max_abs, largest)
    return GapBounds(limit.mean + worst / tokens, largest, limit.k3 + (math.expm1(worst) - worst) / tokens)


def over_limits(stats: GapStats, limit: Tolerance) -> list[str]:
    """The limits that a gap exceeds, with the figures; empty if the gap passes."""
    allowed = bounds(stats, limit)
    figures = (
        ("mean_abs_gap", stats.mean_abs, allowed.mean_abs),
        ("max_abs_gap", stats.max_abs, allowed.max_abs),
        ("k3", stats.k3, allowed.k3),
    )
    # `not value <= bound` instead of `value > bound`, so that NaN fails.
    return [f"{name} {value:.3g} > {bound:.3g}" for name, value, bound in figures if not value <= bound]


class JudgedGap(NamedTuple):
    """A gap and the limits that it was compared with. Its tokens may be those of several steps (`PooledGap`)."""

    stats: GapStats
    limit: Tolerance

    def figures(self) -> dict[str, float]:
        """Every figure with its limit, in nats, and the number of tokens; empty if nothing was compared."""
        if not self.stats.tokens:
            return {}
        allowed = bounds(self.stats, self.limit)
        return {
            "tokens": self.stats.tokens,
            "mean_abs_gap": self.stats.mean_abs,
            "mean_allowed": allowed.mean_abs,
            "max_abs_gap": self.stats.max_abs,
            "max_allowed": allowed.max_abs,
            "k3": self.stats.k3,
            "k3_allowed": allowed.k3,
        }

    def metrics(self) -> dict[str, float]:
        """The means that were compared with their limits, as metrics; empty if nothing was compared."""
        found = self.figures()
        return {f"parity/judged_{name}": found[name] for name in ("mean_abs_gap", "k3", "tokens") if found}


class PooledGap:
    """Pools the gaps of steps with few tokens; `waiting` has the sums over tokens whose means are not checked yet.

    The largest gap is checked at once; the means are checked after enough tokens. In half precision the few tokens that
    a step learns from may be uncertain ones, and if the same token after the same text is in several completions, all
    of them have one and the same rounding.
    """

    # From this number of tokens on, the mean and k3 of bf16 rounding are as steady as those of a whole step.
    enough = 256

    def __init__(self, waiting: GapStats = GapStats()) -> None:
        self.waiting = waiting

    def add(self, stats: GapStats, limit: Tolerance) -> GapStats:
        """Add a step's gap. The gap to check is empty if few tokens have come together and none is over its limit."""
        pooled = self.waiting + stats
        if pooled.tokens >= self.enough or not stats.max_abs <= limit.largest(stats.tokens):
            self.waiting = GapStats()
            return pooled
        self.waiting = pooled
        return GapStats()


def gap_error(
    stats: GapStats, limit: Tolerance, version: int, parts: str, cause: str, fix: str
) -> ProofError:
    """The error for a gap over its limits. `parts`, `cause` and `fix` explain the gap."""
    return ProofError(
        "gap",
        f"at version {version}, over {stats.tokens} sampled tokens: {', '.join(over_limits(stats, limit))} nats "
        f"(mean {stats.mean_abs:.3g}, max {stats.max_abs:.3g} in request {stats.worst}, k3 {stats.k3:.3g}); "
        f"of a sample: {parts}",
        cause,
        f"{fix}. Do not raise the tolerance before the cause is known: the step would be taken on wrong data",
    )


@dataclass(frozen=True, slots=True)
class GapSlope:
    """Sums for the slope of the signed gap g on u = log p + entropy, in which a systematic difference shows.

    Rounding has every sign, so its slope is near 0 however large each gap is. A distribution at (1 + δ) times the
    temperature, or with its logits scaled, has the slope −δ: the mean of |g| may hide that in half precision.

    The tokens of one prompt are not independent: the same token after the same text has the same rounding. So the
    standard error is one of sums over prompts (A of g × u, B of u²).

    Attributes:
        products, squares: sums of g × u and of u² over tokens.
        own_products, own_both, own_squares: sums of A², A × B and B² over prompts.
    """

    tokens: int = 0
    prompts: int = 0
    products: float = 0.0
    squares: float = 0.0
    own_products: float = 0.0
    own_both: float = 0.0
    own_squares: float = 0.0

    @property
    def slope(self) -> float:
        return self.products / self.squares if self.squares > 0 else 0.0

    @property
    def error(self) -> float:
        """The standard error of the slope."""
        if not self.squares > 0:
            return 0.0
        own = self.own_products - 2 * self.slope * self.own_both + self.slope**2 * self.own_squares
        return math.sqrt(max(own, 0.0)) / self.squares

    def __add__(self, other: GapSlope) -> GapSlope:
        names = self.__slots__
        return GapSlope(*(getattr(self, name) + getattr(other, name) for name in names))


def measure_slope(
    gap: NDArray[np.float64], surprises: NDArray[np.float64], prompts: Sequence[str], lengths: Sequence[int]
) -> GapSlope:
    """The sums of N tokens of several requests, one request after the other.

    Args:
        gap, surprises: (N,) g, and log p + entropy by the policy.
        prompts: name of each request's prompt.
        lengths: number of tokens of each request; they add up to N.
    """
    if not len(gap):
        return GapSlope()
    names = list(dict.fromkeys(prompts))
    owners = np.repeat([names.index(name) for name in prompts], lengths)
    products = np.bincount(owners, gap * surprises, len(names))
    squares = np.bincount(owners, surprises * surprises, len(names))
    return GapSlope(
        len(gap),
        len(set(owners.tolist())),
        float(products.sum()),
        float(squares.sum()),
        float(products @ products),
        float(products @ squares),
        float(squares @ squares),
    )


# How many standard errors beyond its limit a slope must be, and the tokens and prompts from which on it is judged.
# After the last number of tokens a new sum begins, so that a fault that begins late is not diluted.
_ERRORS, _TOKENS, _PROMPTS, _MOST = 6.0, 512, 24, 16_384


class PooledSlope:
    """The slope over the generations of a run; `now` has the sums."""

    def __init__(self) -> None:
        self.now = GapSlope()

    def check(self, slope: GapSlope, limit: Tolerance, version: int) -> None:
        """Add a generation, and check the slope of all."""
        self.now = (GapSlope() if self.now.tokens > _MOST else self.now) + slope
        found, error = self.now.slope, self.now.error
        enough = self.now.tokens >= _TOKENS and self.now.prompts >= _PROMPTS
        # `not` instead of `>`, so that NaN fails.
        if enough and not abs(found) - _ERRORS * error <= limit.slope:
            raise ProofError(
                "gap",
                f"at version {version} the signed gap grows with how likely a token is: its slope on log p + entropy "
                f"is {found:+.3f} ± {error:.3f} over {self.now.tokens} tokens (limit {limit.slope:g}, beyond "
                f"{_ERRORS:g} standard errors)",
                f"the engine's distribution is {'flatter' if found < 0 else 'sharper'} than the policy's, as at "
                f"{1 / (1 + max(found, -0.9)):.2f} times the temperature: another temperature, or another scale of "
                "logits or attention, on one side",
                "compare temperature, logit scale, attention scale and soft-capping of both sides",
            )


# Weight of the prior: the estimate starts as if this many tokens with the dtypes' widest tail had been measured.
_PRIOR_TOKENS = 32


class GapTail:
    """Lowers a limit on the largest gap to fit the tail of the run's gaps. It never raises the limit.

    The tail is modelled as an exponential distribution. Its scale follows from the third and fourth moments: E|g|⁴ ÷
    (4 E|g|³). High moments depend mainly on the tail. Tokens without a gap (the model is certain of them) do not
    change the quotient. The limit stays above a multiple of the largest gap so far (`Tolerance.largest`).

    `outer` is the limit of the dtypes. With an engine in 8 bits it depends on the tokens, and is set before each step.
    """

    def __init__(self, limit: Tolerance) -> None:
        self.outer = limit
        self._before = GapStats()

    @property
    def limit(self) -> Tolerance:
        """The limit on the next step."""
        prior = self.outer.tail
        fourths = self._before.sum_fourths + 24 * _PRIOR_TOKENS * prior**4
        cubes = self._before.sum_cubes + 6 * _PRIOR_TOKENS * prior**3
        tail = min(prior, fourths / (4 * cubes))
        return replace(self.outer, tail=tail, widest=prior, seen=self._before.max_abs)

    def add(self, stats: GapStats) -> None:
        """Add the gap of a step that is within its limits to the estimate."""
        self._before = self._before + stats
