"""The environment of a program whose processes all run on the pretend GPU, with vLLM's CUDA path (`pretend_cuda/vllm/`)."""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).parent
SITE = TESTS / "pretend_cuda" / "vllm" / "site"


def environment(gib: float = 1.0, *, devices: int = 1) -> dict[str, str]:
    """Variables for such a program. Python imports `sitecustomize.py` at its start, from the first folder of PYTHONPATH.

    Args:
        gib: size of the device.
        devices: devices that programs count. All of them are `cuda:0`.
    """
    paths = [SITE, TESTS, TESTS / "training", TESTS.parent / "src", TESTS.parent]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PRETEND_GIB": str(gib),
        "PRETEND_DEVICES": str(devices),
        # One thread: a result must not depend on the number of free cores.
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
