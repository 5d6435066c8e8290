"""Layers that keep only their products: the same gradients to the bit, less memory, nothing computed twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from accounts import difference, gradients, make, shifted_engine
from blocks import small_blocks
from tiny import make_model, make_stateful
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedModel

from lockstep.learn import recomputation, scoring
from lockstep.learn.attention.tree import adopt_tree_attention
from lockstep.learn.pack import Pack, pack_rows, pack_sequences
from lockstep.learn.recomputation import products_kept
from lockstep.learn.scoring import score_pack
from lockstep.learn.sequence import TrainingSequence
from lockstep.learn.update import Policy
from lockstep.models.adapters import causal_model

ATEN = torch.ops.aten
ATTENTION = torch.ops.lockstep.attend.default
Build = Callable[[], PreTrainedModel]


def experts() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = MixtralConfig(
        vocab_size=384, num_key_value_heads=1, num_local_experts=4, initializer_range=0.3, **sizes
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def adapted() -> Any:
    return peft.get_peft_model(
        make_model("llama"), peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
    )


class Halved(torch.nn.Linear):
    """A layer that changes its own product in place."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).mul_(0.5)


def changing() -> PreTrainedModel:
    model = make_model("llama")
    up = model.model.layers[1].mlp.up_proj
    up.__class__ = Halved
    return model


MODELS: dict[str, Build] = {
    "llama": lambda: make_model("llama"),
    "qwen2": lambda: make_model("qwen2"),
    "mistral": lambda: make_model("mistral"),
    "experts": experts,
    "without attention": make_stateful,
    "adapted": adapted,
    "changes a product": changing,
}


def pack_for(model: PreTrainedModel) -> Pack:
    sequences = [
        TrainingSequence(f"a#{i}", tuple(range(4, 44)), tuple(range(50 + 9 * i, 62 + 9 * i)), (0.0,) * 12)
        for i in range(5)
    ]
    with small_blocks():
        cut = pack_rows if getattr(causal_model(model), "_is_stateful", False) else pack_sequences
        (pack,) = cut(sequences, 1000)
    return pack


def forward(model: PreTrainedModel, pack: Pack) -> torch.Tensor:
    logps = score_pack(model, pack, 1.0, 512).logps
    return (logps * torch.linspace(-1, 1, len(logps))).sum()


def bytes_of(model: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def layer_bytes(pack: Pack) -> float:
    """What a layer keeps of this pack if it keeps everything, as it was measured."""
    return max(recomputation.KEPT_BYTES.values(), default=0) * pack.input_ids.numel()


def plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch recomputation off: forwards keep everything."""
    monkeypatch.setattr(recomputation, "outermost", lambda model: iter(()))


def prepared(build: Build, monkeypatch: pytest.MonkeyPatch) -> tuple[PreTrainedModel, Pack]:
    """A model that has no room for layers that keep everything, and a pack.

    What its layers keep was measured before.
    """
    model = build().train()
    adopt_tree_attention(causal_model(model))
    pack = pack_for(model)
    forward(model, pack)
    monkeypatch.setattr(recomputation, "WEIGHTS_OF_ROOM", 0)
    return model, pack


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16 autocast"])
@pytest.mark.parametrize("kind", MODELS)
def test_gradients_are_the_same_to_the_bit(kind: str, half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recomputation, "KEPT_BYTES", {})
    model, pack = prepared(MODELS[kind], monkeypatch)
    results = []
    # The forwards recompute no layer (their memory is measured in this dtype), every layer, some layers, and none.
    for room in (0, 0, 1.5 * layer_bytes(pack) / bytes_of(model), None):
        if room is None:
            plainly(monkeypatch)
        else:
            monkeypatch.setattr(recomputation, "WEIGHTS_OF_ROOM", room)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = forward(model, pack)
        loss.backward()
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        results.append({"loss": loss.detach(), **found})
    *others, plain = results
    assert any(bool(value.any()) for name, value in plain.items() if name != "loss")
    for other in others:
        assert plain.keys() == other.keys()
        for name, value in plain.items():
            assert torch.equal(other[name], value), name


@pytest.mark.parametrize("checkpointing", [False, True])
def test_weights_are_cast_once_for_all_packs_and_gradients_are_the_same_to_the_bit(
    checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, pack = prepared(MODELS["llama"], monkeypatch)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = Policy(model, lambda: torch.autocast("cpu", torch.bfloat16), lambda loss: loss.backward())
    weight, found, casts = model.model.layers[0].mlp.up_proj.weight, [], []
    for keep in (policy.casts_kept, nullcontext):
        model.zero_grad()
        with keep(), Casts(weight) as seen:
            for _ in range(3):
                with policy.autocast():
                    loss = forward(model, pack)
                policy.backward(loss)
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        casts.append(seen.count)
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    assert casts[1] >= 3
    assert casts[0] == (casts[1] if checkpointing else 1)


class Casts(TorchDispatchMode):
    """Counts how often a weight is cast to another dtype."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self._weight, self.count = weight.data_ptr(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].data_ptr() == self._weight:
            self.count += 1
        return func(*args, **(kwargs or {}))


def left_bytes(model: PreTrainedModel, pack: Pack) -> int:
    """The bytes that a forward keeps for its backward."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        loss = forward(model, pack)
    assert loss.requires_grad
    return sum(event.self_cpu_memory_usage for event in seen.key_averages())


@pytest.mark.parametrize("kind", ["llama", "qwen2", "experts", "adapted"])
def test_a_forward_leaves_much_less(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, pack = prepared(MODELS[kind], monkeypatch)
    # The layers then need most of the memory.
    monkeypatch.setattr(
        scoring, "token_logps", lambda head, hidden, *a, **k: (hidden.sum(1), hidden.sum(1).detach())
    )
    lean = left_bytes(model, pack)
    plainly(monkeypatch)
    # Attention itself keeps no scores in either case.
    assert 0 < lean < 0.8 * left_bytes(model, pack)


def recomputed_layers(model: PreTrainedModel, pack: Pack) -> int:
    """How many layers compute their activation a second time for the backward."""
    with Counting() as counting:
        forward(model, pack).backward()
    return counting.calls[ATEN.silu.default] - model.config.num_hidden_layers


def test_what_a_layer_keeps_is_measured_per_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recomputation, "KEPT_BYTES", {})
    models = [make_model("llama", num_hidden_layers=layers).train() for layers in (2, 3)]
    for model in models:
        adopt_tree_attention(model)
    pack = pack_for(models[0])
    forward(models[0], pack)
    measured = layer_bytes(pack)
    plainly(monkeypatch)
    fewer, more = (left_bytes(model, pack) for model in models)
    assert measured == pytest.approx(more - fewer, rel=0.1)


def test_layers_keep_everything_as_long_as_it_takes_no_more_memory_than_the_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recomputation, "KEPT_BYTES", {})
    model = make_model("llama", num_hidden_layers=5).train()
    adopt_tree_attention(model)
    pack = pack_for(model)
    forward(model, pack)
    needed = layer_bytes(pack)
    assert recomputed_layers(model, pack) == max(0, 5 - int(bytes_of(model) / needed))
    for layers in range(6):
        monkeypatch.setattr(recomputation, "WEIGHTS_OF_ROOM", (layers + 0.5) * needed / bytes_of(model))
        assert recomputed_layers(model, pack) == 5 - layers


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))


def test_no_product_and_no_attention_is_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model, pack = prepared(MODELS["llama"], monkeypatch)
    counts = []
    for lean in (True, False):
        if not lean:
            plainly(monkeypatch)
        with Counting() as counting:
            forward(model, pack).backward()
        counts.append(counting.calls)
    lean_calls, plain_calls = counts
    for product in (ATEN.mm.default, ATTENTION):
        assert lean_calls[product] == plain_calls[product] > 0
    assert lean_calls[ATEN.silu.default] == 2 * plain_calls[ATEN.silu.default] > 0


def test_a_model_is_left_as_it_was() -> None:
    model = make_model("llama").train()
    model.gradient_checkpointing_enable()
    model.gradient_checkpointing_disable()
    model.model.layers[0].gradient_checkpointing = False
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(KeyError), products_kept(model):
        {}[model.is_gradient_checkpointing]
    assert [dict(vars(module)) for module in model.modules()] == before


def test_a_layer_within_a_layer_is_left_to_the_outer_one() -> None:
    model = make_model("llama").train()
    outer, outer.inner = model.model.layers
    model.model.layers = model.model.layers[:1]
    with products_kept(model):
        assert (outer.gradient_checkpointing, outer.inner.gradient_checkpointing) == (True, False)


def test_a_users_own_checkpointing_is_left_to_it() -> None:
    model = make_model("llama").train()
    model.gradient_checkpointing_enable()
    chosen = model.model.layers[0]._gradient_checkpointing_func
    with products_kept(model):
        assert model.model.layers[0]._gradient_checkpointing_func is chosen
    assert model.is_gradient_checkpointing


def test_with_a_pytorch_that_does_not_show_results_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.11 is one."""
    monkeypatch.setattr(recomputation, "SelectiveCheckpointContext", SimpleNamespace)
    model = make_model("llama").train()
    with products_kept(model):
        assert not model.is_gradient_checkpointing
        assert "_gradient_checkpointing_func" not in vars(model.model.layers[0])


def test_without_gradients_nothing_changes() -> None:
    model = make_model("llama").train()
    with torch.no_grad(), products_kept(model):
        assert not model.is_gradient_checkpointing


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "adapted"])
def test_a_users_own_checkpointing_of_the_full_model_gives_the_same_gradients_to_the_bit(
    kind: str, reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, pack = prepared(MODELS[kind], monkeypatch)
    assert (pack.ends is None) == (kind == "without attention")
    results, products = [], []
    for own in (False, True):
        if own:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad()
        with Counting() as counting:
            loss = forward(model, pack)
            loss.backward()
        results.append(
            {"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}
        )
        products.append(sum(counting.calls[product] for product in (ATEN.mm.default, ATTENTION)))
    # Recomputation was used: operations whose results are usually kept were computed once more.
    assert products[1] > products[0]
    for name, value in results[0].items():
        assert value.any(), name
        assert torch.equal(results[1][name], value), name


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("case", ["grpo-full", "dpo-sigmoid", "ppo"])
def test_a_run_that_checkpoints_its_full_model_has_the_same_gradients_at_every_step(
    untied_dir: str, tmp_path: Path, case: str, reentrant: bool
) -> None:
    fields = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    plain = make(case, untied_dir, tmp_path / "plain", engine=shifted_engine(untied_dir))
    saving = make(case, untied_dir, tmp_path / "saving", engine=shifted_engine(untied_dir), **fields)
    with small_blocks():
        expected, found = gradients(plain), gradients(saving)
    assert saving.model.is_gradient_checkpointing
    assert not plain.model.is_gradient_checkpointing
    assert len(found) == len(expected) == 2
    assert all(difference(*steps) <= 1e-6 for steps in zip(expected, found, strict=True))
