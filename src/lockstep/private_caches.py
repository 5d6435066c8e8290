"""Folders of the user alone: the home directory, and the caches from which libraries execute what they compiled before.

Containers often run as a user id without a name, without HOME, or with a HOME such as `/` that cannot be written.
Python and many libraries raise there, each in its own way.

PyTorch's compiler keeps pickles and shared objects in `torchinductor_<user>` in the shared temporary folder, and
whoever makes that folder first chooses what a run executes. Such a folder gets a place in the user's own cache. Other
libraries use a folder in the home directory, or where a variable says. These folders are checked.

`use_private_caches` sets the variables before a library reads them. Child processes, such as a server's, inherit them.
"""

from __future__ import annotations

import grp
import logging
import os
import pwd
import stat
from collections.abc import Mapping
from pathlib import Path

from lockstep.errors import InputError
from lockstep.files import folder_until_exit

_logger = logging.getLogger(__name__)

# Where `getpass.getuser` looks before it asks for the name of the user id.
_NAMES = ("LOGNAME", "USER", "LNAME", "USERNAME")


def expanded(name: str) -> Path:
    """The path that a user means, with `~` written out."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        why = "the home directory that ~ stands for is not known; write the whole path"
        raise InputError(f"{name}: {why}") from error


def missing_home(given: Mapping[str, str]) -> dict[str, str]:
    """Variables that a user without a home or a name needs; empty for others. Their folders are removed at the end."""
    made = {}
    try:
        usual = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        usual = ""
        if not any(given.get(name) for name in _NAMES):
            made["LOGNAME"] = f"uid{os.getuid()}"
    home = given.get("HOME") or usual
    if not home:
        home = made["HOME"] = str(folder_until_exit("lockstep-home-"))
        _logger.warning(
            "HOME is not set, and this user has no name: converted models and caches go to %s and are not kept. "
            "Set HOME to keep them",
            home,
        )
    elif not given.get("XDG_CACHE_HOME") and not _is_or_can_be(Path(home, ".cache")):
        made["XDG_CACHE_HOME"] = str(folder_until_exit("lockstep-cache-"))
        _logger.warning(
            "%s/.cache cannot be made: converted models and caches go to %s and are not kept. Set XDG_CACHE_HOME or "
            "HOME to a folder that can be written",
            home.rstrip("/"),
            made["XDG_CACHE_HOME"],
        )
    return made


def _is_or_can_be(folder: Path) -> bool:
    """Whether a folder is there, perhaps with models that an image brings along, or can be made now."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return False
    return True


# Each variable, and where its library keeps the folder if it is not set. Empty: in the shared temporary folder. None:
# beside the library's own files. All were found in the sources of the packages that a run installs
# (docs/internals/server.md).
FOLDERS: dict[str, str | None] = {
    "TORCHINDUCTOR_CACHE_DIR": "",
    "QUACK_CACHE_DIR": "",
    "CUTE_DSL_CACHE_DIR": "",
    "TRITON_CACHE_DIR": "{TRITON_HOME}/.triton/cache",
    "TRITON_OVERRIDE_DIR": "{TRITON_HOME}/.triton/override",
    "TORCH_EXTENSIONS_DIR": "{XDG_CACHE_HOME}/torch_extensions",
    "PYTORCH_KERNEL_CACHE_PATH": "{XDG_CACHE_HOME}/torch/kernels",
    "HF_MODULES_CACHE": "{HF_HOME}/modules",
    "VLLM_CACHE_ROOT": "{XDG_CACHE_HOME}/vllm",
    "FLASHINFER_WORKSPACE_BASE": "{HOME}/.cache/flashinfer",
    "DG_JIT_CACHE_DIR": "{HOME}/.deep_gemm",
    "TILELANG_CACHE_DIR": "{HOME}/.tilelang",
    "FLYDSL_RUNTIME_CACHE_DIR": "{HOME}/.flydsl",
    "TVM_FFI_CACHE_DIR": "{HOME}/.cache/tvm-ffi",
    "CUDA_CACHE_PATH": "{HOME}/.nv/ComputeCache",
    "NUMBA_CACHE_DIR": None,
}
_CACHES = "XDG_CACHE_HOME"
_MOST_LINKS = 40


def use_private_caches() -> None:
    """Set the variables of this process and of its children, after those that a user without a home needs."""
    os.environ.update(missing_home(os.environ))
    os.environ.update(private_caches(os.environ))


def private_caches(given: Mapping[str, str]) -> dict[str, str]:
    """Variables that name folders of ours, for each library that would otherwise use a folder that others can change.

    Ours are in `$XDG_CACHE_HOME/lockstep/compiled`, by default in `~/.cache`, which is made with mode 0700. If the
    home directory cannot hold such a folder, it is a new temporary folder, which this process removes when it ends.

    Raises:
        InputError: others can change a folder that a variable of the environment names.
    """
    home = given.get("HOME") or _home()
    # Libraries read an empty variable as the current directory.
    places = {"HOME": home, "TRITON_HOME": given.get("TRITON_HOME", home) or "."}
    places[_CACHES] = given.get(_CACHES, f"{home}/.cache") or "."
    places["HF_HOME"] = given.get("HF_HOME", f"{places[_CACHES]}/huggingface") or "."
    unsafe, made = [], {}
    for name, usual in FOLDERS.items():
        if given.get(name):
            _check_named(name, given[name], home)
        elif usual == "" or (usual and why_not_private(_absolute(usual.format(**places), home))):
            unsafe.append(name)
        elif usual and name in given:
            made[name] = str(_absolute(usual.format(**places), home))
    if unsafe:
        named = given.get(_CACHES, "")
        place = _absolute(named or f"{home}/.cache", home) / "lockstep" / "compiled"
        ours = _our_folder(place, named=bool(named))
        made |= {name: str(ours / name.lower()) for name in unsafe}
    return made


def why_not_private(path: Path) -> str | None:
    """Why another user can change what is in a folder; None: nobody else can, apart from root.

    Every folder and every link of the absolute path is examined. A folder that is missing is private if only this
    user can make it.
    """
    rest, place, links = list(reversed(path.parts[1:])), Path("/"), 0
    while rest:
        part = rest.pop()
        if part == "..":
            place = place.parent
            continue
        before, place = place, place / part
        try:
            found = os.lstat(place)
        except FileNotFoundError:
            return f"other users can make {place}" if _others_write(os.lstat(before)) else None
        except OSError as error:
            return f"{place} cannot be examined ({error.strerror})"
        if found.st_uid not in (0, os.geteuid()):
            return f"{place} belongs to another user"
        if stat.S_ISLNK(found.st_mode):
            if (links := links + 1) > _MOST_LINKS:
                return f"{place} is a circle of links"
            target = Path(os.readlink(place))
            rest += reversed(target.parts[1:] if target.is_absolute() else target.parts)
            place = Path("/") if target.is_absolute() else before
        elif not stat.S_ISDIR(found.st_mode):
            return f"{place} is not a folder"
        # Nobody can rename or remove what belongs to somebody else in a sticky folder, such as /tmp.
        elif _others_write(found) and not (rest and found.st_mode & stat.S_ISVTX):
            return f"other users can write into {place}"
    return None


def _others_write(found: os.stat_result) -> bool:
    """Whether a folder's mode lets others write. Many systems make a group per user: such a group is not others."""
    if found.st_mode & stat.S_IWOTH:
        return True
    if not found.st_mode & stat.S_IWGRP:
        return False
    try:
        own, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(found.st_gid)
    except KeyError:
        return True
    is_own = (group.gr_gid, group.gr_name) == (own.pw_gid, own.pw_name)
    return not is_own or not set(group.gr_mem) <= {own.pw_name}


def _check_named(name: str, value: str, home: str) -> None:
    path = _absolute(value, home)
    try:
        # A library would make it, in /tmp perhaps, where others could be first.
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        why = why_not_private(path)
    except OSError as error:
        why = f"it cannot be made ({error.strerror})"
    if why is not None:
        what = "A library executes what it finds there: name a folder that only you can change, or unset"
        raise InputError(f"{name}={value}: {why}. {what} {name}")


def _our_folder(ours: Path, *, named: bool) -> Path:
    try:
        ours.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        ours.mkdir(exist_ok=True, mode=0o700)
        if (why := why_not_private(ours)) is None:
            if os.access(ours, os.W_OK):
                return ours
            why = "it cannot be written"
    except OSError as error:
        why = f"it cannot be made ({error.strerror})"
    if named:
        raise InputError(
            f"{_CACHES} is set, and {ours} cannot be a folder that only you can change: {why}. A library executes "
            f"what it finds there: name a folder of your own, or unset {_CACHES}"
        )
    temporary = folder_until_exit("lockstep-compiled-")
    _logger.warning("%s is not used: %s. Compiled code goes to %s and is not kept", ours, why, temporary)
    return temporary


def _absolute(path: str, home: str) -> Path:
    """A path whose `~` and whose beginning are written out. What follows a link stays as it is."""
    return Path(os.path.join(os.getcwd(), home + path[1:] if path == "~" or path.startswith("~/") else path))


def _home() -> str:
    try:
        return str(Path.home())
    except RuntimeError:
        # This user has no name, as in some containers.
        return "/"
