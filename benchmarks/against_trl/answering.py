"""A program in a process of its own.

It answers each line with one line of JSON. Benchmarks use it to separate the compared programs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import finding_this

# The program that takes steps.
PLAY = "benchmarks.against_trl.play"


class AnsweringProcess:
    """A running Python program.

    Args:
        command: the module and its arguments.
        log: the file that receives its error output.

    Attributes:
        said: its first answer, after its start.

    Raises:
        SystemExit: the program ended instead of answering; the message has the end of its log.
    """

    def __init__(
        self, command: Sequence[str], log: Path, env: Mapping[str, str], cwd: str | None = None
    ) -> None:
        self._log = log
        self._process = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w", encoding="utf-8"),
            text=True,
            encoding="utf-8",
            cwd=cwd,
            env=finding_this(env),
        )
        self.said = self._answer()

    def ask(self, line: str) -> dict[str, Any]:
        """Send a line and wait for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Ask the program to end, and check that it has ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(
                f"{' '.join(map(str, self._process.args))} ended:\n{self._log.read_text(encoding='utf-8')[-3000:]}"
            )
        return json.loads(line)
