"""How many examples a property is tried on: few and always the same in CI, many and others each time by hand.

`HYPOTHESIS_PROFILE=thorough make test ARGS="tests/training/test_packing.py"`
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
settings.register_profile("ci", max_examples=50, derandomize=True, database=None, deadline=None)
settings.register_profile("thorough", max_examples=2000, deadline=None)
settings.load_profile(PROFILE)
# Times as many examples in the thorough profile.
_THOROUGH = 40


def draws(examples: int, **more: Any) -> settings:
    """Settings for a property whose examples are dear, or that needs many: so many in CI."""
    return settings(max_examples=examples * (_THOROUGH if PROFILE == "thorough" else 1), **more)
