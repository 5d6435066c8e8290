"""A pytest plugin: writes one JSON line per test, with the innermost lines of a failure.

`GPU_DAY_FAILURES` names the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    if report.outcome != "failed" and call.when != "call":
        return
    row = {"what": item.nodeid, "outcome": report.outcome}
    if report.outcome == "failed" and call.excinfo is not None:
        error = call.excinfo.value
        frames = [
            f"{e.path}:{e.lineno + 1}" for e in call.excinfo.traceback if "site-packages" not in str(e.path)
        ]
        row |= {
            "is": f"{type(error).__name__}: {str(error)[:300]}",
            "frames": " < ".join(_short(f) for f in frames[:-4:-1]),
        }
    with open(os.environ["GPU_DAY_FAILURES"], "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _short(frame: str) -> str:
    return frame.split("/src/lockstep/")[-1].split("/tests/")[-1]
