"""A file has its whole old content or its whole new content, whatever happens while it is written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from lockstep.files import append_line, free_name, making_folder, replace_text, replacing, temporary_folder


@pytest.mark.parametrize("call", ["fsync", "replace", "inside"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_old_content_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: BaseException
) -> None:
    path = tmp_path / "run.json"
    replace_text(path, "old")

    def fails(*_: Any) -> None:
        raise error

    if call == "replace":
        monkeypatch.setattr(Path, "replace", fails)
    elif call == "fsync":
        monkeypatch.setattr(os, "fsync", fails)

    def write() -> None:
        with replacing(path) as file:
            file.write(b"new")
            if call == "inside":
                raise error

    with pytest.raises(type(error)) as found:
        write()
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]
    if isinstance(error, OSError):
        assert "run.json" in str(found.value)


def test_a_line_that_cannot_be_written_whole_leaves_no_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "receipt.jsonl"
    append_line(path, "one")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        append_line(path, "two", durable=True)
    append_line(path, "three")
    assert path.read_text() == "one\nthree\n"


def test_a_link_stays_a_link_and_a_pipe_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link, pipe = tmp_path / "run.json", tmp_path / "pipe"
    link.symlink_to(tmp_path / "elsewhere" / "there.json")
    replace_text(link, "text")
    assert link.is_symlink()
    assert (tmp_path / "elsewhere" / "there.json").read_text() == "text"
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()))
    found: list[str] = []
    reader.start()
    replace_text(pipe, "text")
    reader.join()
    assert found == ["text"]
    assert pipe.is_fifo()


def test_a_folder_is_whole_or_absent(tmp_path: Path) -> None:
    place = tmp_path / "merged"
    (tmp_path / ".merged.new").mkdir()
    (tmp_path / ".merged.new" / "left by a kill").touch()

    def fails() -> None:
        with making_folder(place) as made:
            (made / "half").touch()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert not list(tmp_path.iterdir())
    with making_folder(place) as made:
        (made / "config.json").touch()
        assert not place.exists()
    assert [p.name for p in place.iterdir()] == ["config.json"]


def test_a_free_name_is_free(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").symlink_to("/nowhere/at/all")
    assert free_name(tmp_path / "log.jsonl").name == "log-2.jsonl"


def test_a_temporary_folder_ends_with_its_block_or_when_another_one_begins(tmp_path: Path) -> None:
    (tmp_path / "work-of-somebody-else").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    killed = (
        "import os, pathlib, sys; from lockstep.files import temporary_folder\n"
        "with temporary_folder('work-', pathlib.Path(sys.argv[1])) as folder:\n"
        "    (folder / 'file').touch(); os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run([sys.executable, "-c", killed, str(tmp_path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob("work-*/file"))) == 1
    with temporary_folder("work-", tmp_path) as first:
        assert not list(tmp_path.glob("work-*/file"))
        (first / "file").touch()
        with temporary_folder("work-", tmp_path):
            assert (first / "file").exists()
        assert first.stat().st_mode & 0o777 == 0o700
    # The owner of an empty folder may be about to take its lock.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "work-of-somebody-else"]
