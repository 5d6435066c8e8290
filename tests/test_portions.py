"""What CI leaves to a release: the table names tests that there are."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from portions import LATER, ROWS_IN_CI

TESTS = Path(__file__).parent


@pytest.mark.parametrize("name", [*ROWS_IN_CI, *LATER])
def test_a_test_that_ci_shortens_is_there(name: str) -> None:
    file, _, test = name.partition("[")[0].partition("::")
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    assert not test or test in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
