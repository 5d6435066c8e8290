"""Runs with filters and real vLLM: the gap is within the limits of a run without, and wrong filters are found."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VLLM, start
from methods import ALONE, GROUPS, PAIRS, make
from tiny import CONTEXT

from lockstep.contract.protocol import GenerationRequest
from lockstep.engines.vllm.in_process import VLLMInProcess
from lockstep.errors import ProofError
from lockstep.extras.selftest.seams import Between

pytestmark = VLLM
# Largest gap of runs without filters in fp32 (`test_methods_on_vllm.py`).
LIMIT = 1e-3
FILTERS: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.9, "temperature": 0.8},
    "top_k": {"top_k": 10},
    "min_p": {"min_p": 0.05},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "regex": {"vllm_structured_outputs_regex": "[a-z]{3,6}( [0-9]{2})*"},
    "json": {
        "structured_outputs_json": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
        }
    },
    "choice": {"structured_outputs_choice": ["yes", "no", "perhaps"]},
    "ids": {"logit_bias": {"7": 2.0, "9": -3.0}, "allowed_token_ids": [0, *range(4, 200)], "min_tokens": 3},
    "all": {
        "top_p": 0.95,
        "top_k": 40,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "bad_words": ["th"],
    }
    | {"vllm_structured_outputs_regex": "[a-z ]{4,60}"},
}
RUNS = {
    **{f"GRPO, {name}": ("GRPO", GROUPS | fields) for name, fields in FILTERS.items()},
    "GRPO, several steps, reference": (
        "GRPO",
        {**GROUPS, **FILTERS["all"], "beta": 0.05, "num_iterations": 2, "entropy_coef": 0.01},
    ),
    "RLOO": ("RLOO", {**GROUPS, **FILTERS["top_p"], **FILTERS["penalties"]}),
    "PPO": ("PPO", {**ALONE, **FILTERS["top_k"], **FILTERS["regex"]}),
    "Online DPO": ("OnlineDPO", {**PAIRS, **FILTERS["min_p"]}),
}
# What an engine does instead of what the run asks for, and what the error says.
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "top_p is ignored": ("GRPO, top_p", {"top_p": 0.999}, "against top_p"),
    "top_k is larger": ("GRPO, top_k", {"top_k": 60}, "against top_k"),
    "min_p is smaller": ("GRPO, min_p", {"min_p": 1e-4}, "min_p"),
    "penalties are ignored": (
        "GRPO, penalties",
        {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
        "a distribution without penalties",
    ),
    "the grammar is ignored": (
        "GRPO, regex",
        {"grammar": None},
        "where the grammar of the request does not allow it",
    ),
    "biases are ignored": ("GRPO, ids", {"logit_bias": ()}, "a distribution without logit_bias"),
}


@pytest.fixture(scope="module")
def vllm(untied_dir: str) -> Iterator[VLLMInProcess]:
    """One engine for all runs; each run pushes its own weights."""
    started = start("vllm", untied_dir)
    yield started  # type: ignore[misc]
    started.close()


def run(name: str, model: str, folder: Path, engine: VLLMInProcess, **more: Any) -> list[dict[str, Any]]:
    """Train three steps. Returns what was logged."""
    method, fields = RUNS[name]
    trainer = make(method, model, folder, engine, {**fields, "max_steps": 3, **more})
    trainer.train()
    return [log for log in trainer.state.log_history if "loss" in log]


@pytest.mark.parametrize("name", RUNS)
def test_the_gap_of_a_run_with_filters_is_that_of_a_run_without(
    name: str, untied_dir: str, tmp_path: Path, vllm: VLLMInProcess
) -> None:
    logs = run(name, untied_dir, tmp_path, vllm)
    assert len(logs) == 3
    for log in logs:
        assert 0.0 < log["parity/max_abs_gap"] < LIMIT
        assert math.isfinite(log["grad_norm"])
        assert log.get("sampling/edge_differences", 0.0) < 0.1
    fields = RUNS[name][1]
    if "top_p" in fields:
        # A bad word or a grammar takes nothing from the kept mass, which is measured after them.
        assert all(0.5 < log["sampling/kept_mass"] <= 1.0 + 1e-5 for log in logs)
    assert ("sampling/forced_share" in logs[0]) == (fields.keys() != {*GROUPS, *FILTERS["penalties"]})


@pytest.mark.parametrize("fault", WRONG)
def test_an_engine_that_samples_otherwise_is_found_and_the_setting_is_named(
    fault: str, untied_dir: str, tmp_path: Path, vllm: VLLMInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, other, said = WRONG[fault]
    honest = vllm.serve

    def otherwise(requests: list[GenerationRequest]) -> list[GenerationRequest]:
        return [replace(r, sampling=replace(r.sampling, **other)) for r in requests]

    monkeypatch.setattr(vllm, "serve", lambda inbox: honest(Between(inbox, requests=otherwise)))  # type: ignore[arg-type]
    with pytest.raises(ProofError) as raised:
        run(name, untied_dir, tmp_path, vllm)
    assert said in str(raised.value)


@pytest.mark.release
def test_in_bf16_the_gap_stays_within_the_limits_of_bf16(untied_dir: str, tmp_path: Path) -> None:
    engine = VLLMInProcess(untied_dir, dtype=torch.bfloat16, max_model_len=CONTEXT)
    try:
        for name in ("GRPO, all", "GRPO, several steps, reference", "RLOO", "PPO"):
            logs = run(name, untied_dir, tmp_path / name, engine, bf16=True)
            assert len(logs) == 3
            assert all(log["sampling/effective_sample_size"] > 0.8 for log in logs)
    finally:
        engine.close()
