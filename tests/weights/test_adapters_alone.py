"""An adapter alone in real vLLM, in this process: exact, with a new name per push, refused where it cannot be exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from conftest import VLLM
from test_adapters import LINEAR, adapted, gpt2, move
from tiny import CONTEXT, make_model, save

from lockstep.contract.adapters import AdapterLimits
from lockstep.contract.probe import probe_vector
from lockstep.contract.protocol import Completion, Engine, GenerationRequest, RequestKey
from lockstep.contract.sampling import Sampling
from lockstep.contract.tensors import LoadedWeights, key_of
from lockstep.engines.transformers_engine import TransformersEngine
from lockstep.engines.vllm.in_process import VLLMInProcess
from lockstep.engines.vllm.port.requests import prompt_logprobs, sampling_params, scoring_params
from lockstep.errors import InputError, ProofError
from lockstep.extras.lora_alone import adapter_source
from lockstep.extras.lora_alone.adapter_arguments import adapter_arguments
from lockstep.extras.lora_alone.adapter_proof import AdapterPush, check_adapter_probe
from lockstep.extras.lora_alone.adapter_push import check_adapter_live, check_held
from lockstep.extras.lora_alone.adapter_source import (
    AdapterSource,
    BaseSource,
    EffectiveSource,
    adapter_shape,
    check_alone,
)
from lockstep.models.arithmetic import Precision
from lockstep.tokens.chat import load_tokenizer
from lockstep.watch.gap import measure_gap
from lockstep.watch.modules import check_probe
from lockstep.watch.plain_forward import completion_logps
from lockstep.watch.push import ProvenPusher
from lockstep.weights.push import weights_of

LONG = torch.randint(10, 300, (100,), generator=torch.Generator().manual_seed(0)).tolist()


def opened(folder: Path, model: Any, kind: str, dtype: torch.dtype = torch.float32) -> VLLMInProcess:
    save(make_model(kind, tied=kind == "llama"), folder)
    arguments = adapter_arguments(*adapter_shape(model))
    return VLLMInProcess(str(folder), dtype=dtype, max_model_len=256, max_num_seqs=8, engine_kwargs=arguments)


def pusher(model: Any, engine: Engine, dtype: torch.dtype = torch.float32) -> ProvenPusher:
    return ProvenPusher(model, engine, dtype, Precision(None), extension=AdapterPush)


@pytest.fixture(scope="module")
def model() -> Any:
    """rsLoRA with several ranks: the scaling differs from layer to layer."""
    return adapted(use_rslora=True, rank_pattern={"q_proj": 2, "up_proj": 8})


@pytest.fixture(scope="module")
def engine(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMInProcess]:
    made = opened(tmp_path_factory.mktemp("alone"), model, "qwen2")
    yield made
    made.close()


@pytest.fixture(scope="module")
def pushing(model: Any, engine: VLLMInProcess) -> ProvenPusher:
    return pusher(model, engine)


def asked(name: str) -> GenerationRequest:
    return GenerationRequest(RequestKey(name, 0), LONG, Sampling(16), 1)


def sample(engine: Engine, name: str = "p") -> Completion:
    (found,) = engine.generate([asked(name)]).values()
    return found


def mean_gap(model: Any, found: Completion) -> float:
    own = completion_logps(model, found.prompt_ids, found.token_ids, Sampling(16), Precision(None))
    return measure_gap(torch.tensor(found.logprobs), own, ["r"], [len(own)]).mean_abs


def from_cache(engine: VLLMInProcess) -> int:
    """How many of a long prompt's tokens vLLM finds in its prefix cache."""
    given: Any = {"prompt_token_ids": LONG}
    (output,) = engine.llm.generate(
        given, sampling_params(asked("cached")), use_tqdm=False, lora_request=engine.adapters.request
    )
    return int(output.num_cached_tokens or 0)


def memory_of(engine: VLLMInProcess) -> Any:
    from lockstep.engines.vllm.port.lora import load_from_memory

    (found,) = engine.llm.collective_rpc(load_from_memory)
    return found


def on_vllm(test: Callable[..., None]) -> Callable[..., None]:
    for mark in VLLM:
        test = mark(test)
    return test


@on_vllm
def test_each_push_is_proven_and_the_last_adapter_alone_stays(
    model: Any, engine: VLLMInProcess, pushing: ProvenPusher
) -> None:
    earlier: list[str] = []
    for version in range(4):
        proof = pushing.push(version, canary=True, every_module=version == 2)
        assert proof.canary is not None
        assert proof.canary.mean_abs < 1e-5
        assert not proof.probe.unreached
        # The base travels once.
        assert (proof.push.bytes > 400_000) == (version == 0)
        found = sample(engine)
        assert set(found.weight_versions.tolist()) == {version}
        assert mean_gap(model, found) < 1e-5
        memory = memory_of(engine)
        assert list(memory.tensors) == [engine.adapters.name]
        assert len(memory.slots.list_adapters()) == 1
        for name in earlier:
            with pytest.raises(KeyError, match=name):
                memory.activate(name)
        earlier.append(engine.adapters.name)
        move(model, version)
    assert mean_gap(model, found) > 0.05


@on_vllm
def test_the_prefix_cache_finds_nothing_of_an_earlier_push(
    engine: VLLMInProcess, pushing: ProvenPusher
) -> None:
    pushing.push(10)
    assert [from_cache(engine), from_cache(engine) >= 64] == [0, True]
    # Also where the version stays the same: weights may have been set by hand.
    pushing.push(10)
    assert from_cache(engine) == 0


@on_vllm
def test_vllms_prefix_cache_takes_two_adapters_of_one_name_for_the_same(
    model: Any, engine: VLLMInProcess, pushing: ProvenPusher
) -> None:
    """Its keys have the name and the path of an adapter, and not its number.

    Therefore every push has a name of its own.
    """
    pushing.push(11)
    from_cache(engine)
    from vllm.lora.request import LoRARequest

    used = engine.adapters.request
    assert used is not None
    memory = memory_of(engine)
    for same_name in (True, False):
        name = used.lora_name if same_name else "another"
        memory.drop([used.lora_name, "another"])
        memory.keep(name, AdapterSource(model, torch.float32))
        engine.adapters.request = LoRARequest(name, used.lora_int_id + 1000 + same_name, f"lockstep:{name}")
        engine.llm.llm_engine.add_lora(engine.adapters.request)
        assert (from_cache(engine) > 0) is same_name
    engine.adapters.begin()


@on_vllm
def test_a_base_that_was_changed_by_hand_is_sent_again(
    model: Any, engine: VLLMInProcess, pushing: ProvenPusher
) -> None:
    pushing.push(20)
    with torch.no_grad():
        model.get_base_model().lm_head.weight[3] += 0.1
    proof = pushing.push(21, canary=True)
    assert proof.push.bytes > 400_000
    assert mean_gap(model, sample(engine)) < 1e-5


@on_vllm
def test_a_base_that_is_sent_again_has_no_digest_under_the_key_of_the_one_before(
    engine: VLLMInProcess, pushing: ProvenPusher
) -> None:
    """A base from a GPU has a digest with the key of its push.

    Another key, or none, is drawn for what is sent in its place.
    """
    pushing.push(22)
    of_another, own = iter([f"{0:032x}-1f"]), engine.adapters.base_digest
    with patch.object(type(engine.adapters), "base_digest", lambda _: next(of_another, None) or own()):
        assert pushing.push(23).push.bytes > 400_000
    assert key_of(own()) is None


@on_vllm
def test_no_adapter_is_read_from_a_path(engine: VLLMInProcess, model: Any, tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    model.save_pretrained(tmp_path)
    memory_of(engine)
    with pytest.raises(ValueError, match="does not read adapters from files"):
        engine.llm.llm_engine.add_lora(LoRARequest("mine", 7, str(tmp_path)))


def test_base_and_adapter_together_are_what_a_merged_push_sends() -> None:
    model = adapted(use_rslora=True, rank_pattern={"q_proj": 2})
    source, base = AdapterSource(model, torch.float32), BaseSource(model)
    for name, merged in weights_of(model):
        layer = name.removesuffix(".weight")
        added = source.delta(layer) if layer in source.layers else 0.0
        assert float((base.tensor(name) + added - merged).abs().max()) < 1e-6, name
    plain = dict(make_model().named_parameters())
    assert all(torch.equal(tensor, plain[name]) for name, tensor in base)
    for name, tensor in source:
        assert (tensor.shape, tensor.dtype) == (dict(source.meta_tensors())[name].shape, tensor.dtype)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "whole modules": ({"modules_to_save": ["lm_head"]}, "leave modules_to_save out"),
    "dora": ({"use_dora": True}, "leave use_dora out"),
    "lora bias": ({"target_modules": ["q_proj"], "lora_bias": True}, "leave lora_bias out"),
    "biases": ({"target_modules": ["q_proj"], "bias": "lora_only"}, "bias='none'"),
    "embedding": (
        {"target_modules": [*LINEAR, "embed_tokens"]},
        "embed_tokens: an embedding or the output head",
    ),
    "head": ({"target_modules": [*LINEAR, "lm_head"]}, "lm_head: an embedding or the output head"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_vllms_lora_cannot_hold_is_refused_in_one_sentence(kind: str) -> None:
    fields, message = REFUSED[kind]
    with pytest.raises(InputError, match=message) as refused:
        check_alone(adapted(**fields))
    assert "leave vllm_enable_lora out" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_model_without_an_adapter_and_other_engines_are_refused(untied_dir: str) -> None:
    with pytest.raises(InputError, match="the model has none: set use_peft"):
        check_alone(make_model())
    engine = TransformersEngine(
        untied_dir, load_tokenizer(untied_dir), dtype=torch.float32, max_model_len=CONTEXT
    )
    with pytest.raises(InputError, match="needs vLLM as the engine"):
        pusher(adapted(), engine)


def test_the_rank_that_vllm_gets_is_the_next_one_that_it_has() -> None:
    assert [adapter_arguments(rank, ["a.q"])["max_lora_rank"] for rank in (1, 4, 16, 17, 512)] == [
        1,
        8,
        16,
        32,
        512,
    ]
    with pytest.raises(InputError, match="rank 513, and vLLM's LoRA supports at most 512"):
        adapter_arguments(513, ["a.q"])


def test_a_transposed_layer_is_read_as_the_forward_computes_it() -> None:
    model = adapted(gpt2(), target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    source = AdapterSource(model, torch.float32)
    layer = model.get_base_model().transformer.h[0].attn.c_attn
    inputs = torch.randn(1, 64)
    with torch.no_grad():
        own = layer(inputs) - layer.get_base_layer()(inputs)
    assert float((inputs @ source.delta("transformer.h.0.attn.c_attn").T - own).abs().max()) < 1e-5
    effective = EffectiveSource(model, torch.float32)
    for name, merged in weights_of(model):
        assert float((effective.tensor(name) - merged).abs().max()) < 1e-5, name


@on_vllm
@pytest.mark.parametrize(("scale", "alpha"), [(0.99, 0.05), (0.0, 5e-4)])
def test_a_young_adapter_that_is_not_applied_as_it_should_is_seen_by_the_adapter_probe(
    scale: float, alpha: float, engine: VLLMInProcess
) -> None:
    """Beside its weight it is too small for the module probe and the canary."""
    young = adapted(use_rslora=True, rank_pattern={"q_proj": 2, "up_proj": 8}, lora_alpha=alpha)
    pushing = pusher(young, engine)
    pushing.push(0, canary=True)
    with ExitStack() as faulty:
        for kernel in memory_of(engine).slots.punica_wrapper_mapping.values():
            real = kernel.add_lora_linear
            wrong = lambda y, x, a, b, given, slices, real=real: real(y, x, a, b, scale, slices)  # noqa: E731
            faulty.enter_context(patch.object(kernel, "add_lora_linear", wrong))
        check_probe(pushing.module_probe.measure(1, every=True), 1)
        pushing.score_canary(1)
        with pytest.raises(ProofError, match=r"the adapter adds something else in \d+ of 14 layers"):
            pushing.push(1, every_module=True)


@on_vllm
def test_a_request_without_an_adapter_gets_none_beside_one_that_has_one(
    engine: VLLMInProcess, pushing: ProvenPusher
) -> None:
    """vLLM's own kernel for CPUs gives it the last slot's adapter (fault D6)."""
    pushing.push(30)
    used, vllm = engine.adapters.request, engine.llm.llm_engine

    def logprobs(adapters: dict[str, Any]) -> dict[str, list[float]]:
        vllm.reset_prefix_cache()
        for name, adapter in adapters.items():
            vllm.add_request(name, {"prompt_token_ids": LONG}, scoring_params(), lora_request=adapter)
        outputs: list[Any] = []
        while len(outputs) < len(adapters):
            outputs += [output for output in vllm.step() if output.finished]
        return {output.request_id.partition("-")[0]: list(prompt_logprobs(output)) for output in outputs}

    together, alone = logprobs({"without": None, "with": used}), logprobs({"without": None})
    assert together["without"] == pytest.approx(alone["without"], abs=1e-4)
    assert together["with"] == pytest.approx(logprobs({"with": used})["with"], abs=1e-4)
    assert max(abs(a - b) for a, b in zip(together["with"], together["without"], strict=True)) > 0.1


# ---- the proofs themselves, without vLLM
# ---------------------------------------------------------------------------------


def test_an_adapter_that_is_held_otherwise_than_it_was_sent_is_named() -> None:
    manifest = AdapterSource(adapted(), torch.float32).manifest(3)
    check_held(manifest, LoadedWeights(manifest.tensors, ()))
    first, *others = manifest.tensors
    for wrong in (
        first._replace(digest="0"),
        first._replace(shape=(8, 64)),
        first._replace(name="model.other"),
    ):
        with pytest.raises(
            ProofError,
            match=r"proof 'adapter' failed: at version 3 the engine computes with other .* for 1 of 28",
        ):
            check_held(manifest, LoadedWeights((wrong, *others), ()))
        elsewhere = LoadedWeights(
            manifest.tensors, (), others=(LoadedWeights((wrong, *others), (), "http://b"),)
        )
        with pytest.raises(ProofError, match="at http://b"):
            check_held(manifest, elsewhere)
    with pytest.raises(InputError, match=f"no LoRA layer for {first.name}"):
        check_held(manifest, LoadedWeights(manifest.tensors[1:], (first.name,)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "fields", [{}, {"use_rslora": True, "rank_pattern": {"q_proj": 2}}], ids=["plain", "rslora"]
)
def test_what_is_sent_is_compared_with_the_layers_themselves(
    fields: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A model in training drops a part of what the adapter gets. That is not a part of its weights.
    model = adapted(lora_dropout=0.5, **fields).train()

    def check(version: int) -> None:
        source = AdapterSource(model, dtype)
        with torch.no_grad():
            check_adapter_live(model, source, source.manifest(version), version)

    for version in range(4):
        check(version)
    source = AdapterSource(model, dtype)
    before = source.manifest(0)
    move(model, 1)
    with (
        pytest.raises(ProofError, match=r"proof 'live' failed.*is not the tensor that was sent"),
        torch.no_grad(),
    ):
        check_adapter_live(model, source, before, 0)
    real = adapter_source.full_factors
    by = 1.01 if dtype == torch.float32 else 1.2
    monkeypatch.setattr(
        adapter_source, "full_factors", lambda *given: (*real(*given)[:2], real(*given)[2] * by)
    )
    with pytest.raises(ProofError, match=r"proof 'live' failed.*what the adapter adds in .* differs by"):
        check(0)


class Played:
    """The receiving half of an engine that computes with the trainer's own layers, and scales what the adapter adds."""

    def __init__(self, model: Any, scale: float) -> None:
        self._model, self._scale = model, scale
        self.limits = AdapterLimits(8, torch.float32)

    def probe(self, layers: list[str], seed: int) -> dict[str, torch.Tensor]:
        answers = {}
        for name in layers:
            layer = self._model.get_base_model().get_submodule(name)
            inputs = probe_vector(seed, name, layer.in_features)
            with torch.no_grad():
                off = layer.get_base_layer()(inputs)
                on = off + self._scale * (layer(inputs) - off)
            answers[name] = torch.stack([on, off, on - off])
        return answers


def test_the_adapter_probe_passes_rounding_and_finds_a_thousandth() -> None:
    model = adapted()

    def probed(scale: float, every: bool) -> dict[str, float]:
        return check_adapter_probe(model, Played(model, scale), torch.float32, 1, 1, every=every)  # type: ignore[arg-type]

    assert max(probed(1.0, True).values()) < 1e-5
    assert (len(probed(1.0, True)), len(probed(1.0, False))) == (14, 6)
    for wrong in (1.001, 0.0, float("nan")):
        with pytest.raises(ProofError, match="proof 'adapter_probe' failed"):
            probed(wrong, True)


# ---- engines of their own: vLLM's groups end with the first engine that is closed
# -----------------------------------------


@on_vllm
@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3", marks=pytest.mark.release)])
def test_half_precision_and_a_tied_head_are_proven_too(kind: str, tmp_path: Path) -> None:
    model = adapted(make_model(kind, tied=kind == "llama"), target_modules=["q_proj", "down_proj"])
    engine = opened(tmp_path, model, kind, torch.bfloat16)
    try:
        pushing = pusher(model, engine, torch.bfloat16)
        for version in range(2):
            proof = pushing.push(version, canary=True, every_module=True)
            assert proof.probe.worst[1] < proof.probe.limit
            move(model, version)
        assert proof.push.bytes * 2 == sum(
            tensor.nbytes for _, tensor in AdapterSource(model, torch.float32)
        ), "bf16 adapters are half as large"
    finally:
        engine.close()


@on_vllm
def test_a_layer_for_which_the_engine_has_no_lora_is_named(tmp_path: Path) -> None:
    model = adapted()
    narrow = adapted(target_modules=["q_proj"])
    engine = opened(tmp_path, narrow, "qwen2")
    try:
        with pytest.raises((InputError, ProofError), match=r"no LoRA layer for .*o_proj"):
            pusher(model, engine).push(0)
    finally:
        engine.close()
