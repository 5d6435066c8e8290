"""QLoRA: GRPO on 4-bit base weights, on an engine that holds their values in full precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import needs_vllm, start
from test_adapter_runs import EVERY, PROMPTS, by_length, lora, trainer, weights
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lockstep import GRPOConfig, GRPOTrainer, OnlineDPOConfig, OnlineDPOTrainer
from lockstep.engines.protocol import Engine
from lockstep.errors import InputError
from lockstep.models.quantised import is_quantised

FOUR_BITS = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)


def quantised_trainer(path: str, folder: Path, engine: Engine, **fields: Any) -> GRPOTrainer:
    return trainer(path, folder, engine, lora(), model_init_kwargs={"quantization_config": FOUR_BITS}, **fields)


@pytest.fixture(scope="module")
def hf_engine(untied_dir: str) -> Engine:
    return start("transformers", untied_dir)


@pytest.fixture(scope="module", params=["transformers", pytest.param("vllm", marks=[pytest.mark.vllm, needs_vllm])])
def either(request: pytest.FixtureRequest, untied_dir: str) -> Any:
    made = start(request.param, untied_dir)
    yield made
    made.close()


@pytest.mark.parametrize("by", ["the trainer's argument", "model_init_kwargs"])
def test_a_run_raises_no_gap_and_moves_the_adapter_alone(
    untied_dir: str, tmp_path: Path, either: Engine, by: str
) -> None:
    given: dict[str, Any] = {"quantization_config": FOUR_BITS}
    base = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 12, "max_steps": 3}
    base |= {"logging_steps": 1, "save_strategy": "no", "bf16": False, "learning_rate": 1e-2, "report_to": "none"}
    config = GRPOConfig(
        output_dir=str(tmp_path), **base, model_init_kwargs=given if by == "model_init_kwargs" else None
    )
    arguments = {} if by == "model_init_kwargs" else given
    run = GRPOTrainer(untied_dir, by_length, config, PROMPTS, peft_config=lora(), engine=either, **arguments)
    assert sum(is_quantised(p) for p in run.model.parameters()) == 2 * len(EVERY)
    before = weights(run)
    run.train()
    after = weights(run)
    moved = {name for name, old in before.items() if not torch.equal(after[name], old)}
    assert moved == {name for name, p in run.model.named_parameters() if p.requires_grad}
    logs = [log for log in run.state.log_history if "loss" in log]
    assert len(logs) == 3
    assert all(log["parity/max_abs_gap"] < 1e-3 for log in logs)


def test_a_run_goes_on_where_it_was_to_the_bit(untied_dir: str, tmp_path: Path, hf_engine: Engine) -> None:
    whole = quantised_trainer(untied_dir, tmp_path / "whole", hf_engine, max_steps=4)
    whole.train()
    cut = quantised_trainer(untied_dir, tmp_path / "cut", hf_engine, max_steps=4, save_strategy="steps", save_steps=2)
    cut.train()
    again = quantised_trainer(untied_dir, tmp_path / "cut", hf_engine, max_steps=4)
    again.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-2"))
    expected = weights(whole)
    assert all(torch.equal(value, expected[name]) for name, value in weights(again).items())


def test_with_a_reference_it_is_the_quantised_model_without_the_adapter(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    run = quantised_trainer(untied_dir, tmp_path, hf_engine, beta=0.1)
    run.train()
    kl = [log["kl"] for log in run.state.log_history if "kl" in log]
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert kl[-1] > 1e-6


def test_online_dpo_trains_on_it_too(untied_dir: str, tmp_path: Path, hf_engine: Engine) -> None:
    config = OnlineDPOConfig(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=4,
        max_new_tokens=8,
        logging_steps=1,
        save_strategy="no",
        bf16=False,
        report_to="none",
        model_init_kwargs={"quantization_config": FOUR_BITS},
    )
    run = OnlineDPOTrainer(
        untied_dir, reward_funcs=by_length, args=config, train_dataset=PROMPTS, peft_config=lora(), engine=hf_engine
    )
    before = weights(run)
    run.train()
    assert any(not torch.equal(value, before[name]) for name, value in weights(run).items())


def test_contradictions_are_named_before_the_model_is_loaded(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    config = GRPOConfig(output_dir=str(tmp_path), bf16=False, model_init_kwargs={"quantization_config": FOUR_BITS})
    with pytest.raises(InputError, match="given twice"):
        GRPOTrainer(
            untied_dir, by_length, config, PROMPTS, quantization_config=FOUR_BITS, peft_config=lora(), engine=hf_engine
        )
    with pytest.raises(InputError, match="give a peft_config"):
        GRPOTrainer(untied_dir, by_length, config, PROMPTS, engine=hf_engine)
    plain = GRPOConfig(output_dir=str(tmp_path), bf16=False)
    model = AutoModelForCausalLM.from_pretrained(untied_dir)
    with pytest.raises(InputError, match="a model that is loaded here"):
        GRPOTrainer(model, by_length, plain, PROMPTS, quantization_config=FOUR_BITS, engine=hf_engine)
