"""The ids that vLLM's sampler kept are recorded for the right request and token. Other requests cost nothing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import VLLM, start
from draws import draws
from hypothesis import given
from hypothesis import strategies as st
from tiny import make_model

from lockstep.contract.protocol import Completion, Engine, GenerationRequest, RequestKey
from lockstep.contract.sampling import Sampling
from lockstep.engines.vllm.in_process import VLLMInProcess
from lockstep.engines.vllm.port.kept_ids import kept_ids_from, kept_rows, record_kept_ids
from lockstep.tokens.arrays import BadValues
from lockstep.weights.push import push_weights


@draws(40)
@given(
    rows=st.lists(
        st.tuples(st.sets(st.integers(0, 9), min_size=1), st.sampled_from([0, 1, 3, 10])), min_size=1
    ),
)
def test_a_row_has_its_finite_ids_if_it_has_a_limit_and_does_not_exceed_it(
    rows: list[tuple[set[int], int]],
) -> None:
    logprobs = torch.full((len(rows), 10), -torch.inf)
    for row, (kept, _) in zip(logprobs, rows, strict=True):
        row[sorted(kept)] = -1.0
    limits = np.array([limit for _, limit in rows])
    if not limits.any():
        return
    ids, places = kept_rows(logprobs, limits)
    assert ids.dtype == np.int32
    found = [ids[start:end].tolist() for start, end in pairwise(places)]
    assert found == [sorted(kept) if len(kept) <= limit else [] for kept, limit in rows]


def test_sets_that_are_no_ids_are_refused() -> None:
    kept = kept_ids_from([[3, 5], [], [4]])
    assert (kept.ids.tolist(), kept.ends.tolist()) == ([3, 5, 4], [2, 2, 3])
    for sets in ([[1.5]], [["a"]], [[2**40]]):
        with pytest.raises(BadValues):
            kept_ids_from(sets)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def crowded(untied_dir: str) -> Iterator[Engine]:
    """A vLLM engine whose cache is too small for the requests of a test, so that it preempts some of them."""
    engine = start("vllm", untied_dir, max_num_seqs=8, engine_kwargs={"num_gpu_blocks_override": 18})
    push_weights(make_model(), engine, 1)
    yield engine
    engine.close()


def asked(sampling: Sampling) -> list[GenerationRequest]:
    return [GenerationRequest(RequestKey(f"p{i}", 0), [5 + i] * 20, sampling, i) for i in range(8)]


@pytest.mark.vllm
class TestInProcess:
    pytestmark = VLLM

    def test_a_preempted_request_keeps_its_sets(
        self, crowded: VLLMInProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        scheduler = crowded.llm.llm_engine.engine_core.engine_core.scheduler
        preempted, real = [], scheduler._preempt_request

        def noted(*given: object, **more: object) -> None:
            preempted.append(given)
            real(*given, **more)

        monkeypatch.setattr(scheduler, "_preempt_request", noted)
        sampling = Sampling(80, top_p=0.8, logit_bias=((0, -50.0),))
        found = crowded.generate(asked(sampling))
        assert preempted
        # A request alone is not preempted.
        for request in asked(sampling):
            (alone,) = crowded.generate([request]).values()
            assert same(alone, found[request.key])

    def test_nothing_is_computed_for_a_batch_without_filters(
        self, crowded: VLLMInProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails(*given: object) -> None:
            raise AssertionError("kept ids were computed for a batch without filters")

        monkeypatch.setattr("lockstep.engines.vllm.port.kept_ids.kept_rows", fails)
        found = crowded.generate(asked(Sampling(5, repetition_penalty=1.2)))
        assert all(c.kept_ids is None for c in found.values())

    def test_a_second_trainer_finds_the_recorder_of_the_first(self, crowded: VLLMInProcess) -> None:
        workers: list[object] = []
        crowded.llm.collective_rpc(workers.append)
        first = workers[0].model_runner.sampler.sample  # type: ignore[attr-defined]
        record_kept_ids(workers[0])
        assert workers[0].model_runner.sampler.sample == first  # type: ignore[attr-defined]


def same(one: Completion, other: Completion) -> bool:
    """Whether two completions of a request agree.

    In another batch, an id at the limit of a filter may be kept or not.
    """
    assert one.kept_ids is not None
    assert other.kept_ids is not None
    moved = int((one.kept_ids.sizes != other.kept_ids.sizes).sum())
    return one.token_ids.tolist() == other.token_ids.tolist() and moved <= 1
