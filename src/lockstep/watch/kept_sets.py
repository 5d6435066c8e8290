"""The ids that an engine's filters kept, compared with the trainer's own filters within rounding.

The trainer scores sampled tokens among the engine's kept ids. Therefore the parity gap does not see a filter that the
engine applies wrongly or not at all, and this proof does. The whole logits come from the hidden states of the forward
that proves the tokens, and `FilterBounds` says what the filters keep.

The proof computes the rounding of the logits that would explain each set. It is 0 if the trainer keeps the same ids.
There are two limits: one for the rounding of each token, and one for the mean over the drawn tokens. In half
precision a single token may differ by nats, and so may a set's edge. But the mean is small, and a filter that one
side ignores makes it large.

Proof `kept_ids`.
Shows: every sampled token is among the ids that its filters kept; the kept ids of drawn tokens are those that the
trainer's own filters keep, up to rounding.
Does not show: a wrong set of a token that is not drawn (the gap shows it if the log-prob differs).
When: every request; every generation, 64 tokens per micro-batch.

Logits differ by rounding, so an id at the edge of a set may be in one side's set alone. Every filter keeps the
likeliest ids. Therefore two edges say for any rounding what it keeps: ids that are surely kept, and ids that may be
kept. The order of the filters is that of `contract/distribution.py`.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.contract.distribution import Distribution
from lockstep.contract.sampling import Sampling
from lockstep.errors import ProofError
from lockstep.tokens.arrays import SmallIds
from lockstep.watch.tolerances import Tolerance

# How near vLLM's kernels for GPUs come to the edge of top-p (`vllm.v1.sample.ops.topk_topp_triton`). They do not
# sort. For at most 64 rows a ladder of 8 pivots divides the log-probs from the lowest, which is at least that of
# 1e-30, to the highest five times. For more rows, or among the ids of a top-k, the probabilities are halved 18 times,
# or until what is left is smaller than 1e-9.
_LADDER, _LONGEST, _HALVED, _SMALLEST = 9.0**-5, 70.0, 2.0**-18, 1e-9
# Steps of the search for a rounding: its result is exact to 1 / 2^10 of the largest rounding.
_HALVINGS = 10


@dataclass(frozen=True, slots=True)
class Bounds:
    """Two edges, in nats: which ids this filter and those before it keep.

    For any rounding, an id whose logit is at least `sure` is kept, and one below `possible` never.
    """

    name: str
    sure: float
    possible: float


class FilterBounds:
    """The bounds of one token's filters, for any rounding.

    Args:
        logits: (V,) logits after all steps that depend on ids, divided by the temperature; −inf for banned ids.
        searched: whether the engine searches the edge of top-p instead of sorting. Ids very near to it may then be on
            either side.
    """

    def __init__(self, logits: NDArray[np.floating], sampling: Sampling, *, searched: bool = False) -> None:
        self._sampling, self._searched = sampling, searched
        # Ascending, because this is the order that a binary search needs. Single precision is sorted faster.
        self._rising = np.sort(logits[logits > -np.inf]).astype(np.float64)
        self._likeliest = float(self._rising[-1])
        # The probability of the n likeliest ids, for each n, up to one common factor.
        self._totals = np.concatenate([[0.0], np.exp(self._rising[::-1] - self._likeliest).cumsum()])

    def after(self, rounding: float) -> list[Bounds]:
        """The bounds after each filter in force; the first are those of the ids that nothing has banned.

        `rounding` is the largest difference between the engine's and the trainer's logit of an id, in nats.
        """
        sampling, lowest = self._sampling, float(self._rising[0])
        found = [Bounds("grammar, allowed_token_ids, bad_words or min_tokens", lowest, lowest)]
        # Two logits may move towards each other.
        apart = 2 * rounding
        if sampling.min_p > 0.0:
            edge = self._likeliest + math.log(sampling.min_p)
            found.append(_narrowed(found[-1], "min_p", edge + apart, edge - apart))
        if sampling.top_k > 0:
            found.append(self._after_top_k(found[-1], sampling.top_k, apart))
        if sampling.top_p < 1.0:
            found.append(self._after_top_p(found[-1], sampling.top_p, apart))
        return found

    def rounding_for(self, lowest_kept: float, highest_missing: float, largest: float) -> float:
        """The smallest rounding, in nats, that explains a set; at most `largest`, with which the filters may keep it.

        Args:
            lowest_kept: smallest logit of an id in the set.
            highest_missing: largest logit of an id that is not in the set; −inf if there is none.
        """
        low, high = 0.0, largest
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            last = self.after(middle)[-1]
            fits = lowest_kept >= last.possible and highest_missing < last.sure
            low, high = (low, middle) if fits else (middle, high)
        return high

    def _after_top_k(self, before: Bounds, top_k: int, apart: float) -> Bounds:
        # The k-th largest logit, if that many ids pass the filters before.
        highest = self._logit(top_k - 1) if self._count(before.possible) >= top_k else -math.inf
        lowest = self._logit(top_k - 1) if self._count(before.sure) >= top_k else -math.inf
        return _narrowed(before, "top_k", highest + apart, lowest - apart)

    def _after_top_p(self, before: Bounds, top_p: float, apart: float) -> Bounds:
        """Top-p keeps an id if those that are likelier have less than `top_p` of the probability, and always one id."""
        sure, possible = self._count(before.sure), self._count(before.possible)
        # An id may be kept as long as the ids that are surely likelier have too little of the probability. Their odds
        # against the others change at most by a factor of exp(apart).
        most_above = top_p * self._totals[possible] / (top_p + (1 - top_p) * math.exp(-apart))
        above = int(np.searchsorted(self._totals[: sure + 1], most_above)) - 1
        lowest = self._logit(above) - apart if above < sure else -math.inf

        def may_leave(rank: int) -> bool:
            logit = self._logit(rank)
            as_likely, own = min(possible, self._count(logit - apart)), math.exp(logit - self._likeliest)
            above = self._totals[as_likely] - own
            rest = max(self._totals[sure] - self._totals[as_likely], 0.0) + own
            return bool(above * math.exp(apart) * (1 - top_p) >= top_p * rest)

        staying = bisect.bisect_left(range(sure), True, key=may_leave)
        highest = self._logit(staying - 1) if staying else math.inf
        if self._searched:
            total = float(self._totals[possible])
            highest, lowest = self._moved(highest, 1.0, total), self._moved(lowest, -1.0, total)
        return _narrowed(before, "top_p", highest, lowest)

    def _moved(self, edge: float, sign: float, total: float) -> float:
        """The edge that a search may find instead, above it (1) or below it (−1). The likeliest id is kept in any case.

        `total` is the probability of all ids, as a multiple of that of the likeliest id.
        """
        if math.isinf(edge):
            return edge
        step = min(self._likeliest - float(self._rising[0]), _LONGEST) * _LADDER
        moved = math.exp(edge - self._likeliest) + sign * max(_HALVED, _SMALLEST * total)
        by_halves = self._likeliest + math.log(moved) if moved > 0.0 else -math.inf
        found = max(edge + step, by_halves) if sign > 0 else min(edge - step, by_halves)
        return min(found, self._likeliest)

    def _logit(self, rank: int) -> float:
        """The logit of the id that has `rank` likelier ids."""
        return float(self._rising[len(self._rising) - 1 - rank])

    def _count(self, edge: float) -> int:
        """How many ids have a logit of at least `edge`."""
        return len(self._rising) - int(np.searchsorted(self._rising, edge))


def _narrowed(before: Bounds, name: str, sure: float, possible: float) -> Bounds:
    return Bounds(name, max(before.sure, sure), max(before.possible, possible))


@dataclass(frozen=True, slots=True)
class KeptToken:
    """A sampled token, and what decides on its set.

    Attributes:
        request: name of the request.
        place: index of the token among the sampled tokens of the completion.
        logits: (V,) float32 raw logits of the trainer.
        prompt_ids: ids before the completion.
        output_ids: ids of the completion before the token.
        masks: (C, ⌈V / 32⌉) the grammar's masks of the completion, at least up to the token; None without a grammar.
        is_current: whether the trainer's weights are those that sampled the token. Only then is the set compared.
    """

    request: str
    place: int
    logits: torch.Tensor
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    masks: torch.Tensor | None
    kept: SmallIds
    is_current: bool = True


@dataclass(frozen=True, slots=True)
class KeptSetStats:
    """What comparisons found. The results of parts can be added.

    Attributes:
        tokens: number of tokens whose sets were compared.
        differences: by how many ids the sets of the two sides differ in size, and at least one per set that differs.
        rounding: sum over the tokens of the smallest rounding of the logits that explains the set, in nats.
        nearest: largest rounding of a token, divided by its limit.
        measured, mass: of how many tokens, and the sum of the probability that the trainer gives to the ids that the
            engine kept, before top-k, top-p and min-p.
    """

    tokens: int = 0
    differences: int = 0
    rounding: float = 0.0
    nearest: float = 0.0
    measured: int = 0
    mass: float = 0.0

    @property
    def mean_rounding(self) -> float:
        """Mean rounding per token, in nats."""
        return self.rounding / max(self.tokens, 1)

    def metrics(self) -> dict[str, float]:
        """Columns of the metrics: differences per token, and nats."""
        return {
            "sampling/edge_differences": self.differences / max(self.tokens, 1),
            "sampling/edge_rounding": self.mean_rounding,
        }

    def __add__(self, other: KeptSetStats) -> KeptSetStats:
        return KeptSetStats(
            self.tokens + other.tokens,
            self.differences + other.differences,
            self.rounding + other.rounding,
            max(self.nearest, other.nearest),
            self.measured + other.measured,
            self.mass + other.mass,
        )

    def check_mean(self, sampling: Sampling, limit: Tolerance) -> None:
        """Check that the drawn tokens' sets need no more rounding on average than the gap allows."""
        largest = mean_limit(self.tokens, sampling, limit)
        if self.mean_rounding > largest:
            raise _wrong(
                f"at {self.tokens} drawn tokens the kept ids are explained only if logits differ by "
                f"{self.mean_rounding:.3g} nats on average; the limit is {largest:.3g}",
                " or ".join(sampling.filters),
            )


def mean_limit(tokens: int, sampling: Sampling, limit: Tolerance) -> float:
    """Limit on the mean rounding of some tokens, in nats."""
    return limit.mean_of(tokens) * _stretch(sampling)


@dataclass(frozen=True, slots=True)
class KeptSetProof:
    """The proof of a run. The limits on the gap bound the rounding of logits; `searched` is as in `FilterBounds`."""

    distribution: Distribution
    limit: Tolerance
    searched: bool = False

    def check(self, tokens: Iterable[KeptToken]) -> KeptSetStats:
        """Check that each set has the ids of the filters, up to rounding. The error names the filters."""
        return sum((self._check_token(token) for token in tokens), KeptSetStats())

    def _check_token(self, token: KeptToken) -> KeptSetStats:
        sampling = self.distribution.sampling
        shaped = self.distribution.shaped(token.logits, token.prompt_ids, token.output_ids, token.masks)
        logits = shaped[0].numpy()
        kept = shaped[0, torch.from_numpy(token.kept.astype(np.int64))]
        mass = float((kept.logsumexp(0) - shaped[0].logsumexp(0)).exp())
        if not token.is_current:
            return KeptSetStats(measured=1, mass=mass)
        bounds = FilterBounds(logits, sampling, searched=self.searched)
        lowest = token.kept[logits[token.kept].argmin()]
        others = logits.copy()
        others[token.kept] = -np.inf
        missing = int(others.argmax())
        of_missing = float(others[missing])
        own = bounds.after(0.0)[-1]
        if logits[lowest] >= own.possible and of_missing < own.sure:
            return KeptSetStats(1, measured=1, mass=mass)
        largest = self.limit.largest(len(token.kept)) * _stretch(sampling)
        stages = bounds.after(largest)
        for stage in stages:
            if logits[lowest] < stage.possible:
                raise _error(token, f"kept id {lowest} against {stage.name}", stage.name)
        if of_missing >= stages[-1].sure:
            names = " and ".join(stage.name for stage in stages[1:])
            raise _error(token, f"left out id {missing}, which {names} would keep", names)
        rounding = bounds.rounding_for(float(logits[lowest]), of_missing, largest)
        differences = max(abs(int((logits >= own.sure).sum()) - len(token.kept)), 1)
        return KeptSetStats(1, differences, rounding, rounding / largest, 1, mass)


def _stretch(sampling: Sampling) -> float:
    """How much larger the rounding of a processed logit may be than that of a log-prob at temperature 1."""
    penalty = sampling.repetition_penalty
    return max(penalty, 1.0 / penalty) / sampling.temperature


def _error(token: KeptToken, found: str, filters: str) -> ProofError:
    return _wrong(
        f"for sampled token {token.place} of request {token.request} the engine {found}, by more than rounding",
        filters,
    )


def _wrong(found: str, filters: str) -> ProofError:
    return ProofError(
        "kept_ids",
        found,
        f"the engine applies {filters} in another way than the run asks for, or not at all, or reports the "
        f"set of another token",
        "start the engine as Lockstep starts it, without filters or processors of its own; if it was, report "
        "this message",
    )
