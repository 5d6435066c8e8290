"""Sets the number of Hypothesis examples per property.

CI uses few and the same every time; `thorough` uses many new ones.

`HYPOTHESIS_PROFILE=thorough make test ARGS="tests/learn/test_packing.py"`
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
# The thorough profile uses this many times more examples.
_THOROUGH = 40


def draws(examples: int, **more: Any) -> settings:
    """Settings for a property with `examples` examples in CI: fewer if they are expensive, more if it needs them."""
    return settings(max_examples=examples * (_THOROUGH if PROFILE == "thorough" else 1), **more)


def hold(name: str, examples: int, check: Callable[..., None], **drawn: SearchStrategy[Any]) -> None:
    """Check a property on examples that depend on the name of the case.

    Otherwise all cases of a test draw the same ones in CI.

    Args:
        name: the name of the case.
        check: called with the drawn arguments.
    """
    few = draws(examples, suppress_health_check=list(HealthCheck))
    tried = few(given(**drawn)(check))
    (seed(crc32(name.encode()))(tried) if PROFILE == "ci" else tried)()
