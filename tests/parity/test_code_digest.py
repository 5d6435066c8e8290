"""The digest of a reward function changes with what the function computes, and with nothing else."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.parity.resume.code_digest import code_digest

HELPER = "def helped(x):\n    return x + 1\n"
FILE = """
import math
import helper_of_rewards

WEIGHTS = {"a": 1.0}
calls = 0

class Table:
    size = 3

    def at(self, x):
        return x * self.size

def other():
    return 1

def inner(x):
    return Table().at(x)

def score(completions, **_):
    global calls
    calls += 1
    return [inner(len(c)) * WEIGHTS["a"] + helper_of_rewards.helped(math.pi) for c in completions]
"""
NAMES = ("rewards_for_digest", "helper_of_rewards")


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Any]:
    """A function that gives `score` of a file with this text, beside a helper file."""
    sys.path.insert(0, str(tmp_path))

    def loaded(text: str = FILE, helper: str = HELPER) -> Any:
        for name in NAMES:
            sys.modules.pop(name, None)
        for name, content in zip(NAMES, (text, helper), strict=True):
            path = tmp_path / f"{name}.py"
            path.unlink(missing_ok=True)
            path.write_text(content)
        importlib.invalidate_caches()
        spec = importlib.util.spec_from_file_location(NAMES[0], tmp_path / f"{NAMES[0]}.py")
        module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
        sys.modules[NAMES[0]] = module
        spec.loader.exec_module(module)  # type: ignore[union-attr]
        return module.score

    yield loaded
    sys.path.remove(str(tmp_path))
    for name in NAMES:
        sys.modules.pop(name, None)


CHANGES = {
    "its own text": ("global calls", "global calls  # and more"),
    "a function that it calls": ("return Table().at(x)", "return Table().at(x) + 1"),
    "a class two calls away": ("size = 3", "size = 4"),
    "a table of constants": ('"a": 1.0', '"a": 2.0'),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_what_the_function_uses_changes_the_digest(load: Any, what: str) -> None:
    before = code_digest(load())
    assert code_digest(load(FILE.replace(*CHANGES[what]))) != before
    assert code_digest(load()) == before


def test_a_change_in_another_file_of_the_users_changes_the_digest(load: Any) -> None:
    before = code_digest(load())
    assert code_digest(load(helper=HELPER.replace("+ 1", "+ 2"))) != before


def test_what_the_function_does_not_use_does_not_count(load: Any) -> None:
    before = code_digest(load())
    assert code_digest(load(FILE.replace("def other():\n    return 1", "def another():\n    return 2"))) == before


def test_a_call_does_not_change_the_digest(load: Any) -> None:
    score = load()
    before = code_digest(score)
    score(["ab"])
    assert code_digest(score) == before


class Counting:
    def __init__(self, scale: float) -> None:
        self.scale, self.calls = scale, 0

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        self.calls += 1
        return [self.scale for _ in completions]


def test_an_object_counts_with_the_values_that_it_was_made_with() -> None:
    one = Counting(1.0)
    before = code_digest(one)
    one(["a"])
    assert code_digest(one) == before == code_digest(Counting(1.0))
    assert code_digest(Counting(2.0)) != before


def scaled(completions: list[str], scale: float, **_: Any) -> list[float]:
    return [scale for _ in completions]


def test_the_arguments_of_a_partial_function_and_the_cells_of_a_closure_count() -> None:
    def closed(scale: float) -> Any:
        return lambda completions, **_: [scale for _ in completions]

    for make in (lambda scale: functools.partial(scaled, scale=scale), closed):
        assert code_digest(make(1.0)) == code_digest(make(1.0)) != code_digest(make(2.0))


def test_a_models_weights_count() -> None:
    model = torch.nn.Linear(2, 1)
    before = code_digest(model)
    with torch.no_grad():
        model.weight[0, 0] *= 1.01
    assert code_digest(model) != before


def test_a_wrapper_of_a_built_in_function_has_a_digest() -> None:
    @functools.wraps(dict.update)
    def wrapper(*given: Any) -> None:
        dict.update(*given)

    def reward(completions: list[str], **_: Any) -> None:
        wrapper({}, {})

    assert code_digest(reward) == code_digest(reward)
