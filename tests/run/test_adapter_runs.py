"""GRPO that trains an adapter: proven like any other run, resumed to the bit, and saved for plain PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from conftest import needs_vllm, start
from datasets import Dataset
from tiny import make_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TrainerCallback

from lockstep import GRPOConfig, GRPOTrainer, OnlineDPOConfig, OnlineDPOTrainer
from lockstep.contract.protocol import Engine
from lockstep.errors import InputError, ProofError
from lockstep.models.adapters import Base, base_digest, is_adapted, read_base
from lockstep.models.quantised import is_quantised
from lockstep.weights.push import weights_of

PROMPTS = Dataset.from_dict({"prompt": [f"what is {i} + {i}" for i in range(8)]})
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def lora(**fields: Any) -> peft.LoraConfig:
    return peft.LoraConfig(
        **{
            "r": 4,
            "lora_alpha": 8,
            "target_modules": EVERY,
            "lora_dropout": 0.2,
            "task_type": "CAUSAL_LM",
            **fields,
        }
    )


def by_length(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(len(ids) + ids[0] % 7) for ids in completion_ids]


def trainer(
    model: Any,
    folder: Path,
    engine: Engine,
    peft_config: Any = None,
    quantization_config: Any = None,
    **fields: Any,
) -> GRPOTrainer:
    base: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 12,
    }
    base |= {"max_steps": 3, "logging_steps": 1, "save_strategy": "no", "bf16": False, "disable_tqdm": True}
    base |= {"learning_rate": 1e-2, "report_to": "none"}
    config = GRPOConfig(output_dir=str(folder), **{**base, **fields})
    return GRPOTrainer(
        model,
        by_length,
        config,
        PROMPTS,
        quantization_config=quantization_config,
        peft_config=peft_config,
        engine=engine,
    )


def weights(run: GRPOTrainer) -> dict[str, torch.Tensor]:
    """Copies of the model's parameters, on the host."""
    return {name: p.detach().clone().cpu() for name, p in run.model.named_parameters()}


def pushed(run: GRPOTrainer) -> dict[str, torch.Tensor]:
    """What a push sends, on the host."""
    return {name: tensor.cpu() for name, tensor in weights_of(run.model)}


@pytest.fixture(
    scope="module", params=["transformers", pytest.param("vllm", marks=[pytest.mark.vllm, needs_vllm])]
)
def either(request: pytest.FixtureRequest, untied_dir: str) -> Any:
    made = start(request.param, untied_dir)
    yield made
    made.close()


@pytest.mark.parametrize("fields", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}], ids=str)
def test_a_run_raises_no_gap_and_moves_the_adapter_alone(
    untied_dir: str, tmp_path: Path, either: Engine, fields: dict[str, Any]
) -> None:
    run = trainer(untied_dir, tmp_path, either, lora(**fields), max_steps=4)
    before = weights(run)
    run.train()
    after = weights(run)
    moved = {name for name, old in before.items() if not torch.equal(after[name], old)}
    trained = {name for name, p in run.model.named_parameters() if p.requires_grad}
    assert moved == trained
    assert all("lora_" in name or "modules_to_save" in name for name in moved)
    logs = [log for log in run.state.log_history if "loss" in log]
    assert len(logs) == 4
    assert all(log["parity/max_abs_gap"] < 1e-3 for log in logs)
    # The policy now differs from the base model.
    base = dict(make_model().named_parameters())
    assert all(
        not torch.equal(tensor, base[name]) for name, tensor in pushed(run).items() if "up_proj" in name
    )
    receipt = [json.loads(line) for line in (tmp_path / "receipt.jsonl").read_text().splitlines()]
    assert [entry["version"] for entry in receipt if entry["kind"] == "step"] == [0, 1, 2, 3]
    assert len({entry["digest"] for entry in receipt if entry["kind"] == "step"}) == 4


def test_a_new_adapters_policy_is_the_models_and_its_seed_is_the_runs(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    def made(seed: int, state: int) -> GRPOTrainer:
        torch.manual_seed(state)
        return trainer(untied_dir, tmp_path, hf_engine, lora(), seed=seed)

    run = made(42, 1)
    sent, base = pushed(run), dict(make_model().named_parameters())
    assert sent.keys() == base.keys()
    assert all(torch.equal(sent[name], base[name]) for name in base)
    again, other = weights(made(42, 2)), weights(made(43, 1))
    assert all(torch.equal(again[name], value) for name, value in weights(run).items())
    assert any(not torch.equal(other[name], value) for name, value in weights(run).items())


def test_an_adapters_dropout_is_off(untied_dir: str, tmp_path: Path, hf_engine: Engine) -> None:
    run = trainer(untied_dir, tmp_path, hf_engine, lora(lora_dropout=0.5))
    found = [module for module in run.model.modules() if isinstance(module, torch.nn.Dropout)]
    assert len(found) >= len(EVERY) * 2
    assert all(module.p == 0.0 for module in found)


def test_a_run_that_forgets_the_adapter_is_stopped(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lockstep.run.source as module

    real, base = module.push_weights, make_model()
    monkeypatch.setattr(module, "push_weights", lambda model, engine, version: real(base, engine, version))
    run = trainer(untied_dir, tmp_path, hf_engine, lora())
    with pytest.raises(ProofError, match=r"at version 1 .* weights give other outputs"):
        run.train()
    # At version 0 the adapter adds nothing, so the first step was right.
    assert run.state.global_step == 1


class StopAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = control.should_training_stop or state.global_step >= self._step


@pytest.mark.parametrize("fields", [{}, {"modules_to_save": ["lm_head"], "use_rslora": True}], ids=str)
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, fields: dict[str, Any]
) -> None:
    saves = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    whole = trainer(untied_dir, tmp_path / "whole", hf_engine, lora(**fields), **saves)
    whole.train()
    first = trainer(untied_dir, tmp_path / "cut", hf_engine, lora(**fields), **saves)
    first.add_callback(StopAfter(4))
    first.train()
    assert first.state.global_step == 4
    second = trainer(untied_dir, tmp_path / "cut", hf_engine, lora(**fields), **saves)
    second.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-4"))
    expected = weights(whole)
    assert any(not torch.equal(value, expected[name]) for name, value in weights(first).items())
    assert all(torch.equal(value, expected[name]) for name, value in weights(second).items())
    assert second.state.log_history[-2]["loss"] == whole.state.log_history[-2]["loss"]


def test_a_checkpoint_holds_the_adapter_alone_and_plain_peft_loads_it(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    run = trainer(untied_dir, tmp_path, hf_engine, lora(), save_strategy="steps", save_steps=3)
    run.train()
    saved = tmp_path / "checkpoint-3"
    assert (saved / "adapter_model.safetensors").exists()
    assert not list(saved.glob("model*.safetensors"))
    plain = AutoModelForCausalLM.from_pretrained(untied_dir, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(plain, saved)
    assert weights_of(loaded).manifest(0).digest == weights_of(run.model).manifest(0).digest
    about = read_base(saved)
    assert about is not None
    assert about == Base(base_digest(plain), "float32", adapter=about.adapter)
    assert about.adapter.keys() == {"adapter_config.json", "adapter_model.safetensors"}


def test_a_model_that_comes_with_its_adapter_is_trained_on(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    plain = AutoModelForCausalLM.from_pretrained(untied_dir, dtype=torch.float32)
    model = peft.get_peft_model(plain, lora(init_lora_weights=False))
    run = trainer(model, tmp_path, hf_engine)
    run.train()
    assert all(log["parity/max_abs_gap"] < 1e-3 for log in run.state.log_history if "loss" in log)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_gives_the_adapter_the_same_step(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, reentrant: bool
) -> None:
    settings = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    plain, saving = (
        trainer(
            untied_dir,
            tmp_path,
            hf_engine,
            lora(),
            max_steps=1,
            gradient_checkpointing=on,
            **(settings if on else {}),
        )
        for on in (False, True)
    )
    before = weights(saving)
    plain.train()
    saving.train()
    expected = weights(plain)
    for name, value in weights(saving).items():
        assert torch.allclose(value, expected[name], atol=1e-5), name
    assert any(not torch.equal(value, before[name]) for name, value in weights(saving).items())


def test_configurations_that_cannot_be_trained_are_refused_before_an_engine_starts(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    plain = AutoModelForCausalLM.from_pretrained(untied_dir, dtype=torch.float32)
    model = peft.get_peft_model(plain, lora())
    refused: list[tuple[Any, Any, str]] = [
        (model, lora(), "has an adapter already"),
        (untied_dir, {"r": 4}, "peft_config is a dict"),
        (untied_dir, peft.IA3Config(target_modules=["q_proj"]), "IA3Config, which is not supported"),
        (untied_dir, lora(target_modules=["no_such_layer"]), "does not fit the model"),
        (untied_dir, lora(trainable_token_indices=[3]), "TrainableTokensWrapper"),
        (untied_dir, lora(layer_replication=[[0, 2]]), "layer_replication"),
    ]
    for given, config, message in refused:
        with pytest.raises(InputError, match=message):
            trainer(given, tmp_path, hf_engine, config)
    model.save_pretrained(tmp_path / "saved")
    plain = AutoModelForCausalLM.from_pretrained(untied_dir, dtype=torch.float32)
    frozen = peft.PeftModel.from_pretrained(plain, tmp_path / "saved")
    with pytest.raises(InputError, match="is_trainable=True"):
        trainer(frozen, tmp_path, hf_engine)
    assert is_adapted(frozen)


# ---- on 4-bit base weights (QLoRA)
# ----------------------------------------------------------------------------------------


FOUR_BITS = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)


@pytest.mark.parametrize("by", ["the trainer's argument", "model_init_kwargs"])
def test_a_quantised_run_raises_no_gap_and_moves_the_adapter_alone(
    untied_dir: str, tmp_path: Path, either: Engine, by: str
) -> None:
    given: dict[str, Any] = {"quantization_config": FOUR_BITS}
    fields = {"model_init_kwargs": given} if by == "model_init_kwargs" else given
    run = trainer(untied_dir, tmp_path, either, lora(), **fields)
    assert sum(is_quantised(p) for p in run.model.parameters()) == 2 * len(EVERY)
    before = weights(run)
    run.train()
    after = weights(run)
    moved = {name for name, old in before.items() if not torch.equal(after[name], old)}
    assert moved == {name for name, p in run.model.named_parameters() if p.requires_grad}
    logs = [log for log in run.state.log_history if "loss" in log]
    assert len(logs) == 3
    assert all(log["parity/max_abs_gap"] < 1e-3 for log in logs)


@pytest.mark.release
def test_a_quantised_run_goes_on_where_it_was_to_the_bit(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    whole = trainer(untied_dir, tmp_path / "whole", hf_engine, lora(), FOUR_BITS, max_steps=4)
    whole.train()
    cut = trainer(
        untied_dir,
        tmp_path / "cut",
        hf_engine,
        lora(),
        FOUR_BITS,
        max_steps=4,
        save_strategy="steps",
        save_steps=2,
    )
    cut.train()
    again = trainer(untied_dir, tmp_path / "cut", hf_engine, lora(), FOUR_BITS, max_steps=4)
    again.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-2"))
    expected = weights(whole)
    assert all(torch.equal(value, expected[name]) for name, value in weights(again).items())


def test_the_reference_of_a_quantised_run_is_the_quantised_model_without_the_adapter(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    run = trainer(untied_dir, tmp_path, hf_engine, lora(), FOUR_BITS, beta=0.1)
    run.train()
    kl = [log["kl"] for log in run.state.log_history if "kl" in log]
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert kl[-1] > 1e-6


def test_online_dpo_trains_on_quantised_weights_too(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
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
        untied_dir,
        reward_funcs=by_length,
        args=config,
        train_dataset=PROMPTS,
        peft_config=lora(),
        engine=hf_engine,
    )
    before = weights(run)
    run.train()
    assert any(not torch.equal(value, before[name]) for name, value in weights(run).items())


def test_contradictions_about_quantisation_are_named_before_the_model_is_loaded(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    config = GRPOConfig(
        output_dir=str(tmp_path), bf16=False, model_init_kwargs={"quantization_config": FOUR_BITS}
    )
    with pytest.raises(InputError, match="given twice"):
        GRPOTrainer(
            untied_dir,
            by_length,
            config,
            PROMPTS,
            quantization_config=FOUR_BITS,
            peft_config=lora(),
            engine=hf_engine,
        )
    with pytest.raises(InputError, match="give a peft_config"):
        GRPOTrainer(untied_dir, by_length, config, PROMPTS, engine=hf_engine)
    described = GRPOConfig(
        output_dir=str(tmp_path), bf16=False, model_init_kwargs={"quantization_config": FOUR_BITS.to_dict()}
    )
    with pytest.raises(
        InputError, match=r"is a mapping.* give the trainer quantization_config=BitsAndBytesConfig"
    ):
        GRPOTrainer(untied_dir, by_length, described, PROMPTS, peft_config=lora(), engine=hf_engine)
    plain = GRPOConfig(output_dir=str(tmp_path), bf16=False)
    model = AutoModelForCausalLM.from_pretrained(untied_dir)
    with pytest.raises(InputError, match="a model that is loaded here"):
        GRPOTrainer(model, by_length, plain, PROMPTS, quantization_config=FOUR_BITS, engine=hf_engine)
