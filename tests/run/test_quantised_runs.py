"""Runs that sample with weights in 8 bits: all proofs are on, the gap is explained, importance weights correct it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import VLLM
from servers import KEY, serve
from test_adapter_runs import StopAfter, lora, trainer, weights
from tiny import CONTEXT

from lockstep.contract.protocol import Completion
from lockstep.engines.vllm.in_process import VLLMInProcess
from lockstep.errors import InputError, ProofError
from lockstep.extras.selftest.seams import Between
from lockstep.learn.methods.grpo import GRPOConfig
from lockstep.learn.methods.online_dpo import OnlineDPOConfig
from lockstep.server.keys import KEY_VARIABLE

pytestmark = VLLM
SCHEME = "fp8_per_channel"
IN_8_BITS: dict[str, Any] = {"vllm_quantization": SCHEME, "bf16": True, "learning_rate": 1e-3}


@pytest.fixture(scope="module")
def engine(untied_dir: str) -> Iterator[VLLMInProcess]:
    made = VLLMInProcess(untied_dir, dtype=torch.bfloat16, max_model_len=CONTEXT, quantization=SCHEME)
    yield made
    made.close()


def logged(run: Any, name: str) -> list[float]:
    return [log[name] for log in run.state.log_history if "loss" in log]


def receipt(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "receipt.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "fields",
    [{}, {"bf16": False, "engine_dtype": "bfloat16"}, {"max_staleness": 1}, {"top_k": 20}],
    ids=["bf16", "trainer in fp32", "ahead", "filtered"],
)
def test_every_step_is_proven_and_the_gap_is_what_quantisation_explains(
    untied_dir: str, tmp_path: Path, engine: VLLMInProcess, fields: dict[str, Any]
) -> None:
    run = trainer(untied_dir, tmp_path, engine, max_steps=4, eval_strategy="no", **IN_8_BITS | fields)
    before = weights(run)
    run.train()
    assert any(not torch.equal(value, before[name]) for name, value in weights(run).items())
    errors, gaps = logged(run, "parity/quantisation_error"), logged(run, "parity/mean_abs_gap")
    assert all(0.5 < gap / error < 2 for gap, error in zip(gaps, errors, strict=True) if gap)
    assert gaps[0] > 0
    assert max(logged(run, "parity/gap_defect")) == 0
    assert min(logged(run, "sampling/importance_sampling_ratio/max")) > 1.5
    start, *steps = receipt(tmp_path)
    assert start["engine"]["quantization"] == SCHEME
    assert start["quantisation"]["codes"] == 8
    for name in ("canary", "sampled"):
        assert start["quantisation"][f"{name}_with_whole_inputs"]["mean_abs_gap"] < 0.15
    assert all(line["quantisation"]["error"] > 0 for line in steps if line["kind"] == "step")


def shifted(engine: VLLMInProcess, monkeypatch: pytest.MonkeyPatch, nats: float) -> None:
    """The engine reports log-probs that are off by this much, some up and some down."""

    def off(requests: Any, answers: list[Completion]) -> list[Completion]:
        signs = [np.where(np.arange(len(a.logprobs)) % 2, -1.0, 1.0) for a in answers]
        return [replace(a, logprobs=a.logprobs + nats * s) for a, s in zip(answers, signs, strict=True)]

    real = engine.serve
    monkeypatch.setattr(engine, "serve", lambda inbox: real(Between(inbox, answers=off)))


def test_a_gap_that_quantisation_does_not_explain_is_refused(
    untied_dir: str, tmp_path: Path, engine: VLLMInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(untied_dir, tmp_path, engine, **IN_8_BITS)
    shifted(engine, monkeypatch, 3.0)
    with pytest.raises(ProofError, match=r"gap.*mean_abs_gap"):
        run.train()


def test_log_probs_of_another_distribution_are_refused_at_the_start(
    untied_dir: str, tmp_path: Path, engine: VLLMInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In a step, the difference would be as large as that of 8 bits.
    (runner,) = engine.llm.collective_rpc(lambda worker: worker.model_runner)
    # vLLM's second model runner, for GPUs, has one sampler instead of two.
    for sampler in filter(None, (runner.sampler, getattr(runner.sampler, "topk_topp_sampler", None))):
        monkeypatch.setattr(sampler, "logprobs_mode", "raw_logprobs")
    trainer(untied_dir, tmp_path / "one", engine, **IN_8_BITS, max_steps=1).train()
    run = trainer(untied_dir, tmp_path / "other", engine, **IN_8_BITS, temperature=0.7)
    with pytest.raises(ProofError, match=r"inputs that are not quantised.*another temperature"):
        run.train()
    assert run.state.global_step == 0


@pytest.mark.release
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(
    untied_dir: str, tmp_path: Path, engine: VLLMInProcess
) -> None:
    saves: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, **IN_8_BITS}
    whole = trainer(untied_dir, tmp_path / "whole", engine, lora(), **saves)
    whole.train()
    first = trainer(untied_dir, tmp_path / "cut", engine, lora(), **saves)
    first.add_callback(StopAfter(2))
    first.train()
    second = trainer(untied_dir, tmp_path / "cut", engine, lora(), **saves)
    second.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-2"))
    expected = weights(whole)
    assert all(torch.equal(value, expected[name]) for name, value in weights(second).items())


def test_an_engine_that_the_run_did_not_ask_for_is_refused(
    untied_dir: str, tmp_path: Path, engine: VLLMInProcess
) -> None:
    with pytest.raises(
        ProofError, match="quantization is 'fp8_per_channel' in the engine, training assumes None"
    ):
        trainer(untied_dir, tmp_path, engine, bf16=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vllm_importance_sampling_correction": False}, "leaves that uncorrected"),
        ({"use_vllm": False}, "use_vllm=false is not supported with vllm_quantization"),
        ({"vllm_enable_lora": True}, "vllm_enable_lora is not supported with vllm_quantization"),
        ({"fsdp": "full_shard"}, "FSDP is not supported with vllm_quantization"),
        ({"bf16": False}, "half-precision models only.*engine_dtype=bfloat16"),
        ({"vllm_quantization": "fp8"}, "vllm_quantization='fp8'; it must be fp8_per_channel"),
    ],
    ids=str,
)
def test_contradictions_are_named_before_anything_is_loaded(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        GRPOConfig(output_dir=str(tmp_path), **IN_8_BITS | fields)
    assert OnlineDPOConfig(output_dir=str(tmp_path), **IN_8_BITS).vllm_quantization == SCHEME


@pytest.mark.long
def test_a_server_in_8_bits_trains_like_an_engine_here(
    untied_dir: str, tmp_path: Path, engine: VLLMInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    here = trainer(untied_dir, tmp_path / "here", engine, **IN_8_BITS)
    here.train()
    with serve(untied_dir, tmp_path, "--quantization", SCHEME, dtype="bfloat16") as server:
        there = trainer(
            untied_dir,
            tmp_path / "there",
            None,
            vllm_server_base_url=server.url,
            **IN_8_BITS,  # type: ignore[arg-type]
        )
        there.train()
        with pytest.raises(ProofError, match="quantization is 'fp8_per_channel'"):
            trainer(untied_dir, tmp_path / "plain", None, vllm_server_base_url=server.url, bf16=True)  # type: ignore[arg-type]
    assert receipt(tmp_path / "there")[0]["quantisation"]["codes"] == 8
    assert logged(there, "reward") == pytest.approx(logged(here, "reward"), rel=0.5)
