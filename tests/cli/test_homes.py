"""A user without a home, as in many containers: a user id without a name, no HOME, or a HOME that cannot be written."""

from __future__ import annotations

import getpass
import os
import pwd
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from lockstep.cli.main import main
from lockstep.errors import InputError
from lockstep.models.packaged import cache_dir
from lockstep.private_caches import FOLDERS, expanded, missing_home, use_private_caches


@pytest.fixture
def nameless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A user id that no data base names, without HOME; returns the folder for temporary files."""

    def unknown(uid: int) -> NoReturn:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in (
        *FOLDERS,
        "HOME",
        "XDG_CACHE_HOME",
        "HF_HOME",
        "TRITON_HOME",
        "LOGNAME",
        "USER",
        "LNAME",
        "USERNAME",
    ):
        # Set first, so that what the test sets is taken back.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_a_user_without_a_home_gets_one_for_the_run(nameless: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError, match="home directory"):
        Path.home()
    use_private_caches()
    assert Path.home().parent == nameless
    assert cache_dir().is_relative_to(Path.home())
    assert getpass.getuser() == f"uid{os.getuid()}"
    assert "Set HOME to keep them" in caplog.text


def test_a_home_that_cannot_be_written_keeps_its_name_and_the_caches_go_elsewhere(
    nameless: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = missing_home({"HOME": "/proc/none", "USER": "somebody"})
    assert made.keys() == {"XDG_CACHE_HOME"}
    assert Path(made["XDG_CACHE_HOME"]).parent == nameless
    assert "Set XDG_CACHE_HOME or HOME" in caplog.text


def test_a_user_with_a_home_keeps_everything(nameless: Path) -> None:
    assert missing_home({"HOME": str(nameless), "USER": "somebody"}) == {}
    assert missing_home({"HOME": "/proc/none", "USER": "somebody", "XDG_CACHE_HOME": str(nameless)}) == {}
    # Models that an image brings along are read, though nothing can be written beside them.
    (nameless / ".cache").chmod(0o500)
    assert missing_home({"HOME": str(nameless), "USER": "somebody"}) == {}


WORDS: dict[str, Callable[[str], list[str]]] = {
    "data": lambda name: ["grpo", "--model_name_or_path", "m", "--dataset_name", f"{name}.jsonl"],
    "model": lambda name: ["verify", "--model", name],
    "key": lambda name: ["serve", "m", "--key-file", name],
}


@pytest.mark.parametrize("words", WORDS)
def test_a_home_of_nobody_is_one_line(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(WORDS[words]("~nobody-of-this-name/x")) == 2
    assert (
        "the home directory that ~ stands for is not known; write the whole path" in capsys.readouterr().err
    )


def test_a_tilde_is_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/of/mine")
    assert expanded("~/x") == Path("/home/of/mine/x")
    with pytest.raises(InputError):
        expanded("~nobody-of-this-name/x")
