"""A gap is split into parts that add up, and each origin is recognised on a real engine."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.contract.distribution import Distribution
from lockstep.contract.protocol import Completion
from lockstep.errors import ProofError
from lockstep.extras.selftest.optimizer_faults import STEP_FAULTS
from lockstep.extras.selftest.rollout_faults import TOKEN_FAULTS
from lockstep.extras.selftest.sampling_faults import LOGPROB_FAULTS
from lockstep.extras.selftest.seams import loads_instead
from lockstep.extras.verify.stage import Stage
from lockstep.rollouts.driver import collect
from lockstep.rollouts.programs.interruptions import Interruption, interrupted
from lockstep.watch.custody import Record, SampledTokens
from lockstep.watch.draws import DrawStats
from lockstep.watch.gap import GapStats, GapTail, PooledGap, PooledSlope, measure_gap
from lockstep.watch.gap_explained import Decomposition, decompose, split_gap
from lockstep.watch.kept_sets import KeptSetStats
from lockstep.watch.model_gradient import Checked, ModelGradient
from lockstep.watch.tolerances import Tolerance, tolerance
from lockstep.weights.push import weights_of

SINGLE = tolerance(torch.float32, torch.float32)
gaps = st.floats(0, 50)


@given(fresh=gaps, stale=gaps, raw=st.none() | gaps, other=st.none() | gaps)
def test_the_parts_add_up_and_none_is_negative(
    fresh: float, stale: float, raw: float | None, other: float | None
) -> None:
    parts = split_gap(fresh, stale, SINGLE, raw=raw, other_dtype=other)
    every = (parts.semantics, parts.numerics, parts.staleness, parts.defect)
    assert min(every) >= 0
    assert sum(every) == pytest.approx(parts.total) == pytest.approx(fresh + stale)


def test_a_gap_within_the_dtypes_limit_is_numerics_and_over_it_a_defect() -> None:
    assert split_gap(9e-5, 0.0, SINGLE).metrics() == {
        "parity/gap_semantics": 0.0,
        "parity/gap_numerics": 9e-5,
        "parity/gap_staleness": 0.0,
        "parity/gap_defect": 0.0,
    }
    assert split_gap(0.3, 0.0, SINGLE).defect == pytest.approx(0.3 - SINGLE.mean)


def explained(
    stage: Stage,
    completions: list[Completion],
    version: int | None = None,
    *,
    stale_by_design: bool = False,
    limit: Tolerance = SINGLE,
) -> Decomposition:
    return decompose(
        stage.model,
        stage.engine,
        completions[:3],
        Distribution(stage.sampling()),
        stage.precision,
        stage.trainer.proofs.push.probes,
        stage.version if version is None else version,
        limit,
        stale_by_design=stale_by_design,
    )


def injected(stage: Stage, fault_id: str) -> AbstractContextManager:
    (fault,) = [f for f in (*LOGPROB_FAULTS, *TOKEN_FAULTS) if f.id == fault_id]
    return fault.inject(stage)


@pytest.fixture(autouse=True)
def clean(stage: Stage) -> None:
    stage.push(every_module=True)


def test_a_clean_sample_is_numerics(stage: Stage) -> None:
    found = explained(stage, stage.sample(stage.sampling()))
    assert found.parts.total == found.parts.numerics < SINGLE.mean
    assert found.layers == ()


def test_what_was_put_into_a_completion_has_no_part_in_an_explanation(stage: Stage) -> None:
    groups = collect(
        stage.prompts,
        stage.engine,
        stage.tokenizer,
        stage.sampling(),
        Record,
        num_generations=2,
        run_seed=1,
        version=stage.version,
        program=interrupted(Interruption(3, (77, 78, 79), (1,)), stage.sampling()),
    )
    completions = [r.completion for group in groups for r in group.rollouts]
    completions.sort(key=lambda c: c.sampled is None)
    assert completions[0].sampled is not None
    found = explained(stage, completions)
    assert found.parts.total == found.parts.numerics < SINGLE.mean
    # The difference of a sampled token appears in full, at its place.
    first = completions[0]
    place = first.sampled_places[-1]
    assert place > len(first.sampled_places)
    wrong = replace(
        first, logprobs=(*first.logprobs[:place], first.logprobs[place] - 3, *first.logprobs[place + 1 :])
    )
    found = explained(stage, [wrong])
    assert found.parts.defect == pytest.approx(3 / len(first.sampled_places), rel=0.01)
    assert "asked again it agrees" in found.cause


@pytest.mark.parametrize("judge", ["generation", "evaluation"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_half_precision_the_means_of_few_tokens_are_judged_with_those_of_the_next_steps(
    stage: Stage, dtype: torch.dtype, judge: str
) -> None:
    # Eight completions of one prompt, as a run of the recipe in bf16 had them. Logits over 32 are rounded to quarters.
    logps = torch.tensor(
        [[-0.13, -0.56, 0.0]] * 4 + [[-0.13, -1.06, 0.0]] * 2 + [[-2.13, 0.0, 0.0]] * 2
    ).flatten()
    policy = torch.tensor(
        [[-0.08, -0.96, 0.0]] * 4 + [[-0.08, -0.71, 0.0]] * 2 + [[-2.58, 0.0, 0.0]] * 2
    ).flatten()
    size = 0.45 if dtype == torch.bfloat16 else 4e-4
    gap = measure_gap(logps * size / 0.45, policy * size / 0.45, [f"a#{i}" for i in range(8)], [3] * 8)
    longest = max(stage.sample(stage.sampling()), key=lambda c: len(c.token_ids))
    sampled = [replace(longest, token_ids=longest.token_ids[:3], logprobs=longest.logprobs[:3])] * 8
    proofs = stage.trainer.proofs
    with (
        patch.object(proofs, "tail", GapTail(tolerance(dtype, dtype))),
        patch.multiple(
            proofs, pool=PooledGap(), _evaluated_pool=PooledGap(), _judged_version=-1, _bets=False
        ),
        # It would set the limits of this engine's dtype.
        patch.object(proofs, "measure_limits", lambda *_, **__: None),
    ):
        versions = itertools.count()

        def check() -> None:
            if judge == "generation":
                proofs.check_gap(gap, KeptSetStats(), gap.tokens, sampled, next(versions))
            else:
                proofs.check_evaluation(gap, DrawStats(), KeptSetStats(), sampled, stage.version)

        if dtype == torch.bfloat16:
            for _ in range(10):
                check()
        with pytest.raises(ProofError, match=r"(mean_abs_gap|k3) .* > "):
            check()


def test_a_generation_that_is_judged_twice_is_pooled_once_and_keeps_what_was_compared(stage: Stage) -> None:
    proofs, half = stage.trainer.proofs, tolerance(torch.bfloat16, torch.bfloat16)
    gap, sets = GapStats(24, 0.1, 0.01, 0.0, "a#0"), KeptSetStats(tokens=3, differences=1, rounding=0.3)
    with (
        patch.object(proofs, "tail", GapTail(half)),
        patch.multiple(proofs, pool=PooledGap(), _judged_version=-1, kept_sets=KeptSetStats()),
        patch.object(proofs, "measure_limits", lambda *_, **__: None),
    ):
        # First over all tokens, then over those of the step's own forward, whose sets were not compared again.
        proofs.check_gap(gap, sets, 24, [], 1)
        proofs.check_gap(gap, KeptSetStats(), 24, [], 1)
        assert proofs.pool.waiting.tokens == 24
        assert proofs.judged_now.figures() == {}
        assert proofs.kept_sets == sets
        proofs.check_gap(gap, KeptSetStats(), 24, [], 2)
        assert proofs.pool.waiting.tokens == 48
        assert proofs.kept_sets == KeptSetStats()
        # Enough tokens: what is judged and shown is the pool, also after the second judgement of the same tokens.
        many = GapStats(240, 12.0, 0.4, 2.0, "b#0")
        for _ in range(2):
            proofs.check_gap(many, KeptSetStats(), 240, [], 3)
            judged = proofs.judged_now.figures()
            assert judged == proofs.judged
            assert (judged["tokens"], judged["mean_abs_gap"]) == (288, pytest.approx(12.2 / 288))
            assert judged["mean_allowed"] == pytest.approx(half.mean + 0.4 / 288)
        # The next few tokens wait again; what was judged last is still shown.
        proofs.check_gap(gap, KeptSetStats(), 24, [], 4)
        assert proofs.judged_now.figures() == {}
        assert proofs.judged["tokens"] == 288


def test_a_gap_is_reported_beside_a_rollout_without_a_sampled_token(stage: Stage) -> None:
    first, *others = stage.sample(stage.sampling())
    empty = replace(first, sampled=[False] * len(first.token_ids))
    wrong = replace(others[0], logprobs=(others[0].logprobs[0] - 3, *others[0].logprobs[1:]))
    gap = GapStats(8, 3.0, 3.0, 3.0, str(wrong.key))
    error = stage.trainer.proofs.explained.error(gap, SINGLE, [empty, wrong], stage.version)
    assert error.check == "gap"
    assert "defect" in str(error)


def test_raw_log_probs_are_semantics(stage: Stage) -> None:
    with injected(stage, "P1"):
        found = explained(stage, stage.sample(stage.sampling()))
    assert found.parts.semantics > 0.9 * found.parts.total > 0.01
    assert "raw distribution" in found.cause
    assert "processed_logprobs" in found.fix


def test_older_tokens_are_staleness(stage: Stage) -> None:
    completions = stage.sample(stage.sampling())
    with stage.moved(0.05):
        stage.push()
        found = explained(stage, completions)
    assert found.parts.staleness == found.parts.total > 0.01
    assert "older weights" in found.cause


def test_old_tokens_that_are_as_they_should_be_neither_hide_a_defect_nor_are_blamed_for_it(
    stage: Stage,
) -> None:
    old = stage.sample(stage.sampling())
    with stage.moved(0.05):
        stage.push()
        new = stage.sample(stage.sampling())[0]
        wrong = replace(new, logprobs=(new.logprobs[0] - 3, *new.logprobs[1:]))
        found = explained(stage, [wrong, *old], stale_by_design=True)
    assert found.parts.defect == pytest.approx(3 / len(new.logprobs), rel=0.01)
    assert found.parts.staleness == 0
    assert "older weights than the policy's" not in found.cause


def test_a_head_in_another_dtype_is_numerics_with_its_name(stage: Stage) -> None:
    with injected(stage, "P5"):
        found = explained(stage, stage.sample(stage.sampling()))
    assert found.parts.numerics > 0.5 * found.parts.total > SINGLE.mean
    assert "output head in bfloat16" in found.cause


def test_a_stale_layer_is_a_defect_with_its_name(stage: Stage) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    with loads_instead(stage, lambda sent: [(n, t * 1.5 if n == name else t) for n, t in sent]):
        # The engine samples as if no probe had stopped the run.
        from lockstep.weights.push import forget_push, push_weights

        stage.trainer.state.global_step += 1
        # No weight has changed since the last push.
        forget_push(stage.engine)
        push_weights(stage.model, stage.engine, stage.version)
        found = explained(stage, stage.sample(stage.sampling()))
    assert found.layers == (name,)
    assert name in found.cause
    assert found.parts.defect > 0.9 * found.parts.total


def test_older_weights_that_outputs_do_not_show_are_named(stage: Stage) -> None:
    from lockstep.weights.push import forget_push, push_weights

    name = "model.layers.1.mlp.up_proj.weight"
    kept, before = dict(weights_of(stage.model))[name].clone(), stage.version
    with (
        stage.kept_weights(),
        loads_instead(stage, lambda sent: [(n, kept if n == name else t) for n, t in sent]),
    ):
        stage.move(1e-5)
        stage.trainer.state.global_step += 1
        forget_push(stage.engine)
        push_weights(stage.model, stage.engine, stage.version)
        first = stage.sample(stage.sampling())[0]
        # A log-prob that these weights do not explain, so that there is a gap to explain.
        found = explained(stage, [replace(first, logprobs=(*first.logprobs[:-1], first.logprobs[-1] - 3))])
    assert found.layers == (name,)
    # The version is known if this share of the model had its turn in it.
    known = f"older weights of {name}: those of version {before}"
    assert (
        known in found.cause
        or f"other weights of {name} than the trainer sends: older ones, or" in found.cause
    )


def test_an_engine_that_agrees_when_it_is_asked_again_computes_in_no_other_dtype(stage: Stage) -> None:
    completions = stage.sample(stage.sampling())
    coarse = tolerance(torch.bfloat16, torch.bfloat16)
    # Of older weights, as those of a cache that was kept: the gap is over its limit, and another dtype may halve it.
    wrong = [replace(c, logprobs=tuple(x - 0.5 for x in c.logprobs)) for c in completions]
    with patch("lockstep.watch.gap_explained._other_precisions", raises_if_asked):
        found = explained(stage, wrong, limit=coarse)
    assert "asked again it agrees" in found.cause


def raises_if_asked(precision: object) -> dict[str, object]:
    raise AssertionError("no other dtype can be the cause")


def test_each_step_adds_its_tokens_to_the_signed_gap_once(stage: Stage) -> None:
    proofs = stage.trainer.proofs
    with patch.object(proofs, "slopes", PooledSlope()):
        stage.step()
        now = proofs.slopes.now
        assert now.tokens >= proofs.judged["tokens"] > 0
        assert now.prompts == len(stage.prompts)
        proofs.check_slope(now, stage.version)
        assert proofs.slopes.now == now


def test_answers_of_other_requests_are_a_defect_that_the_engine_does_not_repeat(stage: Stage) -> None:
    with injected(stage, "L3"):
        found = explained(stage, stage.sample(stage.sampling()))
    assert found.parts.defect > 0.9 * found.parts.total
    assert "asked again it agrees" in found.cause


def test_one_wrong_log_prob_among_many_is_explained_too(stage: Stage) -> None:
    completion = stage.sample(stage.sampling())[0]
    wrong = replace(completion, logprobs=(completion.logprobs[0] - 3, *completion.logprobs[1:]))
    found = explained(stage, [wrong])
    assert found.parts.defect == pytest.approx(3 / len(wrong.logprobs), rel=0.01)


def test_a_fault_of_the_packed_forward_is_not_blamed_on_the_engine(stage: Stage) -> None:
    (fault,) = [f for f in STEP_FAULTS if f.id == "A3"]
    with (
        # Without the proofs that find it earlier.
        patch.object(ModelGradient, "begin", lambda *given: Checked({})),
        patch.object(SampledTokens, "check", lambda *given: None),
        fault.inject(stage),
        pytest.raises(ProofError) as failed,
    ):
        stage.step()
    assert failed.value.check == "gap"
    assert "the trainer's own packed forward" in failed.value.cause
    assert "caches" not in failed.value.cause


@pytest.mark.parametrize(
    ("dtype", "size", "may_be_rounding"),
    [(torch.float32, 4e-4, False), (torch.bfloat16, 0.45, True), (torch.bfloat16, 9.0, False)],
)
def test_the_error_says_where_rounding_may_be_the_cause_of_a_gap_in_the_packed_forward(
    stage: Stage, dtype: torch.dtype, size: float, may_be_rounding: bool
) -> None:
    completions = stage.sample(stage.sampling())[:3]
    found = decompose(
        stage.model,
        stage.engine,
        completions,
        Distribution(stage.sampling()),
        stage.precision,
        stage.trainer.proofs.push.probes,
        stage.version,
        tolerance(dtype, dtype),
        packed=GapStats(24, sum_abs=8 * size, max_abs=size, worst=str(completions[0].key)),
    )
    assert "the trainer's own packed forward" in found.cause
    assert ("or rounding" in found.cause) is ("bf16=false" in found.fix) is may_be_rounding


def test_a_fault_of_the_engine_is_not_blamed_on_the_packed_forward(stage: Stage) -> None:
    with injected(stage, "L3"), pytest.raises(ProofError) as failed:
        stage.step()
    assert failed.value.check == "gap"
    assert "packed" not in failed.value.cause
