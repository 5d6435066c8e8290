"""Every field of Lockstep that the page for prime-rl's users names exists. (prime-rl itself is on no registry.)"""

from __future__ import annotations

import json
import re
from pathlib import Path

from lockstep.cli.help import FIELDS_FILE

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "migrating-from-prime-rl.md"


def test_every_field_in_the_column_of_lockstep_exists() -> None:
    described = json.loads(FIELDS_FILE.read_text())
    fields = {name for part in described.values() for name in part} | {"agent"}
    rows = [line.split("|")[3] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    named = {name for cell in rows for name in re.findall(r"`(\w+)[`:]", cell)}
    assert len(named) > 25
    assert named - fields == set()
