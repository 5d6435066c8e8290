"""The canary: a few fixed sequences that both sides score at the same weight version.

The log-probs come from `Engine.score`, which uses no cache, and from the trainer's plain forward. The canary needs no
rollouts. So it can run before the first rollout is sampled, and it stands in for rollouts that are older than the weights.

Proof canary (`gap`).
Shows: both sides give four fixed sequences the same log-probs, by another path than sampling.
Does not show: that sampled tokens agree.
When: before the first sample, an evaluation included; with `max_staleness` also every generation, before the
optimizer step.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel

from lockstep.contract.protocol import ProbedEngine
from lockstep.contract.sampling import Sampling
from lockstep.models.autocast import Precision
from lockstep.tokens.tokenizer import embedding_rows
from lockstep.watch.gap import GapStats, measure_gap
from lockstep.watch.gap_explained import check_gap
from lockstep.watch.rescoring import casting_once, completion_logps
from lockstep.watch.tolerances import Tolerance

_SEQUENCES, _LENGTH = 4, 24


def canary_sequences(vocab_size: int, max_model_len: int) -> dict[str, tuple[int, ...]]:
    """Sequences of ids drawn from the whole vocabulary. They are always the same for a model and an engine."""
    draw = random.Random(0)
    length = max(2, min(_LENGTH, max_model_len - 1))
    return {f"canary{i}": tuple(draw.randrange(vocab_size) for _ in range(length)) for i in range(_SEQUENCES)}


def canary_gap(
    model: PreTrainedModel,
    sequences: Mapping[str, tuple[int, ...]],
    scores: Mapping[str, Sequence[float] | torch.Tensor],
    precision: Precision,
) -> GapStats:
    """Parity gap between an engine's scores and the trainer's own log-probs at temperature 1, with the trainer's current weights.

    Args:
        sequences: the scored sequences, by name.
        scores: the engine's log-probs of every id of each sequence, except the first id.

    Raises:
        ProofError: a log-prob is not finite.
    """
    gap = GapStats()
    with casting_once(model, precision):
        for name, ids in sequences.items():
            policy = completion_logps(model, ids[:1], ids[1:], Sampling(max_tokens=1), precision)
            gap = gap + measure_gap(torch.as_tensor(scores[name]), policy, [name], [len(policy)])
    return gap


def score_canary(model: PreTrainedModel, engine: ProbedEngine, max_model_len: int, precision: Precision) -> GapStats:
    """Parity gap between engine and trainer over the canary's tokens, at temperature 1.

    Raises:
        ProofError: the engine holds no committed weights, or a log-prob is not finite.
    """
    sequences = canary_sequences(embedding_rows(model), max_model_len)
    return canary_gap(model, sequences, engine.score(sequences), precision)


def check_canary(gap: GapStats, limit: Tolerance, version: int) -> None:
    """Check the canary's parity gap against its limits.

    Raises:
        ProofError: the gap is over a limit.
    """
    check_gap(
        gap,
        limit,
        version,
        "the canary's tokens, which no policy sampled, score differently although every probed module agrees: positions, "
        "attention mask, or a part of the model that no probe reaches",
        "compare the model's configuration on both sides (rope scaling, sliding window, soft-capping)",
    )
