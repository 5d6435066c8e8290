"""Faults between the engine's answer and the gradient of the weights.

M1 to M8 stand between the engine's answer and the loss. Most of them leave every log-prob of the scoring pass right.

R1 to R9 and G1 to G6 stand between the scores and the gradient of the log-probs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

import lockstep.learn.methods.grpo as methods
import lockstep.learn.update as updating
import lockstep.rollouts.rewards as rewards
from lockstep.algorithms.advantages import group_advantages
from lockstep.algorithms.losses import TokenLoss, clipped_policy_loss
from lockstep.extras.selftest.seams import Fault, Patch, generations_become
from lockstep.extras.verify.stage import Stage
from lockstep.learn.generation import Generation
from lockstep.learn.methods.objective import Tally, TokenBatch
from lockstep.learn.pack import Pack
from lockstep.learn.sequence import TrainingSequence
from lockstep.learn.update import OptimizerStep, Policy
from lockstep.rollouts.group import Rollout, RolloutGroup

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
    pairs = zip(group.rollouts, [*texts[1:], texts[0]], strict=True)
    return replace(group, rollouts=tuple(replace(rollout, text=text) for rollout, text in pairs))


def other_row(group: RolloutGroup) -> RolloutGroup:
    return replace(group, prompt=replace(group.prompt, columns={"answer": "of another row"}))


def _scores_become(change: Callable[[list[Any]], list[Any]]) -> Callable[[Stage], Patch]:
    """What the reward functions return is put to other completions. Each function answers a list of all completions."""

    def inject(stage: Stage) -> Patch:
        real = rewards._checked
        # A stage may have spent its time for asking.
        stage.trainer.watch.asked_again.forget()
        return patch.object(rewards, "_checked", lambda *given: change(real(*given)))

    return inject


@contextmanager
def _divided_twice(stage: Stage) -> Iterator[None]:
    accelerator, hooks = stage.trainer.accelerator, stage.trainer.watch.hooks
    real = accelerator.backward
    try:
        with patch.object(accelerator, "backward", lambda loss, **kwargs: real(loss / 2, **kwargs)):
            # The backward counts as one that was there when training began.
            hooks.note()
            yield
    finally:
        hooks.note()


def _only(places: Callable[[int], slice]) -> Callable[[Stage], Patch]:
    """Only some tokens of each completion have a gradient."""

    def change(batch: TokenBatch) -> TokenBatch:
        keeps = torch.zeros_like(batch.logps)
        start = 0
        for length in batch.segments.lengths.tolist():
            keeps[start : start + length][places(length)] = 1.0
            start += length
        return replace(batch, logps=batch.logps * keeps + batch.logps.detach() * (1 - keeps))

    return _batches_become(change)


def _forgotten_ratio(batch: TokenBatch) -> TokenBatch:
    return replace(batch, old_logps=batch.old_logps - 0.3)


def _unclipped(stage: Stage) -> AbstractContextManager[Any]:
    """The ratios are far from 1, so that there is something to clip, and nothing is clipped."""

    def loss(ratios: torch.Tensor, advantages: torch.Tensor, *bounds: Any) -> TokenLoss:
        return clipped_policy_loss(ratios * 1.5, advantages, 9.0, 9.0)

    return patch.object(methods, "clipped_policy_loss", loss)


def _weight_doubled(stage: Stage) -> Patch:
    return generations_become(lambda found: found.changed(lambda s: replace(s, weight=2 * s.weight)))


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
    Fault("R5", "the weight of a token doubled", _weight_doubled),
    Fault("R6", "the text of the next completion", scored_become(next_text)),
    Fault("R7", "the columns of another row", scored_become(other_row)),
    Fault("R8", "the scores of the next completion", _scores_become(lambda scores: [*scores[1:], scores[0]])),
    Fault("R9", "all scores of a generation in reverse order", _scores_become(lambda scores: scores[::-1])),
    Fault("G1", "the loss times four", _losses_become(lambda loss, batch: 4 * loss)),
    Fault("G2", "the loss divided twice", _divided_twice),
    Fault("G3", "only the last token of a completion learns", _only(lambda n: slice(n - 1, n))),
    Fault("G4", "every second token learns", _only(lambda n: slice(0, n, 2))),
    Fault("G5", "old log-probs off by 0.3", _batches_become(_forgotten_ratio)),
    Fault("G6", "nothing is clipped, of ratios that are too large", _unclipped),
)


@contextmanager
def _learned_become(change: Callable[[TrainingSequence], TrainingSequence]) -> Iterator[None]:
    """The forward of the loss gets other sequences. The scoring pass before the first step gets the right ones."""

    def changed(real: Any) -> Callable[..., Iterator[Pack]]:
        def packed(sequences: Sequence[TrainingSequence], budget: int) -> Iterator[Pack]:
            learned = torch.is_grad_enabled()
            yield from real([change(s) for s in sequences] if learned else sequences, budget)

        return packed

    with (
        patch.object(updating, "pack_sequences", changed(updating.pack_sequences)),
        patch.object(updating, "pack_rows", changed(updating.pack_rows)),
    ):
        yield


def _hotter(stage: Stage) -> Patch:
    real = updating.score_pack

    def scored(model: Any, pack: Pack, temperature: float, *more: Any, **named: Any) -> Any:
        times = 1.5 if torch.is_grad_enabled() else 1.0
        return real(model, pack, times * temperature, *more, **named)

    return patch.object(updating, "score_pack", scored)


def _other_prompt(stage: Stage) -> Patch:
    return _learned_become(lambda s: replace(s, prompt_ids=s.prompt_ids[::-1]))


def _old_off(stage: Stage) -> Patch:
    def off(s: TrainingSequence) -> TrainingSequence:
        return s if s.old_logps is None else replace(s, old_logps=s.old_logps - 0.3)

    return _learned_become(off)


def _old_forgotten(stage: Stage) -> Patch:
    return _learned_become(lambda s: replace(s, old_logps=None))


def _other_part(stage: Stage) -> Patch:
    real = OptimizerStep.learn

    def learn(self: OptimizerStep, policy: Policy, sequences: Any, part: int) -> float:
        generation = stage.trainer.loop.generation
        assert generation is not None
        batches = generation.micro_batches
        return real(self, policy, batches[(part + 1) % len(batches)], part)

    return patch.object(OptimizerStep, "learn", learn)


def _part_twice(stage: Stage) -> Patch:
    """The first completion of a micro-batch stands in the place of the second."""
    real = OptimizerStep.learn

    def learn(self: OptimizerStep, policy: Policy, sequences: Sequence[TrainingSequence], part: int) -> float:
        first, _, *others = sequences
        return real(self, policy, [first, first, *others], part)

    return patch.object(OptimizerStep, "learn", learn)


def _behaviour_exchanged(stage: Stage) -> Patch:
    """Two completions of one length exchange the log-probs that the engine reported."""

    def exchanged(generation: Generation) -> Generation:
        every = [s for batch in generation.micro_batches for s in batch]
        pairs = ((a, b) for i, a in enumerate(every) for b in every[i + 1 :] if a.length == b.length)
        one, other = next(pairs, (every[0], every[0]))
        moved = {one.name: other.behaviour_logps, other.name: one.behaviour_logps}
        return generation.changed(lambda s: replace(s, behaviour_logps=moved.get(s.name, s.behaviour_logps)))

    return generations_become(exchanged)


def _next_tokens(stage: Stage) -> Patch:
    """Each completion gets the tokens of the next one of its group, with their log-probs. Texts and rewards stay."""

    def moved(group: RolloutGroup) -> RolloutGroup:
        others = [*group.rollouts[1:], group.rollouts[0]]
        return replace(group, rollouts=tuple(map(_with_tokens, group.rollouts, others)))

    def _with_tokens(rollout: Rollout, other: Rollout) -> Rollout:
        return replace(rollout, completion=replace(other.completion, key=rollout.key))

    source = stage.trainer.source
    real = source.score
    return patch.object(source, "score", lambda groups, state: [moved(g) for g in real(groups, state)])


def _needs_old(stage: Stage) -> str:
    why = "one step per generation: the loss uses the log-probs of its own forward"
    return why if stage.config.single_update else ""


def _needs_parts(stage: Stage) -> str:
    config = stage.config
    return "" if config.parts_per_generation * config.world_size > 1 else "a generation is one micro-batch"


LEARNED_FAULTS = (
    Fault("M1", "the forward of the loss at another temperature", _hotter),
    Fault("M2", "the forward of the loss with another prompt", _other_prompt),
    Fault("M3", "old log-probs off by 0.3 before the loss", _old_off, needs=_needs_old),
    Fault("M4", "old log-probs forgotten: those of the loss's own forward", _old_forgotten, needs=_needs_old),
    Fault("M5", "a step learns from the tokens of another part", _other_part, needs=_needs_parts),
    Fault("M6", "one completion learned twice, another one never", _part_twice),
    Fault("M7", "two completions exchange the engine's log-probs", _behaviour_exchanged),
    Fault("M8", "completions get the tokens of the next one, and keep their rewards", _next_tokens),
)
