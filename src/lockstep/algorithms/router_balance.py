"""The auxiliary loss of a mixture of experts: it rises where few experts get most tokens (arXiv 2101.03961, equations 4 to 6).

The forward of the policy gives the routers' logits of a pack. The loss is added to that of an optimizer step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Routing:
    """How routers distribute positions over E experts. Sums over positions and layers.

    Attributes:
        chosen: (E,) int64 how often each expert was chosen.
        probabilities: (E,) sum of each expert's probability, with gradient.
        rows: number of positions × number of layers.
    """

    chosen: torch.Tensor
    probabilities: torch.Tensor
    rows: int

    @classmethod
    def of(cls, logits: Sequence[torch.Tensor], copies: torch.Tensor, top_k: int) -> Routing:
        """The routing of T positions.

        Args:
            logits: per layer, (T, E) or (B, L, E) logits of the router, for any float dtype.
            copies: (T,) int64 how many times each position is counted.
            top_k: experts per token.
        """
        experts = logits[0].shape[-1]
        chosen = torch.zeros(experts, dtype=torch.long, device=logits[0].device)
        sums = []
        for layer in logits:
            wide = layer.reshape(-1, experts).to(torch.promote_types(layer.dtype, torch.float32))
            probabilities, weights = wide.softmax(-1), copies.to(layer.device)
            best = probabilities.detach().topk(top_k, dim=-1).indices.flatten()
            chosen += torch.zeros_like(chosen).scatter_add_(0, best, weights.repeat_interleave(top_k))
            # A matrix product would be in half precision under autocast.
            sums.append((probabilities * weights[:, None]).sum(0))
        return cls(chosen, torch.stack(sums).sum(0), int(copies.sum()) * len(logits))

    def counts(self) -> dict[str, Any]:
        """What `Shares.of` needs, as JSON types."""
        return {"chosen": self.chosen.tolist(), "rows": self.rows}


@dataclass(frozen=True, slots=True)
class Shares:
    """How many of a step's choices fell on each expert.

    Attributes:
        chosen: (E,) float64 mean number of choices per row; the sum is the number of experts per token.
        rows: number of rows of the step.
    """

    chosen: torch.Tensor
    rows: int

    @classmethod
    def of(cls, parts: Sequence[dict[str, Any]]) -> Shares:
        """The shares over several packs, from the `counts` of each."""
        rows = sum(part["rows"] for part in parts)
        chosen = torch.tensor([part["chosen"] for part in parts], dtype=torch.float64).sum(0)
        return cls(chosen / rows, rows)


def balance_loss(part: Routing, whole: Shares) -> torch.Tensor:
    """A pack's share of the auxiliary loss of a step; a scalar with gradient. The shares of all packs add up to the loss.

    The loss is E × Σ over experts of (mean number of choices × mean probability), over all rows of the step.
    """
    chosen = whole.chosen.to(part.probabilities.device, part.probabilities.dtype)
    return len(chosen) * (chosen * part.probabilities).sum() / whole.rows
