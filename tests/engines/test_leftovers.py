"""What killed engines leave in the temporary folder and in shared memory is removed, and nothing else."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.engines.vllm import environment as leftovers
from lockstep.engines.vllm.environment import socket_folder

SHARED = Path("/dev/shm")
# An owner whose engine uses a file in shared memory; it waits to be killed.
OWNER = """
import mmap, os, sys
from pathlib import Path
from lockstep.engines.vllm import environment as leftovers
folder = Path(sys.argv[1])
with leftovers.owned(folder), open(sys.argv[2], "r+b") as file:
    used = mmap.mmap(file.fileno(), 0)
    leftovers.note(folder, [os.getpid()])
    print("up", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A file in shared memory with a name as multiprocessing gives."""
    made = SHARED / f"psm_{uuid.uuid4().hex[:8]}"
    made.write_bytes(bytes(64))
    yield made
    made.unlink(missing_ok=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "lockstep-12345678"
    made.mkdir(mode=0o700)
    return made


def start(folder: Path, shared: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", OWNER, str(folder), str(shared)]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"up\n"
    return owner


def test_what_a_killed_owner_leaves_is_removed_and_what_a_living_one_has_is_not(
    folder: Path, shared: Path
) -> None:
    with start(folder, shared) as owner:
        leftovers.remove_dead(folder.parent)
        assert folder.exists()
        assert shared.exists()
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert shared.exists()
    # Somebody else still uses it.
    with shared.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        leftovers.remove_listed(folder)
        assert shared.exists()
    leftovers.remove_dead(folder.parent)
    assert not folder.exists()
    assert not shared.exists()


def test_a_folder_whose_processes_outlive_its_owner_is_left_alone(folder: Path) -> None:
    with leftovers.owned(folder):
        pass
    environment = {"VLLM_RPC_BASE_PATH": str(folder)}
    with subprocess.Popen(["sleep", "600"], env=environment) as orphan:
        leftovers.remove_dead(folder.parent)
        assert folder.exists()
        orphan.kill()
    leftovers.remove_dead(folder.parent)
    assert not folder.exists()


def test_what_belongs_to_somebody_else_is_left_alone(
    folder: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with leftovers.owned(folder):
        pass
    (folder / "shared-memory").write_text(f"{shared.stat().st_ino} {shared.name}\n")
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    leftovers.remove_dead(folder.parent)
    leftovers.remove_listed(folder)
    assert folder.exists()
    assert shared.exists()
    monkeypatch.undo()
    # A folder without a lock, and a link.
    other, link = folder.parent / "lockstep-other", folder.parent / "lockstep-link"
    other.mkdir()
    target = folder.parent / "target"
    folder.rename(target)
    link.symlink_to(target)
    leftovers.remove_dead(folder.parent)
    assert other.exists()
    assert (target / "owner.lock").exists()


@pytest.mark.parametrize(
    "line", ["1 {name}", "{inode} ../../{path}", "{inode} /{path}", "x {name}", "{inode} other"]
)
def test_a_list_that_is_wrong_removes_nothing(line: str, folder: Path, shared: Path) -> None:
    said = line.format(name=shared.name, inode=shared.stat().st_ino, path=str(shared).lstrip("/"))
    (folder / "shared-memory").write_text(f"{said}\n\0\n")
    leftovers.remove_listed(folder)
    assert shared.exists()


def test_only_names_of_engines_are_listed(folder: Path, shared: Path) -> None:
    users = SHARED / f"my-data-{uuid.uuid4().hex}"
    users.write_bytes(bytes(64))
    try:
        with (
            users.open("r+b") as one,
            shared.open("r+b") as two,
            mmap.mmap(one.fileno(), 0),
            mmap.mmap(two.fileno(), 0),
        ):
            assert leftovers.shared_by(os.getpid()) >= {shared.name}
            leftovers.note(folder, [os.getpid()])
        leftovers.remove_listed(folder)
        assert users.exists()
        assert not shared.exists()
    finally:
        users.unlink()


def test_the_next_engine_removes_what_the_last_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = Path(f"/tmp/ls-{uuid.uuid4().hex[:8]}")
    short.mkdir()
    try:
        monkeypatch.setattr("tempfile.tempdir", str(short))
        dead = short / "lockstep-dead"
        dead.mkdir()
        with leftovers.owned(dead):
            (dead / "vllm_dist_1").touch()
        with socket_folder() as folder:
            assert sorted(short.iterdir()) == [folder]
        assert not list(short.iterdir())
    finally:
        short.rmdir()
