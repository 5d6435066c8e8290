"""A reader who follows a prompt or a parameter through the code opens few files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from conftest import needs_vllm
from forked import finish

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
@pytest.mark.vllm
@needs_vllm
def test_a_prompt_passes_through_at_most_20_files_and_a_parameter_through_13() -> None:
    done = finish([sys.executable, str(ROOT / "scripts" / "follow.py")], timeout=600)
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    counts = [int(line.split(": ")[1].split()[0]) for line in printed.splitlines() if line.endswith(" files")]
    prompt, parameter = counts
    assert 10 < prompt <= 20, printed
    assert 5 < parameter <= 13, printed
