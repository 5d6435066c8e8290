"""While a program starts, Python's collector is off and bitsandbytes waits; afterwards both are as before."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.start_up import _ImportedLater, collector_off


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


def test_a_package_that_is_imported_later_is_itself_when_something_of_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_package").mkdir()
    (tmp_path / "slow_package" / "__init__.py").write_text("answer = 42\n")
    monkeypatch.syspath_prepend(tmp_path)
    later = sys.modules["slow_package"] = _ImportedLater("slow_package")
    try:
        import slow_package  # type: ignore[import-not-found]

        assert slow_package is later
        assert not hasattr(later, "__path__")
        assert later.answer == 42
        assert sys.modules["slow_package"] is not later
    finally:
        del sys.modules["slow_package"]


@pytest.mark.release
def test_peft_imports_bitsandbytes_when_it_uses_it() -> None:
    pytest.importorskip("bitsandbytes")
    lines = (
        "import sys; from lockstep.start_up import import_peft; import_peft()",
        "import transformers; from transformers.utils import is_bitsandbytes_available as there",
        "assert 'bitsandbytes' not in sys.modules and there()",
        "from peft.import_utils import is_bnb_4bit_available; assert is_bnb_4bit_available()",
        "import bitsandbytes, peft.helpers; assert peft.helpers.bnb.functional is bitsandbytes.functional",
    )
    subprocess.run([sys.executable, "-c", "; ".join(lines)], check=True, timeout=120)
