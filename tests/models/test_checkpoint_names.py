"""A push has the names and values that `save_pretrained` writes, even if a family keeps experts in fused tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_families import make_family
from safetensors.torch import load_file
from torch.nn.functional import silu

from lockstep.contract.probe import expert_input
from lockstep.engines import transformers_engine as transformers_probe
from lockstep.errors import InputError
from lockstep.models import parameters as checkpoint_names
from lockstep.models.parameters import checkpoint_tensors
from lockstep.weights.push import weights_of


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mixtral", "olmoe"])
def test_a_push_has_the_tensors_of_a_saved_checkpoint(family: str, tmp_path: Path) -> None:
    model = make_family(family, tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    saved, sent = load_file(tmp_path / "model.safetensors"), dict(weights_of(model))
    assert sent.keys() == saved.keys()
    assert all(torch.equal(sent[name], saved[name]) for name in saved)


def test_the_tensors_of_experts_are_the_models_own_memory() -> None:
    model = make_family("qwen3_moe")
    parts = [p for p in checkpoint_tensors(model) if ".experts." in p.name]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(3.0)
    assert len(parts) == 2 * 4 * 3
    assert all(bool((p.tensor == 3.0).all()) for p in parts)


def test_with_an_adapter_experts_are_sent_as_without_it(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = make_family("mixtral")
    plain = {name: tensor.clone() for name, tensor in weights_of(model)}
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    sent = dict(weights_of(adapted))
    changed = {name for name in plain if not torch.equal(plain[name], sent[name])}
    assert sent.keys() == plain.keys()
    assert changed == {f"model.layers.{i}.self_attn.q_proj.weight" for i in (0, 1)}


def test_experts_that_are_no_series_of_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where gate and up projections lie row by row in turn."""
    model, real = make_family("olmoe"), checkpoint_names.revert_weight_conversion

    def in_turn(model: object, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: t.flip(0) if t.numel() > 1 else t for name, t in real(model, tensors).items()}  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint_names, "revert_weight_conversion", in_turn)
    with pytest.raises(InputError, match="cannot be sent to vLLM; set use_vllm to false"):
        checkpoint_tensors(model)


def test_the_transformers_engine_answers_for_each_expert() -> None:
    model = make_family("qwen3_moe")
    found = transformers_probe.list_modules(model, weights_of(model).names)
    name = "model.layers.1.mlp.experts"
    answer = transformers_probe.output_of(name, model.get_submodule(name), 5, True).view(4, -1)
    vector, sent = expert_input(5, name, 64), weights_of(model)
    gate, up, down = (sent.tensor(f"{name}.2.{part}_proj.weight") for part in ("gate", "up", "down"))
    torch.testing.assert_close(answer[2], down @ (silu(gate @ vector) * (up @ vector)))
    # transformers' routers are not linear layers.
    assert found.unreached == tuple(f"model.layers.{i}.mlp.gate.weight" for i in (0, 1))
    assert found.probed[name].tensors[6:9] == tuple(
        f"{name}.2.{part}_proj.weight" for part in ("gate", "up", "down")
    )
