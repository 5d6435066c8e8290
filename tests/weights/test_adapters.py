"""An engine gets the merged weights of a model with an adapter, exact to the byte, and the model does not change."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from conftest import needs_vllm, start
from servers import connect
from test_push import Recorder
from tiny import make_model
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel

from lockstep.contract import tensors as tensor_specs
from lockstep.contract.protocol import Engine
from lockstep.contract.tensors import LoadedWeights
from lockstep.engines.transformers_engine import TransformersEngine
from lockstep.errors import InputError, ProofError
from lockstep.models.arithmetic import Precision
from lockstep.watch.modules import ModuleProbe
from lockstep.watch.plain_forward import sequence_logits
from lockstep.weights.merged import AdaptedSource
from lockstep.weights.push import push_weights, weights_of
from lockstep.weights.source import PlainSource

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "linear": {},
    "rslora": {"use_rslora": True, "rank_pattern": {"q_proj": 2}},
    "dora": {"use_dora": True},
    "embedding": {"target_modules": [*LINEAR, "embed_tokens", "lm_head"]},
    "dora-embedding": {"use_dora": True, "target_modules": ["embed_tokens", "q_proj"]},
    "modules-to-save": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "saved-blocks": {"target_modules": ["q_proj"], "modules_to_save": ["mlp"]},
    "biases": {"target_modules": ["q_proj"], "lora_bias": True, "bias": "lora_only"},
}


def adapted(model: PreTrainedModel | None = None, *, seed: int = 0, **fields: Any) -> Any:
    """A model with an adapter. Every tensor of the adapter and every copied module differs from its initial value."""
    settings = {"r": 4, "lora_alpha": 6, "target_modules": LINEAR, "task_type": "CAUSAL_LM", **fields}
    torch.manual_seed(seed)
    made = peft.get_peft_model(model if model is not None else make_model(), peft.LoraConfig(**settings))
    move(made, seed)
    return made


def move(model: torch.nn.Module, seed: int) -> None:
    """Change the trained weights, as an optimizer step would do."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p += (0.05 * torch.randn(p.shape, generator=generator)).to(p)


def gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=384, n_positions=128, n_embd=64, n_layer=2, n_head=2)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def merged_by_peft(model: Any) -> PreTrainedModel:
    return copy.deepcopy(model).merge_and_unload()


def bits(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.state_dict().items()}


def unchanged(model: torch.nn.Module, before: dict[str, torch.Tensor]) -> bool:
    after = model.state_dict()
    return after.keys() == before.keys() and all(
        torch.equal(after[name], old) for name, old in before.items()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sent_is_what_merging_gives_under_the_base_models_names(kind: str) -> None:
    model = adapted(**KINDS[kind])
    before = bits(model)
    sent = dict(weights_of(model))
    expected = {name: p.detach() for name, p in merged_by_peft(model).named_parameters()}
    base = dict(make_model().named_parameters())
    assert list(sent) == list(expected) == list(base)
    for name, value in expected.items():
        assert sent[name].dtype == value.dtype
        assert float((sent[name] - value).abs().max()) < 1e-6, name
    assert unchanged(model, before)
    assert any(not torch.equal(sent[name], base[name]) for name in sent)


def test_weights_that_lie_the_other_way_round_are_merged_so() -> None:
    model = adapted(gpt2(), target_modules=["c_attn", "c_proj", "c_fc", "wpe"], fan_in_fan_out=True)
    expected = dict(merged_by_peft(model).named_parameters())
    sent = dict(weights_of(model))
    assert sent.keys() == expected.keys()
    assert all(float((sent[name] - value).abs().max()) < 1e-6 for name, value in expected.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_merging_twice_gives_the_same_bytes_and_the_digest_covers_them(dtype: torch.dtype) -> None:
    model = adapted(make_model().to(dtype))
    source = weights_of(model)
    first = source.manifest(1)
    assert {t.dtype for t in first.tensors} == {str(dtype).removeprefix("torch.")}
    assert all(weights_of(model).manifest(2).digest == first.digest for _ in range(5))
    # Layers of the same shape are merged one after the other and may reuse the same memory; each must have its own
    # digest.
    matrices = [t for t in first.tensors if len(t.shape) == 2]
    assert len({t.digest for t in matrices}) == len(matrices)
    move(model, 7)
    changed = {
        a.name for a, b in zip(first.tensors, source.manifest(3).tensors, strict=True) if a.digest != b.digest
    }
    assert changed == {t.name for t in matrices if ".layers." in t.name}


def test_a_bf16_base_is_merged_in_float32_and_rounded_once() -> None:
    model = adapted(make_model().to(torch.bfloat16))
    layer = model.get_base_model().model.layers[1].mlp.up_proj
    exact = layer.base_layer.weight.double() + 1.5 * (
        layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    )
    sent = weights_of(model).tensor("model.layers.1.mlp.up_proj.weight")
    assert float((sent == exact.to(torch.bfloat16)).float().mean()) > 0.999


def test_a_push_is_what_the_source_holds() -> None:
    model, receiver = adapted(), Recorder()
    record = push_weights(model, receiver, 4)
    assert receiver.events == ["begin", "load", "reset", "commit"]
    assert record.digest == PlainSource(merged_exactly(model)).manifest(4).digest
    assert record.bytes == sum(p.nbytes for p in make_model().parameters())


def merged_exactly(model: Any) -> PreTrainedModel:
    plain = make_model()
    plain.load_state_dict(dict(weights_of(model)))
    return plain


@pytest.mark.parametrize("together", [1, 100_000])
def test_a_push_never_holds_a_second_copy(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_specs, "GROUP_BYTES", together)
    alive: list[int] = []

    class Watcher(Recorder):
        def load(self, tensors: Any, base: str = "") -> LoadedWeights:
            refs: list[Any] = []
            for _, tensor in tensors:
                refs = [*(r for r in refs if r() is not None), weakref.ref(tensor)]
                alive.append(sum(r().nbytes for r in refs))
            return LoadedWeights((), ())

    with pytest.raises(ProofError, match="0 arrived"):
        push_weights(adapted(), Watcher(), 1)
    # At most one chunk and the last tensor of the previous chunk are alive at the same time.
    assert max(alive) <= together + 2 * max(p.nbytes for p in make_model().parameters())


@pytest.mark.parametrize(
    ("dtype", "pushes"),
    [
        (torch.float32, 30),
        (torch.bfloat16, 100),
        pytest.param(torch.bfloat16, 1000, marks=pytest.mark.release),
    ],
    ids=["fp32", "bf16", "a thousand in bf16"],
)
def test_many_pushes_leave_every_weight_as_it_was(untied_dir: str, dtype: torch.dtype, pushes: int) -> None:
    engine = start("transformers", untied_dir)
    model = adapted(make_model().to(dtype), modules_to_save=["lm_head"])
    before, first = bits(model), None
    for version in range(pushes):
        record = push_weights(model, engine, version)
        first = first or record.digest
        assert record.digest == first
    assert unchanged(model, before)
    assert all(not layer.merged for layer in model.modules() if isinstance(layer, peft.tuners.lora.LoraLayer))


def test_a_tied_model_is_sent_once_and_ties_that_the_adapter_breaks_are_refused() -> None:
    tied = adapted(make_model("llama", tied=True))
    assert "lm_head.weight" not in dict(weights_of(tied))
    assert "lm_head.weight" in weights_of(tied).names
    for fields in ({"target_modules": ["lm_head"]}, {"modules_to_save": ["embed_tokens"]}):
        with pytest.raises(InputError, match=r"tied in the model, but the adapter unties them"):
            weights_of(adapted(make_model("llama", tied=True), **fields))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM"), "IA3"),
        (peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"), "PREFIX_TUNING"),
        (peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10, task_type="CAUSAL_LM"), "ADALORA"),
        (peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[3]), "TrainableTokensWrapper"),
        (peft.LoraConfig(target_parameters=["mlp.up_proj.weight"]), "ParamWrapper"),
        (peft.LoraConfig(target_modules=["o_proj"], lora_bias=True), "adds a bias"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_adapters_that_cannot_be_merged_are_refused_by_name(config: Any, named: str) -> None:
    with pytest.raises(InputError, match=named):
        weights_of(peft.get_peft_model(make_model(), config))


def test_several_active_adapters_and_merged_ones_are_refused() -> None:
    model = adapted()
    model.add_adapter("other", peft.LoraConfig(target_modules=["q_proj"]))
    weights_of(model)
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(InputError, match=r"2 active adapters \(default, other\)"):
        weights_of(model)
    merged = adapted()
    merged.merge_adapter()
    with pytest.raises(InputError, match="merged into the base weight"):
        weights_of(merged)


def test_base_layers_in_eight_bits_are_refused() -> None:
    class Int8Params(torch.nn.Parameter):
        pass

    model = adapted()
    layer = model.get_base_model().model.layers[0].mlp.up_proj.base_layer
    layer.weight = Int8Params(layer.weight.data)
    with pytest.raises(InputError, match=r"layers\.0\.mlp\.up_proj\.weight is quantised to 8 bits"):
        weights_of(model)


# ---- the probe
# -----------------------------------------------------------------------------------------------------------


VLLM = [pytest.mark.vllm, needs_vllm]


@pytest.fixture(
    scope="module",
    params=["transformers", pytest.param("vllm", marks=VLLM), pytest.param("server", marks=VLLM)],
)
def own_engine(request: pytest.FixtureRequest, untied_dir: str) -> Any:
    if request.param == "server":
        made: Engine = connect(request.getfixturevalue("server").url)
    else:
        made = start(request.param, untied_dir)
    yield made
    made.close()


@pytest.mark.parametrize("kind", KINDS)
def test_the_probe_agrees_with_the_adapter_at_every_module(own_engine: Engine, kind: str) -> None:
    model = adapted(**KINDS[kind])
    push_weights(model, own_engine, 1)
    probe = ModuleProbe(model, own_engine, torch.float32)
    record = probe.measure(1, every=True)
    assert record.failed == []
    assert probe.reached() == 1.0
    assert probe.measure(2, every=False).failed == []
    # The same check with whole sequences, which uses only the forwards of the two models.
    ids = (5, 9, 200, 31, 77, 8)
    scored = torch.tensor(own_engine.score({"a": ids})["a"])
    own = sequence_logits(model, ids).log_softmax(-1)[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]
    assert float((scored - own.cpu()).abs().max()) < 1e-3


def test_an_engine_that_holds_the_base_without_the_adapter_is_found(own_engine: Engine) -> None:
    model = adapted()
    push_weights(make_model(), own_engine, 1)
    failed = ModuleProbe(model, own_engine, torch.float32).measure(1, every=True).failed
    assert set(failed) == {
        f"{name}.weight" for name, _ in make_model().named_modules() if name.split(".")[-1] in LINEAR
    }


def test_one_layer_without_its_delta_is_found_and_named(own_engine: Engine) -> None:
    model, missing = adapted(), "model.layers.1.self_attn.v_proj.weight"
    partial = merged_exactly(model)
    with torch.no_grad():
        partial.get_parameter(missing).copy_(make_model().get_parameter(missing))
    push_weights(partial, own_engine, 1)
    assert ModuleProbe(model, own_engine, torch.float32).measure(1, every=True).failed == [missing]


def test_the_head_in_another_dtype_is_the_adapted_one() -> None:
    model, ids = adapted(target_modules=["lm_head"]), (5, 9, 200)
    whole = sequence_logits(model, ids)
    assert torch.allclose(sequence_logits(model, ids, Precision(head=torch.float32)), whole, atol=1e-4)
    assert not torch.allclose(sequence_logits(make_model(), ids), whole, atol=1e-2)


def test_a_saved_adapter_gives_the_same_bytes_when_it_is_loaded_again(tmp_path: Path) -> None:
    model = adapted(modules_to_save=["lm_head"])
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    again = peft.PeftModel.from_pretrained(make_model(), tmp_path)
    assert isinstance(weights_of(again), AdaptedSource)
    assert weights_of(again).manifest(0).digest == weights_of(model).manifest(0).digest


def test_the_transformers_engine_never_sees_more_than_its_own_tensors(untied_dir: str) -> None:
    engine = start("transformers", untied_dir)
    assert isinstance(engine, TransformersEngine)
    extra = [*weights_of(adapted()), ("lora_A.weight", torch.zeros(2, 2))]
    assert "lora_A.weight" not in {spec.name for spec in engine.load(extra).tensors}
