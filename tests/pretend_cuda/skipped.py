"""Tests that cannot run with the pretend GPU on, each with its reason. Used by: `plugin.py`."""

from __future__ import annotations

import pytest

_RANKS = "ranks are processes of their own, on the CPU"
# The beginning of a test's name below tests/, and why.
_REASONS = {
    "pretend_cuda/": "compares the device with a process that has none",
    "beside_trl/test_trls_own_scripts.py::test_a_script_in_the_way_of_trls_gspo_example_learns_an_adapter[trl]": (
        "on a GPU TRL's own trainer compiles Triton kernels, and none run here"
    ),
    "shards/": "gloo takes no tensor of a GPU; FSDP2 and ZeRO-3 are on the device in tests/pretend_cuda/test_shards.py",
    "weights/test_nccl.py": "there is no NCCL, and every process has the same GPU",
    "run/test_two_ranks.py": _RANKS,
    "run/test_sharded_training.py": _RANKS,
    "images/test_pictures_on_two_ranks.py": _RANKS,
    "extras/trl/test_trl_ranks.py": _RANKS,
}


def reason(item: pytest.Item) -> str | None:
    """Why a test cannot run with the device on. None: it can."""
    if item.get_closest_marker("vllm") is not None:
        return "vLLM's CPU build has no GPU; make test-cuda-vllm runs these tests on vLLM's own GPU path"
    name = item.nodeid.removeprefix("tests/")
    return next((why for start, why in _REASONS.items() if name.startswith(start)), None)
