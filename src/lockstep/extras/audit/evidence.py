"""Scores rollouts with the model, one plain forward per rollout: what the log-probs would be, and what the draws proof needs.

These values are compared with the log-probs that the dump reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from lockstep.contract.distribution import Distribution
from lockstep.extras.audit.dumps import AuditedRollout
from lockstep.models.autocast import Precision
from lockstep.watch.bets import TokenDraws
from lockstep.watch.rescoring import logit_chunks

Values = NDArray[np.float64]
_PLAIN = Precision()


@dataclass(frozen=True)
class Scored:
    """The model's values of the S sampled ids of a rollout.

    Attributes:
        reported: (S,) log-probs of the dump; NaN where there is none.
        own: (S,) the model's log-probs under the stated distribution.
        draws: sums over the model's distributions; None: they were not asked for.
        others: (S,) log-probs under other distributions, by name.
    """

    rollout: AuditedRollout
    reported: Values
    own: Values
    draws: TokenDraws | None = None
    others: dict[str, Values] = field(default_factory=dict)

    @property
    def gaps(self) -> Values:
        """(S,) reported − own."""
        return self.reported - self.own


@torch.no_grad()
def score(
    model: PreTrainedModel,
    rollout: AuditedRollout,
    stated: Distribution,
    precision: Precision = _PLAIN,
    others: dict[str, Distribution] | None = None,
    prompt_ids: Sequence[int] | None = None,
    *,
    draws: bool = False,
) -> Scored:
    """Score a rollout's sampled ids. No tensor of logits is larger than `LOGITS_BYTES`.

    Args:
        others: further distributions under which the ids are scored too.
        prompt_ids: another prompt than the rollout's.
        draws: whether to compute the sums for the draws proof, which cost as much as the log-probs.
    """
    prompt, tokens = list(rollout.prompt_ids if prompt_ids is None else prompt_ids), rollout.completion_ids
    wanted = {"": stated, **(others or {})}
    found: dict[str, list[float]] = {name: [] for name in wanted}
    sums: list[tuple[float, float, float, float]] = []
    place = 0
    for rows in logit_chunks(model, [*prompt, *tokens[:-1]], len(prompt) - 1, precision):
        chosen = [i for i in range(len(rows)) if rollout.sampled[place + i]]
        targets = torch.tensor([tokens[place + i] for i in chosen], dtype=torch.long)
        logits = rows[chosen].cpu()
        for name, distribution in wanted.items():
            logps = _logps(logits, distribution, prompt, tokens, [place + i for i in chosen])
            chosen_logps = logps.gather(1, targets[:, None])[:, 0]
            found[name] += chosen_logps.tolist()
            if draws and not name:
                sums += draw_sums(logps.double(), chosen_logps.double())
        place += len(rows)
    reported, scores = rollout.logprobs[rollout.sampled], {name: np.array(v) for name, v in found.items()}
    own = scores.pop("")
    # The sums of each id, as columns: entropies, variances, below, upto.
    found_draws = TokenDraws(own, *np.array(sums).reshape(-1, 4).T) if draws else None
    return Scored(rollout, reported, own, found_draws, scores)


def _logps(
    logits: torch.Tensor, distribution: Distribution, prompt: list[int], tokens: list[int], places: list[int]
) -> torch.Tensor:
    if distribution.is_tempered_only:
        return (logits / distribution.sampling.temperature).log_softmax(-1)
    rows = [distribution.logprobs(row, prompt, tokens[:i]) for row, i in zip(logits, places, strict=True)]
    return torch.stack(rows) if rows else logits


def draw_sums(logps: torch.Tensor, own: torch.Tensor) -> list[tuple[float, float, float, float]]:
    """Entropy, variance of log p, mass of less likely ids, and mass of at most as likely ids, of each row."""
    p = logps.exp()
    finite = logps.masked_fill(p == 0, 0.0)
    mean = (p * finite).sum(-1)
    variance = (p * (finite - mean[:, None]) ** 2).sum(-1)
    below = (p * (logps < own[:, None])).sum(-1)
    upto = (p * (logps <= own[:, None])).sum(-1)
    return list(zip((-mean).tolist(), variance.tolist(), below.tolist(), upto.tolist(), strict=True))
