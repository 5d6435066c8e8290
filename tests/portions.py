"""Divides a matrix of cases: CI runs a portion, and `make test-release` runs the rest.

A matrix combines options. Where the code of one option does not know the other options, CI needs each option once, and not each
combination. The file of a test says which portion it keeps and why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def portion(cases: Iterable[Any], kept: Callable[[Any], bool]) -> list[Any]:
    """The cases as parameters of a test. A case that is not kept has the mark `release`.

    Args:
        cases: values, or tuples of values if the test has several parameters.
        kept: whether CI runs a case.
    """
    return [case if kept(case) else _for_releases(case) for case in cases]


def _for_releases(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.release)
