"""4-bit base weights are sent as the values that their layers compute with, and stay trainable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from conftest import start
from transformers import BitsAndBytesConfig

from lockstep.errors import InputError
from lockstep.models.policy import load_policy
from lockstep.models.quantised import check_quantization, dequantised, is_quantised, prevent_packing
from lockstep.weights.push import push_weights, weights_of

LAYER = "model.layers.0.mlp.up_proj"


def four_bits(**fields: Any) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(load_in_4bit=True, **fields)


def quantised(path: str, dtype: torch.dtype = torch.float32, **fields: Any) -> Any:
    return load_policy(path, {"quantization_config": four_bits(**fields), "dtype": dtype})


def adapted(model: Any, **fields: Any) -> Any:
    torch.manual_seed(0)
    settings = {
        "r": 4,
        "target_modules": ["up_proj", "q_proj"],
        "task_type": "CAUSAL_LM",
        "init_lora_weights": False,
    }
    return peft.get_peft_model(model, peft.LoraConfig(**settings, **fields))


@pytest.mark.parametrize(
    "fields", [{}, {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_values_are_those_that_a_layer_multiplies_with(
    untied_dir: str, dtype: torch.dtype, fields: dict[str, Any]
) -> None:
    layer = (
        quantised(untied_dir, dtype, bnb_4bit_compute_dtype=torch.float32, **fields)
        .get_submodule(LAYER)
        .train()
    )
    assert is_quantised(layer.weight)
    values = dequantised(layer.weight)
    assert values.shape == (layer.out_features, layer.in_features)
    assert torch.equal(layer(torch.eye(layer.in_features, device=values.device)).T, values)
    # Four bits hold sixteen values per block.
    assert len(values.flatten()[:64].unique()) <= 16
    assert layer.weight.quant_state.dtype == dtype


def test_a_model_that_is_run_before_it_is_trained_keeps_its_gradients(untied_dir: str) -> None:
    model = adapted(quantised(untied_dir))
    prevent_packing(model)
    model.eval()
    with torch.no_grad():
        model(torch.tensor([[5, 6, 7]], device=model.device))
    model.train()
    model(torch.tensor([[5, 6, 7]], device=model.device)).logits.sum().backward()
    first = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj.lora_A.default")
    assert first.weight.grad is not None
    assert float(first.weight.grad.abs().sum()) > 0


def test_weights_that_were_packed_for_inference_are_refused(untied_dir: str) -> None:
    model = adapted(quantised(untied_dir))
    model.get_submodule(
        f"base_model.model.{LAYER}"
    ).base_layer.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(InputError, match="packed for inference"):
        prevent_packing(model)
    with pytest.raises(InputError, match="packed for inference"):
        dict(weights_of(model))


def test_what_is_sent_is_the_values_and_the_delta_under_the_base_models_names(untied_dir: str) -> None:
    model = adapted(quantised(untied_dir))
    source = weights_of(model)
    sent, plain = dict(source), load_policy(untied_dir)
    assert sent.keys() == dict(weights_of(plain)).keys()
    assert {name: (t.shape, t.dtype) for name, t in source.meta_tensors()} == {
        n: (t.shape, t.dtype) for n, t in sent.items()
    }
    layer = model.get_submodule(f"base_model.model.{LAYER}")
    delta = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    torch.testing.assert_close(sent[f"{LAYER}.weight"], dequantised(layer.base_layer.weight) + delta)
    # A layer without an adapter is quantised too.
    other = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(sent[other], dequantised(model.get_submodule(f"base_model.model.{other[:-7]}").weight))


@pytest.mark.parametrize("fields", [{}, {"use_rslora": True}, {"use_dora": True}], ids=str)
def test_a_plain_model_with_what_is_sent_computes_what_the_quantised_one_does(
    untied_dir: str, fields: dict[str, Any]
) -> None:
    model, plain = adapted(quantised(untied_dir), **fields).train(), load_policy(untied_dir)
    plain.to(model.device)
    ids = torch.tensor([[5, 6, 7, 8]], device=model.device)
    with torch.no_grad():
        before = plain(ids).logits
        plain.load_state_dict(dict(weights_of(model)), strict=False)
        torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)
        assert float((plain(ids).logits - before).abs().max()) > 0.1


@pytest.mark.parametrize("pushes", [20, pytest.param(1000, marks=pytest.mark.release)])
def test_many_pushes_leave_every_code_as_it_was(untied_dir: str, pushes: int) -> None:
    engine, model = start("transformers", untied_dir), adapted(quantised(untied_dir))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    digests = {push_weights(model, engine, version).digest for version in range(pushes)}
    assert len(digests) == 1
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_quantised_model_without_an_adapter_is_refused(untied_dir: str) -> None:
    with pytest.raises(InputError, match="give it a LoRA adapter"):
        weights_of(quantised(untied_dir))


def test_what_no_engine_could_be_given_is_refused() -> None:
    with pytest.raises(InputError, match="does not load in 4 bits"):
        check_quantization(BitsAndBytesConfig(load_in_8bit=True), peft.LoraConfig())
    with pytest.raises(InputError, match="give a peft_config"):
        check_quantization(four_bits(), None)
    check_quantization(four_bits(), peft.LoraConfig())
    check_quantization(None, None)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(InputError, match=r"lockstep-rl\[quantized\]"):
        check_quantization(four_bits(), peft.LoraConfig())


def test_a_directory_with_weights_that_are_stored_quantised_is_refused(
    untied_dir: str, tmp_path: Path
) -> None:
    quantised(untied_dir).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="is quantised"):
        load_policy(str(tmp_path), {"quantization_config": four_bits()})
