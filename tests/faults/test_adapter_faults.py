"""Every fault of an adapter alone in vLLM's LoRA is caught by the proof that is meant for it."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
from conftest import needs_vllm
from stages import config

from lockstep.extras.lora_alone.adapter_faults import ADAPTER_FAULTS
from lockstep.extras.selftest.self_test import run_self_test
from lockstep.extras.verify.stage import open_stage

CAUGHT_BY = {
    "D1": "adapter",
    "D1b": "live",
    "D2": "version",
    "D2b": "module_probe",
    "D3": "adapter",
    "D3b": "module_probe",
    "D3c": "live",
    "D4": "adapter",
    "D4b": "gap",
    "D5": "gap",
}


@pytest.mark.vllm
@needs_vllm
@pytest.mark.parametrize("bf16", [False, pytest.param(True, marks=pytest.mark.release)], ids=["fp32", "bf16"])
def test_every_fault_of_adapters_is_caught(untied_dir: str, tmp_path: Path, bf16: bool) -> None:
    settings = config(tmp_path, use_vllm=True, bf16=bf16, vllm_enable_lora=True)
    # With a new adapter's B of zeros, no fault would have an effect.
    adapter = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", init_lora_weights=False)
    with open_stage(untied_dir, settings, peft_config=adapter) as stage:
        control, *verdicts = run_self_test(stage, lambda name: None, ADAPTER_FAULTS)
    assert not control.caught_by, control.message
    assert not [v for v in verdicts if v.skipped]
    assert {v.id: v.caught_by for v in verdicts} == CAUGHT_BY
