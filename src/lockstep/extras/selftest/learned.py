"""Faults between the engine's answer and the loss: M1 to M8. Most of them leave every log-prob of the scoring pass right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

import lockstep.training.step.update as updating
from lockstep.extras.selftest.seams import Fault, Patch, generations_become
from lockstep.extras.verify.stage import Stage
from lockstep.rollouts.group import Rollout, RolloutGroup
from lockstep.training.batch.pack import Pack
from lockstep.training.batch.sequence import TrainingSequence
from lockstep.training.step.generation import Generation
from lockstep.training.step.update import OptimizerStep, Policy


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
        return real(model, pack, 1.5 * temperature if torch.is_grad_enabled() else temperature, *more, **named)

    return patch.object(updating, "score_pack", scored)


def _other_prompt(stage: Stage) -> Patch:
    return _learned_become(lambda s: replace(s, prompt_ids=s.prompt_ids[::-1]))


def _old_off(stage: Stage) -> Patch:
    return _learned_become(lambda s: replace(s, old_logps=s.old_logps - 0.3) if s.old_logps is not None else s)


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
    return "one step per generation: the loss uses the log-probs of its own forward" if _single(stage) else ""


def _needs_parts(stage: Stage) -> str:
    config = stage.config
    return "" if config.parts_per_generation * config.world_size > 1 else "a generation is one micro-batch"


def _single(stage: Stage) -> bool:
    return stage.config.single_update


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
