"""Proofs of an engine in 8 bits while its layers leave their inputs as they are: both sides use the values of the same codes.

Then no code of an input can be rounded to its other neighbour, and the gap is that of the dtypes. What stands between the layers,
and what the engine does with the logits, is proven as exactly as with an engine that is not in 8 bits. `ProvenPusher` scores the
canary in this way, and lets the engine sample from the run's distribution. Both come after the push of a start, when no request
runs. An engine that runs a compiled program cannot change its layers. Then these proofs are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch

from lockstep.contract.distribution import Distribution
from lockstep.contract.protocol import Completion, Engine, GenerationRequest, RequestKey, request_seed
from lockstep.errors import ProofError
from lockstep.tokens.arrays import whole_numbers
from lockstep.watch.canary import canary_gap, check_canary
from lockstep.watch.gap import GapStats, measure_gap
from lockstep.watch.gap_explained import check_gap
from lockstep.watch.quantised_gap import QuantisationError
from lockstep.watch.rescoring import sampled_logps
from lockstep.watch.tolerances import Tolerance

# Completions per canary sequence, and the largest number of their tokens.
_SAMPLES, _TOKENS = 2, 12


def score_with_whole_inputs(
    engine: Engine, error: QuantisationError, sequences: Mapping[str, tuple[int, ...]], limit: Tolerance, version: int
) -> GapStats | None:
    """Score the canary's sequences. Returns its gap, or None if the engine cannot leave its inputs as they are.

    Args:
        error: computes the trainer's side.
        limit: the limits of the dtypes.

    Raises:
        ProofError: the gap is over a limit, or the engine keeps what it has computed in this way.
    """
    scores: Mapping[str, tuple[float, ...]] = {}
    with whole_inputs(engine, version) as are_whole:
        if are_whole:
            scores = engine.score(sequences)
    if not scores:
        return None
    with error.in_8_bits(inputs_too=False):
        gap = canary_gap(error.model, sequences, scores, error.precision)
    check_canary(gap, limit, version)
    return gap


def sample_with_whole_inputs(
    engine: Engine,
    error: QuantisationError,
    sequences: Mapping[str, tuple[int, ...]],
    distribution: Distribution,
    limit: Tolerance,
    version: int,
) -> GapStats | None:
    """Sample completions of the canary's sequences from the run's distribution, and compare the log-probs that the engine reports.

    Returns:
        The gap; None if the engine cannot leave its inputs as they are.

    Raises:
        ProofError: the gap is over a limit, or the engine keeps what it has computed in this way.
    """
    requests = _requests(sequences, distribution, engine.settings().max_model_len, version)
    answers: Mapping[RequestKey, Completion] = {}
    with whole_inputs(engine, version) as are_whole:
        if are_whole:
            answers = engine.generate(requests)
    if not answers:
        return None
    gap = GapStats()
    with error.in_8_bits(inputs_too=False):
        for key, answer in answers.items():
            own = sampled_logps(error.model, answer, distribution, error.precision).cpu()
            # An id that rounding alone puts outside the trainer's own filters.
            kept = own.isfinite() if distribution.sampling.is_filtered else torch.ones(len(own), dtype=torch.bool)
            behaviour = torch.from_numpy(answer.sampled_logprobs.copy())
            gap += measure_gap(behaviour[kept], own[kept], [str(key)], [int(kept.sum())])
    check_gap(
        gap,
        limit,
        version,
        "with inputs that are not quantised, the engine scores the canary as the trainer does, and reports other log-probs for "
        "tokens that it samples: another temperature, other filters, or log-probs of another token",
        "start the engine with logprobs_mode=processed_logprobs and without sampling settings of its own",
    )
    return gap


@contextmanager
def whole_inputs(engine: Engine, version: int) -> Iterator[bool]:
    """In this context the engine's layers leave their inputs as they are, if the value is true.

    Keys and values that were computed in the other way are dropped at the beginning and at the end.

    Raises:
        ProofError: the engine keeps them.
    """
    if not engine.quantise_inputs(False):
        yield False
        return
    try:
        _drop_caches(engine, version)
        yield True
    finally:
        engine.quantise_inputs(True)
    _drop_caches(engine, version)


def _drop_caches(engine: Engine, version: int) -> None:
    if not engine.reset_caches():
        raise ProofError(
            "caches",
            f"the engine did not confirm the reset of its caches at a proof of version {version}",
            "requests are still running in the engine, so keys and values that were computed with inputs in 8 bits, or without, "
            "stay in use",
            "finish or abort every request before proving an engine",
        )


def _requests(
    sequences: Mapping[str, tuple[int, ...]], distribution: Distribution, context: int, version: int
) -> list[GenerationRequest]:
    wanted = distribution.sampling
    tokens = min(wanted.max_tokens, _TOKENS, context - 1)
    sampling = replace(wanted, max_tokens=tokens, min_tokens=min(wanted.min_tokens, tokens))
    keys = [
        (RequestKey(f"canary/{name}", i), ids[: context - tokens])
        for name, ids in sequences.items()
        for i in range(_SAMPLES)
    ]
    return [GenerationRequest(key, whole_numbers(ids), sampling, request_seed(0, version, key)) for key, ids in keys]
