"""While a program starts, Python's collector is off; afterwards it is as before, and ignores what was made."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from lockstep.start_up import collector_off


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    gc.enable()


def test_the_collector_is_off_within_and_on_after_an_error_too() -> None:
    def fails() -> None:
        with collector_off():
            raise ValueError(f"on: {gc.isenabled()}")

    with pytest.raises(ValueError, match="on: False"):
        fails()
    assert gc.isenabled()


def test_blocks_may_be_nested_and_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with collector_off(), collector_off():
        pass
    assert not gc.isenabled()
    gc.enable()
    with collector_off():
        with collector_off():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_was_made_within_is_frozen_before_the_collector_is_on_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: on.append(gc.isenabled()))
    with collector_off():
        pass
    assert on == [False]
