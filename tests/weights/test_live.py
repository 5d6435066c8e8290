"""What a push sends is compared with the live model: old weights in the source and wrong merges are found and named."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import peft
import pytest
import torch
from model_families import make_family
from test_adapters import KINDS, adapted, gpt2, move
from test_push import Recorder
from tiny import make_model

from lockstep.errors import ProofError
from lockstep.weights import push as push_module
from lockstep.weights.merged import AdaptedSource
from lockstep.weights.push import push_weights
from lockstep.weights.source import PlainSource


class HalfPrecision(Recorder):
    wire_dtype = torch.bfloat16


def stale_source(source: type[PlainSource], model: Any) -> Any:
    """A context in which pushes read the weights that the model has now, whatever it learns later."""
    old = {name: tensor.clone() for name, tensor in source(model)}

    class Stale(source):  # type: ignore[misc, valid-type]
        def tensor(self, name: str) -> torch.Tensor:
            return old[self.first_name(name)]

    return patch.object(push_module, "weights_of", Stale)


@pytest.mark.parametrize("receiver", [Recorder, HalfPrecision])
def test_a_source_with_old_weights_is_found_before_the_version_is_committed(receiver: type[Recorder]) -> None:
    model, engine = make_model(), receiver()
    with stale_source(PlainSource, model):
        push_weights(model, engine, 4)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.01)
        with pytest.raises(ProofError, match="not those of the live model") as failed:
            push_weights(model, engine, 5)
    assert failed.value.check == "live"
    assert engine.version is None


def test_one_old_tensor_is_found_and_named() -> None:
    model = make_model()
    with stale_source(PlainSource, model):
        with torch.no_grad():
            model.model.norm.weight[3] += 1e-6
        with pytest.raises(
            ProofError, match=r"1 of 2\d compared tensors .* the first is model\.norm\.weight"
        ):
            push_weights(model, Recorder(), 4)


def test_a_model_that_changes_while_it_is_sent_is_found() -> None:
    model = make_model()

    class Changing(Recorder):
        def load(self, tensors: Any, base: str = "") -> Any:
            loaded = super().load(tensors, base)
            with torch.no_grad():
                model.model.norm.weight[3] += 1e-6
            return loaded

    with pytest.raises(ProofError, match=r"model\.norm\.weight"):
        push_weights(model, Changing(), 4)


def test_an_old_adapter_is_found() -> None:
    model = adapted()
    with stale_source(AdaptedSource, model):
        push_weights(model, Recorder(), 4)
        move(model, 5)
        with pytest.raises(ProofError) as failed:
            push_weights(model, Recorder(), 5)
    assert failed.value.check == "merge"


def test_a_source_that_forgets_the_adapter_is_found() -> None:
    forgets = patch.object(push_module, "weights_of", lambda model: PlainSource(make_model()))
    with forgets, pytest.raises(ProofError) as failed:
        push_weights(adapted(), Recorder(), 4)
    assert failed.value.check == "merge"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_right_merge_passes(kind: str, dtype: torch.dtype) -> None:
    for version in range(4):
        model = adapted(make_model().to(dtype), seed=version, **KINDS[kind])
        push_weights(model, Recorder(), version)
        push_weights(model, HalfPrecision(), version)


def test_a_right_merge_passes_for_transposed_layers_and_scaled_embeddings() -> None:
    transposed = adapted(gpt2(), target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    # Gemma multiplies the rows of its embedding by a number.
    scaled = adapted(
        make_family("gemma", tie_word_embeddings=False), target_modules=["embed_tokens", "q_proj"]
    )
    for model in (transposed, scaled):
        for version in range(4):
            push_weights(model, Recorder(), version)


@pytest.mark.parametrize("size", [1e-3, 1.0])
@pytest.mark.parametrize("kind", ["linear", "dora", "embedding"])
def test_a_merge_with_another_scaling_is_found_and_names_the_layer(kind: str, size: float) -> None:
    """Also early in a run, when the adapter adds a thousandth of the layer's output."""
    model = adapted(**KINDS[kind])
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name or "lora_embedding_B" in name:
                p.mul_(size)
    with patch.object(AdaptedSource, "tensor", scaled_by(1.05)), pytest.raises(ProofError) as failed:
        push_weights(model, Recorder(), 1)
    assert failed.value.check == "merge"
    assert "merged weight of model." in failed.value.found or "lm_head" in failed.value.found


def scaled_by(factor: float) -> Any:
    """`AdaptedSource.tensor` for layers whose scaling is wrong."""
    real = AdaptedSource.tensor

    def tensor(self: AdaptedSource, name: str) -> torch.Tensor:
        layer = self._layers.get(name)
        if not isinstance(layer, peft.tuners.lora.LoraLayer):
            return real(self, name)
        with patch.dict(layer.scaling, {key: factor * value for key, value in layer.scaling.items()}):
            return real(self, name)

    return tensor
