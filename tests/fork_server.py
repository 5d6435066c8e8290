"""A process that imports torch and vLLM once.

It forks whenever a test, or a program of a test, starts a Python program.

A Python program spends 4 to 8 CPU seconds on these imports, and `lockstep serve` consists of three processes that do
so. A fork has the imports already. It has its own arguments, environment, output, signals, process group and exit
code, as any program has. The programs that it starts are its own children.
`forked.py` starts this process and tells it what to run.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib.util
import json
import logging
import multiprocessing
import os
import random
import runpy
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from vllm_once import search_kernels_once

# The libraries that servers and trainers import. Every program imports Lockstep itself again.
MODULES = (
    "transformers.trainer",
    "transformers.models.qwen2.modeling_qwen2",
    "peft",
    "datasets",
    "pyarrow.parquet",
    "trl.trainer.grpo_trainer",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.model_executor.models.qwen2",
)
# vLLM's worker. That of a CPU, when it is imported, takes the place of functions that the worker of a GPU calls.
WORKERS = {"cpu": "vllm.v1.worker.cpu_worker", "cuda": "vllm.v1.worker.gpu_worker"}
_END_LIMIT = 30.0
_exec = subprocess._fork_exec  # type: ignore[attr-defined]


def import_all() -> None:
    """Import `MODULES` and vLLM's worker where they are installed, and let every program fork its own programs too."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    gc.disable()
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name in (*MODULES, WORKERS[device]):
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    if device == "cpu" and (platforms := sys.modules.get("vllm.platforms.cpu")):
        search_kernels_once()
        platforms.CpuPlatform.register_triton_kernel_overrides()
    # A fork has no other thread than this one, and no library may rely on one.
    assert threading.active_count() == 1, threading.enumerate()
    subprocess._fork_exec = fork_or_exec  # type: ignore[attr-defined]
    # vLLM on a CPU always spawns its engine. Spawned processes are programs that import everything.
    given = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: given("fork" if method == "spawn" else method)  # type: ignore[assignment]
    os.register_at_fork(after_in_child=_leave_what_is_the_parents)
    # As in `conftest.py`.
    os.fsync = lambda fd: None  # type: ignore[assignment]
    set_title("fork server of Lockstep's tests")
    gc.enable()
    gc.collect()
    gc.freeze()


def fork_or_exec(
    args: list[str], executables: Any, close_fds: bool, kept: Any, cwd: Any, env: Any, *more: Any
) -> int:
    """Starts a program for `subprocess`:

    `python -m MODULE` and `python FILE.py` as a fork, others as `subprocess` does.
    """
    words = [os.fsdecode(word) for word in args if word not in ("-u", b"-u")]
    if len(words) < 2 or words[0] != sys.executable or not (words[1] == "-m" or words[1].endswith(".py")):
        return int(_exec(args, executables, close_fds, kept, cwd, env, *more))
    child_in, _, _, child_out, _, child_err, _, error, _, new_session, *_, umask, prepare, _ = more
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    try:
        for place, fd in enumerate((child_in, child_out, child_err)):
            if fd >= 0:
                os.dup2(fd, place)
        if umask >= 0:
            os.umask(umask)
        _become(words, env, cwd, {*kept} - {error}, new_session, prepare)
    finally:
        os._exit(1)


def _become(
    words: list[str],
    env: list[bytes] | None,
    cwd: str | None,
    kept: set[int],
    new_session: bool,
    prepare: Callable[[], None] | None,
) -> NoReturn:
    """Run a program in this process, as if the process had just been started for it."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in kept:
            with suppress(OSError):
                os.close(fd)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if new_session:
        os.setsid()
    if prepare is not None:
        prepare()
    if cwd is not None:
        os.chdir(cwd)
    if env is not None:
        os.environ.clear()
        os.environb.update(dict(entry.split(b"=", 1) for entry in env))
        sys.path[:0] = [
            path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path
        ]
    if host := os.environ.pop("LOCKSTEP_TESTS_HOST", None):
        from hosts import enter

        enter(host)
    if dynamo := sys.modules.get("torch._dynamo"):
        # torch has read this variable when it was imported.
        dynamo.config.disable = os.environ.get("TORCHDYNAMO_DISABLE") == "1"
    set_title(" ".join(words))
    random.seed()
    # What the parent program cleans up at its end.
    multiprocessing.process._children = set()  # type: ignore[attr-defined]
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    os._exit(_run(words))


def _run(words: list[str]) -> int:
    """Run `python -m MODULE …` or `python FILE.py …`; returns the exit code of the interpreter."""
    module = words[2] if words[1] == "-m" else None
    sys.argv = words[2:] if module else words[1:]
    sys.path.insert(0, os.getcwd() if module else str(Path(words[1]).resolve().parent))
    code = 0
    try:
        if module:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[1], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - this is what an interpreter does at its end
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _leave_what_is_the_parents() -> None:
    """In a fork, as in a new program: hold no network connection of the parent, and wake no event loop of it."""
    signal.set_wakeup_fd(-1)
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            # A copy of a pipe would stay open, and the pipe's other end would never see its end.
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as found:
                network = found.family in (socket.AF_INET, socket.AF_INET6)
        except OSError:
            continue
        if network:
            # The object that owns the number may still close it.
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, fd)
            os.close(nothing)


def set_title(title: str) -> None:
    """Set what lists of processes show. The first call must come before any change of the environment."""
    # It comes with vLLM.
    with suppress(ImportError):
        from setproctitle import setproctitle

        setproctitle(title)


def serve(listener: socket.socket) -> None:
    """Run programs for those who connect, until standard input is closed. Then end the programs that are left."""
    running: dict[socket.socket, subprocess.Popen[bytes]] = {}
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while sys.stdin not in (ready := select.select([sys.stdin, listener, reader, *running], [], [])[0]):
        if reader in ready:
            os.read(reader, 4096)
        if listener in ready:
            caller, program = _start(listener)
            running[caller] = program
        for caller, program in list(running.items()):
            if caller in ready and program.poll() is None:
                # The process that started the program has ended.
                _end(program)
            if program.poll() is not None:
                _tell(caller, program.returncode)
                caller.close()
                del running[caller]
    for program in running.values():
        _end(program)
    # Without the end of an interpreter, in which libraries print what they did not free.
    os._exit(0)


def _start(listener: socket.socket) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    if subprocess._fork_exec is _exec:  # type: ignore[attr-defined]
        import_all()
    caller, _ = listener.accept()
    data, streams, _, _ = socket.recv_fds(caller, 1 << 16, 2)
    while not data.endswith(b"\n"):
        data += caller.recv(1 << 16)
    asked = json.loads(data)
    program = subprocess.Popen(
        asked["words"],
        env=asked["env"],
        cwd=asked["cwd"],
        stdin=subprocess.DEVNULL,
        stdout=streams[0],
        stderr=streams[1],
        preexec_fn=_end_with_parent,
    )
    for fd in streams:
        os.close(fd)
    _tell(caller, program.pid)
    return caller, program


def _end_with_parent() -> None:
    """In a fork: be asked to end when the fork server is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _end(program: subprocess.Popen[bytes]) -> None:
    program.terminate()
    try:
        program.wait(_END_LIMIT)
    except subprocess.TimeoutExpired:
        program.kill()
        program.wait()


def _tell(caller: socket.socket, number: int) -> None:
    with suppress(OSError):
        caller.sendall(f"{number}\n".encode())


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
