"""No library executes what another user has put into a folder, in the temporary folder or where a variable says."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from input.training_words import words
from servers import free_port
from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

from lockstep import GRPOTrainer
from lockstep.cli.main import main
from lockstep.engines.vllm.start import start_vllm
from lockstep.errors import InputError
from lockstep.private_caches import FOLDERS, private_caches, use_private_caches, why_not_private

STRANGER = 4242
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of somebody else")
INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory without any cache, and no variable that names one."""
    for name in (*FOLDERS, "XDG_CACHE_HOME", "HF_HOME", "TRITON_HOME"):
        # At the end of a test, what the functions have set is gone too.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def plain(folder: Path) -> Path:
    folder.mkdir(0o755)
    return folder


def of_another_user(folder: Path) -> Path:
    plain(folder)
    os.chown(folder, STRANGER, STRANGER)
    return folder


def open_to_all(folder: Path) -> Path:
    plain(folder).chmod(0o777)
    return folder


def sticky(folder: Path) -> Path:
    plain(folder).chmod(0o1777)
    return folder


def open_to_a_group(folder: Path) -> Path:
    os.chown(plain(folder), -1, STRANGER)
    folder.chmod(0o775)
    return folder


def below_an_open_folder(folder: Path) -> Path:
    return plain(open_to_all(folder) / "own")


def below_a_strangers_folder(folder: Path) -> Path:
    return plain(of_another_user(folder) / "own")


def link_into_an_open_folder(folder: Path) -> Path:
    folder.symlink_to(below_an_open_folder(folder.with_name("open")))
    return folder


def link_of_another_user(folder: Path) -> Path:
    folder.symlink_to(plain(folder.with_name("target")))
    os.chown(folder, STRANGER, STRANGER, follow_symlinks=False)
    return folder


def link_to_a_link_in_an_open_folder(folder: Path) -> Path:
    inner = open_to_all(folder.with_name("open")) / "link"
    inner.symlink_to(plain(folder.with_name("target")))
    folder.symlink_to(inner)
    return folder


def up_again_through_a_link(folder: Path) -> Path:
    """`link/../own`: the parent of what the link leads to, and not the folder with the link."""
    inside = plain(below_an_open_folder(folder.with_name("open")) / "inside")
    plain(inside.parent / "own")
    folder.symlink_to(inside)
    return folder / ".." / "own"


def circle(folder: Path) -> Path:
    folder.symlink_to(folder)
    return folder


def file(folder: Path) -> Path:
    folder.touch()
    return folder


def sticky_itself(folder: Path) -> Path:
    return sticky(folder)


def missing_below_a_strangers_folder(folder: Path) -> Path:
    return of_another_user(folder) / "new"


UNSAFE: dict[Callable[[Path], Path], str] = {
    of_another_user: "belongs to another user",
    open_to_all: "other users can write into",
    open_to_a_group: "other users can write into",
    sticky_itself: "other users can write into",
    below_an_open_folder: "other users can write into",
    below_a_strangers_folder: "belongs to another user",
    missing_below_a_strangers_folder: "belongs to another user",
    link_into_an_open_folder: "other users can write into",
    link_of_another_user: "belongs to another user",
    link_to_a_link_in_an_open_folder: "other users can write into",
    up_again_through_a_link: "other users can write into",
    circle: "a circle of links|cannot be made",
    file: "cannot be made",
}


def own_link(folder: Path) -> Path:
    folder.symlink_to(plain(folder.with_name("target")))
    return folder


def relative_link(folder: Path) -> Path:
    plain(folder.with_name("target"))
    folder.symlink_to("target")
    return folder


SAFE: list[Callable[[Path], Path]] = [
    plain,
    own_link,
    relative_link,
    lambda folder: folder / "deep" / "new",
    # As /tmp: nobody else can rename what is mine.
    lambda folder: plain(sticky(folder) / "own"),
    lambda folder: sticky(folder) / "new",
]


@needs_root
@pytest.mark.parametrize("make", UNSAFE)
def test_a_named_folder_that_another_user_can_change_is_refused(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    path = make(tmp_path / "cache")
    with pytest.raises(
        InputError, match=f"^{INDUCTOR}={path}: .*({UNSAFE[make]}).*only you can change, or unset {INDUCTOR}"
    ):
        private_caches({**os.environ, INDUCTOR: str(path)})


@pytest.mark.parametrize("make", SAFE)
def test_a_named_folder_of_the_users_own_is_used_as_it_is(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    path = make(tmp_path / "cache")
    made = private_caches({**os.environ, INDUCTOR: str(path)})
    assert INDUCTOR not in made
    assert why_not_private(path) is None
    assert path.is_dir()


@pytest.mark.parametrize("name", FOLDERS)
def test_every_variable_is_examined(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"^{name}="):
        private_caches({**os.environ, name: str(open_to_all(tmp_path / "cache"))})


def test_what_libraries_keep_in_the_shared_temporary_folder_goes_to_a_folder_of_the_users_alone(
    home: Path,
) -> None:
    use_private_caches()
    ours = home / ".cache" / "lockstep" / "compiled"
    # A library makes the folder inside ours.
    assert stat.S_IMODE(ours.stat().st_mode) == 0o700
    found = {
        name: os.environ[name]
        for name in ("TORCHINDUCTOR_CACHE_DIR", "QUACK_CACHE_DIR", "CUTE_DSL_CACHE_DIR")
    }
    assert all(Path(path).parent == ours for path in found.values())
    assert cache_dir() == found["TORCHINDUCTOR_CACHE_DIR"]
    assert Path(triton_cache_dir(0)).is_relative_to(ours)
    # Folders in the home directory stay where they are, with what a user has compiled or fetched before.
    assert os.environ.keys() & FOLDERS.keys() == found.keys()


def test_a_folder_in_a_home_directory_that_others_can_change_is_not_used(
    home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An open home directory ends no run: what is compiled is not kept."""
    home.chmod(0o777)
    made = private_caches(os.environ)
    assert made.keys() == {name for name, usual in FOLDERS.items() if usual is not None}
    (place,) = {Path(path).parent for path in made.values()}
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert not place.is_relative_to(home)
    assert "other users can write into" in caplog.text
    shared = open_to_all(tmp_path / "shared")
    with pytest.raises(
        InputError, match=r"XDG_CACHE_HOME is set, and .*name a folder of your own, or unset XDG_CACHE_HOME"
    ):
        private_caches({**os.environ, "XDG_CACHE_HOME": str(shared)})
    home.chmod(0o755)
    made = private_caches({**os.environ, "HF_HOME": str(shared), "TRITON_HOME": str(shared)})
    assert {"HF_MODULES_CACHE", "TRITON_CACHE_DIR", "TRITON_OVERRIDE_DIR"} <= made.keys()


def test_an_empty_variable_does_not_mean_the_current_directory(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(open_to_all(tmp_path / "shared"))
    ours = home / ".cache" / "lockstep" / "compiled"
    for name, usual in FOLDERS.items():
        if usual is not None:
            assert Path(private_caches({"HOME": str(home), name: ""})[name]).is_relative_to(home), name
    for name, folder in (
        ("TRITON_HOME", "TRITON_CACHE_DIR"),
        ("HF_HOME", "HF_MODULES_CACHE"),
        ("XDG_CACHE_HOME", "VLLM_CACHE_ROOT"),
    ):
        assert Path(private_caches({"HOME": str(home), name: ""})[folder]).is_relative_to(ours)


@pytest.mark.parametrize("home_of", ["/proc/none", "/dev/null"])
def test_a_home_directory_that_cannot_be_written_ends_no_run_and_leaves_nothing(
    home_of: str, tmp_path: Path
) -> None:
    source = (
        "from lockstep.private_caches import *; use_private_caches(); import os; "
        "print(os.environ['QUACK_CACHE_DIR'])"
    )
    given = {**os.environ, "HOME": home_of, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", source], env=given, capture_output=True, text=True, check=True
    )
    assert Path(done.stdout.splitlines()[-1]).is_relative_to(tmp_path)
    assert list(tmp_path.glob("lockstep-*")) == []


@pytest.mark.parametrize("command", ["grpo", "verify", "serve"])
def test_a_command_refuses_before_it_loads_anything(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(INDUCTOR, str(open_to_all(tmp_path / "cache")))
    given = {
        "grpo": words(tmp_path, "none"),
        "verify": ["verify", "--model", "none"],
        "serve": ["serve", "none"],
    }
    assert main(given[command]) == 2
    assert f"lockstep: {INDUCTOR}=" in capsys.readouterr().err


def test_a_servers_processes_get_the_folders_and_a_temporary_folder_of_their_own(
    home: Path, untied_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM compiles parts of itself into the temporary folder, under names that anybody knows, and loads them."""
    given: list[dict[str, str]] = []

    class Recorded:
        def __init__(self, command: list[str], environment: dict[str, str], *_: Any, **__: Any) -> None:
            given.append(environment)
            assert why_not_private(Path(environment["TMPDIR"])) is None

        def run(self) -> None: ...

    monkeypatch.setattr("lockstep.server.supervisor.Supervisor", Recorded)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert main(["serve", untied_dir, "--port", str(free_port())]) == 0
    (found,) = given
    assert Path(found[INDUCTOR]).parent == home / ".cache" / "lockstep" / "compiled"
    assert not Path(found["TMPDIR"]).exists()


def test_trainers_and_engines_of_a_script_refuse_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(open_to_all(tmp_path / "cache")))
    with pytest.raises(InputError, match=r"^VLLM_CACHE_ROOT="):
        GRPOTrainer("none", [])
    with pytest.raises(InputError, match=r"^VLLM_CACHE_ROOT="):
        start_vllm({}, ExitStack())
