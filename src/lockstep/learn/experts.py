"""Mixtures of experts: which experts the routers choose, and the loss that balances them.

The auxiliary loss rises where few experts get most tokens (arXiv 2101.03961, equations 4 to 6). It needs how often each
expert is chosen. A parity gap is explained by the choices in two precisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from lockstep.errors import InputError
from lockstep.learn.pack import Pack


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
            logits: per layer, (T, E) or (B, L, E) logits of the router.
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
    """A pack's share of the auxiliary loss of a step; a scalar with gradient.

    The loss is E × Σ over experts of (mean number of choices × mean probability), over all rows of the step.
    """
    chosen = whole.chosen.to(part.probabilities.device, part.probabilities.dtype)
    return len(chosen) * (chosen * part.probabilities).sum() / whole.rows


def has_routers(model: PreTrainedModel) -> bool:
    """Whether a causal language model can return the logits of routers."""
    return hasattr(model.config.get_text_config(), "output_router_logits")


def experts_per_token(model: PreTrainedModel) -> int:
    """The number of experts per token, as the model's own auxiliary loss counts them."""
    found = getattr(model, "num_experts_per_tok", None)
    return int(model.config.get_text_config().num_experts_per_tok if found is None else found)


def chosen_experts(logits: Sequence[torch.Tensor], top_k: int) -> torch.Tensor:
    """(L, T, K) ids of the experts of T positions, ascending, from each layer's (T, E) or (B, T / B, E) logits."""
    wide = torch.stack([layer.reshape(-1, layer.shape[-1]).float() for layer in logits])
    return wide.softmax(-1).topk(top_k, dim=-1).indices.sort(-1).values


# By how much the two losses may differ. In half precision a model rounds its routers' probabilities to few digits.
_CLOSE, _CLOSE_IN_HALF = 1e-4, 0.02
# Number of tokens of the check.
_TOKENS = 32


def routing_of(model: PreTrainedModel, logits: Sequence[torch.Tensor], pack: Pack) -> Routing:
    """The routing of a pack, in which each position counts once per sequence that goes through it.

    Raises:
        InputError: gradients are on, and no router gets one.
    """
    if torch.is_grad_enabled() and not any(layer.requires_grad for layer in logits):
        raise InputError(
            "the auxiliary loss reaches no router of this model: either gradient checkpointing is re-entrant (set "
            'gradient_checkpointing_kwargs={"use_reentrant": false}), or nothing before a router is trained (set '
            "router_aux_loss_coef=0)"
        )
    return Routing.of(logits, pack.copies, experts_per_token(model))


@torch.no_grad()
def check_routers(model: PreTrainedModel) -> None:
    """Refuse a model that returns no logits of its routers, or computes another auxiliary loss from them."""
    ids = torch.arange(_TOKENS, device=model.device)[None] % model.get_input_embeddings().weight.shape[0]
    was_training = model.training
    model.eval()
    try:
        outputs = model(input_ids=ids, use_cache=False, output_router_logits=True)
    finally:
        model.train(was_training)
    own, logits = getattr(outputs, "aux_loss", None), getattr(outputs, "router_logits", None)
    # A family may route in several parts, whose rows are not tokens (Doge).
    if logits and own is not None and all(layer.numel() == _TOKENS * logits[0].shape[-1] for layer in logits):
        routing = Routing.of(logits, torch.ones_like(ids[0]), experts_per_token(model))
        found = balance_loss(routing, Shares.of([routing.counts()]))
        close = _CLOSE_IN_HALF if logits[0].dtype.itemsize == 2 else _CLOSE
        if abs(float(found) - float(own)) <= close * abs(float(own)):
            return
    raise InputError(
        f"the auxiliary loss of {type(model).__name__}'s routers is not the usual one of a mixture of "
        "experts, and is not supported; set router_aux_loss_coef=0 to train without it"
    )
