"""Forwards of a sharded model: all ranks make them together (`shards/passes.py`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from transformers import PreTrainedModel

from lockstep.shards.model import ShardedModel
from lockstep.tokens.arrays import reals, whole_numbers
from lockstep.training.batch.pack import pack_rows, pack_sequences
from lockstep.training.batch.sequence import TrainingSequence
from lockstep.training.forward.scoring import TokenScores, score_pack


def in_passes(shards: ShardedModel, compute: Callable[[], TokenScores]) -> TokenScores:
    """The scores that `compute` gives. With gradient, the caller is inside `ShardedModel.learning`."""
    if torch.is_grad_enabled():
        return shards.run(compute, _with_gradient)
    with shards.looking():
        return shards.run(compute, _with_gradient)


def plays_learning(
    model: PreTrainedModel, shards: ShardedModel, autocast: Callable[[], AbstractContextManager], *, plain_rows: bool
) -> Callable[[], None]:
    """A function that plays the forward and backward of a pack: one token, whose loss is 0.

    Args:
        autocast: that of the run's own forwards.
        plain_rows: whether the model cannot attend within a tree.
    """
    one = TrainingSequence("", whole_numbers([0]), whole_numbers([0]), reals([0.0]))
    (pack,) = (pack_rows if plain_rows else pack_sequences)([one], 1 << 10)

    def play() -> None:
        here, was_training = pack.to(model.device), model.training
        # Gradient checkpointing, and with it the order of gathers, is on in training mode only.
        model.train()
        try:
            with torch.enable_grad():
                with autocast():
                    scores = shards.run(lambda: score_pack(model, here, 1.0, 1), _with_gradient)
                (scores.logps.sum() * 0.0).backward()
        finally:
            model.train(was_training)

    return play


def _with_gradient(scores: TokenScores) -> list[torch.Tensor | None]:
    return [scores.logps, scores.entropies, scores.values]
