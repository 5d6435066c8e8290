"""An engine with weights in 8 bits is proven like any other: real vLLM, tiny models, bf16, `fp8_per_channel`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from conftest import VLLM
from tiny import CONTEXT, make_model, perturbed, save_model
from transformers import PreTrainedModel

from lockstep.engines.vllm.in_process import VLLMInProcess
from lockstep.errors import InputError, ProofError
from lockstep.extras.fp8 import quantised_proof
from lockstep.extras.fp8.quantisation import LARGEST_ERROR, quantised_linear, quantised_rows
from lockstep.extras.fp8.quantised_push import QuantisedPush
from lockstep.models.arithmetic import Precision
from lockstep.watch.gap import over_limits
from lockstep.watch.modules import ModuleProbe
from lockstep.watch.push import ProvenPusher, score_canary
from lockstep.watch.settings import check_settings, expected_settings
from lockstep.watch.tolerances import tolerance

pytestmark = VLLM
SCHEME = "fp8_per_channel"
HALF = Precision(torch.bfloat16)
LAST = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def engine(untied_dir: str) -> Iterator[VLLMInProcess]:
    started = VLLMInProcess(untied_dir, dtype=torch.bfloat16, max_model_len=CONTEXT, quantization=SCHEME)
    yield started
    started.close()


def pusher_of(model: PreTrainedModel, engine: VLLMInProcess) -> ProvenPusher:
    return ProvenPusher(model, engine, torch.bfloat16, HALF, extension=QuantisedPush)


def layer_of(engine: VLLMInProcess, name: str = LAST) -> Any:
    (model,) = engine.llm.collective_rpc(lambda worker: worker.model_runner.model)
    return model.get_submodule(name)


# ---- a push ------------------------------------------------------------------------------------------------------


def test_every_push_is_quantised_anew_to_the_bit(engine: VLLMInProcess) -> None:
    places = layer_of(engine).weight.data_ptr()
    for version in range(1, 4):
        moved = perturbed(make_model(), 0.5, seed=version)
        record = pusher_of(moved, engine).push(version, canary=True).probe
        # Two layers of four modules each; embedding, head and norms are not quantised.
        assert (record.codes, record.recoded, record.unreached) == (8, (), ())
        assert record.worst[1] < 1e-5
        assert layer_of(engine).weight.data_ptr() == places


def test_merged_adapters_are_quantised_like_other_weights(engine: VLLMInProcess) -> None:
    lora = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    adapted = peft.get_peft_model(make_model(), lora)
    assert pusher_of(adapted, engine).push(1, canary=True).probe.codes == 8


@pytest.mark.parametrize("fault", ["code", "scale", "older", "exact", "next_bit_of_a_scale"])
def test_a_layer_with_other_codes_or_scales_is_named(engine: VLLMInProcess, fault: str) -> None:
    pusher_of(perturbed(make_model(), 0.5, seed=7), engine).push(7)
    layer = layer_of(engine)
    older = layer.weight.clone(), layer.weight_scale.clone()
    pusher = pusher_of(perturbed(make_model(), 0.5, seed=8), engine)
    pusher.push(8)
    right = layer.weight.clone(), layer.weight_scale.clone()
    found = "codes"
    with torch.inference_mode():
        if fault == "code":
            layer.weight.view(torch.uint8)[0, 0] ^= 1
        elif fault == "scale":
            layer.weight_scale.copy_(older[1])
            found = "module_probe"
        elif fault == "older":
            layer.weight.copy_(older[0])
            layer.weight_scale.copy_(older[1])
            found = "module_probe"
        elif fault == "exact":
            # A weight that moves within the step of its scale: no probe can see it in the noise of 8 bits, but the
            # bytes differ.
            layer.weight.view(torch.uint8)[3] ^= 1
        else:
            layer.weight_scale.view(torch.int32)[2] += 1
    try:
        with pytest.raises(ProofError, match=LAST) as error:
            pusher.probe(8)
        assert error.value.check in ({found, "module_probe"} if fault == "exact" else {found})
    finally:
        layer.weight.copy_(right[0])
        layer.weight_scale.copy_(right[1])
    pusher.probe(8)


def test_two_layers_in_each_others_place_and_a_layer_that_is_not_quantised_are_named(
    engine: VLLMInProcess,
) -> None:
    moved = perturbed(make_model(), 0.5, seed=9)
    pusher = pusher_of(moved, engine)
    pusher.push(9)
    layer, other = layer_of(engine), layer_of(engine, "model.layers.0.mlp.down_proj")
    held = layer.weight.clone(), layer.weight_scale.clone()
    with torch.inference_mode():
        layer.weight.copy_(other.weight)
        layer.weight_scale.copy_(other.weight_scale)
    with pytest.raises(ProofError, match=LAST):
        pusher.probe(9)
    with torch.inference_mode():
        layer.weight.copy_(held[0])
        layer.weight_scale.copy_(held[1])
    weight = moved.get_submodule(LAST).weight.detach()
    real = layer.quant_method.apply
    layer.quant_method.apply = lambda own, x, bias=None: torch.nn.functional.linear(x, weight.to(x), bias)
    try:
        with pytest.raises(ProofError, match=f"module_probe.*{LAST}"):
            pusher.probe(9)
    finally:
        layer.quant_method.apply = real
    pusher.probe(9)


def test_an_error_of_the_size_of_a_step_is_found_in_a_tensor_that_was_sent(engine: VLLMInProcess) -> None:
    moved = perturbed(make_model(), 0.5, seed=10)
    pusher_of(moved, engine).push(10)
    off = perturbed(make_model(), 0.5, seed=10)
    with torch.no_grad():
        off.get_submodule(LAST).weight.mul_(1 + LARGEST_ERROR * torch.randn(64, 128).sign())
    record = ModuleProbe(off, engine, torch.bfloat16).measure(10, every=True)
    assert record.recoded == (LAST,)
    assert record.failed == [f"{LAST}.weight"]


# ---- settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [None, "fp8_per_block"])
def test_an_engine_in_another_scheme_than_the_runs_is_refused(
    engine: VLLMInProcess, asked: str | None
) -> None:
    def expected(scheme: str | None) -> Any:
        return expected_settings(make_model(), None, torch.bfloat16, 8, quantization=scheme)

    check_settings(expected(SCHEME), engine.settings())
    with pytest.raises(ProofError, match=f"quantization is '{SCHEME}'.*assumes {asked!r}"):
        check_settings(expected(asked), engine.settings())
    with pytest.raises(ProofError, match=f"quantization is None.*assumes '{SCHEME}'"):
        check_settings(expected(SCHEME), replace(engine.settings(), quantization=None))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quantization": "fp8", "dtype": torch.bfloat16}, "it must be fp8_per_channel"),
        (
            {"quantization": SCHEME, "dtype": torch.float32},
            "half-precision models only.*engine_dtype=bfloat16",
        ),
        ({"engine_kwargs": {"quantization": SCHEME}, "dtype": torch.bfloat16}, "vllm_quantization"),
    ],
)
def test_what_could_not_be_proven_is_refused_before_the_engine_starts(
    untied_dir: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        VLLMInProcess(untied_dir, max_model_len=CONTEXT, **fields)


# ---- the gap -----------------------------------------------------------------------------------------------------


def test_the_trainer_in_8_bits_computes_a_layer_as_the_engine_does(engine: VLLMInProcess) -> None:
    moved = perturbed(make_model(), 0.5, seed=11)
    pusher_of(moved, engine).push(11)
    inputs = torch.randn(5, 64).bfloat16()
    name = "model.layers.0.self_attn.o_proj"
    weight = quantised_rows(moved.get_submodule(name).weight.detach().bfloat16())
    with torch.inference_mode():
        theirs, _ = layer_of(engine, name)(inputs)
    ours = quantised_linear(inputs, weight, None)
    torch.testing.assert_close(theirs.float(), ours, rtol=2.0**-8, atol=1e-3)
    # Without the quantisation of the inputs it is another product.
    assert (theirs.float() - inputs.float() @ weight.values().T).abs().max() > 10 * (
        theirs.float() - ours
    ).abs().max()


def test_the_limits_are_those_of_the_dtypes_plus_what_quantisation_explains(engine: VLLMInProcess) -> None:
    pusher = pusher_of(perturbed(make_model(), 0.5, seed=12), engine)
    found = pusher.push(12, canary=True).canary
    half = tolerance(torch.bfloat16, torch.bfloat16)
    assert isinstance(pusher.extension, QuantisedPush)
    error = pusher.extension.error.canary
    assert found is not None
    assert over_limits(found, half)
    assert not over_limits(found, pusher.limit)
    assert 0.5 < found.mean_abs / error.mean_abs < 2
    assert pusher.limit.mean == half.mean + 1.5 * error.mean_abs
    # Without quantised inputs, nothing is left but the rounding of the dtypes.
    whole = pusher.extension.error.with_whole_inputs
    assert whole is not None
    assert not over_limits(whole, half)
    assert whole.mean_abs < found.mean_abs / 4
    # An engine whose log-probs are off by more than that is refused.
    worse = replace(found, sum_abs=found.sum_abs + found.tokens * pusher.limit.mean)
    assert over_limits(worse, pusher.limit)


def test_an_engine_that_cannot_leave_its_inputs_as_they_are_is_told_once(
    engine: VLLMInProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # As with CUDA graphs.
    monkeypatch.setattr(quantised_proof, "quantise_inputs", lambda engine, wanted: False)
    caplog.set_level("INFO", "lockstep")
    pusher = pusher_of(make_model(), engine)
    pusher.push(12, canary=True)
    pusher.push(13, canary=True)
    assert isinstance(pusher.extension, QuantisedPush)
    assert pusher.extension.error.with_whole_inputs is None
    (line,) = [
        record.message
        for record in caplog.records
        if "without quantised inputs is left out" in record.message
    ]
    assert "enforce_eager" in line


def test_a_fault_between_the_modules_is_found_within_the_limits_of_the_dtypes(engine: VLLMInProcess) -> None:
    moved = perturbed(make_model("qwen2"), 0.5, seed=13)
    pusher = pusher_of(moved, engine)
    pusher.push(13, canary=True)
    embedding = layer_of(engine, "model.layers.1.self_attn.rotary_emb")
    right = embedding.cos_sin_cache.clone()
    with torch.inference_mode():
        # The positions of one layer are off by a tenth of a token.
        embedding.cos_sin_cache.copy_(torch.lerp(right, right.roll(1, 0), 0.1))
    try:
        assert not over_limits(score_canary(moved, engine, CONTEXT, HALF), pusher.limit)
        with pytest.raises(ProofError, match=r"gap(.|\n)*positions"):
            pusher.score_canary(13)
    finally:
        embedding.cos_sin_cache.copy_(right)
    pusher.score_canary(13)


def test_experts_in_8_bits_are_refused(engine: VLLMInProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    found = engine.modules(tuple(n for n, _ in make_model().named_parameters()))
    other = replace(found, probed={n: replace(m, quantization="Other") for n, m in found.probed.items()})
    monkeypatch.setattr(engine, "modules", lambda names: other)
    with pytest.raises(
        InputError, match=r"by Other, which cannot be proven yet.*leave vllm_quantization out"
    ):
        ModuleProbe(make_model(), engine, torch.bfloat16)


def test_a_tied_model_and_one_without_biases_are_proven_too(tmp_path: Path) -> None:
    started = VLLMInProcess(
        str(save_model(tmp_path / "tied", kind="llama", tied=True)),
        dtype=torch.bfloat16,
        max_model_len=CONTEXT,
        quantization=SCHEME,
    )
    try:
        moved = perturbed(make_model("llama", tied=True), 0.5)
        assert pusher_of(moved, started).push(1, canary=True).probe.codes == 8
    finally:
        started.close()
