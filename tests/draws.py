"""How many examples a property is tried on: few and always the same in CI, many and others each time by hand.

`HYPOTHESIS_PROFILE=thorough make test ARGS="tests/training/test_packing.py"`
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from zlib import crc32

from hypothesis import HealthCheck, given, seed, settings
from hypothesis.strategies import SearchStrategy

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
settings.register_profile("ci", max_examples=50, derandomize=True, database=None, deadline=None)
settings.register_profile("thorough", max_examples=2000, deadline=None)
settings.load_profile(PROFILE)
# Times as many examples in the thorough profile.
_THOROUGH = 40


def draws(examples: int, **more: Any) -> settings:
    """Settings for a property whose examples are dear, or that needs many: so many in CI."""
    return settings(max_examples=examples * (_THOROUGH if PROFILE == "thorough" else 1), **more)


def hold(name: str, examples: int, check: Callable[..., None], **drawn: SearchStrategy[Any]) -> None:
    """Check a property on examples that are another case's own: all cases of one test would draw the same in CI.

    Args:
        name: the case's.
        check: called with the arguments that are drawn.
    """
    few = draws(examples, suppress_health_check=list(HealthCheck))
    tried = few(given(**drawn)(check))
    (seed(crc32(name.encode()))(tried) if PROFILE == "ci" else tried)()
