"""What a drawn sum of scores is over, and its gradient on the path that a run's own steps take.

A sum is over the tokens of a whole completion after its whole prompt, the longest of some drawn ones. Its neighbours in
the step go through the model in the same pack, and have no part in the sum. So packs, shared prompts, the chunks of the
head, the blocks of attention and recomputation are on the path, at every position that a completion has.

Without autocast a forward needs up to twice the memory. So only what fills at most half of a pack is computed without
it. If no completion does, the sum is over the end of a prompt and the beginning of two completions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from lockstep.config.run import OnlineConfig
from lockstep.devices import sent, usual_token_budgets
from lockstep.learn.sequence import TrainingSequence
from lockstep.learn.update import Policy
from lockstep.tokens.arrays import places_of

# The longest one of so many drawn sequences is taken.
AMONG = 4
# Completions of a sum over parts, and ids of each: the end of its prompt, and the beginning of the completion.
_COMPLETIONS, _PROMPT, _IDS = 2, 32, 12


class Used(NamedTuple):
    """Which scores a sum is over."""

    logps: bool = True
    entropies: bool = False
    values: bool = False


@dataclass(frozen=True, slots=True)
class Drawn:
    """The sequences of a drawn sum.

    Attributes:
        packed: those that go through the model, in their order.
        chosen: those that the sum is over. The others of `packed` have no part in it.
        factors: (3, N) float64 factors of the log-probs, entropies and values of the chosen sequences' N tokens.
    """

    packed: Sequence[TrainingSequence]
    chosen: Sequence[TrainingSequence]
    factors: torch.Tensor

    @classmethod
    def over(
        cls,
        packed: Sequence[TrainingSequence],
        chosen: Sequence[TrainingSequence],
        used: Used,
        size: float,
        draws: np.random.Generator,
    ) -> Drawn:
        """Signs are drawn. The factors together have a size of 1 / `size`."""
        count = sum(s.length for s in chosen)
        signs = draws.integers(0, 2, (3, count)) * 2.0 - 1.0
        factors = signs * np.array(used)[:, None] / (size * np.sqrt(count * sum(used)))
        return cls(packed, chosen, torch.from_numpy(factors))

    def with_other_ids(self, ids: np.ndarray, draws: np.random.Generator) -> Drawn:
        """The same sum over drawn ids in the places of all ids of the chosen completions."""
        other = {s.name: s.but(completion_ids=draws.choice(ids, len(s.completion_ids))) for s in self.chosen}
        packed, chosen = ([other.get(s.name, s) for s in own] for own in (self.packed, self.chosen))
        return Drawn(packed, chosen, self.factors)


def budget(config: OnlineConfig) -> int:
    """How many positions a pack of the run's steps usually has at most."""
    return config.token_budget or usual_token_budgets()[0]


def whole(
    sequences: Sequence[TrainingSequence], places: Sequence[int], most: int, draws: np.random.Generator
) -> tuple[list[TrainingSequence], list[TrainingSequence]]:
    """The longest of some sequences at drawn places, with its neighbours; and it alone.

    The neighbours add at most as many positions as the sequence has, and make at most `most` with it.
    """
    drawn = draws.permutation(np.array(places))[:AMONG].tolist()
    place = max(drawn, key=lambda i: len(sequences[i].path))
    chosen = sequences[place]
    first, last, left, grows = place, place, min(len(chosen.path), most - len(chosen.path)), True
    while grows:
        grows = False
        for other in (first - 1, last + 1):
            if 0 <= other < len(sequences) and (size := _more(sequences[other], chosen)) <= left:
                first, last, left, grows = min(first, other), max(last, other), left - size, True
    return list(sequences[first : last + 1]), [chosen]


def _more(sequence: TrainingSequence, beside: TrainingSequence) -> int:
    """How many positions a sequence adds to a pack with another one."""
    same = np.array_equal(sequence.prompt_ids, beside.prompt_ids)
    return len(sequence.completion_ids) if same else len(sequence.path)


def parts(
    sequences: Sequence[TrainingSequence], draws: np.random.Generator
) -> tuple[list[TrainingSequence], list[TrainingSequence]]:
    """Parts of a drawn sequence, and of another one of the same prompt if there is one: it shares its positions."""
    first = sequences[int(draws.integers(len(sequences)))]
    same = [s for s in sequences if s is not first and np.array_equal(s.prompt_ids, first.prompt_ids)]
    chosen = [_cut(s) for s in (first, *same[: _COMPLETIONS - 1])]
    return chosen, chosen


def _cut(sequence: TrainingSequence) -> TrainingSequence:
    """The end of the prompt and the beginning of the completion, with at least one sampled id."""
    places = places_of(sequence.sampled, len(sequence.completion_ids))
    size = max(_IDS, int(places[0]) + 1)
    kept = int((places < size).sum())
    return TrainingSequence(
        sequence.name,
        sequence.prompt_ids[-_PROMPT:],
        sequence.completion_ids[:size],
        sequence.behaviour_logps[:kept],
        sampled=None if sequence.sampled is None else sequence.sampled[:size],
        kept_ids=None if sequence.kept_ids is None else sequence.kept_ids.part(0, kept),
    )


class Gradients:
    """A context in which the trained tensors hold the gradients of a drawn sum, as the trainer computes them."""

    def __init__(
        self,
        policy: Policy,
        drawn: Drawn,
        named: Mapping[str, torch.nn.Parameter],
        config: OnlineConfig,
        *,
        entropies: bool,
    ) -> None:
        self._policy, self._drawn = policy, drawn
        self._named, self._config, self._entropies = named, config, entropies

    def __enter__(self) -> None:
        lengths = [s.length for s in self._drawn.chosen]
        names = [s.name for s in self._drawn.chosen]
        factors_of = dict(zip(names, self._drawn.factors.split(lengths, 1), strict=True))
        with self._policy.casts_kept():
            for pack in self._policy.packs(self._drawn.packed, self._config):
                if factors_of.keys() & {s.name for s in pack.sequences}:
                    self._learn(pack, factors_of)

    def _learn(self, pack: Any, factors_of: Mapping[str, torch.Tensor]) -> None:
        scores = self._policy.score(pack, self._config, entropy_gradient=self._entropies)
        # A pack may have another order.
        found = [factors_of.get(s.name, torch.zeros(3, s.length)) for s in pack.sequences]
        factors = sent(torch.cat(found, 1).to(scores.logps.dtype), scores.logps.device)
        total = (scores.logps * factors[0]).sum()
        if self._entropies:
            total = total + (scores.entropies * factors[1]).sum()
        if scores.values is not None:
            total = total + (scores.values * factors[2]).sum()
        self._policy.backward(total)

    def __exit__(self, *error: object) -> None:
        for parameter in self._named.values():
            parameter.grad = None
