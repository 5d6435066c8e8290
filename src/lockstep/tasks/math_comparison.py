"""Whether a completion's final answer equals a reference as mathematics, by math-verify, within a time limit.

math-verify limits its time by a signal, and Python handles signals only in the main thread of a process. For other
threads a worker process compares one pair at a time: it reads and writes lines of JSON. If it does not answer in time,
it is killed, and the next pair gets a new worker.
"""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.errors import LockstepError
from lockstep.processes import for_helpers

_logger = logging.getLogger(__name__)

# Seconds that math-verify may take for one expression and for one comparison.
_PARSE_LIMIT, _COMPARE_LIMIT = 10, 5
# Seconds for one pair in the worker process, longer than math-verify's own limits; and for its start (sympy is slow).
PAIR_LIMIT, _START_LIMIT = 2 * _PARSE_LIMIT + _COMPARE_LIMIT + 5, 120.0
UNREADABLE, SKIPPED, TIMED_OUT = "[unparseable]", "[skipped]", "[timed out]"


@dataclass(frozen=True, slots=True)
class Compared:
    """The parsed reference and answer, and the score: 1 if they are equal, else 0; None: no readable reference."""

    gold: str
    answer: str
    score: float | None


def compare(reference: str | None, text: str) -> Compared:
    """Compare a completion's final answer with a reference, from any thread."""
    if reference is None:
        return Compared(UNREADABLE, SKIPPED, None)
    if threading.current_thread() is threading.main_thread():
        return _compare_here(reference, text)
    return _worker.compare(reference, text)


def _compare_here(reference: str, text: str) -> Compared:
    # Imported only here, because importing sympy takes a second.
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    gold = parse(reference, parsing_timeout=_PARSE_LIMIT)
    if not gold:
        return Compared(UNREADABLE, SKIPPED, None)
    units = NormalizationConfig(units=True)
    latex = {"normalization_config": units, "boxed_match_priority": 0, "try_extract_without_anchor": False}
    how: dict[str, Any] = {"extraction_mode": "first_match", "parsing_timeout": _PARSE_LIMIT}
    found = parse(text, extraction_config=[LatexExtractionConfig(**latex)], **how)
    score = float(verify(gold, found, timeout_seconds=_COMPARE_LIMIT))
    return Compared(str(gold), str(found) if found else UNREADABLE, score)


class Worker:
    """A process that compares pairs. It is started at its first use."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._alone = threading.Lock()

    def compare(self, reference: str, text: str) -> Compared:
        with self._alone:
            process = self._started()
            found = self._asked(process, [reference, text])
            if found is not None:
                return Compared(**found)
            self._stop()
        _logger.warning(
            f"comparing an answer with {reference!r:.80} took longer than {PAIR_LIMIT:g} s or ended the process that "
            f"compares; it scores 0: {text[-80:]!r}"
        )
        return Compared(reference, TIMED_OUT, 0.0)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._stop()
            # The worker ends when its input ends, so also when this process ends. Its new session keeps Ctrl-C from it.
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**for_helpers(), "PYTHONSAFEPATH": "1"},
                start_new_session=True,
            )
            if _read_line(self._process, _START_LIMIT) is None:
                self._stop()
                what = "the process that compares answers (accuracy)"
                raise LockstepError(f"{what} did not start in {_START_LIMIT:g} s")
        return self._process

    def _asked(self, process: subprocess.Popen[bytes], pair: list[str]) -> Any:
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(pair).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            return None
        return _read_line(process, PAIR_LIMIT)

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _read_line(process: subprocess.Popen[bytes], seconds: float) -> Any:
    """One line of JSON; None if it does not come in time, or the process has ended."""
    assert process.stdout is not None
    line, deadline = b"", time.monotonic() + seconds
    # `select.select` fails where the process has more than 1024 open files.
    ready = select.poll()
    ready.register(process.stdout, select.POLLIN)
    while not line.endswith(b"\n"):
        if not ready.poll(1000 * max(deadline - time.monotonic(), 0)):
            return None
        part = os.read(process.stdout.fileno(), 65536)
        if not part:
            return None
        line += part
    return json.loads(line)


_worker = Worker()


def _serve() -> None:
    """The loop of the worker process. Text that libraries print goes to stderr."""
    out, sys.stdout = sys.stdout, sys.stderr
    _compare_here("1", r"\boxed{1}")
    print(json.dumps("ready"), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(asdict(_compare_here(*json.loads(line)))), file=out, flush=True)


if __name__ == "__main__":
    _serve()
