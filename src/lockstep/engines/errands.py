"""Work that programs hand to the thread in which their engine is served, because it belongs into that thread.

Python lets only the main thread handle signals, and many objects, such as a connection to SQLite, belong to the thread that made
them. Therefore plain tools and environments run in the thread that calls the engine (`rollouts/programs/workers.py`), as reward
functions do. That thread does the work between two steps of the engine (`engines/inbox.py`, `rollouts/driver.py`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from lockstep.engines.http.call_loop import Pending
from lockstep.errors import LockstepError


class Errands:
    """Pieces of work in the order in which they came. Any thread hands them in, and one thread does them.

    Attributes:
        changed: notified about each piece of work. An inbox waits on it for requests and for work together.
        seconds: how long all work has taken so far.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.seconds = 0.0
        self._waiting: deque[tuple[Callable[[], Any], Future[Any]]] = deque()

    def ask(self, work: Callable[[], Any]) -> Future[Any]:
        """Hand in a piece of work. If the caller cancels the returned future first, it is not done."""
        found: Future[Any] = Future()
        with self.changed:
            self._waiting.append((work, found))
            self.changed.notify_all()
        return found

    @property
    def waiting(self) -> bool:
        """Whether there is work."""
        return bool(self._waiting)

    def do_next(self) -> bool:
        """Do one piece of work in this thread. False: there is none.

        Raises:
            KeyboardInterrupt: it came while the work was done. Every other error goes to the caller who handed the work in.
        """
        try:
            work, found = self._waiting.popleft()
        except IndexError:
            return False
        if not found.set_running_or_notify_cancel():
            return True
        began = time.monotonic()
        try:
            found.set_result(work())
        except KeyboardInterrupt:
            found.set_exception(LockstepError("the run was interrupted during this call"))
            raise
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            found.set_exception(error)
        finally:
            self.seconds += time.monotonic() - began
        return True

    def do_during(self, call: Pending[Any, Any], patience: float) -> None:
        """Do all work until a call has ended, or until there is no work for `patience` seconds."""
        call.when_done(self._wake)
        while not call.done():
            with self.changed:
                if not self.changed.wait_for(lambda: self._waiting or call.done(), patience):
                    return
            self.do_next()

    def _wake(self, _: object) -> None:
        with self.changed:
            self.changed.notify_all()
