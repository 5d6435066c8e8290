"""With `enforce_eager` on a CPU vLLM compiles nothing, and computes the same ranks."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from conftest import needs_vllm
from draws import draws
from hypothesis import given
from hypothesis import strategies as st

from lockstep.contract.protocol import GenerationRequest, RequestKey
from lockstep.contract.sampling import Sampling
from lockstep.engines.vllm.in_process import VLLMInProcess
from lockstep.engines.vllm.port.patches import count_at_least
from lockstep.models.policy import load_policy
from lockstep.weights.push import push_weights


@draws(40)
@given(
    rows=st.lists(
        st.lists(st.sampled_from([-torch.inf, -2.0, -1.0, 0.0]), min_size=3, max_size=3), min_size=1
    )
)
def test_ranks_are_those_that_vllm_counts(rows: list[list[float]]) -> None:
    x = torch.tensor(rows)
    values = x[:, :1].contiguous()
    found = count_at_least(x, values)
    assert found.dtype == torch.int64
    assert torch.equal(found, (x >= values).sum(-1))


@pytest.mark.vllm
@needs_vllm
def test_a_request_with_logprobs_compiles_nothing(tied_vllm: VLLMInProcess, tied_dir: str) -> None:
    from torch._dynamo.utils import counters

    push_weights(load_policy(tied_dir), tied_vllm, 0)
    before = counters["frames"]["total"]
    for count in (1, 3):
        requests = [GenerationRequest(RequestKey("p", n), (1, 2), Sampling(4), 0) for n in range(count)]
        answers = tied_vllm.generate(requests)
        assert all(len(answer.logprobs) == len(answer.token_ids) for answer in answers.values())
    assert tied_vllm.score({"s": (1, 2, 3)})["s"]
    assert counters["frames"]["total"] == before


@pytest.mark.vllm
@needs_vllm
@pytest.mark.release
def test_the_compilers_table_is_not_loaded_with_vllm_and_can_be_loaded_later() -> None:
    code = """
import sys
import lockstep
from lockstep.engines.vllm.port.patches import import_without_compiler
import_without_compiler()
assert "vllm" in sys.modules and "torch._inductor.lowering" not in sys.modules
import torch._inductor.lowering
assert torch._inductor.lowering.FALLBACK_ALLOW_LIST is not None
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
