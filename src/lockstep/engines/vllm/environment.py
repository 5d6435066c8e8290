"""The environment in which vLLM's processes start, and the files that killed ones leave behind.

Each engine has a private folder, and its owner holds a lock in it: `lockstep serve`, or the trainer. The folder also
has the list of the engine's files in shared memory. Whoever starts the next engine on the machine removes the folders
whose lock nobody holds any more, with these files. A lock ends with its process, however that ends.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import multiprocessing
import os
import re
import shutil
import signal
import stat
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import torch

from lockstep.engines.vllm.port.engine import read_environment_again
from lockstep.processes import KEY_VARIABLE

# The lock of a folder's owner, and the list of files in shared memory: inode and name per line.
_LOCK, _LIST = "owner.lock", "shared-memory"
_SHARED = Path("/dev/shm")
# Semaphores and shared memory of Python's multiprocessing, and what vLLM names itself.
_NAMES = re.compile(r"(sem\.mp-|psm_|vllm)[\w.-]+")


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Inside the context, this process is the owner of a folder. At its end, the listed files are removed."""
    # The lock is held before the file has its name, so that nobody takes the folder for one of a dead owner.
    with (folder / f"{_LOCK}.new").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / f"{_LOCK}.new").rename(folder / _LOCK)
        try:
            yield
        finally:
            remove_listed(folder)


def note(folder: Path, processes: Iterable[int], without: Iterable[str] = ()) -> None:
    """Add the files in shared memory that processes use to the list of a folder, `without` those of others."""
    listed = _read_list(folder)
    names = {name for process in processes for name in shared_by(process)} - set(without)
    for name in names:
        with contextlib.suppress(OSError):
            found = (_SHARED / name).lstat()
            if found.st_uid == os.geteuid():
                listed[name] = found.st_ino
    with contextlib.suppress(OSError):
        (folder / f"{_LIST}.new").write_text(
            "".join(f"{inode} {name}\n" for name, inode in listed.items()), encoding="utf-8"
        )
        (folder / f"{_LIST}.new").rename(folder / _LIST)


def shared_by(process: int) -> set[str]:
    """Names of the files in shared memory that a process has mapped; none if the process is gone or another user's."""
    found = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
            path = line.partition("/")[1] + line.partition("/")[2]
            name = path.removeprefix(f"{_SHARED}/")
            # A file whose name was removed has another ending.
            if path != name and _NAMES.fullmatch(name):
                found.add(name)
    return found


def _all_processes() -> list[int]:
    """The ids of all processes on this machine."""
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def remove_dead(parent: Path) -> None:
    """Remove this user's folders in `parent` whose owners are gone, with their files in shared memory."""
    for folder in parent.glob("lockstep-*"):
        with contextlib.suppress(OSError):
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            # A folder without a lock belongs to something else.
            lock = os.open(folder / _LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(lock, encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not _is_used(folder):
                    remove_listed(folder)
                    shutil.rmtree(folder, ignore_errors=True)


def _is_used(folder: Path) -> bool:
    """Whether a process was started for this folder and outlives its owner."""
    return any(os.fsencode(folder) in _environment_of(process) for process in _all_processes())


def _environment_of(process: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/environ").read_bytes()
    return b""


def _read_list(folder: Path) -> dict[str, int]:
    found = {}
    with contextlib.suppress(OSError):
        for line in (folder / _LIST).read_text(encoding="utf-8", errors="replace").splitlines():
            inode, _, name = line.partition(" ")
            if inode.isdecimal() and _NAMES.fullmatch(name):
                found[name] = int(inode)
    return found


def remove_listed(folder: Path) -> None:
    """Remove the listed files that nobody uses. A name may belong to another file by now, which has another inode."""
    listed = _read_list(folder)
    if not listed:
        return
    used = {name for process in _all_processes() for name in shared_by(process)}
    for name, inode in listed.items():
        with contextlib.suppress(OSError):
            found = (_SHARED / name).lstat()
            if name not in used and (found.st_ino, found.st_uid) == (inode, os.geteuid()):
                (_SHARED / name).unlink()


# vLLM's processes unpickle messages from each other, so that their sockets must not be reachable from other machines.
LOOPBACK = {"VLLM_HOST_IP": "127.0.0.1", "VLLM_LOOPBACK_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
SOCKETS = "VLLM_RPC_BASE_PATH"
# A socket's path may have 107 characters. vLLM adds a slash and 36 characters.
_LONGEST_FOLDER = 70
# Holds the process id of the trainer, for the processes that vLLM starts beside it.
_TRAINER = "LOCKSTEP_TRAINER_PROCESS"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def cpu_settings(threads: int) -> dict[str, str]:
    """Settings of threads and memory for processes of vLLM that share a machine's CPU with a trainer.

    Each has this number of threads; docs/internals/server.md has measurements.
    """
    return {
        # By default vLLM reserves one core for its scheduler and binds its threads to the others.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        # By default a waiting thread is busy for some milliseconds, on a core that the trainer needs.
        "GOMP_SPINCOUNT": "3000",
        # By default oneDNN caches its last 1024 matmuls, and every new number of tokens per step adds five. Until
        # this cache was full, the server's memory grew by 20%. vLLM has its own cache of 32 matmuls per shape of
        # weights; these 128 are for torch's own calls.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    }


def exact_products(*dtypes: object) -> dict[str, str]:
    """Settings for an engine of which a part computes in one of these dtypes, or dtypes with these names.

    By default Triton's kernels, such as vLLM's attention in float32, round float32 numbers to 11 bits before they
    multiply them (TF32), whatever PyTorch's own setting is.
    """
    return {"TRITON_F32_DEFAULT": "ieee"} if {torch.float32, "float32"} & set(dtypes) else {}


@contextmanager
def socket_folder() -> Iterator[Path]:
    """A new folder for the sockets and temporary files of vLLM's processes. Only this user can open it.

    The context removes it at its end, and at its beginning those of engines whose owners were killed.
    """
    default = tempfile.gettempdir()
    parent = default if len(default) <= _LONGEST_FOLDER - len("/lockstep-12345678") else "/tmp"
    remove_dead(Path(parent))
    # The processes may be killed at any moment and leave sockets behind.
    with (
        tempfile.TemporaryDirectory(prefix="lockstep-", dir=parent, ignore_cleanup_errors=True) as folder,
        owned(Path(folder)),
    ):
        yield Path(folder)


@contextmanager
def process_start(workers: int, sockets: Path) -> Iterator[None]:
    """Inside the context, vLLM starts its worker processes with the settings that a trainer's machine needs.

    The trainer's own environment, number of threads and main module are as before when the context ends. `sockets` is
    the folder for the sockets between the processes.
    """
    cores = len(os.sched_getaffinity(0))
    settings = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", **LOOPBACK, SOCKETS: os.fspath(sockets)}
    # Workers load what they compile from the temporary folder. This process keeps its own.
    tempfile.gettempdir()
    settings["TMPDIR"] = os.fspath(sockets)
    settings[_TRAINER] = str(os.getpid())
    usual = {"OMP_NUM_THREADS": str(max(cores // workers, 1))}
    if not torch.cuda.is_available():
        usual = cpu_settings(int(usual["OMP_NUM_THREADS"]))
        if "OMP_WAIT_POLICY" in os.environ:
            # The user has set the wait policy, and this default would override it.
            del usual["GOMP_SPINCOUNT"]
    settings |= {name: value for name, value in usual.items() if name not in os.environ}
    threads = torch.get_num_threads()
    read_environment_again()
    try:
        with _environment({**settings, KEY_VARIABLE: None}), _without_main_module():
            yield
    finally:
        # vLLM takes the threads away from a process that only schedules. This process trains too.
        torch.set_num_threads(threads)


@contextmanager
def _environment(settings: Mapping[str, str | None]) -> Iterator[None]:
    """Inside the context, this process has these variables; those that are None are missing."""
    before = {name: os.environ.get(name) for name in settings}
    try:
        _set(settings)
        yield
    finally:
        _set(before)


@contextmanager
def environment_kept() -> Iterator[None]:
    """After the context, this process has the variables that it had before."""
    before = dict(os.environ)
    try:
        yield
    finally:
        _set({**dict.fromkeys(os.environ), **before})


def _set(settings: Mapping[str, str | None]) -> None:
    for name, value in settings.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def _without_main_module() -> Iterator[None]:
    """Processes that are started inside the context do not import the program's main module.

    By default Python imports it in every new process. A script that trains at its top level would then train there too.
    """
    prepare = spawn.get_preparation_data

    def without_main(name: str) -> dict[str, Any]:
        return {key: value for key, value in prepare(name).items() if not key.startswith("init_main")}

    spawn.get_preparation_data = without_main
    try:
        yield
    finally:
        spawn.get_preparation_data = prepare


def leave_signals_to_trainer(worker: Any) -> None:
    """Let a worker process ignore SIGINT and SIGTERM. vLLM calls it inside the process.

    A terminal and many schedulers send these signals to all processes of a run. The trainer then ends its optimizer
    step and writes a checkpoint, and needs its engine until then. A worker process ends when the trainer closes its
    engine, or dies.
    """
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def end_with_trainer() -> None:
    """In a process that vLLM has started beside a trainer: end when the trainer dies. Elsewhere it does nothing.

    vLLM's own workers notice it only when they have started, and only between two calls.
    """
    parent = multiprocessing.parent_process()
    if parent is None or os.environ.pop(_TRAINER, "") != str(parent.pid):
        return

    def end() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end, name="lockstep-end-with-trainer", daemon=True).start()


@contextmanager
def files_in(folder: Path) -> Iterator[None]:
    """Inside the context, vLLM in this process puts its temporary files into a folder."""
    with _environment({SOCKETS: os.fspath(folder)}):
        yield


def close_at_exit(close: Callable[[], None]) -> Callable[[], None]:
    """Call a bound method when Python exits, if its object still exists. Returns a function that cancels the call.

    Python waits at its exit for the worker processes, which ignore its SIGTERM. This call ends them before.
    """
    method = weakref.WeakMethod(close)

    def call() -> None:
        if (found := method()) is not None:
            found()

    atexit.register(call)
    return lambda: atexit.unregister(call)
