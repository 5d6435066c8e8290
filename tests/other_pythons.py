"""Pythons of their own for packages that clash with ours. `make environments` makes them."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / ".environments"


def python_with(package: str) -> Path:
    """The Python that has a package."""
    return FOLDER / package / "bin" / "python"


def needs(package: str) -> pytest.MarkDecorator:
    """Skips the tests of a package that nobody has installed."""
    return pytest.mark.skipif(
        not python_with(package).exists(),
        reason=f"{package} is not installed in a Python of its own (make environments)",
    )
