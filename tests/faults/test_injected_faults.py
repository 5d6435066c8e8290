"""Every fault that can be injected into the running stack is caught by the proof that docs/proof.md names for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import needs_vllm
from stages import stage_on

from lockstep.verify.faults.seams import Fault
from lockstep.verify.run import recover
from lockstep.verify.self_test import FAULTS, run_self_test
from lockstep.verify.stage import Stage

# The proofs that may stop each fault. There are two where a sampled probe may come before the gap.
CAUGHT_BY = {
    "T1": {"echo"},
    "T2": {"echo"},
    "T4": {"gap"},
    "L1": {"keys"},
    "L2": {"keys"},
    "L3": {"gap"},
    "L4": {"keys"},
    "L5": {"gap"},
    "W1": {"module_probe"},
    "W2": {"module_probe"},
    "W3": {"module_probe", "gap"},
    "W3b": {"digest"},
    "W4": {"manifest"},
    "W4b": {"caches"},
    "W5": {"module_probe"},
    "W6": {"gap"},
    "W7": {"manifest"},
    "W8": {"module_probe"},
    "small-1": {"module_probe", "gap"},
    "small-2": {"module_probe", "gap"},
    "small-3": {"version"},
    "P1": {"gap"},
    "P2": {"gap"},
    "P3": {"logprobs"},
    "P3b": {"gap"},
    "P4": {"gap"},
    "P5": {"module_probe"},
    "A1": {"verify: exact accounting"},
    "A2": {"verify: exact accounting"},
    "A3": {"gap"},
    "A4": {"verify: finish reasons"},
    "A5": {"samples"},
    "A6": {"gap"},
}


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.id for fault in FAULTS])
def test_the_fault_is_caught_by_its_proof(stage: Stage, fault: Fault) -> None:
    control, verdict = run_self_test(stage, lambda name: None, (fault,))
    assert control.caught_by == "", control.message
    if verdict.skipped:
        pytest.skip(verdict.skipped)
    assert verdict.caught_by in CAUGHT_BY[fault.id], f"{verdict.caught_by}: {verdict.message}"


@pytest.mark.vllm
@needs_vllm
def test_in_bf16_every_fault_that_its_rounding_leaves_is_caught(tied_dir: str, tmp_path: Path) -> None:
    with stage_on(tied_dir, tmp_path, use_vllm=True, bf16=True) as stage:
        control, *verdicts = run_self_test(stage, lambda name: None)
    assert control.caught_by == "", control.message
    assert {v.id for v in verdicts if v.skipped} == {"W5", "small-1", "P5"}
    assert [v.id for v in verdicts if not v.skipped and not v.caught_by] == []


def test_the_table_is_that_of_the_faults() -> None:
    assert set(CAUGHT_BY) == {fault.id for fault in FAULTS}


def test_an_injection_leaves_nothing_behind(stage: Stage) -> None:
    before = {n: p.detach().clone() for n, p in stage.model.named_parameters()}
    run_self_test(stage, lambda name: None)
    recover(stage)
    assert all((p == before[n]).all() for n, p in stage.model.named_parameters())
    assert stage.step() > 0


def test_a_fault_that_nothing_catches_is_reported_as_such(stage: Stage) -> None:
    from contextlib import nullcontext

    _, verdict = run_self_test(stage, lambda name: None, (Fault("none", "no fault at all", lambda s: nullcontext()),))
    assert (verdict.caught_by, verdict.steps) == ("", 3)
