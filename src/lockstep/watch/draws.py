"""The draws proof: every token was drawn from the distribution whose log-prob the engine reported.

An engine that samples at another temperature, cuts the tail, keeps the better of two tokens or never ends, and reports
the right log-probs, has no gap. The proof bets against such engines on every sampled token of drawn rollouts. The
product of the pays is the evidence of a bet. Without a fault it has mean 1 at any time, so it exceeds 1e6 in at most
one of a million runs of any length (Ville's inequality). Why the mean is 1:

- The pay of a token has mean 1, whatever came before it: its bet is fixed before the token is sampled.
- The seed and the number of the generation alone decide which rollouts are drawn (`learn/generation.py`). Neither a
  token nor a reward has a part in it. So the tokens that are bet on are tokens like all others.
- Rollouts that are not drawn pay nothing, even if the policy learns from them and their sums are available. It learns
  from them because of their rewards, and tokens that are chosen by a reward may be likelier or rarer than their
  log-probs say.
- A generation of which nothing is drawn leaves the evidence as it is.

The evidence is of the whole run: the receipt keeps it, and a resumed run goes on with it.

Proof `draws`.
Shows: every token was drawn from the distribution whose log-prob the engine reported: no other temperature, no cut
tail, no better one of two; no end token, earlier id or part of the vocabulary comes too rarely or too often
(docs/internals/proof.md#draws).
Does not show: a fault that is smaller than the tokens of the run can show; a choice between samples that looks at
nothing but a reward; what a `rollout_func` returned.
When: every step that has drawn rollouts (docs/internals/proof.md#groups-without-a-gradient), before the optimizer:
every token of them.

A bet is placed on every sampled token. A bet is a distribution r over the vocabulary that a faulty engine might sample
from. It is made from the trainer's own distribution p of the token. The token pays r(token) ÷ q(token), with q the
probability that the engine reported. If the engine drew from q, the mean pay is Σ r = 1, whatever r is: no rounding of
the trainer can make the bet unfair. If it drew from something that resembles r, the pay grows from token to token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.errors import ProofError
from lockstep.learn.id_classes import ClassValues
from lockstep.tokens.arrays import Flags
from lockstep.watch.id_bets import IdBet, bets_on_context, bets_on_parts

Values = NDArray[np.float64]


@dataclass(frozen=True)
class TokenDraws:
    """What the trainer's distributions p say of N sampled tokens. What several bets need is computed once.

    Attributes:
        logps: (N,) log p(token).
        entropies, variances: (N,) entropy of p, and variance of log p under p.
        below: (N,) mass of the ids that are less likely than the token.
        upto: (N,) mass of the ids that are at most as likely, the token included.
        classes: the classes of ids that each token is of, with their masses; None: nobody bets on them.
    """

    logps: Values
    entropies: Values
    variances: Values
    below: Values
    upto: Values
    classes: ClassValues | None = None

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
    """One bet: what the engine does if it wins, and (N,) log(r ÷ p) of the sampled tokens.

    Attributes:
        suspicion, reason, remedy: in the words of an error.
    """

    suspicion: str
    log_ratios: Callable[[TokenDraws], Values]
    reason: str = (
        "it samples with another temperature or filter than it reports, or something keeps the better of several "
        "samples"
    )
    remedy: str = (
        "compare the engine's sampling settings with the run's, and look for a program that chooses between "
        "samples"
    )


def _tilted(size: float) -> Callable[[TokenDraws], Values]:
    """r = p × (1 + λu + λ²u² ÷ 2) ÷ (1 + λ²V ÷ 2), with u = log p + entropy, of mean 0 and variance V.

    The polynomial is positive everywhere and agrees with exp(λu) to the second order. Its mean needs no sum but V.
    """

    def log_ratios(draws: TokenDraws) -> Values:
        tilt = size * draws.surprises
        return np.log((1.0 + tilt + tilt**2 / 2) / (1.0 + size**2 / 2 * draws.variances))

    return log_ratios


def _by_rank(integral: Callable[[Values, TokenDraws], Values]) -> Callable[[TokenDraws], Values]:
    """r = p × the mean of a density over the token's place, from `below` to `upto`, among ids sorted by probability.

    Ids of the same probability share a place. The means of all places, weighted with their masses, add up to the
    density's integral from 0 to 1.

    Args:
        integral: the density's integral from 0 to (N,) places; 1 at 1. The density may depend on entropy and
            variance, which are the same for every token that could have been sampled.
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


_LIKELY, _UNLIKELY = "prefers likely tokens", "prefers unlikely tokens"


def _bets() -> dict[str, Bet]:
    short = "leaves out the least likely tokens"
    found: dict[str, Bet] = {}
    for size in (0.02, 0.05, 0.1, 0.2):
        found[f"tilt +{size}"] = Bet(_LIKELY, _tilted(size))
        found[f"tilt -{size}"] = Bet(_UNLIKELY, _tilted(-size))
    for exponent in (0.7, 1.5, 2.0, 8.0):
        found[f"rank {exponent}"] = Bet(_LIKELY if exponent > 1 else _UNLIKELY, _power(exponent))
    for mass in (0.003, 0.01, 0.03):
        found[f"tail {mass}"] = Bet(short, _cut(_of_mass(mass), 0.02))
    # What min-p and top-k cut grows with how flat the distribution is (fitted to samples of SmolLM2-135M).
    found["tail by variance"] = Bet(short, _cut(lambda draws: 0.02 * draws.variances, 0.1))
    found["tail by entropy"] = Bet(short, _cut(lambda draws: 0.01 * draws.entropies**2, 0.1))
    return found


def _on_ids(bet: IdBet) -> Bet:
    remedy = (
        "look for what changes logits or ids after the engine has computed its log-probs: a logits processor, a "
        "plug-in, a mask of ids"
    )

    def log_ratios(draws: TokenDraws) -> Values:
        return np.zeros_like(draws.logps) if draws.classes is None else bet.log_ratios(draws.classes)

    return Bet(bet.suspicion, log_ratios, bet.reason, remedy)


# From so many sampled tokens on, a token is a late one.
_LATE = 64


def _at_places() -> dict[str, Bet]:
    """Bets on the first tokens of completions and of what follows an insertion, and on late tokens."""

    def first(classes: ClassValues) -> Flags:
        return classes.first

    def late(classes: ClassValues) -> Flags:
        return classes.places >= _LATE

    found: dict[str, Bet] = {}
    reason = "its settings, its seeds or its kernels differ from place to place of a completion"
    for where, chosen, words in (
        (first, "first", "the first tokens"),
        (late, "late", f"tokens from {_LATE} on"),
    ):
        for name, bet in ((n, b) for n, b in LIKELIHOOD.items() if n in _PLACED):
            found[f"{chosen} {name}"] = Bet(f"{bet.suspicion} at {words}", _where(where, bet), reason)
    return found


_PLACED = ("tilt +0.2", "tilt -0.2", "rank 0.7", "rank 2.0", "rank 8.0")


def _where(chosen: Callable[[ClassValues], Flags], bet: Bet) -> Callable[[TokenDraws], Values]:
    """The bet at some tokens, with r = p at all others."""

    def log_ratios(draws: TokenDraws) -> Values:
        if draws.classes is None:
            return np.zeros_like(draws.logps)
        return np.where(chosen(draws.classes), bet.log_ratios(draws), 0.0)

    return log_ratios


# Chosen by their power on samples of SmolLM2-135M (`make draws`).
LIKELIHOOD = _bets()
CONTEXT = {name: _on_ids(bet) for name, bet in bets_on_context()} | _at_places()
PARTS = {name: _on_ids(bet) for name, bet in bets_on_parts()}
BETS = {**LIKELIHOOD, **CONTEXT, **PARTS}
# The share of the stake that each bet has, as a logarithm. The bets on likelihood together have one half.
SHARES = {
    name: math.log(share / len(bets))
    for share, bets in ((0.5, LIKELIHOOD), (0.25, CONTEXT), (0.25, PARTS))
    for name in bets
}

# Largest probability that the evidence of a run without a fault ever reaches the limit.
FALSE_ALARM = 1e-6
# Digits after the point of the evidence that the receipt keeps.
_DIGITS = 5
# Nats that each token pays for the rounding of the log-softmax in fp32, which may be the same in a whole run.
SLACK = 1e-5


@dataclass(frozen=True, slots=True)
class DrawStats:
    """Sums over sampled tokens. The sums of a generation's parts can be added.

    Attributes:
        tokens: number of tokens that were bet on.
        fresh: how many of them the weights of the forward have sampled. The other sums but `evidence` are over these.
        surprise: sum of log p(token) + entropy. Its mean is 0.
        variance: sum of the variances of log p.
        completions: number of completions with fresh tokens.
        squares: sum over completions of the square of each one's own `surprise`.
        evidence: sum of the log pay of each bet.
    """

    tokens: int = 0
    fresh: int = 0
    surprise: float = 0.0
    variance: float = 0.0
    completions: int = 0
    squares: float = 0.0
    evidence: Mapping[str, float] = field(default_factory=dict)

    @property
    def z(self) -> float:
        """Standard deviations by which likely tokens are too frequent, over tokens; below 0: too rare."""
        return self.surprise / math.sqrt(self.variance) if self.variance > 0 else 0.0

    @property
    def z_completions(self) -> float:
        """The same over whole completions, measured by how much they really vary."""
        return self.surprise / math.sqrt(self.squares) if self.squares > 0 else 0.0

    def __add__(self, other: DrawStats) -> DrawStats:
        names = {**self.evidence, **other.evidence}
        return DrawStats(
            self.tokens + other.tokens,
            self.fresh + other.fresh,
            self.surprise + other.surprise,
            self.variance + other.variance,
            self.completions + other.completions,
            self.squares + other.squares,
            {name: self.evidence.get(name, 0.0) + other.evidence.get(name, 0.0) for name in names},
        )


def measure_draws(
    draws: TokenDraws, behaviour: torch.Tensor, lengths: Sequence[int], fresh: np.ndarray | None = None
) -> DrawStats:
    """Statistics of the N tokens of several completions, one completion after the other.

    Tokens of older weights are bet on like the others: the weights have not learned from them yet, and a bet needs no
    more. The other sums are about the trainer's own distribution, and leave these tokens out.

    Args:
        behaviour: (N,) the engine's log-probs.
        lengths: number of tokens of each completion; they add up to N.
        fresh: (N,) bool, whether the weights of the forward have sampled each token; None: true for all.
    """
    if not sum(lengths):
        return DrawStats()
    shift = draws.logps - behaviour.double().cpu().numpy() - SLACK
    shifts = float(shift.sum())
    evidence = {name: float(bet.log_ratios(draws).sum()) + shifts for name, bet in BETS.items()}
    counted = np.ones(len(shift), dtype=bool) if fresh is None else fresh
    surprises = np.where(counted, draws.surprises, 0.0)
    starts = np.cumsum([0, *lengths[:-1]])[np.array(lengths) > 0]
    return DrawStats(
        len(shift),
        int(counted.sum()),
        float(surprises.sum()),
        float(draws.variances[counted].sum()),
        int(np.logical_or.reduceat(counted, starts).sum()),
        float(np.square(np.add.reduceat(surprises, starts)).sum()),
        evidence,
    )


class DrawEvidence:
    """The evidence of a run: over `generations` with tokens to bet on, the logarithm of what each bet has `held`.

    A fault may begin late, when a bet has long lost what it had. So each bet starts again at every generation, with a
    share of the stake: 1 ÷ k(k + 1) at generation k, in all 1. The evidence is the mean of what all bets hold, by
    their shares. A bet that the receipt of an older version does not have holds what it would if it had paid 1.
    """

    def __init__(self) -> None:
        self.generations = 0
        self.held: dict[str, float] = {}

    def add(self, stats: DrawStats) -> None:
        """Add a generation. One without tokens that were bet on does not count."""
        if not stats.tokens:
            return
        self.generations += 1
        stake = -math.log(self.generations) - math.log(self.generations + 1)
        for name in BETS:
            before = float(np.logaddexp(self.held.get(name, -math.inf), stake))
            # Rounded, so that a line of the receipt stays short.
            self.held[name] = round(before + stats.evidence.get(name, 0.0), _DIGITS)

    @property
    def log_evidence(self) -> float:
        """Logarithm of the evidence against the claim. The stakes of later generations count as held."""
        kept = -math.log(self.generations + 1)
        values = [SHARES[name] + float(np.logaddexp(held, kept)) for name, held in self.held.items()]
        return float(np.logaddexp.reduce(values)) if values else 0.0

    @property
    def strongest(self) -> str:
        """The bet that holds most."""
        return max(self.held, key=lambda name: self.held[name])

    def data(self) -> dict[str, Any]:
        """What the receipt keeps."""
        return {"generations": self.generations, "held": dict(self.held)}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> DrawEvidence:
        """The evidence that a receipt has kept."""
        found = cls()
        found.generations = int(data["generations"])
        if found.generations:
            fair = math.log(found.generations) - math.log(found.generations + 1)
            found.held = {name: float(data["held"].get(name, fair)) for name in BETS}
        return found

    def check(self, version: int, stats: DrawStats) -> None:
        """Check that the evidence is below 1 ÷ `FALSE_ALARM`. Version and stats are those of the last generation."""
        if not self.log_evidence < -math.log(FALSE_ALARM):
            bet = BETS[self.strongest]
            raise ProofError(
                "draws",
                f"at version {version}: the sampled tokens are not draws from the distributions whose "
                f"log-probs were reported. The evidence is 1e{self.log_evidence / math.log(10):.1f} of "
                f"{1 / FALSE_ALARM:.0e} after {self.generations} generations, most by the bet "
                f"'{self.strongest}'; Z {stats.z:+.1f} over the last {stats.fresh} tokens",
                f"the engine {bet.suspicion}: {bet.reason}",
                bet.remedy,
            )


def draw_metrics(evidence: DrawEvidence, stats: DrawStats) -> dict[str, float]:
    """Metrics of a run's evidence, and of its last generation if tokens of it were bet on."""
    found = {"parity/draws_log10_evidence": evidence.log_evidence / math.log(10)}
    if stats.tokens:
        found |= {"parity/draws_z": stats.z, "parity/draws_z_completions": stats.z_completions}
    return found
