"""The canary uses the same sequences each time and detects a change; copied samples are told apart from equal draws."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from lockstep.engines.protocol import Completion, RequestKey
from lockstep.errors import ProofError
from lockstep.parity.canary import canary_sequences, score_canary
from lockstep.parity.gap import over_limits
from lockstep.parity.samples import check_samples
from lockstep.parity.tolerances import tolerance
from lockstep.verify.stage import Stage

SINGLE = tolerance(torch.float32, torch.float32)


def test_the_sequences_are_fixed_and_fit() -> None:
    sequences = canary_sequences(384, 512)
    assert sequences == canary_sequences(384, 512)
    assert all(len(ids) < 512 and max(ids) < 384 for ids in sequences.values())
    assert all(len(ids) == 7 for ids in canary_sequences(384, 8).values())


def test_both_sides_agree_until_the_policy_moves_without_a_push(stage: Stage) -> None:
    context = stage.engine.settings().max_model_len
    stage.push()
    assert over_limits(score_canary(stage.model, stage.engine, context, stage.precision), SINGLE) == []
    with stage.moved(0.01):
        found = score_canary(stage.model, stage.engine, context, stage.precision)
    assert len(over_limits(found, SINGLE)) >= 2


def test_a_run_does_not_start_with_a_canary_that_fails(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    real = stage.engine.score
    monkeypatch.setattr(
        stage.engine, "score", lambda asked: {n: tuple(v - 0.1 for v in s) for n, s in real(asked).items()}
    )
    with pytest.raises(ProofError, match="canary's tokens"):
        stage.trainer.begin_training()


def group(tokens: list[tuple[int, ...]], logprob: float) -> list[Completion]:
    return [
        Completion(RequestKey("p", i), (1, 2), ids, (logprob,) * len(ids), (0,) * len(ids), "length")
        for i, ids in enumerate(tokens)
    ]


def test_equal_samples_against_all_odds_are_refused() -> None:
    # Three more draws of a sequence with probability e^-8 each have probability e^-24 < 1e-9.
    with pytest.raises(ProofError, match="all 4 completions of prompt p are the same 8 tokens") as failed:
        check_samples([group([(1,) * 8] * 4, -1.0)])
    assert failed.value.check == "samples"


def test_a_sure_model_may_repeat_itself() -> None:
    check_samples([group([(1,) * 8] * 4, -0.01), group([(5,)], -30.0)])


def test_tokens_that_were_put_in_are_no_evidence_of_copies() -> None:
    # All ids are equal, but only one of the eight tokens was sampled: three more draws with probability e^-1 each.
    def interrupted(logprob: float) -> list[Completion]:
        logps, mask = (logprob, *[0.0] * 7), (True, *[False] * 7)
        return [replace(c, logprobs=logps, sampled=mask) for c in group([(1,) * 8] * 4, -1.0)]

    check_samples([interrupted(-1.0)])
    with pytest.raises(ProofError, match="are the same 8 tokens"):
        check_samples([interrupted(-8.0)])


def test_one_that_differs_is_enough() -> None:
    check_samples([group([(1,) * 8] * 7 + [(2,) * 8], -1.0)])


def test_the_chance_of_a_false_alarm_is_as_stated() -> None:
    # The probability that all n draws agree on a sequence s with p(s)^(n-1) <= alpha is at most alpha. Here this holds for every s.
    vocabulary, samples = 60_000, 3
    chance = vocabulary * (1 / vocabulary) ** samples
    assert chance <= 1e-9
    with pytest.raises(ProofError):
        check_samples([group([(1,)] * samples, -math.log(vocabulary))])
