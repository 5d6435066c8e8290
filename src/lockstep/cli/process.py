"""The process of a command: a guard around it, its memory settings, and its end.

Any code in the trainer's process (a reward function, a library) can end the process with any exit code (`os._exit`).
No other code of the process runs then. So a training command forks before it imports anything heavy. The child trains,
and writes a byte to a pipe when a run begins and when it has ended. The parent waits, forwards signals, and ends as
the child did, with one exception: if the child exits with code 0 during a run, the parent exits with code 1.

An interpreter that ends frees every object one by one: 4 CPU seconds with PyTorch and vLLM. `EndAtOnce` runs what
programs have registered for their end, writes what the streams hold, and leaves the rest to the operating system.

Training and vLLM on a CPU allocate and free gigabytes in every step. The C library gives large blocks back to Linux,
which clears each page of 4 KiB before it hands it out again. So a command asks for huge pages and for kept memory
(docs/internals/speed.md). A process can ask only at its start: the command starts anew, once, and children inherit it.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import thread as executors
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from lockstep.errors import LockstepError
from lockstep.safe_text import complain

# Two bytes for the pipe that differ from every signal number.
_BEGUN, _ENDED = b"\xf0", b"\xf1"
_PASSED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
# Seconds that a command waits for such threads when it has ended.
_THREADS = 10.0
# A signal that was sent to both processes appears on the child's pipe within these seconds.
_BOTH = 0.2
_ENDED_EARLY = (
    "lockstep: the process was ended with exit code 0 before the run had ended, by something that it ran "
    "(os._exit in a reward "
    "function, for one); the same command goes on from the last checkpoint"
)

_pipe: int | None = None


def split_in_two() -> None:
    """Fork: the child returns and continues, the parent only waits for it.

    Call this once, before threads are started.
    """
    global _pipe
    if not hasattr(os, "fork") or not hasattr(signal, "sigwaitinfo"):
        return
    # If SIGCHLD is ignored, the parent cannot wait for the child.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    reader, writer = os.pipe()
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, {*_PASSED_ON, signal.SIGCHLD})
    parent = os.getpid()
    child = os.fork()
    if child:
        os.close(writer)
        _wait(child, reader)
    os.close(reader)
    _end_with(parent)
    _pipe = writer
    # Python writes the number of each signal that it handles to this pipe.
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_say_no_more)
    signal.pthread_sigmask(signal.SIG_SETMASK, earlier)


@contextmanager
def run_to_its_end() -> Iterator[None]:
    """Wraps a training run: a SystemExit inside it becomes an error, and the parent sees an early end of the process.

    Raises:
        LockstepError: code inside the run raised SystemExit.
    """
    _say(_BEGUN)
    try:
        yield
    except SystemExit as error:
        raise LockstepError(
            f"something that the run called ended the program (SystemExit: {error.code}) before the run had "
            f"ended; the same "
            "command goes on from the last checkpoint"
        ) from error
    finally:
        # An error has its own exit code, so the run counts as ended here too.
        _say(_ENDED)


def _say(word: bytes) -> None:
    if _pipe is not None:
        os.write(_pipe, word)


def _say_no_more() -> None:
    global _pipe
    _pipe = None
    signal.set_wakeup_fd(-1)


def _wait(child: int, reader: int) -> NoReturn:
    """Wait in the parent until the child ends; then end in the same way."""
    heard = _Heard(reader)
    while True:
        info = signal.sigwaitinfo({*_PASSED_ON, signal.SIGCHLD})
        if info.si_signo != signal.SIGCHLD:
            if not heard.signal(info.si_signo):
                os.kill(child, info.si_signo)
            continue
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid and not os.WIFSTOPPED(status):
            heard.read(0)
            _end(status, heard.within_a_run)


class _Heard:
    """The bytes that the child has written to the pipe."""

    def __init__(self, reader: int) -> None:
        self._reader = reader
        self._own: Counter[int] = Counter()
        self.within_a_run = False

    def read(self, seconds: float) -> bool:
        """Read the bytes on the pipe; returns whether any came within `seconds`."""
        if not select.select([self._reader], [], [], seconds)[0]:
            return False
        for word in (found := os.read(self._reader, 4096)):
            if word in (_BEGUN[0], _ENDED[0]):
                self.within_a_run = word == _BEGUN[0]
            else:
                self._own[word] += 1
        return bool(found)

    def signal(self, number: int) -> bool:
        """Whether the child got the signal itself (Ctrl-C and schedulers send to both).

        If not, the parent must forward it.
        """
        while self._own[number] <= 0:
            if not self.read(_BOTH):
                # A forwarded signal appears on the pipe too; this −1 cancels it.
                self._own[number] -= 1
                return False
        self._own[number] -= 1
        return True


def _end(status: int, within_a_run: bool) -> NoReturn:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    code = os.waitstatus_to_exitcode(status)
    if code == 0 and within_a_run:
        complain(_ENDED_EARLY)
        code = 1
    os._exit(code)


def _end_with(parent: int) -> None:
    """On Linux the kernel kills this process when the parent dies, so that no training continues without a parent."""
    if sys.platform != "linux":
        return
    import ctypes

    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class EndAtOnce:
    """Make it first:

    Python calls the functions of `atexit` in the reverse order, so this one is called after all others.

    Attributes:
        code: the exit code of a command that has returned. None: it has raised an error, and the interpreter ends as
            usual.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        atexit.register(self._end)

    def leave_threads(self) -> None:
        """Wait a little for threads that a user's functions have started: Python would wait for them for ever."""
        # The threads of executors wait for work until they are told that there is none, as Python does at its end.
        executors._shutdown = True
        for queue in list(executors._threads_queues.values()):
            queue.put(None)
        limit = time.monotonic() + _THREADS
        for thread in threading.enumerate():
            if not thread.daemon and thread is not threading.current_thread():
                thread.join(max(0.0, limit - time.monotonic()))
                if thread.is_alive():
                    complain(f"lockstep: the thread {thread.name} still runs; the process ends without it")
                    # The last of them is `_end`.
                    atexit._run_exitfuncs()

    def _end(self) -> None:
        if self.code is None:
            return
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                # Nobody reads it any more.
                continue
        os._exit(self.code)


_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_TUNABLES = "GLIBC_TUNABLES"
_HUGE = {"glibc.malloc.hugetlb": "1"}
# No block is a mapping of its own, which would be returned when it is freed; and the heap is not trimmed below a
# terabyte.
_KEEP = {"glibc.malloc.mmap_max": "0", "glibc.malloc.trim_threshold": str(1 << 40)}
# If the user has set one of these, both settings of `_KEEP` are left to the user.
_KEEP_NAMES = (*_KEEP, "glibc.malloc.mmap_threshold", "glibc.malloc.top_pad")


def start_anew_with_tunables() -> None:
    """Replace this process by the same command with these settings, if that changes anything. The process keeps its id.

    A process whose command line does not end with `sys.argv` (a child that another program made) is left unchanged.
    """
    words = sys.argv[1:]
    wanted = with_tunables(os.environ, kernel_setting())
    if wanted is not None and words and sys.executable and sys.orig_argv[-len(words) :] == words:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], wanted)


def kernel_setting() -> str:
    """The setting of Linux for huge pages, such as "always [madvise] never"; empty on other systems."""
    return _SETTING.read_text(encoding="utf-8") if _SETTING.exists() else ""


def with_tunables(given: Mapping[str, str], setting: str) -> dict[str, str] | None:
    """An environment that asks for huge pages and kept memory where the user has not decided; None: for nothing.

    Huge pages are not asked for if the kernel gives them to all or to none.

    Args:
        setting: the result of `kernel_setting`.
    """
    tunables = given.get(_TUNABLES, "")
    asked: dict[str, str] = {}
    if "[madvise]" in setting and not any(name in tunables for name in _HUGE):
        asked |= _HUGE
    if setting and not any(name in tunables for name in _KEEP_NAMES):
        asked |= _KEEP
    if not asked:
        return None
    return {
        **given,
        _TUNABLES: ":".join(filter(None, [tunables, *(f"{name}={value}" for name, value in asked.items())])),
    }
