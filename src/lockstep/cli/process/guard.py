"""A training command never ends with exit code 0 before its run has ended: a parent process sees to it.

Whatever runs in the trainer's process (a reward function, a library) can end it at any moment, with any exit code, and no code of
that process is called any more (`os._exit`). So the command splits itself in two before anything heavy is imported: the child
trains, and says on a pipe when a run begins and when it has ended; the parent waits, passes signals on, and ends as the child did,
but for an exit code of 0 between the two. Used by `cli/main.py` (the split) and `cli/training.py` (the words on the pipe).
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from lockstep.errors import LockstepError

# Bytes on the pipe that are no signal's number.
_BEGUN, _ENDED = b"\xf0", b"\xf1"
_PASSED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
# Seconds in which a signal that was sent to both processes shows at the child.
_BOTH = 0.2
_ENDED_EARLY = (
    "lockstep: the process was ended with exit code 0 before the run had ended, by something that it ran (os._exit in a reward "
    "function, for one); the same command goes on from the last checkpoint"
)

_pipe: int | None = None


def split_in_two() -> None:
    """Go on in a child process; the process that calls this only waits for it. To be called once, before threads are started."""
    global _pipe
    if not hasattr(os, "fork") or not hasattr(signal, "sigwaitinfo"):
        return
    # An ignored end of a child cannot be waited for.
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
    # Python writes the number of each signal that it handles there.
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_say_no_more)
    signal.pthread_sigmask(signal.SIG_SETMASK, earlier)


@contextmanager
def run_to_its_end() -> Iterator[None]:
    """Around a training run: what ends the program within is an error, and what ends the process is seen by the parent.

    Raises:
        LockstepError: something within raised SystemExit.
    """
    _say(_BEGUN)
    try:
        yield
    except SystemExit as error:
        raise LockstepError(
            f"something that the run called ended the program (SystemExit: {error.code}) before the run had ended; the same "
            "command goes on from the last checkpoint"
        ) from error
    finally:
        # Errors have exit codes of their own.
        _say(_ENDED)


def _say(word: bytes) -> None:
    if _pipe is not None:
        os.write(_pipe, word)


def _say_no_more() -> None:
    global _pipe
    _pipe = None
    signal.set_wakeup_fd(-1)


def _wait(child: int, reader: int) -> NoReturn:
    """The parent's life. It ends as the child does."""
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
    """What the child has said on the pipe."""

    def __init__(self, reader: int) -> None:
        self._reader = reader
        self._own: Counter[int] = Counter()
        self.within_a_run = False

    def read(self, seconds: float) -> bool:
        """Take what is there; whether there was anything in this time."""
        if not select.select([self._reader], [], [], seconds)[0]:
            return False
        for word in (found := os.read(self._reader, 4096)):
            if word in (_BEGUN[0], _ENDED[0]):
                self.within_a_run = word == _BEGUN[0]
            else:
                self._own[word] += 1
        return bool(found)

    def signal(self, number: int) -> bool:
        """Whether the child got a signal by itself (Ctrl-C and schedulers send to both); if not, it is to be passed on."""
        while self._own[number] <= 0:
            if not self.read(_BOTH):
                # What is passed on shows on the pipe too.
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
        print(_ENDED_EARLY, file=sys.stderr, flush=True)
        code = 1
    os._exit(code)


def _end_with(parent: int) -> None:
    """On Linux: be killed when the parent is, so that no training goes on that nobody waits for."""
    if sys.platform != "linux":
        return
    import ctypes

    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
