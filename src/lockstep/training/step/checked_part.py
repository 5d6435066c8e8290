"""A drawn part of a real optimizer step whose gradient is compared with a plain forward, for `watch/finite_differences.py`.

`training/step/model_gradient.py` draws it at the beginning of a step. `training/step/update.py` lets it go through the model in a
pack of its own, with the loss, the backward and the hooks of every other pack. What this pack adds to `.grad` stays there: the
optimizer uses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel

from lockstep.engines.protocol import Completion, RequestKey
from lockstep.tokens.arrays import filled, whole_numbers
from lockstep.training.batch.pack import Pack, units_of
from lockstep.training.batch.sequence import TrainingSequence
from lockstep.training.forward.scoring import TokenScores
from lockstep.watch.distributions import Distribution
from lockstep.watch.finite_differences import Added, Drawn

# Among so many drawn units of sequences, the shortest one is the part.
_AMONG = 4


class CheckedPart:
    """The part of one step, on one rank.

    Args:
        names: of its sequences, which have a gradient and stay in one pack.
        named: the trained tensors.
        distribution: the one that the sequences were sampled from.
        seed: draws the direction.
    """

    def __init__(
        self,
        names: frozenset[str],
        named: Mapping[str, torch.nn.Parameter],
        distribution: Distribution,
        seed: tuple[int, ...],
    ) -> None:
        self._names, self._named, self._distribution, self._seed = names, named, distribution, seed
        self._pack: tuple[TrainingSequence, ...] = ()
        self._flows: list[torch.Tensor] = []
        self._added: Added | None = None

    def split(self, sequences: Sequence[TrainingSequence]) -> list[list[TrainingSequence]]:
        """The sequences of a micro-batch: those of the part, and the others. Empty lists are left out."""
        own = [s for s in sequences if s.name in self._names]
        return [part for part in (own, [s for s in sequences if s.name not in self._names]) if part]

    @property
    def sequences(self) -> Sequence[TrainingSequence]:
        """The sequences of the part, in the order of their pack."""
        return self._pack

    @contextmanager
    def watch(self, pack: Pack, scores: TokenScores) -> Iterator[None]:
        """A context for the loss of a pack and its backward. What the pack of the part adds to the gradients is kept."""
        if pack.sequences[0].name not in self._names:
            yield
            return
        self._pack = pack.sequences
        for tensor in (scores.logps, scores.entropies, scores.values):
            flow = torch.zeros(len(scores.logps), dtype=torch.float64, device=scores.logps.device)
            if tensor is not None and tensor.requires_grad:
                tensor.register_hook(partial(_keep, flow))
            self._flows.append(flow)
        self._added = Added(self._named, self._seed)
        yield
        self._added.read()

    def gradient(self, model: PreTrainedModel, critic: torch.nn.Module | None) -> tuple[Added, Drawn] | None:
        """What the part has added to the gradients, and its sum of scores, both divided by the size of the sum's coefficients.

        None if the loss has no gradient at the part's tokens.
        """
        if self._added is None:
            return None
        coefficients = torch.stack(self._flows)
        size = float(coefficients.norm())
        if not size:
            return None
        completions = [completion_of(s) for s in self._pack]
        drawn = Drawn(model, critic, completions, coefficients / size, self._distribution)
        return self._added.scaled(1 / size), drawn


def _keep(flow: torch.Tensor, gradient: torch.Tensor) -> None:
    flow += gradient.detach()


def draw_part(batches: Sequence[Sequence[TrainingSequence]], draws: np.random.Generator) -> list[TrainingSequence]:
    """The shortest of some drawn units of a step's sequences with a gradient; empty if there is none without pictures."""
    units = [unit for batch in batches for unit in units_of(batch) if all(s.pictures is None for s in unit)]
    if not units:
        return []
    chosen = draws.permutation(len(units))[:_AMONG].tolist()
    return min((units[i] for i in chosen), key=lambda unit: sum(len(s.path) for s in unit))


def completion_of(sequence: TrainingSequence) -> Completion:
    """A sequence as an engine would have answered it. Its log-probs and versions are not those of an engine."""
    count = len(sequence.completion_ids)
    return Completion(
        RequestKey(sequence.name, 0),
        sequence.prompt_ids,
        sequence.completion_ids,
        filled(0.0, count),
        whole_numbers([0] * count),
        "length",
        sequence.sampled,
        sequence.kept_ids,
    )
