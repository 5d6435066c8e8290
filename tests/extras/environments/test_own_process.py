"""Programs of other processes run in any Python: they import nothing of Lockstep."""

from __future__ import annotations

import re
from pathlib import Path

import lockstep

SOURCE = Path(lockstep.__file__).parent


def test_a_program_of_another_process_imports_nothing_of_lockstep() -> None:
    programs = [*(SOURCE / "extras/environments/own_process").glob("*.py")]
    programs.append(SOURCE / "rollouts/programs/environment_runner.py")
    assert len(programs) == 5
    ours = re.compile(r"^\s*(?:from|import) lockstep", re.MULTILINE)
    assert [path.name for path in programs if ours.search(path.read_text(encoding="utf-8"))] == []
