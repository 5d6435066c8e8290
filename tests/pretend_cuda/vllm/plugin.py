"""A plugin of pytest for `make test-cuda-vllm`: it skips tests that say nothing on the pretend GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

# The beginning of a test's name below tests/, and why.
_REASONS = {
    "pretend_cuda/": "starts processes of its own that have the device",
    "watch/test_experts_on_vllm.py::test_experts_that_an_update_leaves_unpacked": "only a CPU's engine packs experts",
    "engines/test_sleep.py::test_what_is_refused_by_name": "asks for adapters in float32, which a GPU's engine refuses",
    "engines/test_vllm_kept_ids.py::TestInProcess": "its engine is crowded by the size of a block of the "
    "cache on a CPU",
    "engines/test_vllm_requests.py::test_weights_and_cache_have_the_bytes_that_are_counted_before_a_run_loads_its_model": (  # noqa: E501
        "counts the memory of a run on a CPU"
    ),
    "extras/verify/test_verify_command.py::TestBadInput::test_a_model_that_the_engine_cannot_load": (
        "its heads of 16 are missing among a CPU's kernels only"
    ),
    **{
        f"weights/test_tied_head.py::test_the_{proof}_a_stale_tied_head": "leaves out a step that only a CPU's "
        "engine needs"
        for proof in ("gap_catches", "probe_names")
    },
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        for start, why in _REASONS.items():
            if name.startswith(start):
                item.add_marker(pytest.mark.skip(reason=why))


# The words with which Lockstep refuses adapters alone on an engine in float32 (`engines/vllm/arguments.py`). Most
# tests of adapters have such an engine, because its log-probs are exact.
_ADAPTERS = "computes adapters in half precision only, and the engine's dtype is float32"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A test that ends in this refusal is skipped: it can run on a CPU only."""
    if call.excinfo is not None and _ADAPTERS in str(call.excinfo.value):
        try:
            pytest.skip("asks for adapters in float32, which a GPU's engine refuses")
        except pytest.skip.Exception:
            call.excinfo = pytest.ExceptionInfo.from_current()
    return (yield)
