"""Compares the ids that an engine's filters kept with the trainer's own filters, at drawn tokens.

`training/generate/proofs.py` uses it once per generation, before the policy moves. The trainer scores sampled tokens among the
engine's kept ids. Therefore the parity gap does not see a filter that the engine applies wrongly or not at all, and this proof
does. The whole logits come from a forward of one completion alone (`parity/rescoring.py`), and the filters are those of
`engines/filters/sampling.py`.

The proof computes the rounding of the logits that would explain each set. It is 0 if the trainer keeps the same ids. There are two
limits: one for the rounding of each token, and one for the mean over the drawn tokens. In half precision a single token may differ
by nats, and so may a set's edge. But the mean is small, and a filter that one side ignores makes it large.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedModel

from lockstep.engines.filters.sampling import filtered
from lockstep.engines.protocol import Completion, Sampling
from lockstep.errors import ProofError
from lockstep.parity.distributions import Distribution
from lockstep.parity.filter_bounds import FilterBounds
from lockstep.parity.rescoring import Precision, row_logits
from lockstep.parity.tolerances import Tolerance
from lockstep.tokens.arrays import Ids

# Tokens of a generation whose sets are compared. Only the first ids of a completion are read for it.
_DRAWN, _LONGEST = 64, 4096


@dataclass(frozen=True, slots=True)
class KeptSetStats:
    """What comparisons found.

    Attributes:
        tokens: number of tokens whose sets were compared.
        differences: number of ids that only one side keeps, and that lie within rounding of an edge.
        rounding: sum over the tokens of the smallest rounding of the logits that explains the set, in nats.
        nearest: largest rounding of a token, divided by its limit.
        mean_limit: limit on the mean rounding, in nats.
    """

    tokens: int = 0
    differences: int = 0
    rounding: float = 0.0
    nearest: float = 0.0
    mean_limit: float = math.inf

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
        )


@dataclass(frozen=True, slots=True)
class KeptSetProof:
    """The proof of a run.

    Attributes:
        model: the policy. When a generation is checked, it holds the weights that the engine holds.
        distribution: the distribution that every request asks for.
        precision: precision of the trainer's forward.
        limit: limits on the gap. They bound the rounding of logits.
    """

    model: PreTrainedModel
    distribution: Distribution
    precision: Precision
    limit: Tolerance

    @property
    def sampling(self) -> Sampling:
        return self.distribution.sampling

    def check(self, completions: Sequence[Completion], version: int) -> KeptSetStats:
        """Compare the sets of drawn tokens, of as few completions as possible.

        Args:
            version: the model's weight version. Tokens of other versions are left out.

        Raises:
            ProofError: an id is in an engine's set, or missing in it, against the filters and by more than rounding; or the sets
                need more rounding in the mean than the gap allows. The error names the filters.
        """
        rng, found = np.random.default_rng(version), KeptSetStats()
        for place in rng.permutation(len(completions)):
            drawn = _drawn(completions[place], version, _DRAWN - found.tokens, rng)
            if len(drawn):
                found += self._check_completion(completions[place], drawn)
            if found.tokens >= _DRAWN:
                break
        found = replace(found, mean_limit=self.limit.mean_of(found.tokens) * self._stretch)
        if found.mean_rounding > found.mean_limit:
            raise _mean_error(found, self.sampling)
        return found

    def _check_completion(self, completion: Completion, drawn: Ids) -> KeptSetStats:
        """Compare the sets of drawn tokens of one completion."""
        prompt, output = completion.prompt_ids.tolist(), completion.token_ids.tolist()
        positions = completion.sampled_places[drawn]
        path, predictors = [*prompt, *output[: positions[-1]]], len(prompt) - 1 + positions
        masks = self.distribution.masks(output[: positions[-1] + 1])
        found = KeptSetStats()
        rows = row_logits(self.model, path, predictors, self.precision, completion.pictures)
        for token, position, row in zip(drawn.tolist(), positions.tolist(), rows, strict=True):
            shaped = self.distribution.shaped(row, prompt, output[:position], masks)
            found += self._check_token(completion, token, shaped)
        return found

    def _check_token(self, completion: Completion, token: int, shaped: torch.Tensor) -> KeptSetStats:
        """Compare the set of one token.

        Args:
            shaped: (1, V) logits after all steps that depend on ids, divided by the temperature.
        """
        assert completion.kept_ids is not None
        ids = completion.kept_ids.part(token, token + 1).ids
        kept = np.zeros(shaped.shape[1], dtype=bool)
        kept[ids] = True
        own = (filtered(shaped, self.sampling)[0].cpu() > -torch.inf).numpy()
        differences = int((own != kept).sum())
        if not differences:
            return KeptSetStats(1)
        logits = shaped[0].double().cpu().numpy()
        bounds, largest = FilterBounds(logits, self.sampling), self.limit.largest(len(ids)) * self._stretch
        lowest, missing = ids[logits[ids].argmin()], int(np.where(kept, -np.inf, logits).argmax())
        of_missing = -np.inf if kept[missing] else logits[missing]
        stages = bounds.after(largest)
        for stage in stages:
            if logits[lowest] < stage.possible:
                raise _error(completion, token, f"kept id {lowest} against {stage.name}", stage.name)
        if of_missing >= stages[-1].sure:
            names = " and ".join(stage.name for stage in stages[1:])
            raise _error(completion, token, f"left out id {missing}, which {names} would keep", names)
        rounding = bounds.rounding_for(logits[lowest], of_missing, largest)
        return KeptSetStats(1, differences, rounding, rounding / largest)

    @property
    def _stretch(self) -> float:
        """How much larger the rounding of a processed logit may be than that of a log-prob at temperature 1."""
        penalty = self.sampling.repetition_penalty
        return max(penalty, 1.0 / penalty) / self.sampling.temperature


def _drawn(completion: Completion, version: int, wanted: int, rng: np.random.Generator) -> Ids:
    """Indices of up to `wanted` sampled tokens of a version, ascending, among the first ids of a completion."""
    near = completion.sampled_places + len(completion.prompt_ids) < _LONGEST
    fresh = np.flatnonzero(near & (completion.sampled_versions == version))
    return np.sort(rng.choice(fresh, min(wanted, len(fresh)), replace=False))


def _error(completion: Completion, token: int, found: str, filters: str) -> ProofError:
    return _wrong(
        f"for sampled token {token} of request {completion.key} the engine {found}, by more than rounding", filters
    )


def _mean_error(found: KeptSetStats, sampling: Sampling) -> ProofError:
    names = " or ".join(sampling.filters)
    return _wrong(
        f"at {found.tokens} drawn tokens the kept ids are explained only if logits differ by {found.mean_rounding:.3g} nats in the "
        f"mean; the limit is {found.mean_limit:.3g}",
        names,
    )


def _wrong(found: str, filters: str) -> ProofError:
    return ProofError(
        "kept_ids",
        found,
        f"the engine applies {filters} otherwise than the run asks for, or not at all, or reports the set of another token",
        "start the engine as Lockstep starts it, without filters or processors of its own; if it was, report this message",
    )
