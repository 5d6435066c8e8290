"""Faults of the trainer's own optimizer step: A1 to A6."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

import lockstep.rollouts.driver as collecting
import lockstep.training.step.update as updating
from lockstep.contract.protocol import Completion, GenerationRequest
from lockstep.extras.selftest.seams import Fault, Patch, answers_become, at_temperature_one, generations_become
from lockstep.extras.verify.stage import Stage
from lockstep.training.batch.sequence import TrainingSequence
from lockstep.training.step.generation import Generation

Batch = tuple[TrainingSequence, ...]


def _mean_of_parts(generation: Generation, share: float) -> Generation:
    """Each micro-batch is normalised by its own number of tokens, and counts with `share`."""

    def weighted(batch: Batch) -> Batch:
        tokens = sum(s.length for s in batch)
        return tuple(replace(s, weight=share / tokens) for s in batch)

    return replace(generation, micro_batches=tuple(weighted(batch) for batch in generation.micro_batches))


def _summed(stage: Stage) -> Patch:
    return generations_become(lambda generation: _mean_of_parts(generation, 1.0))


def _averaged(stage: Stage) -> Patch:
    return generations_become(lambda g: _mean_of_parts(g, 1.0 / len(g.micro_batches)))


def _attends_to_others(stage: Stage) -> Patch:
    """A token sees every token before it in its row, also those of sibling completions and the padding."""
    real = updating.pack_sequences

    def packed(sequences: Sequence[TrainingSequence], budget: int) -> Iterator[Any]:
        for pack in real(sequences, budget):
            assert pack.ends is not None
            yield replace(pack, ends=torch.full_like(pack.ends, len(pack.ends)))

    return patch.object(updating, "pack_sequences", packed)


def _needs_tree(stage: Stage) -> str:
    is_plain = stage.trainer.loop.policy().plain_rows
    return "the model learns from plain rows, which hold one completion each" if is_plain else ""


def _guessed_reason(stage: Stage) -> Patch:
    def guessed(requests: Sequence[GenerationRequest], answers: list[Completion]) -> list[Completion]:
        end = stage.tokenizer.eos_token_id
        return [replace(a, finish_reason="stop" if a.token_ids[-1] == end else "length") for a in answers]

    return answers_become(stage, guessed)


def _one_seed(stage: Stage) -> Patch:
    return patch.object(collecting, "request_seed", lambda run_seed, version, key: run_seed)


def _long_ones_dropped(stage: Stage) -> Patch:
    def dropped(generation: Generation) -> Generation:
        longest = max(s.length for batch in generation.micro_batches for s in batch)
        batches = tuple(
            tuple(s for s in batch if s.length < longest) or batch[:1] for batch in generation.micro_batches
        )
        return replace(generation, micro_batches=batches)

    return generations_become(dropped)


STEP_FAULTS = (
    Fault("A1", "gradients of micro-batches summed, not averaged", _summed, check="exact accounting"),
    Fault("A2", "the loss normalised per micro-batch, not per step", _averaged, check="exact accounting"),
    Fault("A3", "tokens attend to padding and to other rows", _attends_to_others, needs=_needs_tree),
    Fault("A4", "truncation guessed from the last token", _guessed_reason, check="finish reasons"),
    Fault("A5", "one seed for all requests: a group of equal completions", lambda s: at_temperature_one(s, _one_seed)),
    Fault("A6", "long rollouts left out of the step", _long_ones_dropped),
)
