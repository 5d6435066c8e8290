"""What the suite knows of its own time: seconds of each file, kept to run the longest first and shown by folder at the end.

With two workers, a long file that begins last keeps one of them busy while the other has nothing left. `seconds.json` holds what
each file took; `pytest --keep-seconds` writes it anew. The order needs no exact figures.
Used by: `conftest.py`, as a plugin of pytest.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

KEPT = Path(__file__).parent / "seconds.json"
# Seconds of a test in a file that was never measured.
UNKNOWN = 0.2


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--keep-seconds", action="store_true", help="write tests/seconds.json: the seconds of each file")


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0].removeprefix("tests/")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The file that took longest comes first; tests of a file keep their order."""
    kept = json.loads(KEPT.read_text())
    tests = Counter(file_of(item.nodeid) for item in items)
    took = {name: kept.get(name, UNKNOWN * count) for name, count in tests.items()}
    items.sort(key=lambda item: (-took[file_of(item.nodeid)], file_of(item.nodeid)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Seconds that tests took, all workers together: those of each folder, and with `--keep-seconds` those of each file on disk."""
    files: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                files[file_of(report.nodeid)] += report.duration
    folders: Counter[str] = Counter()
    for name, seconds in files.items():
        folders[name.partition("/")[0]] += seconds
    terminalreporter.section("seconds by folder, workers together")
    for folder, seconds in folders.most_common():
        terminalreporter.write_line(f"{seconds:7.1f} s  {folder}")
    terminalreporter.write_line(f"{folders.total():7.1f} s  in all")
    if config.getoption("keep_seconds"):
        kept = json.loads(KEPT.read_text()) | {name: round(seconds, 1) for name, seconds in files.items()}
        known = {name: kept[name] for name in sorted(kept) if (KEPT.parent / name).exists()}
        KEPT.write_text(json.dumps(known, indent=1) + "\n")
