"""Bets against the claim that every token was drawn from the distribution that the engine reported.

They are placed on every sampled token. A bet is a distribution r over the vocabulary that a faulty engine might sample
from. It is made from the trainer's own distribution p of the token. The token pays r(token) ÷ q(token), with q the
probability that the engine reported. If the engine drew from q, the mean pay is Σ r = 1, whatever r is: no rounding of
the trainer can make the bet unfair. If it drew from something that resembles r, the pay grows from token to token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


@dataclass(frozen=True)
class TokenDraws:
    """What the trainer's distributions p say of N sampled tokens. What several bets need is computed once.

    Attributes:
        logps: (N,) log p(token).
        entropies, variances: (N,) entropy of p, and variance of log p under p.
        below: (N,) mass of the ids that are less likely than the token.
        upto: (N,) mass of the ids that are at most as likely, the token included.
    """

    logps: Values
    entropies: Values
    variances: Values
    below: Values
    upto: Values

    @cached_property
    def surprises(self) -> Values:
        """(N,) log p(token) + entropy, of mean 0 under p."""
        return self.logps + self.entropies

    @cached_property
    def places(self) -> tuple[Values, Values, Values]:
        """(N,) where each token's place among the sorted ids begins and ends, and the log of its width.

        A place that is narrower than the rounding of its ends is widened. A density hardly changes within it.
        """
        below, upto = np.clip(self.below, 0.0, 1.0), np.clip(self.upto, 0.0, 1.0)
        width = np.maximum(upto - below, _NARROWEST)
        below = np.minimum(below, 1.0 - width)
        return below, below + width, np.log(width)


@dataclass(frozen=True, slots=True)
class Bet:
    """One bet.

    Attributes:
        suspicion: what the engine does if this bet wins, as it is said in an error.
        log_ratios: gives (N,) log(r ÷ p) of the sampled tokens.
    """

    suspicion: str
    log_ratios: Callable[[TokenDraws], Values]


def _tilted(size: float) -> Callable[[TokenDraws], Values]:
    """r = p × (1 + λu + λ²u² ÷ 2) ÷ (1 + λ²V ÷ 2), with u = log p + entropy, of mean 0 and variance V.

    The polynomial is positive everywhere and agrees with exp(λu) to the second order. Its mean needs no sum but V.
    """

    def log_ratios(draws: TokenDraws) -> Values:
        tilt = size * draws.surprises
        return np.log((1.0 + tilt + tilt**2 / 2) / (1.0 + size**2 / 2 * draws.variances))

    return log_ratios


def _by_rank(integral: Callable[[Values, TokenDraws], Values]) -> Callable[[TokenDraws], Values]:
    """r = p × the mean of a density over the token's place, from `below` to `upto`, when ids are sorted by their probability.

    Ids of the same probability share a place. The means of all places, weighted with their masses, add up to the density's integral
    from 0 to 1.

    Args:
        integral: the density's integral from 0 to (N,) places; 1 at 1. The density may depend on entropy and variance, which are
            the same for every token that could have been sampled.
    """

    def log_ratios(draws: TokenDraws) -> Values:
        begin, end, log_width = draws.places
        return np.log(integral(end, draws) - integral(begin, draws)) - log_width

    return log_ratios


_NARROWEST = 1e-6


def _power(exponent: float) -> Callable[[TokenDraws], Values]:
    return _by_rank(lambda place, draws: place**exponent)


def _cut(tail: Callable[[TokenDraws], Values], left: float) -> Callable[[TokenDraws], Values]:
    """The density is small in the tail, and constant everywhere else.

    Args:
        tail: gives (N,) masses of the tail.
        left: the density in the tail. It is not 0, because the tail of some tokens is shorter than that of others.
    """

    def integral(place: Values, draws: TokenDraws) -> Values:
        end = np.clip(tail(draws), _NARROWEST, _LONGEST)
        inside = left * np.minimum(place, end)
        return inside + np.maximum(place - end, 0.0) * (1 - left * end) / (1 - end)

    return _by_rank(integral)


_LONGEST = 0.7


def _of_mass(mass: float) -> Callable[[TokenDraws], Values]:
    return lambda draws: np.full_like(draws.logps, mass)


def _bets() -> dict[str, Bet]:
    likely, unlikely = "prefers likely tokens", "prefers unlikely tokens"
    short = "leaves out the least likely tokens"
    found: dict[str, Bet] = {}
    for size in (0.02, 0.05, 0.1, 0.2):
        found[f"tilt +{size}"] = Bet(likely, _tilted(size))
        found[f"tilt -{size}"] = Bet(unlikely, _tilted(-size))
    for exponent in (0.7, 1.5, 2.0, 8.0):
        found[f"rank {exponent}"] = Bet(likely if exponent > 1 else unlikely, _power(exponent))
    for mass in (0.003, 0.01, 0.03):
        found[f"tail {mass}"] = Bet(short, _cut(_of_mass(mass), 0.02))
    # What min-p and top-k cut grows with how flat the distribution is (fitted to samples of SmolLM2-135M).
    found["tail by variance"] = Bet(short, _cut(lambda draws: 0.02 * draws.variances, 0.1))
    found["tail by entropy"] = Bet(short, _cut(lambda draws: 0.01 * draws.entropies**2, 0.1))
    return found


# Chosen by their power on samples of SmolLM2-135M (`make draws`).
BETS = _bets()
