"""Embeddings and heads of real vLLM are written in place, and every distinct weight is packed again exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import needs_vllm, start
from tiny import make_model, perturbed, save
from transformers import PreTrainedModel

from lockstep.engines.vllm.in_process import VLLMInProcess
from lockstep.errors import InputError
from lockstep.watch.modules import ModuleProbe, check_probe
from lockstep.weights.push import push_weights

pytestmark = [pytest.mark.vllm, needs_vllm]


@pytest.fixture(scope="module")
def untied_vllm(untied_dir: str) -> Iterator[VLLMInProcess]:
    started = start("vllm", untied_dir)
    yield started  # type: ignore[misc]
    started.close()


def base(tied: bool) -> PreTrainedModel:
    """The model that the engine was started with."""
    return make_model("llama", tied=True) if tied else make_model()


def parts(engine: VLLMInProcess) -> tuple[Any, Any]:
    """vLLM's own embedding and head."""
    (model,) = engine.llm.collective_rpc(lambda worker: worker.model_runner.model)
    return model.model.embed_tokens, model.lm_head


def product(layer: Any, inputs: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        outputs = layer.quant_method.apply(layer, inputs.to(layer.weight.device))
    return outputs[:, : layer.org_vocab_size].cpu()


def proven(model: PreTrainedModel, engine: VLLMInProcess, version: int) -> None:
    push_weights(model, engine, version)
    check_probe(ModuleProbe(model, engine, torch.float32).measure(version, every=True), version)


@pytest.mark.parametrize("tied", [True, False])
def test_both_compute_with_what_was_sent_in_the_memory_they_had(
    tied: bool, request: pytest.FixtureRequest
) -> None:
    engine = request.getfixturevalue("tied_vllm" if tied else "untied_vllm")
    embedding, head = parts(engine)
    places = embedding.weight.data_ptr(), head.weight.data_ptr()
    for version in range(1, 4):
        moved = perturbed(base(tied), scale=0.5, seed=version)
        proven(moved, engine, version)
        assert (embedding.weight.data_ptr(), head.weight.data_ptr()) == places
        inputs = torch.randn(3, 64, generator=torch.Generator().manual_seed(version))
        # The product of the embedding itself is checked too, because other models have no separate head.
        for layer, weight in ((embedding, moved.model.embed_tokens.weight), (head, moved.lm_head.weight)):
            torch.testing.assert_close(product(layer, inputs), inputs @ weight.detach().T)
    assert (head.weight is embedding.weight) == tied
    if not torch.cuda.is_available():
        assert (head.cpu_linear is embedding.cpu_linear) == tied


def test_an_update_that_ended_between_embedding_and_layers_leaves_nothing_behind(
    tied_vllm: VLLMInProcess,
) -> None:
    moved = perturbed(base(tied=True), scale=0.5, seed=9)
    tied_vllm.begin_update()
    tied_vllm.llm.update_weights({"update_info": {"tensors": list(moved.named_parameters())[:3]}})
    assert tied_vllm.version is None
    proven(perturbed(moved), tied_vllm, 5)


@pytest.mark.parametrize("tied", [True, False])
def test_vllm_loads_from_the_trainers_own_memory(
    tied: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = request.getfixturevalue("tied_vllm" if tied else "untied_vllm")
    (kind,) = engine.llm.collective_rpc(lambda worker: type(worker.model_runner.model))
    load, places = kind.load_weights, {}

    def watched(self: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        given = list(weights)
        places.update((name, tensor.data_ptr()) for name, tensor in given)
        return load(self, iter(given))

    monkeypatch.setattr(kind, "load_weights", watched)
    moved = perturbed(base(tied), seed=4)
    proven(moved, engine, 7)
    assert places == {name: parameter.data_ptr() for name, parameter in moved.named_parameters()}


def test_a_weight_for_which_vllm_has_no_place_stops_the_push(tmp_path: Path) -> None:
    # vLLM's Qwen3 has no bias in the output projection of attention. It loads the files without a word.
    model = make_model("qwen3", attention_bias=True)
    engine = start("vllm", str(save(model, tmp_path)))
    try:
        with pytest.raises(InputError, match=r"no place for 2 of .*layers\.0\.self_attn\.o_proj\.bias"):
            push_weights(model, engine, 1)
        assert engine.version is None
    finally:
        engine.close()


def test_convolutions_round_in_vllms_processes_as_in_the_trainer(untied_vllm: VLLMInProcess) -> None:
    """A worker process has no trainer that chooses it. vLLM calls `register` in each of its processes."""
    from lockstep.engines.vllm.plugin import register

    convolution = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = convolution.fp32_precision
    convolution.fp32_precision = "tf32"
    try:
        register()
        assert convolution.fp32_precision == "ieee"
    finally:
        convolution.fp32_precision = before
