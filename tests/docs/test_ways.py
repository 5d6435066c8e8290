"""A reader who follows a prompt or a parameter through the code by hand opens a known number of files."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

from ways import PARAMETER, PROMPT, House, way

ROOT = Path(__file__).resolve().parents[2]


def test_a_prompt_passes_through_at_most_34_files_and_a_parameter_through_12_with_their_proofs() -> None:
    house = House(ROOT)
    for route, least, files, opened in ((PROMPT, 15, 31, 34), (PARAMETER, 8, 9, 12)):
        found = way(house, route)
        assert not found.faults, "mend the route in scripts/ways.py"
        assert least < len(found.files) <= files, found.files
        assert found.opened <= opened, found.proofs
