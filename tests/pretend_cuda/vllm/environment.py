"""The environment of a program whose processes all run on the pretend GPU, with vLLM's CUDA path."""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).parents[2]
SITE = Path(__file__).parent / "site"


def environment(gib: float = 1.0) -> dict[str, str]:
    """Variables for such a program.

    Python imports `site/sitecustomize.py` at its start, because it is first on PYTHONPATH.

    Args:
        gib: size of the device in GiB.
    """
    helpers = [
        TESTS,
        *(TESTS / name for name in ("run", "images", "server")),
        TESTS.parent / "src",
        TESTS.parent,
    ]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [SITE, *helpers])),
        "PRETEND_GIB": str(gib),
        # One thread: a result must not depend on the number of free cores.
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
