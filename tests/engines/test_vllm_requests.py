"""How much of their prompts the requests of one call find in vLLM's prefix cache, in process."""

from __future__ import annotations

import pytest
from conftest import needs_vllm
from tiny import make_model

from lockstep.engines import vllm_inprocess
from lockstep.engines.protocol import GenerationRequest, RequestKey, Sampling
from lockstep.engines.vllm_inprocess import VLLMInProcess
from lockstep.sync.push import push_weights


@pytest.mark.vllm
@needs_vllm
def test_in_one_call_vllm_computes_a_prompt_once_and_a_beginning_that_prompts_share_once(
    tied_vllm: VLLMInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's counters show it, in whole blocks: all requests enter in one step, and each finds the blocks of earlier ones."""
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
    tied_vllm.generate(requests)
    block = tied_vllm.llm.llm_engine.vllm_config.cache_config.block_size
    shared, whole = 70 // block * block, 109 // block * block
    assert 0 < shared < whole
    assert cached == {key: (whole if key.sample else shared if key.prompt_id != "0" else 0) for key in cached}
    assert len(cached) == len(requests)
