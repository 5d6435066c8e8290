"""The command `lockstep` as a fork of the suite's fork server: python forked_command.py WORD …

It passes signals on, and ends with the exit code of the fork.
"""

from __future__ import annotations

import signal
import sys

from forked import Program

program = Program(
    [sys.executable, "-m", "lockstep.cli.main", *sys.argv[1:]], stdout=sys.stdout, stderr=sys.stderr
)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda sign, _: program.send_signal(signal.Signals(sign)))
code = program.wait()
sys.exit(code if code >= 0 else 128 - code)
