"""Faults between the scores and the gradient of the log-probs: R1 to R9 and G1 to G6."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

import lockstep.rollouts.scores.rewards as rewards
import lockstep.training.methods.grpo as methods
from lockstep.algorithms.advantages import group_advantages
from lockstep.algorithms.policy_loss import TokenLoss, clipped_policy_loss
from lockstep.extras.selftest.seams import Fault, Patch, generations_become
from lockstep.extras.verify.stage import Stage
from lockstep.rollouts.group import RolloutGroup
from lockstep.training.batch.sequence import TrainingSequence
from lockstep.training.methods.objective import Tally, TokenBatch
from lockstep.training.step.generation import Generation

Groups = list[torch.Tensor]


def _advantages_become(change: Callable[[Groups, Groups], Groups]) -> Callable[[Stage], Patch]:
    """The method computes other advantages from the rewards."""

    def made(rewards: Groups, scale: Any) -> Groups:
        return change(rewards, group_advantages(rewards, scale))

    return lambda stage: patch.object(methods, "group_advantages", made)


def _other_mean(rewards: Groups, right: Groups) -> Groups:
    return group_advantages([torch.cat(rewards)], "group")[0].split([len(g) for g in rewards])


def _losses_become(change: Callable[[torch.Tensor, TokenBatch], torch.Tensor]) -> Callable[[Stage], Patch]:
    """The loss of a pack is changed after the method has computed it."""

    def inject(stage: Stage) -> Patch:
        objective = stage.trainer.objective
        real = objective.loss

        def loss(batch: TokenBatch, tally: Tally) -> torch.Tensor:
            return change(real(batch, tally), batch)

        return patch.object(objective, "loss", loss)

    return inject


def _batches_become(change: Callable[[TokenBatch], TokenBatch]) -> Callable[[Stage], Patch]:
    """The method computes its loss from other values per token."""

    def inject(stage: Stage) -> Patch:
        objective = stage.trainer.objective
        real = objective.loss
        return patch.object(objective, "loss", lambda batch, tally: real(change(batch), tally))

    return inject


def scored_become(change: Callable[[RolloutGroup], RolloutGroup]) -> Callable[[Stage], Patch]:
    """Reward functions get other groups than those that were sampled."""

    def inject(stage: Stage) -> Patch:
        source = stage.trainer.source
        real = source.score
        return patch.object(source, "score", lambda groups, state: real([change(g) for g in groups], state))

    return inject


def next_text(group: RolloutGroup) -> RolloutGroup:
    texts = [r.text for r in group.rollouts]
    moved = [*texts[1:], texts[0]]
    return replace(group, rollouts=tuple(replace(r, text=t) for r, t in zip(group.rollouts, moved, strict=True)))


def other_row(group: RolloutGroup) -> RolloutGroup:
    return replace(group, prompt=replace(group.prompt, columns={"answer": "of another row"}))


def _scores_become(change: Callable[[list[Any]], list[Any]]) -> Callable[[Stage], Patch]:
    """What the reward functions return is put to other completions. Each function answers a list of all completions."""

    def inject(stage: Stage) -> Patch:
        real = rewards._checked
        # A stage may have spent its time for asking.
        stage.trainer.watch.asked_again.forget()
        return patch.object(rewards, "_checked", lambda name, answer, count: change(real(name, answer, count)))

    return inject


@contextmanager
def _divided_twice(stage: Stage) -> Iterator[None]:
    real, hooks = stage.trainer.accelerator.backward, stage.trainer.watch.hooks
    try:
        with patch.object(stage.trainer.accelerator, "backward", lambda loss, **kwargs: real(loss / 2, **kwargs)):
            # The backward counts as one that was there when training began.
            hooks.note()
            yield
    finally:
        hooks.note()


def _only(places: Callable[[int], slice]) -> Callable[[TokenBatch], TokenBatch]:
    """Only some tokens of each completion have a gradient."""

    def change(batch: TokenBatch) -> TokenBatch:
        keeps = torch.zeros_like(batch.logps)
        start = 0
        for length in batch.segments.lengths.tolist():
            keeps[start : start + length][places(length)] = 1.0
            start += length
        return replace(batch, logps=batch.logps * keeps + batch.logps.detach() * (1 - keeps))

    return change


def _forgotten_ratio(batch: TokenBatch) -> TokenBatch:
    return replace(batch, old_logps=batch.old_logps - 0.3)


def _unclipped(stage: Stage) -> AbstractContextManager[Any]:
    """The ratios are far from 1, so that there is something to clip, and nothing is clipped."""

    def loss(ratios: torch.Tensor, advantages: torch.Tensor, *bounds: Any) -> TokenLoss:
        return clipped_policy_loss(ratios * 1.5, advantages, 9.0, 9.0)

    return patch.object(methods, "clipped_policy_loss", loss)


def _weights_of(change: Callable[[TrainingSequence], TrainingSequence]) -> Callable[[Stage], Patch]:
    def changed(generation: Generation) -> Generation:
        return generation.changed(change)

    return lambda stage: generations_become(changed)


def _rotated(rewards: Groups, right: Groups) -> Groups:
    return [own.roll(1) for own in right]


def _one_sign(rewards: Groups, right: Groups) -> Groups:
    return [-right[0], *right[1:]]


def _signs(rewards: Groups, right: Groups) -> Groups:
    return [-own for own in right]


LOSS_FAULTS = (
    Fault("R1", "advantages rotated within each group", _advantages_become(_rotated)),
    Fault("R2", "all advantages with the wrong sign", _advantages_become(_signs)),
    Fault("R3", "one group's advantages with the wrong sign", _advantages_become(_one_sign)),
    Fault("R4", "the mean of the batch in place of the group's", _advantages_become(_other_mean)),
    Fault("R5", "the weight of a token doubled", _weights_of(lambda s: replace(s, weight=2 * s.weight))),
    Fault("R6", "the text of the next completion", scored_become(next_text)),
    Fault("R7", "the columns of another row", scored_become(other_row)),
    Fault("R8", "the scores of the next completion", _scores_become(lambda scores: [*scores[1:], scores[0]])),
    Fault("R9", "all scores of a generation in reverse order", _scores_become(lambda scores: scores[::-1])),
    Fault("G1", "the loss times four", _losses_become(lambda loss, batch: 4 * loss)),
    Fault("G2", "the loss divided twice", _divided_twice),
    Fault("G3", "only the last token of a completion learns", _batches_become(_only(lambda n: slice(n - 1, n)))),
    Fault("G4", "every second token learns", _batches_become(_only(lambda n: slice(0, n, 2)))),
    Fault("G5", "old log-probs off by 0.3", _batches_become(_forgotten_ratio)),
    Fault("G6", "nothing is clipped, of ratios that are too large", _unclipped),
)
