"""GRPO whose engine gets the adapter alone: the curve of merged weights, exact resumes, and servers that are lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VLLM, needs_vllm
from servers import KEY, serve
from test_adapter_runs import EVERY, FOUR_BITS, StopAfter, lora, trainer, weights
from tiny import CONTEXT
from transformers import TrainerCallback

from lockstep.engines.vllm.in_process import VLLMInProcess
from lockstep.errors import InputError
from lockstep.extras.lora_alone.adapter_arguments import adapter_arguments
from lockstep.server.keys import KEY_VARIABLE

pytestmark = VLLM
ALONE = {"vllm_enable_lora": True}


@pytest.fixture(scope="module")
def engine(untied_dir: str) -> Iterator[VLLMInProcess]:
    made = VLLMInProcess(
        untied_dir, dtype=torch.float32, max_model_len=CONTEXT, engine_kwargs=adapter_arguments(8, EVERY)
    )
    yield made
    made.close()


def logged(run: Any, name: str) -> list[float]:
    return [log[name] for log in run.state.log_history if "loss" in log]


def test_the_curve_is_that_of_merged_weights_within_rounding(
    untied_dir: str, tmp_path: Path, engine: VLLMInProcess
) -> None:
    runs = []
    for name, fields in (("merged", {}), ("alone", ALONE)):
        run = trainer(untied_dir, tmp_path / name, engine, lora(), max_steps=5, **fields)
        run.train()
        runs.append(run)
        assert max(logged(run, "parity/mean_abs_gap")) < 1e-5
    merged, alone = runs
    for name in ("reward", "loss", "completions/mean_length", "grad_norm"):
        assert logged(alone, name) == pytest.approx(logged(merged, name), rel=1e-3, abs=1e-5), name
    ended = weights(merged)
    assert all(float((value - ended[name]).abs().max()) < 1e-4 for name, value in weights(alone).items())
    assert any(float(value.abs().max()) > 1e-2 for name, value in ended.items() if "lora_B" in name)


@pytest.mark.release
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(
    untied_dir: str, tmp_path: Path, engine: VLLMInProcess
) -> None:
    saves: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, **ALONE}
    whole = trainer(untied_dir, tmp_path / "whole", engine, lora(), **saves)
    whole.train()
    first = trainer(untied_dir, tmp_path / "cut", engine, lora(), **saves)
    first.add_callback(StopAfter(2))
    first.train()
    second = trainer(untied_dir, tmp_path / "cut", engine, lora(), **saves)
    second.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-2"))
    expected = weights(whole)
    assert all(torch.equal(value, expected[name]) for name, value in weights(second).items())


def test_a_quantised_base_is_sent_once_as_the_values_of_its_codes(
    untied_dir: str, tmp_path: Path, engine: VLLMInProcess
) -> None:
    run = trainer(untied_dir, tmp_path, engine, lora(), quantization_config=FOUR_BITS, max_steps=3, **ALONE)
    run.train()
    assert max(logged(run, "parity/mean_abs_gap")) < 1e-5


def test_a_run_starts_vllm_with_room_for_its_adapter(untied_dir: str, tmp_path: Path) -> None:
    run = trainer(untied_dir, tmp_path, None, lora(r=12), max_steps=1, use_vllm=True, **ALONE)  # type: ignore[arg-type]
    try:
        run.train()
        limits = run.engine.adapters.limits  # type: ignore[attr-defined]
        assert limits.rank == 16
    finally:
        run.close()


def test_what_cannot_be_sent_alone_is_refused_before_an_engine_starts(
    untied_dir: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="leave use_dora out"):
        trainer(untied_dir, tmp_path, None, lora(use_dora=True), use_vllm=True, **ALONE)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="use_vllm is false"):
        trainer(untied_dir, tmp_path, None, lora(), use_vllm=False, **ALONE)  # type: ignore[arg-type]


class RestartBefore(TrainerCallback):
    def __init__(self, step: int, restart: Any) -> None:
        self._step, self._restart = step, restart

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            self._restart()


@pytest.mark.long
@needs_vllm
def test_a_server_that_is_killed_gets_the_adapter_again_and_the_weights_are_the_same(
    untied_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    ended = []
    with serve(untied_dir, tmp_path, "--enable_lora", "--max_lora_rank", "8") as server:
        for name in ("calm", "killed"):
            fields: dict[str, Any] = {
                "vllm_server_base_url": server.url,
                "vllm_importance_sampling_correction": False,
            }
            run = trainer(untied_dir, tmp_path / name, None, lora(), max_steps=4, **fields, **ALONE)  # type: ignore[arg-type]
            if name == "killed":
                run.add_callback(RestartBefore(2, server.restart))
            run.train()
            assert max(logged(run, "parity/mean_abs_gap")) < 1e-5
            assert run.source.losses == (name == "killed")
            ended.append(weights(run))
            run.close()
    calm, killed = ended
    assert all(float((value - killed[name]).abs().max()) < 1e-5 for name, value in calm.items())


@pytest.mark.long
@needs_vllm
def test_generations_ahead_carry_the_version_of_their_adapter(
    untied_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with serve(untied_dir, tmp_path, "--enable_lora", "--max_lora_rank", "8") as server:
        fields: dict[str, Any] = {
            "vllm_server_base_url": server.url,
            "max_staleness": 2,
            "learning_rate": 1e-3,
        }
        run = trainer(untied_dir, tmp_path / "run", None, lora(), max_steps=6, **fields, **ALONE)  # type: ignore[arg-type]
        run.train()
        run.close()
    assert run.state.global_step == 6
    assert max(logged(run, "staleness/max")) >= 1
