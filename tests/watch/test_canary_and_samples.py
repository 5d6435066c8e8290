"""The canary uses the same sequences each time and detects a change; copied samples are told apart from equal draws."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.contract.protocol import Completion, RequestKey
from lockstep.contract.sampling import Sampling
from lockstep.errors import ProofError
from lockstep.extras.verify.stage import Stage
from lockstep.models.arithmetic import Precision
from lockstep.models.policy import load_policy
from lockstep.watch.gap import over_limits
from lockstep.watch.plain_forward import completion_logps
from lockstep.watch.push import canary_gap, canary_sequences, score_canary
from lockstep.watch.samples import Seeds, check_samples, log_pay
from lockstep.watch.tolerances import tolerance

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


def group(tokens: list[tuple[int, ...]], logprob: float) -> list[tuple[Completion, ...]]:
    """Samples of one branch each."""
    return [
        (Completion(RequestKey("p", i), (1, 2), ids, (logprob,) * len(ids), (0,) * len(ids), "length"),)
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
    def interrupted(logprob: float) -> list[tuple[Completion, ...]]:
        logps, mask = (logprob, *[0.0] * 7), (True, *[False] * 7)
        return [(replace(c, logprobs=logps, sampled=mask),) for (c,) in group([(1,) * 8] * 4, -1.0)]

    check_samples([interrupted(-1.0)])
    with pytest.raises(ProofError, match="are the same 8 tokens"):
        check_samples([interrupted(-8.0)])


def test_all_branches_of_a_rollout_are_evidence() -> None:
    def branched(second: list[tuple[int, ...]]) -> list[tuple[Completion, ...]]:
        firsts, seconds = group([(1,) * 4] * 4, -1.0), group(second, -1.0)
        return [(*one, *other) for one, other in zip(firsts, seconds, strict=True)]

    # Three more draws of the first branch have probability e^-12 > 1e-9; with the second branch e^-24 < 1e-9.
    check_samples([group([(1,) * 4] * 4, -1.0)])
    with pytest.raises(ProofError, match="are the same 8 tokens"):
        check_samples([branched([(2,) * 4] * 4)])
    check_samples([branched([(2,) * 4] * 3 + [(3,) * 4])])


def test_one_that_differs_is_enough() -> None:
    check_samples([group([(1,) * 8] * 7 + [(2,) * 8], -1.0)])


def test_the_chance_of_a_false_alarm_is_as_stated() -> None:
    # The probability that all n draws agree on a sequence s with p(s)^(n-1) <= alpha is at most alpha. Here this
    # holds for every s.
    vocabulary, samples = 60_000, 3
    chance = vocabulary * (1 / vocabulary) ** samples
    assert chance <= 1e-9
    with pytest.raises(ProofError):
        check_samples([group([(1,)] * samples, -math.log(vocabulary))])


def test_pairs_of_equal_completions_are_refused() -> None:
    pairs = [(1,) * 12, (1,) * 12, (2,) * 12, (2,) * 12]
    with pytest.raises(ProofError, match="p#0 and p#1 begin with the same 12 tokens") as failed:
        check_samples([group(pairs, -3.0)])
    assert failed.value.check == "samples"
    check_samples([group(pairs, -0.1)])


def test_completions_that_part_after_a_long_common_beginning_are_refused() -> None:
    """Equal seeds, and a rounding error that parts the two in the middle."""
    with pytest.raises(ProofError, match="same 12 tokens"):
        check_samples([group([(1,) * 12 + (5,) * 9, (1,) * 12 + (6,) * 9, (7,) * 21], -3.0)])


def test_the_pay_of_a_pair_has_mean_one() -> None:
    """All pairs of completions of two tokens over three ids, of which the second token depends on the first."""
    first, second = [0.5, 0.3, 0.2], [[0.1, 0.1, 0.8], [0.6, 0.2, 0.2], [0.9, 0.05, 0.05]]
    runs = [
        ((a, b), first[a] * second[a][b], (math.log(first[a]), math.log(second[a][b])))
        for a in range(3)
        for b in range(3)
    ]
    for one, _, logps in runs:
        fixed = Completion(RequestKey("p", 0), (1,), one, logps, (0, 0), "length")
        mean = 0.0
        for other, chance, others in runs:
            mean += chance * math.exp(
                log_pay(fixed, Completion(RequestKey("p", 1), (1,), other, others, (0, 0), "length"))
            )
        assert mean == pytest.approx(1.0, abs=1e-6)


def test_equal_seeds_are_refused_before_anything_is_sampled() -> None:
    keys = [RequestKey("p", 0), RequestKey("p", 1), RequestKey("q", 0)]
    with pytest.raises(ProofError, match="p#0 and q#0 have the same seed"):
        Seeds().check(dict(zip(keys, (5, 6, 5), strict=True)), 0)


def test_a_prompt_gets_a_seed_again_only_for_the_same_version() -> None:
    key, seeds = RequestKey("p", 0), Seeds()
    seeds.check({key: 5}, 0)
    # The same generation again, because the engine was lost.
    seeds.check({key: 5}, 0)
    seeds.check({key: 6}, 1)
    with pytest.raises(ProofError, match="that it had at version 1"):
        seeds.check({key: 6}, 2)


def test_the_canary_casts_each_weight_once_and_scores_as_ever(untied_dir: str) -> None:
    model, precision = load_policy(untied_dir), Precision(torch.bfloat16)
    sequences = canary_sequences(384, 512)
    own = {
        n: completion_logps(model, ids[:1], ids[1:], Sampling(1), precision) for n, ids in sequences.items()
    }
    layer = model.model.layers[0].mlp.up_proj.weight

    class Casts(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._to_copy.default and args[0].shape == layer.shape:
                self.count += 1
            return func(*args, **(kwargs or {}))

    with Casts() as casts:
        found = canary_gap(model, sequences, {n: tuple(s.tolist()) for n, s in own.items()}, precision)
    assert found.max_abs == 0
    # Two layers, each with a weight up and a weight of the same shape for the gate.
    assert casts.count == 4
