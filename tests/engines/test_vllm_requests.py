"""The order in which requests enter vLLM in this process, and what each then finds in its prefix cache."""

from __future__ import annotations

import pytest
from conftest import needs_vllm
from hypothesis import given
from hypothesis import strategies as st
from tiny import make_model

from lockstep.engines import vllm_inprocess
from lockstep.engines.protocol import GenerationRequest, RequestKey, Sampling
from lockstep.engines.vllm_inprocess import VLLMInProcess
from lockstep.engines.vllm_requests import prefix_waves
from lockstep.sync.push import push_weights


def asked(prompts: list[int]) -> dict[str, GenerationRequest]:
    """A request of each prompt named, under its own name."""
    requests = [GenerationRequest(RequestKey("p", i), (p, 1, 2), Sampling(4), i) for i, p in enumerate(prompts)]
    return {str(request.key): request for request in requests}


calls = st.lists(st.integers(0, 4), max_size=12).map(asked)


@given(calls)
def test_every_request_enters_once_and_no_wave_is_empty(by_id: dict[str, GenerationRequest]) -> None:
    waves = prefix_waves(by_id)
    assert sorted(name for wave in waves for name in wave) == sorted(by_id)
    assert all(wave[name] is by_id[name] for wave in waves for name in wave)
    assert all(waves)


@given(calls)
def test_a_prompt_enters_once_before_its_other_requests_and_one_prompt_before_all(
    by_id: dict[str, GenerationRequest],
) -> None:
    entered: set[tuple[int, ...]] = set()
    for number, wave in enumerate(prefix_waves(by_id)):
        prompts = [request.prompt_ids for request in wave.values()]
        if number == 0:
            assert len(prompts) == 1
        assert entered.isdisjoint(prompts) or entered.issuperset(prompts)
        assert entered.issuperset(prompts) or len(set(prompts)) == len(prompts)
        entered.update(prompts)
    assert entered == {request.prompt_ids for request in by_id.values()}


@pytest.mark.parametrize("waves", [True, False])
@pytest.mark.vllm
@needs_vllm
def test_in_one_call_vllm_computes_a_prompt_once_and_a_beginning_that_prompts_share_once(
    tied_vllm: VLLMInProcess, monkeypatch: pytest.MonkeyPatch, waves: bool
) -> None:
    """By vLLM's own account, in whole blocks: over waves, and (vLLM 0.32.0) also where all requests enter in one step."""
    push_weights(make_model("llama", tied=True), tied_vllm, 1)
    beginning = tuple(range(10, 80))
    requests = [
        GenerationRequest(RequestKey(str(p), s), beginning + (100 + p,) * 40, Sampling(3), 10 * p + s)
        for p in range(3)
        for s in range(3)
    ]
    completion, cached = vllm_inprocess.completion, {}

    def noted(key: RequestKey, output: object) -> object:
        cached[key] = output.num_cached_tokens  # type: ignore[attr-defined]
        return completion(key, output)

    monkeypatch.setattr(vllm_inprocess, "completion", noted)
    if not waves:
        monkeypatch.setattr(vllm_inprocess, "prefix_waves", lambda by_id: [by_id])
    tied_vllm.generate(requests)
    block = tied_vllm.llm.llm_engine.vllm_config.cache_config.block_size
    shared, whole = 70 // block * block, 109 // block * block
    assert 0 < shared < whole
    assert cached == {key: (whole if key.sample else shared if key.prompt_id != "0" else 0) for key in cached}
    assert len(cached) == len(requests)
