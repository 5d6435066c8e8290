"""Decides which worker runs which test file, and in which order: the longest go first.

Each worker has its own session fixtures. If a long file began last, one worker would run it while the other worker is
idle. `seconds.json` holds the seconds of each file; `pytest --keep-seconds` writes it again. The order does not need
exact figures. Used by: `conftest.py`, as a plugin of pytest.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

KEPT = Path(__file__).parent / "seconds.json"
# Assumed seconds per test in a file that was never measured.
UNKNOWN = 0.2
# The files of this folder share the engines of the `engine` fixture.
TOGETHER = "contract/"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--keep-seconds", action="store_true", help="write tests/seconds.json: the seconds of each file"
    )


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0].removeprefix("tests/")


def names_long_tests(path: Path) -> bool:
    return "mark.long" in path.read_text(encoding="utf-8")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m "long …"`, read only the files that name this mark.

    Each worker spends seconds on reading all of them.
    """
    if not config.getoption("markexpr").startswith("long") or collection_path.suffix != ".py":
        return None
    return None if names_long_tests(collection_path) else True


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """Refuse a mark from elsewhere: `make test-long` would not find its test."""
    if item.get_closest_marker("long") and not names_long_tests(item.path):
        raise pytest.UsageError(
            f"{item.nodeid}: write the mark `long` in the test's own file (tests/schedule.py)"
        )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest share first. The tests of a file keep their order."""
    kept = json.loads(KEPT.read_text())
    tests = Counter(file_of(item.nodeid) for item in items)
    files = {name: kept.get(name, UNKNOWN * count) for name, count in tests.items()}
    shares: Counter[str] = Counter()
    for name, seconds in files.items():
        shares[share_of(name)] += seconds

    def place(item: pytest.Item) -> tuple[float, str, float, str]:
        name = file_of(item.nodeid)
        return (-shares[share_of(name)], share_of(name), -files[name], name)

    items.sort(key=place)


def share_of(name: str) -> str:
    """The share of a file. A share is the unit of work of a worker: one file, or all files of `TOGETHER`."""
    return TOGETHER if name.startswith(TOGETHER) else name


class Shares(LoadFileScheduling):
    """Gives shares to workers in the order in which pytest collected them."""

    def _split_scope(self, nodeid: str) -> str:
        return share_of(file_of(nodeid))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Shares:
    config.option.loadscopereorder = False
    return Shares(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the seconds of each folder, summed over workers.

    With `--keep-seconds`, write the seconds of each file too.
    """
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
