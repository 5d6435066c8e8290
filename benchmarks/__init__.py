"""Programs that print the figures of the docs. The Makefile starts them, as `python -m benchmarks.ROOM.PROGRAM`.

Each room measures one thing: whole steps beside TRL's (`against_trl`), a borrowed GPU (`gpu_day`), what is neither
the model's work nor the engine's (`host`), learning (`learning`), a prediction for many GPUs (`plan`), the proofs
(`proofs`), sampling (`sampling`), and pushes to servers (`servers`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Some programs use the tiny models and the tokenizers of the tests.
sys.path.append(str(ROOT / "tests"))


def finding_this(given: Mapping[str, str]) -> dict[str, str]:
    """An environment whose Python programs find this package in every working directory."""
    paths = [str(ROOT), given.get("PYTHONPATH", "")]
    return {**given, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
