"""DeepSpeed is imported by a run that shards with it, and by nothing else: its import takes about a second."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys
import lockstep.cli.main
import lockstep.extras.deepspeed.weights
import lockstep.run.trainers.methods
from lockstep.extras.deepspeed.settings import take_zero_settings

try:
    take_zero_settings({"zero_optimization": {"stage": 3}}, {})
except ValueError as error:
    assert "lockstep-rl[deepspeed]" in str(error)
assert "deepspeed" not in sys.modules
"""


@pytest.mark.release
def test_the_trainers_and_the_settings_import_no_deepspeed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
