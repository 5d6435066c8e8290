"""Runs a `lockstep` command until its first sampled token, and records when each stage begins.

`start_up.py` starts it with the words of the command. It writes one line of JSON per stage to the file that the
environment variable `LOCKSTEP_STAGES` names: the time, the processor seconds of this process and its children, and
the name of the stage. Like the real command, it starts itself again and forks. All its processes write to the same
file.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

FIRST_TOKEN = "first sampled token"


def note(stage: str) -> None:
    """Write the line of a stage. All processes of a machine share the clock."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    line = {"at": time.monotonic(), "cpu": sum(u.ru_utime + u.ru_stime for u in used), "stage": stage}
    with open(os.environ["LOCKSTEP_STAGES"], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


# Packages that only a developer's environment has (`make dev`). Libraries would import them, and would take longer to
# start.
_DEVELOPERS_ONLY = ("bitsandbytes", "triton", "liger_kernel")


def main() -> int:
    note("Python runs")
    # Python's import system reads None as "there is no such module".
    sys.modules.update(dict.fromkeys(_DEVELOPERS_ONLY))  # type: ignore[arg-type]
    from lockstep.cli.main import main as command
    from lockstep.progress import StatusLine

    begin, end = StatusLine.begin, StatusLine.end

    def begun(self: StatusLine, text: str, detail: Callable[[], str]) -> None:
        note(text)
        begin(self, text, detail)

    def ended(self: StatusLine) -> None:
        text = self._work[-1][0]
        end(self)
        note(f"after: {text}")

    StatusLine.begin, StatusLine.end = begun, ended  # type: ignore[method-assign]
    sys.meta_path.insert(0, _WrapAtImport())  # type: ignore[arg-type]
    return command()


class _WrapAtImport:
    """Wraps the engine when the command imports it, and not earlier, because the time of the import is measured too."""

    @staticmethod
    def find_spec(name: str, path: Any, target: Any = None) -> Any:
        if name == "lockstep.run.source":
            sys.meta_path.pop(0)
            from lockstep.engines.vllm.in_process import VLLMInProcess

            _watch(VLLMInProcess)
        return None


def _watch(engine: Any) -> None:
    serve, step = engine.serve, engine._step

    def served(self: Any, inbox: Any) -> None:
        def first(*args: Any) -> Any:
            found = step(self, *args)
            if args[0] or found[0]:
                note(FIRST_TOKEN)
                os._exit(0)
            return found

        self._step = first
        serve(self, inbox)

    engine.serve = served


if __name__ == "__main__":
    sys.exit(main())
