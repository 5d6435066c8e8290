"""Tests that cannot run with the pretend GPU on, each with its reason. Used by: `plugin.py`."""

from __future__ import annotations

import pytest

# The beginning of a test's name below tests/, and why.
_REASONS = {
    "pretend_cuda/": "compares the device with a process that has none",
    "sync/test_nccl.py": "there is no NCCL, and every process has the same GPU",
    "server/": "a server is a process of its own, on the CPU",
    "shards/": "ranks are processes of their own, on the CPU",
}


def reason(item: pytest.Item) -> str | None:
    """Why a test cannot run with the device on. None: it can."""
    if item.get_closest_marker("vllm") is not None:
        return "vLLM's CPU build has no GPU; make test-cuda-vllm runs these tests on vLLM's own GPU path"
    name = item.nodeid.removeprefix("tests/")
    return next((why for start, why in _REASONS.items() if name.startswith(start)), None)
