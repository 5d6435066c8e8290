"""vLLM gets the settings of the trainer's request, and the requests of one call share vLLM's prefix cache."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import needs_vllm
from tiny import CONTEXT, make_model

from lockstep import GRPOConfig
from lockstep.contract.protocol import GenerationRequest, RequestKey
from lockstep.contract.sampling import Grammar, Sampling
from lockstep.engines.servers.messages import generation_body
from lockstep.engines.vllm import in_process as vllm_inprocess
from lockstep.engines.vllm.in_process import VLLMInProcess
from lockstep.engines.vllm.port.patches import find_files_by_name
from lockstep.engines.vllm.port.requests import (
    check_sent,
    completion,
    fields_of,
    sampling_fields,
    sampling_params,
)
from lockstep.errors import ProofError
from lockstep.learn.memory import Room, RunModels, memory_of_run
from lockstep.weights.push import push_weights


@pytest.mark.vllm
@needs_vllm
def test_in_one_call_vllm_computes_a_prompt_once_and_a_shared_prefix_once(
    tied_vllm: VLLMInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM counts cached tokens in whole blocks.

    All requests enter in one step, and each finds the blocks of earlier ones.
    """
    push_weights(make_model("llama", tied=True), tied_vllm, 1)
    beginning = tuple(range(10, 80))
    requests = [
        GenerationRequest(RequestKey(str(p), s), beginning + (100 + p,) * 40, Sampling(3), 10 * p + s)
        for p in range(3)
        for s in range(3)
    ]
    converted, cached = vllm_inprocess.completion, {}

    def noted(key: RequestKey, output: object, **how: object) -> object:
        cached[key] = output.num_cached_tokens  # type: ignore[attr-defined]
        return converted(key, output, **how)

    monkeypatch.setattr(vllm_inprocess, "completion", noted)
    tied_vllm.generate(requests)
    block = tied_vllm.llm.llm_engine.vllm_config.cache_config.block_size
    shared, whole = 70 // block * block, 109 // block * block
    assert 0 < shared < whole
    assert cached == {key: (whole if key.sample else shared if key.prompt_id != "0" else 0) for key in cached}
    assert len(cached) == len(requests)


PLAIN: dict[str, Any] = {"temperature": 0.7}
ASKED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.71},
    "max_tokens": {"max_tokens": 5},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.2},
    "presence_penalty": {"presence_penalty": 0.1},
    "frequency_penalty": {"frequency_penalty": 0.1},
    "min_tokens": {"min_tokens": 1},
    "stop": {"stop": ("a",)},
    "logit_bias": {"logit_bias": ((3, 1.0),)},
    "allowed_token_ids": {"allowed_token_ids": (3, 4)},
    "bad_words": {"bad_words": ((3, 4),)},
    "grammar": {"grammar": Grammar("regex", "a+")},
    "seed": {},
}


def asked(seed: int = 1, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(
        RequestKey("a", 0), [3, 4], Sampling(**{"max_tokens": 4, **PLAIN, **sampling}), seed
    )


@pytest.mark.vllm
@needs_vllm
@pytest.mark.parametrize("form", ["in process", "over HTTP"])
@pytest.mark.parametrize("name", ASKED)
def test_what_goes_to_vllm_has_the_settings_of_the_request(form: str, name: str) -> None:
    def sent(request: GenerationRequest) -> dict[str, Any]:
        if form == "in process":
            return fields_of(sampling_params(request))
        return json.loads(json.dumps(generation_body(request, "a")), object_hook=_ids_as_numbers)[
            "sampling_params"
        ]

    whole, other = asked(**ASKED[name]), asked(seed=2 if name == "seed" else 1)
    check_sent(whole, sent(whole))
    for request, found in ((whole, sent(other)), (other, sent(whole))):
        with pytest.raises(ProofError, match=f"goes to vLLM with {name}="):
            check_sent(request, found)


def test_a_request_that_names_its_end_tokens_leaves_vllm_no_others() -> None:
    fields = sampling_fields(asked(end_ids=(7, 3)))
    assert (fields["stop_token_ids"], fields["ignore_eos"]) == ([7, 3], True)
    assert not {"stop_token_ids", "ignore_eos"} & sampling_fields(asked()).keys()


def _ids_as_numbers(found: dict[str, Any]) -> dict[Any, Any]:
    """The keys of a JSON mapping are texts. vLLM converts the keys of `logit_bias` to ids."""
    return {int(key) if key.isdigit() else key: value for key, value in found.items()}


@pytest.mark.vllm
@needs_vllm
def test_vllm_finds_the_weights_of_a_directory_by_its_name(tmp_path: Path) -> None:
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    find_files_by_name()
    for name in ("a1", "a[1]"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").touch()
    loader = DefaultModelLoader(LoadConfig())
    found = loader._prepare_weights(str(tmp_path / "a[1]"), None, None, True, None)
    assert found[1] == [str(tmp_path / "a[1]" / "model.safetensors")]


@pytest.mark.vllm
@needs_vllm
def test_weights_and_cache_have_the_bytes_that_are_counted_before_a_run_loads_its_model(
    tied_vllm: VLLMInProcess, tied_dir: str, tmp_path: Path
) -> None:
    """The cache is cut into whole blocks, so that less than one block of each layer is left over."""
    config = GRPOConfig(
        output_dir=str(tmp_path), use_vllm=True, bf16=False, report_to="none", vllm_max_model_length=CONTEXT
    )
    room = Room(torch.device("cpu"), "this machine", 2**40)
    found = {part.name: part.size for part in memory_of_run(config, RunModels(tied_dir), room).parts}
    assert tied_vllm.llm.apply_model(_weight_bytes) == [found["engine"]]
    (caches,) = tied_vllm.llm.collective_rpc(lambda worker: [t.nbytes for t in worker.model_runner.kv_caches])
    blocks = tied_vllm.llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    assert found["cache"] - sum(caches) // blocks < sum(caches) <= found["cache"]


def _weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of vLLM's parameters. On a CPU, its kernels hold the weights of products, and the parameters are empty."""
    packed = [m for m in model.modules() if hasattr(m, "input_size_per_partition") and not m.weight.numel()]
    products = sum(
        m.input_size_per_partition * m.output_size_per_partition * m.weight.itemsize for m in packed
    )
    return products + sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize(("used", "current"), [(None, "2.1"), ("1.1", "2.1"), ("1.1", None)])
def test_an_answer_of_another_adapter_than_the_current_one_is_refused(
    used: str | None, current: str | None
) -> None:
    sample = SimpleNamespace(
        token_ids=[], logprobs=[], finish_reason="stop", weight_versions=(), sampling_mask=None
    )
    adapter = None if used is None else SimpleNamespace(lora_name=used)
    output: Any = SimpleNamespace(outputs=[sample], prompt_token_ids=[1], lora_request=adapter)
    with pytest.raises(
        ProofError, match=f"answered with the adapter {used!r}; the current weights are in .* {current!r}"
    ) as found:
        completion(RequestKey("p", 0), output, filtered=False, adapter=current)
    assert found.value.check == "version"
    assert completion(RequestKey("p", 0), output, filtered=False, adapter=used).finish_reason == "stop"
