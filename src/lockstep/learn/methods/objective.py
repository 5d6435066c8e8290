"""The interface of a method: advantages of scored rollouts, the weight of each token, and the loss of a pack.

Each method is one subclass. An objective does not depend on the engine, on how sequences are packed, or on the number
of ranks. A loss notes its figures in a tally. The tallies of packs and ranks are added to one per optimizer step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from lockstep.algorithms.corrections import importance_weights
from lockstep.algorithms.losses import TokenLoss, clipped_policy_loss, importance_ratios
from lockstep.algorithms.segments import Segments
from lockstep.config.run import OnlineConfig
from lockstep.devices import on_host, sent
from lockstep.learn.pack import Pack
from lockstep.learn.scoring import TokenScores
from lockstep.learn.sequence import TrainingSequence, rollouts_of
from lockstep.rollouts.group import Rollout, RolloutGroup
from lockstep.tokens.arrays import Reals, filled

Config = TypeVar("Config", bound=OnlineConfig)
Scores = dict[str, Reals]
# Scores sequences with the current policy. Returns entropies by request name, on all ranks.
Entropies = Callable[[Sequence[TrainingSequence]], Scores]
Use = Callable[[np.ndarray[Any, np.dtype[np.float64]]], None]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """A pack after its forward: N tokens of B rollouts, flat.

    Attributes:
        sequences: the packed sequences. A rollout of several branches has several.
        rollouts: the first sequence of each of the B rollouts. It has the rollout's weight and unit.
        segments: which token belongs to which rollout.
        logps, entropies: (N,) under the policy, with gradient (entropies have one only if the objective asks for it).
        old_logps: (N,) log-probs of the policy at sampling time.
        behaviour_logps: (N,) log-probs of the engine.
        advantages, weights: (N,).
        pack: the pack, for columns that only some methods have.
        values: (N,) of the critic, with gradient; None if there is no critic.
        support: a figure of the sampling filters, as in `TokenScores`.
    """

    sequences: tuple[TrainingSequence, ...]
    rollouts: tuple[TrainingSequence, ...]
    segments: Segments
    logps: torch.Tensor
    entropies: torch.Tensor
    old_logps: torch.Tensor
    behaviour_logps: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    pack: Pack
    values: torch.Tensor | None = None
    support: torch.Tensor | None = None

    @classmethod
    def of(cls, pack: Pack, scores: TokenScores) -> TokenBatch:
        """Combine a pack's scores with the columns of its sequences."""
        moved = pack.sequences[0].old_logps is not None
        rollouts = tuple(own[0] for own in rollouts_of(pack.sequences))
        device = scores.logps.device
        weights = sent(torch.tensor([s.weight for s in rollouts], dtype=torch.float32), device)
        segments = Segments(sent(torch.tensor(pack.sizes), device), len(scores.logps))
        return cls(
            sequences=pack.sequences,
            rollouts=rollouts,
            segments=segments,
            logps=scores.logps,
            entropies=scores.entropies,
            # If the policy has not changed since sampling, this forward computes the old log-probs.
            old_logps=pack.column("old_logps") if moved else scores.logps.detach(),
            behaviour_logps=pack.column("behaviour_logps"),
            advantages=pack.column("advantages"),
            weights=segments.spread(weights),
            pack=pack,
            values=scores.values,
            support=scores.support,
        )

    @property
    def sequence_advantages(self) -> torch.Tensor:
        """(B,) advantage of each rollout, for methods that have one for all of its tokens."""
        return self.segments.means(self.advantages)

    def kept(self) -> torch.Tensor:
        """(N,) 1 for tokens that the policy learns from, else 0."""
        masked = any(s.kept is not None for s in self.sequences)
        return self.pack.column("kept") if masked else torch.ones_like(self.logps, requires_grad=False)


class Tally:
    """Figures of an optimizer step, added up over packs and ranks: named means (as sum and count), minima and maxima.

    Values on another device are read together, when the first figure is asked for.
    """

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}
        self._lows: dict[str, float] = {}
        self._highs: dict[str, float] = {}
        self._later: list[tuple[torch.Tensor, Use]] = []

    def later(self, values: torch.Tensor, use: Use) -> None:
        """Call a function with float64 values on the host: now, or for another device before a figure is read."""
        values = values.detach().double()
        if values.device.type == "cpu":
            use(values.numpy())
        else:
            self._later.append((values, use))

    def _settle(self) -> None:
        """Read all values that are on another device, with one copy."""
        due, self._later = self._later, []
        for values, (_, use) in zip(on_host([values for values, _ in due]), due, strict=True):
            use(values.numpy())

    def mean(self, name: str, values: torch.Tensor | float, count: float = 1, *, weight: float = 1.0) -> None:
        """Add values to a mean.

        Args:
            values: a tensor of values, or the sum of `count` values.
            weight: of each value.
        """
        if isinstance(values, torch.Tensor):
            size = values.numel()
            self.later(
                values.double().sum(), lambda total: self.mean(name, float(total), size, weight=weight)
            )
            return
        held = self._sums.setdefault(name, [0.0, 0.0])
        held[0] += weight * values
        held[1] += weight * count

    def low(self, name: str, values: torch.Tensor | float) -> None:
        """Include values, or the smallest of them, in a minimum."""
        least = float(values.min()) if isinstance(values, torch.Tensor) else values
        self._lows[name] = _extreme(min, self._lows.get(name), least)

    def high(self, name: str, values: torch.Tensor | float) -> None:
        """Include values, or the largest of them, in a maximum."""
        most = float(values.max()) if isinstance(values, torch.Tensor) else values
        self._highs[name] = _extreme(max, self._highs.get(name), most)

    def total(self, name: str) -> float:
        """The sum behind a mean; 0 if nothing was added."""
        self._settle()
        return self._sums.get(name, [0.0, 0.0])[0]

    def count(self, name: str) -> float:
        """The count behind a mean; 0 if nothing was added."""
        self._settle()
        return self._sums.get(name, [0.0, 0.0])[1]

    def figures(self) -> dict[str, float]:
        """Every mean and extreme to log, by name, without means of nothing and names that begin with `_`."""
        self._settle()
        means = {name: total / count for name, (total, count) in self._sums.items() if count}
        found = means | self._lows | self._highs
        return {name: value for name, value in found.items() if not name.startswith("_")}

    def add(self, data: dict[str, Any]) -> None:
        """Add the content of another tally, as its `data` returns it."""
        for name, (total, count) in data["sums"].items():
            self.mean(name, total, count)
        for name, value in data["lows"].items():
            self._lows[name] = _extreme(min, self._lows.get(name), value)
        for name, value in data["highs"].items():
            self._highs[name] = _extreme(max, self._highs.get(name), value)

    def data(self) -> dict[str, Any]:
        """The whole content, as JSON types."""
        self._settle()
        return {"sums": self._sums, "lows": self._lows, "highs": self._highs}


class Objective(ABC, Generic[Config]):
    """A method, as functions of rollouts and tokens.

    Attributes:
        entropy_gradient: whether the loss has a gradient through the entropies.
        config: the run's configuration.
        epoch: number of completed passes over the training data.
        router_coefficient: weight of the auxiliary loss of a mixture of experts, which the step adds to the method's
            loss; 0: there is none.
        definition: name of the definition that proves advantages and weights; None: there is none.
    """

    epoch = 0
    router_coefficient = 0.0
    definition: str | None = None
    entropy_gradient = False

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def uses_reference(self) -> bool:
        """Whether the method needs the reference model's log-probs."""
        return self.config.beta != 0.0

    @property
    def kl_in_reward(self) -> bool:
        """Whether the advantages need the log-probs of policy and reference model."""
        return False

    @property
    def scores_first(self) -> bool:
        """Whether the policy must score rollouts before they are split into steps, for advantages or masks."""
        return self.kl_in_reward

    @abstractmethod
    def with_advantages(
        self, groups: Sequence[RolloutGroup], sequences: Sequence[TrainingSequence]
    ) -> list[TrainingSequence]:
        """Sequences with their advantages.

        Args:
            groups: the groups of the whole generation, over all ranks.
            sequences: one per rollout, in the order of groups and samples. The sequence of a rollout with several
                branches has the sampled tokens of all branches, and that of a rollout in which nothing was sampled
                has no tokens.
        """

    @abstractmethod
    def sequence_weights(self, lengths: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        """Weight of a token of each completion of one optimizer step, over all ranks.

        Args:
            lengths: (B,) in tokens; 0 for a masked completion.
            groups: (B,) index of the completion's group within the generation.

        Returns:
            (B,) weights.
        """

    @abstractmethod
    def loss(self, batch: TokenBatch, tally: Tally) -> torch.Tensor:
        """A pack's share of the optimizer step's loss; a scalar. Values to log are added to `tally`."""

    def has_gradient(self, sequence: TrainingSequence) -> bool:
        """Whether a sequence contributes a gradient to the policy. Other sequences are scored without gradient.

        The auxiliary loss of routers has a gradient at every position of a sequence for which this is true.
        """
        return sequence.weight != 0.0 and (
            self.router_coefficient != 0.0 or bool(np.any(sequence.advantages))
        )

    def is_masked(self, rollout: Rollout) -> bool:
        """Whether a rollout is left out of the loss: it failed, or it was cut and the config masks such rollouts."""
        masks = getattr(self.config, "mask_truncated_completions", False)
        return rollout.failed is not None or (masks and rollout.finish_reason == "length")

    def filtered(self, group: RolloutGroup) -> bool:
        """Whether a group is left out of every step, including the number of completions."""
        return False

    def prepare_step(
        self, sequences: Sequence[TrainingSequence], entropies: Entropies
    ) -> list[TrainingSequence]:
        """Sequences of one optimizer step, over all ranks, just before its first forward.

        Args:
            entropies: computes entropies, for objectives with `scores_first`.
        """
        return list(sequences)

    def finish_step(self, tally: Tally) -> dict[str, float]:
        """Take the step's figures over all ranks, before the optimizer runs. Returns additional figures to log."""
        return {}

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, in JSON types."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's state."""

    def correction(self, batch: TokenBatch) -> torch.Tensor | None:
        """(N,) importance weights for the difference between engine and trainer; None if off."""
        config = self.config
        if not config.vllm_importance_sampling_correction:
            return None
        return importance_weights(
            batch.old_logps,
            batch.behaviour_logps,
            batch.segments,
            config.vllm_importance_sampling_mode,
            config.vllm_importance_sampling_clip_min,
            config.vllm_importance_sampling_clip_max,
        )


def scores_by_function(
    groups: Sequence[RolloutGroup], weights: Sequence[float] | None
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Each group's (G, K) scores, NaN if a function gave none, and the (K,) weights of the functions.

    In float64, because in float32 a group with equal scores could get a tiny advantage from rounding.
    """
    names = list(groups[0].rollouts[0].scores)

    def of_rollout(rollout: Rollout) -> list[float]:
        return [math.nan if (score := rollout.scores[name]) is None else float(score) for name in names]

    scores = [torch.tensor([*map(of_rollout, g.rollouts)], dtype=torch.float64) for g in groups]
    given = list(weights) if weights is not None else []
    # The scores of environments stand behind those of the functions, and have weight 1.
    return scores, torch.tensor([*given, *([1.0] * (len(names) - len(given)))])


def clipped_tokens(objective: Objective[Any], batch: TokenBatch, tally: Tally) -> torch.Tensor:
    """(N,) PPO's clipped loss with one ratio per token and the importance correction, for advantages per token."""
    ratios = importance_ratios(batch.logps, batch.old_logps, batch.segments, "token")
    token = clipped_policy_loss(
        ratios, batch.advantages, objective.config.epsilon, objective.config.clip_high
    )
    note_clipping(batch, token, tally)
    correction = objective.correction(batch)
    return token.loss if correction is None else token.loss * correction


def with_one_advantage(
    sequences: Sequence[TrainingSequence], advantages: Sequence[torch.Tensor]
) -> list[TrainingSequence]:
    """Sequences with one advantage per completion. It is the advantage of each of its tokens."""
    values = torch.cat(list(advantages)).tolist()
    return [s.but(advantages=filled(v, s.length)) for s, v in zip(sequences, values, strict=True)]


@torch.no_grad()
def note_clipping(batch: TokenBatch, token: TokenLoss, tally: Tally, *, by_sequence: bool = False) -> None:
    """Log how much was clipped, under TRL's names; `by_sequence` in means over completions, each with one ratio."""
    lengths = np.array(batch.pack.sizes)

    def note(counts: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        low, high = means = counts / np.maximum(lengths, 1)
        sums, count = (means.sum(1), len(lengths)) if by_sequence else (counts.sum(1), int(lengths.sum()))
        for name, total in {"low": sums[0], "high": sums[1], "region": sums[0] + sums[1]}.items():
            tally.mean(f"clip_ratio/{name}_mean", float(total), count)
        tally.low("clip_ratio/low_min", float(low.min()))
        tally.high("clip_ratio/high_max", float(high.max()))

    # (2, B) numbers of clipped tokens.
    clipped = torch.stack([token.low_clipped, token.high_clipped]).float()
    tally.later(batch.segments.sums_of_rows(clipped), note)


def _extreme(choose: Callable[..., float], held: float | None, value: float) -> float:
    """The smaller or larger of two values. A NaN stays."""
    if held is None or math.isnan(value):
        return value
    return held if math.isnan(held) else choose(held, value)
