"""Every fault of an engine that holds the weights in 8 bits is caught by the proof that is meant for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import VLLM
from stages import stage_on

from lockstep.extras.fp8.quantised_faults import QUANTISED_FAULTS
from lockstep.extras.selftest.optimizer_faults import STEP_FAULTS
from lockstep.extras.selftest.rollout_faults import TOKEN_FAULTS
from lockstep.extras.selftest.sampling_faults import LOGPROB_FAULTS
from lockstep.extras.selftest.seams import vllm_worker
from lockstep.extras.selftest.self_test import run_self_test
from lockstep.extras.selftest.weight_faults import WEIGHT_FAULTS
from lockstep.extras.verify.logprob_checks import parity_by_dtype, semantics

pytestmark = VLLM
CAUGHT_BY = {
    "Q1": "module_probe",
    "Q2": "module_probe",
    "Q3": "codes",
    "Q3b": "codes",
    "Q4": "module_probe",
    "Q5": "module_probe",
}


@pytest.mark.release
def test_every_fault_of_weights_in_8_bits_is_caught(untied_dir: str, tmp_path: Path) -> None:
    with stage_on(
        untied_dir, tmp_path, use_vllm=True, bf16=True, vllm_quantization="fp8_per_channel"
    ) as stage:
        control, *verdicts = run_self_test(stage, lambda name: None, QUANTISED_FAULTS)
    assert not control.caught_by, control.message
    assert not [v for v in verdicts if v.skipped]
    assert {v.id: v.caught_by for v in verdicts} == CAUGHT_BY


def test_every_row_of_a_verification_passes_in_8_bits(untied_dir: str, tmp_path: Path) -> None:
    with stage_on(
        untied_dir, tmp_path, use_vllm=True, bf16=True, vllm_quantization="fp8_per_channel"
    ) as stage:
        # The engine now has keys and values of these prompts that were computed with inputs in 8 bits.
        stage.step()
        rows = [*semantics(stage), *parity_by_dtype(stage)]
        layers = [m for m in vllm_worker(stage).model_runner.model.modules() if hasattr(m, "weight_scale")]
        assert not [layer for layer in layers if "apply" in vars(layer.quant_method)]
        stage.step()
    assert len(rows) >= 7
    # With keys and values that were computed with inputs in 8 bits, the means are 0.10 to 0.18; without, up to 0.081.
    assert not [(row.proof, row.figure) for row in rows if not row.passed or row.details["mean"] > 0.09]


@pytest.mark.release
def test_the_faults_of_other_engines_are_caught_in_8_bits_too(untied_dir: str, tmp_path: Path) -> None:
    faults = (*TOKEN_FAULTS, *WEIGHT_FAULTS, *LOGPROB_FAULTS, *STEP_FAULTS)
    with stage_on(
        untied_dir, tmp_path, use_vllm=True, bf16=True, vllm_quantization="fp8_per_channel"
    ) as stage:
        control, *verdicts = run_self_test(stage, lambda name: None, faults)
    assert not control.caught_by, control.message
    injected = [v for v in verdicts if not v.skipped]
    assert len(injected) > 25
    assert not [v.id for v in injected if not v.caught_by]
