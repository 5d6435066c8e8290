"""Compares the ids that an engine's filters kept with the trainer's own filters, at drawn tokens.

The trainer scores sampled tokens among the engine's kept ids. Therefore the parity gap does not see a filter that the
engine applies wrongly or not at all, and this proof does. The whole logits come from the hidden states of the forward
that proves the tokens, and `watch/filter_bounds.py` says what the filters keep.

The proof computes the rounding of the logits that would explain each set. It is 0 if the trainer keeps the same ids. There are two
limits: one for the rounding of each token, and one for the mean over the drawn tokens. In half precision a single token may differ
by nats, and so may a set's edge. But the mean is small, and a filter that one side ignores makes it large.

Proof `kept_ids`.
Shows: every sampled token is among the ids that its filters kept; the kept ids of drawn tokens are those that the
trainer's own filters keep, up to rounding.
Does not show: a wrong set of a token that is not drawn (the gap shows it if the log-prob differs).
When: every request; every generation, 64 tokens per micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lockstep.contract.distribution import Distribution
from lockstep.contract.sampling import Sampling
from lockstep.errors import ProofError
from lockstep.tokens.arrays import SmallIds
from lockstep.watch.filter_bounds import FilterBounds
from lockstep.watch.tolerances import Tolerance


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
        kept: the ids that the engine kept.
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
        measured: number of tokens, compared or not, of which `mass` is a sum.
        mass: sum over them of the probability that the trainer gives to the kept ids before top-k, top-p and min-p.
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
        """Check the mean rounding of a generation's drawn tokens.

        Raises:
            ProofError: the sets need more rounding on average than the gap allows. The error names the filters.
        """
        largest = mean_limit(self.tokens, sampling, limit)
        if self.mean_rounding > largest:
            raise _wrong(
                f"at {self.tokens} drawn tokens the kept ids are explained only if logits differ by {self.mean_rounding:.3g} nats "
                f"on average; the limit is {largest:.3g}",
                " or ".join(sampling.filters),
            )


def mean_limit(tokens: int, sampling: Sampling, limit: Tolerance) -> float:
    """Limit on the mean rounding of some tokens, in nats."""
    return limit.mean_of(tokens) * _stretch(sampling)


@dataclass(frozen=True, slots=True)
class KeptSetProof:
    """The proof of a run.

    Attributes:
        distribution: the distribution that every request asks for.
        limit: limits on the gap. They bound the rounding of logits.
        searched: whether the engine searches the edge of top-p instead of sorting (`FilterBounds`).
    """

    distribution: Distribution
    limit: Tolerance
    searched: bool = False

    def check(self, tokens: Iterable[KeptToken]) -> KeptSetStats:
        """Compare the set of each token.

        Raises:
            ProofError: an id is in an engine's set, or missing in it, against the filters and by more than rounding. The error
                names the filters.
        """
        return sum((self._check_token(token) for token in tokens), KeptSetStats())

    def _check_token(self, token: KeptToken) -> KeptSetStats:
        sampling = self.distribution.sampling
        shaped = self.distribution.shaped(token.logits, token.prompt_ids, token.output_ids, token.masks)
        logits = shaped[0].numpy()
        mass = float(
            (shaped[0, torch.from_numpy(token.kept.astype(np.int64))].logsumexp(0) - shaped[0].logsumexp(0)).exp()
        )
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
        f"for sampled token {token.place} of request {token.request} the engine {found}, by more than rounding", filters
    )


def _wrong(found: str, filters: str) -> ProofError:
    return ProofError(
        "kept_ids",
        found,
        f"the engine applies {filters} in another way than the run asks for, or not at all, or reports the set of another token",
        "start the engine as Lockstep starts it, without filters or processors of its own; if it was, report this message",
    )
