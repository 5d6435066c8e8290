"""What Lockstep changes in vLLM's second model runner, which runs on GPUs only. `tests/vllm_facts.py` has the names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import VLLM

from lockstep.engines.vllm import in_process
from lockstep.engines.vllm.arguments import MAX_KEPT_IDS
from lockstep.engines.vllm.in_process import VLLMInProcess
from lockstep.engines.vllm.port.engine import request_limits, searches_top_p
from lockstep.engines.vllm.port.kept_ids import SecondRunnerKeptIds
from lockstep.errors import InputError

pytestmark = VLLM


def test_sets_are_computed_only_while_a_request_asks_and_larger_ones_become_empty() -> None:
    """The runner is played: vLLM's own needs a GPU."""
    sampler: Any = SimpleNamespace(
        return_sampling_mask=False, add_request=lambda *_: None, sample=lambda *_: None
    )

    def step(hidden_states: Any, batch: Any) -> tuple[Any]:
        sampler.sample(None, None, None, batch.idx_mapping_np)
        sets = SimpleNamespace(counts=torch.tensor(batch.counts)) if sampler.return_sampling_mask else None
        return (SimpleNamespace(sampling_mask_tensors=sets),)

    runner = SimpleNamespace(sampler=sampler, max_num_reqs=4, sample=step)
    SecondRunnerKeptIds(runner)

    def counts(places: list[int], counts: list[int]) -> list[int] | None:
        batch = SimpleNamespace(idx_mapping_np=np.array(places), counts=counts)
        sets = runner.sample(None, batch)[0].sampling_mask_tensors
        return None if sets is None else sets.counts.tolist()

    sampler.add_request(0, SimpleNamespace(extra_args={MAX_KEPT_IDS: 20}))
    sampler.add_request(2, SimpleNamespace(extra_args=None))
    assert counts([2, 0], [300, 20]) == [0, 20]
    assert counts([0], [21]) == [0]
    assert counts([2], [300]) is None
    # Another request in the place of the first one.
    sampler.add_request(0, SimpleNamespace(extra_args={}))
    assert counts([0, 2], [20, 20]) is None


def test_the_limits_of_a_request_are_those_of_vllms_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    second = SimpleNamespace(use_v2_model_runner=True)
    sizes = {
        "allowed_token_ids": 1024,
        "logit_bias": 1024,
        "end_ids": 128,
        "bad_words": 128,
        "bad_word_ids": 1024,
    }
    assert request_limits(second) == sizes
    assert request_limits(SimpleNamespace(use_v2_model_runner=False)) == {}
    # A user can make two of the tables larger.
    monkeypatch.setenv("VLLM_MAX_NUM_BAD_WORDS", "300")
    assert request_limits(second) == sizes | {"bad_words": 300}


@pytest.mark.parametrize("has_triton", [True, False])
def test_an_engine_says_whether_vllm_searches_the_edge_of_top_p(
    has_triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own function decides, which both of its runners call."""
    import vllm.v1.sample.ops.topk_topp_sampler as filters

    searched: list[torch.Tensor] = []
    monkeypatch.setattr(filters, "HAS_TRITON", has_triton)
    monkeypatch.setattr(
        filters, "apply_top_k_top_p_triton", lambda *given: searched.extend(given), raising=False
    )
    filters.apply_top_k_top_p(torch.zeros(1, 4), None, torch.tensor([0.9]))
    assert searches_top_p() is has_triton is bool(searched)


@pytest.mark.parametrize("error", [AttributeError("no 'requests'"), AssertionError()])
def test_an_engine_that_does_not_start_says_why(
    error: Exception, untied_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(in_process, "start_vllm", fails)
    with pytest.raises(
        InputError, match="no 'requests'" if str(error) else r"AssertionError: without a text .*raise error"
    ):
        VLLMInProcess(untied_dir, dtype=torch.float32, max_model_len=64)
