"""The exact probe: what an engine's modules hold is what the trainer sends, to the bit, in every dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from conftest import needs_vllm
from model_families import make_family, save_family
from peft import LoraConfig, get_peft_model
from tiny import CONTEXT, make_model, save_model

from lockstep.contract.probe import HeldPart, exact_products
from lockstep.engines.transformers_engine import TransformersEngine
from lockstep.errors import ProofError
from lockstep.extras.selftest.seams import Named, loads_instead
from lockstep.models.arithmetic import Precision
from lockstep.tokens.chat import load_tokenizer
from lockstep.watch.push import ProvenPusher
from lockstep.weights.push import weights_of

DTYPES = [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.release)]
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}.get
# Relative changes that the module probe does not see. In half precision they change about one element in four.
# Pushes after which a model of two layers was compared as a whole on a CPU.
PUSHES = 8
SMALL = {torch.float32: 1e-5, torch.bfloat16: 1e-3, torch.float16: 3e-4}


def engine_of(model: str, dtype: torch.dtype) -> TransformersEngine:
    return TransformersEngine(model, load_tokenizer(model), dtype=dtype, max_model_len=CONTEXT)


def pusher_of(model: Any, engine: Any, dtype: torch.dtype) -> ProvenPusher:
    return ProvenPusher(model, engine, dtype, Precision(None))


@torch.no_grad()
def move(model: torch.nn.Module, size: float, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.mul_(1 + size * torch.randn(p.shape, generator=draw))


def loading(engine: Any, change: Callable[[Named], Named]) -> Any:
    return loads_instead(SimpleNamespace(engine=engine), change)  # type: ignore[arg-type]


@contextmanager
def asked_parts(engine: Any) -> Iterator[list[HeldPart]]:
    parts, real = list[HeldPart](), engine.held

    def held(asked: Any, *more: Any) -> Any:
        parts.extend(asked)
        return real(asked, *more)

    with patch.object(engine, "held", held):
        yield parts


@pytest.fixture(scope="module", params=DTYPES, ids=NAMES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An engine whose linear layers have biases, in each dtype."""
    folder = str(save_model(tmp_path_factory.mktemp("model") / "qwen2"))
    engine = engine_of(folder, request.param)
    yield SimpleNamespace(engine=engine, dtype=request.param)
    engine.close()


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "olmo2"])
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
def test_equal_weights_never_differ(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, engine = make_family(family), engine_of(save_family(family, tmp_path / "m"), dtype)
    with torch.no_grad():
        for p in model.parameters():
            # Neither a sum nor every kernel can keep these two.
            p.view(-1)[3], p.view(-1)[5] = -0.0, 1e-40
    pusher = pusher_of(model, engine, dtype)
    for version in range(4):
        pusher.push(version)
        move(model, 0.01, version)
    held = pusher.held_weights.compare(4, every=True)
    assert held.modules == held.of_modules
    # What was not pushed yet differs everywhere.
    assert {*held.differing} >= {name for name in weights_of(model).names if name.endswith("weight")}
    assert held.older == 3


def test_every_element_is_compared_within_four_pushes_per_layer_on_a_cpu(case: Any) -> None:
    model = make_model()
    pusher = pusher_of(model, case.engine, case.dtype)
    pusher.push(0)
    with asked_parts(case.engine) as parts:
        for version in range(1, 1 + PUSHES):
            pusher.push(version)
    for name, module in pusher.module_probe.modules.probed.items():
        own = {part for part in parts if part.name == name}
        # Every matrix also shows a column at every fourth push.
        columns = {part for part in own if part.stop - part.start == 1 and module.kind == "linear"}
        assert len(columns) == (PUSHES / 4 if module.kind == "linear" else 0)
        ranges = sorted((part.start, part.stop) for part in own - columns if part.start < part.stop)
        ends = [0, *(stop for _, stop in ranges)]
        assert [start for start, _ in ranges] == ends[:-1]
        weight = model.get_parameter(f"{name}.weight")
        assert ends[-1] == weight.shape[-1 if module.kind == "linear" else 0]
        assert any(part.asks_for_bias for part in own) == module.has_bias


def test_merged_weights_are_compared_module_by_module_and_all_within_as_many_pushes(case: Any) -> None:
    model = get_peft_model(make_model(), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    pusher = pusher_of(model, case.engine, case.dtype)
    first = pusher.push(0).held
    assert (first.differing, first.modules) == ((), first.of_modules)
    with asked_parts(case.engine) as parts:
        counts = [pusher.push(version).held.modules for version in range(1, 1 + PUSHES)]
    assert sum(counts) == first.of_modules == len({part.name for part in parts})


def failure_of(
    pusher: ProvenPusher, model: torch.nn.Module, dtype: torch.dtype, versions: range
) -> ProofError:
    """The error of the first push that fails. The weights move before each."""
    for version in versions:
        move(model, SMALL[dtype], version)
        try:
            pusher.push(version)
        except ProofError as error:
            return error
    raise AssertionError(f"{len(versions)} pushes have passed")


def one_step(dtype: torch.dtype, wrong: str) -> Callable[[Named], Named]:
    """One element of a tensor becomes the next number of a dtype."""

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        held, kind = tensor.to(dtype), torch.int32 if dtype == torch.float32 else torch.int16
        held.view(-1)[-7:].view(kind)[0] += 1
        return held.to(tensor.dtype)

    return lambda sent: [
        (name, changed(tensor.clone()) if name == wrong else tensor) for name, tensor in sent
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.0.self_attn.v_proj.bias",
        "model.layers.1.post_attention_layernorm.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
    ],
)
def test_one_element_one_step_of_the_dtype_off_is_named_within_four_pushes_per_layer(
    case: Any, wrong: str
) -> None:
    model = make_model()
    pusher = pusher_of(model, case.engine, case.dtype)
    pusher.push(0)
    with loading(case.engine, one_step(case.dtype, wrong)):
        failed = failure_of(pusher, model, case.dtype, versions=range(1, 1 + PUSHES))
    assert failed.check == "held_weights"
    assert failed.found.endswith(f"in 1 tensors, compared to the bit: {wrong}")
    # At a start everything is looked at.
    with loading(case.engine, one_step(case.dtype, wrong)), pytest.raises(ProofError, match="held_weights"):
        pusher_of(model, case.engine, case.dtype).push(3)


@pytest.mark.parametrize("begins", [1, 3])
def test_older_weights_are_named_with_their_version_within_four_pushes(case: Any, begins: int) -> None:
    model, late = make_model(), "model.layers.1.mlp.up_proj.weight"
    pusher, kept = pusher_of(model, case.engine, case.dtype), dict[str, torch.Tensor]()
    for version in range(begins):
        kept = {late: model.get_parameter(late).detach().clone()}
        pusher.push(version)
        move(model, SMALL[case.dtype], version)
    with loading(case.engine, lambda sent: [(n, kept.get(n, t)) for n, t in sent]):
        failed = failure_of(pusher, model, case.dtype, versions=range(begins, begins + 4))
    assert failed.check == "held_weights"
    assert failed.found.endswith(f"in 1 tensors, compared to the bit: {late}")
    assert "the engine computes with older weights" in failed.cause


def test_a_precision_that_rounds_products_is_set_aside_while_weights_are_read() -> None:
    place: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = place.fp32_precision
    try:
        place.fp32_precision = "bf16"
        with exact_products():
            assert place.fp32_precision == "ieee"
        assert place.fp32_precision == "bf16"
    finally:
        place.fp32_precision = before


@pytest.mark.vllm
@needs_vllm
def test_a_tensor_of_a_fused_layer_is_named_alone_and_a_tied_one_by_both_names(tied_vllm: Any) -> None:
    model, single = make_model("llama", tied=True), torch.float32
    pusher = pusher_of(model, tied_vllm, single)
    pusher.push(0)
    late, embedding = "model.layers.0.self_attn.k_proj.weight", "model.embed_tokens.weight"
    for wrong, named in ((late, late), (embedding, f"{embedding}, lm_head.weight")):
        with loading(tied_vllm, one_step(single, wrong)):
            failed = failure_of(pusher, model, single, versions=range(1, 1 + PUSHES))
        assert failed.check == "held_weights"
        assert failed.found.endswith(f"compared to the bit: {named}")
        pusher.push(3)
