"""A random batch, flat for our functions and padded for TRL's, and trainers of TRL that have no model.

TRL's own methods run on the padded batch. A trainer is made without its constructor and gets the attributes that
these methods read. Padding holds arbitrary numbers, so that a test fails if a result depends on them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from lockstep.algorithms.segments import Segments

JUNK = -1.7


@dataclass(frozen=True)
class Batch:
    """Completions as flat tokens; `advantages` has shape (B,), all other tensors have shape (N,)."""

    segments: Segments
    logps: torch.Tensor
    old: torch.Tensor
    behaviour: torch.Tensor
    reference: torch.Tensor
    entropies: torch.Tensor
    advantages: torch.Tensor

    def rows(self, keep: slice) -> Batch:
        """The batch with only some of the completions."""
        starts = [0, *self.segments.lengths.cumsum(0).tolist()]
        first, last, _ = keep.indices(len(self.segments.lengths))
        tokens = slice(starts[first], starts[last])
        flat = (self.logps, self.old, self.behaviour, self.reference, self.entropies)
        return Batch(
            Segments(self.segments.lengths[keep]), *(part[tokens] for part in flat), self.advantages[keep]
        )

    def padded(self, values: torch.Tensor, fill: float = JUNK) -> torch.Tensor:
        """(B, T) of (N,) values, right-padded; differentiable."""
        lengths = self.segments.lengths.tolist()
        width = max(lengths)
        parts = values.split(lengths)
        return torch.stack([torch.cat([row, row.new_full((width - len(row),), fill)]) for row in parts])

    @property
    def mask(self) -> torch.Tensor:
        """(B, T) int64, 1 for a token."""
        return self.padded(torch.ones(len(self.logps)), 0.0).long()


def random_batch(seed: int, lengths: tuple[int, ...] = (3, 7, 1, 0, 5, 6), drift: float = 0.35) -> Batch:
    """A batch whose log-probs have changed since sampling, whose sides differ, and with advantages of both signs."""
    random = torch.Generator().manual_seed(seed)

    def noise() -> torch.Tensor:
        return drift * torch.randn(sum(lengths), generator=random)

    old = -3 * torch.rand(sum(lengths), generator=random) - 0.05
    advantages = torch.randn(len(lengths), generator=random)
    advantages[:2] = torch.tensor([0.8, -1.3])
    entropies = 4 * torch.rand(sum(lengths), generator=random)
    return Batch(
        Segments(torch.tensor(lengths)),
        old + noise(),
        old,
        old + noise() / 4,
        old + noise(),
        entropies,
        advantages,
    )


class OneProcess:
    """The functions of accelerate that TRL calls, for one process."""

    num_processes = 1
    process_index = 0
    is_main_process = True
    sync_gradients = True
    device = torch.device("cpu")

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        return value

    gather_for_metrics = gather

    def reduce(self, value: torch.Tensor, reduction: str) -> torch.Tensor:
        return value

    def pad_across_processes(self, value: torch.Tensor, dim: int, pad_index: float) -> torch.Tensor:
        return value

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


def without_model(trainer_class: type, scores: Callable[..., Any], **attributes: object) -> Any:
    """A trainer of TRL whose log-probs come from `scores`, with the attributes that the tested methods read."""
    trainer = object.__new__(trainer_class)
    given = {
        "accelerator": OneProcess(),
        "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
        "_metrics": {"train": defaultdict(list)},
        "aux_loss_enabled": False,
        "_get_per_token_logps_and_entropies": scores,
        **attributes,
    }
    for name, value in given.items():
        setattr(trainer, name, value)
    return trainer


def ids_of(batch: Batch) -> dict[str, torch.Tensor]:
    """The ids and masks of a batch for TRL's losses: one prompt token, any completion tokens."""
    rows = len(batch.advantages)
    return {
        "prompt_ids": torch.ones(rows, 1, dtype=torch.long),
        "prompt_mask": torch.ones(rows, 1, dtype=torch.long),
        "completion_ids": torch.ones_like(batch.mask),
        "completion_mask": batch.mask,
    }
