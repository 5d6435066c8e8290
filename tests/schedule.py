"""Decides which worker runs which test file, and in which order: files that share a server go together, and the longest go first.

Each worker has its own session fixtures. All files in `SERVED` go to one worker, so that their server is started once. If a long
file began last, one worker would run it while the other worker is idle. `seconds.json` holds the seconds of each file;
`pytest --keep-seconds` writes it again. The order does not need exact figures.
Used by: `conftest.py`, as a plugin of pytest.
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
# Files whose tests use the session's server.
SERVED = {
    "contract/test_engine_contract.py",
    "contract/test_interrupted_completions.py",
    "integrations/test_trl_ranks.py",
    "server/test_access.py",
    "server/test_connection.py",
    "server/test_examples.py",
    "server/test_faults_while_training.py",
    "server/test_generations_ahead.py",
    "server/test_hand_started_servers.py",
    "server/test_in_flight.py",
    "server/test_online_dpo_script.py",
    "server/test_push_order.py",
    "server/test_restarted_servers.py",
    "server/test_several_servers.py",
    "server/test_sick_answers.py",
    "server/test_stopped_and_strange_servers.py",
    "server/test_two_ranks_on_a_server.py",
    "sync/test_adapters.py",
    "verify/test_verify_command.py",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--keep-seconds", action="store_true", help="write tests/seconds.json: the seconds of each file")


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0].removeprefix("tests/")


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
    """The share of a file. A share is the unit of work of a worker: one file, or all files that use the server."""
    return "server" if name in SERVED else name


class Shares(LoadFileScheduling):
    """Gives shares to workers in the order in which pytest collected them."""

    def _split_scope(self, nodeid: str) -> str:
        return share_of(file_of(nodeid))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Shares:
    config.option.loadscopereorder = False
    return Shares(config, log)


def check_served(current: str) -> None:
    """Fail if a file that is not in `SERVED` would start its own server.

    Args:
        current: the running test, in pytest's notation.
    """
    name = file_of(current)
    assert name in SERVED, (
        f"{name} uses the session's server: name it in tests/schedule.py, so that one server is enough"
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the seconds of each folder, summed over workers. With `--keep-seconds`, write the seconds of each file too."""
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
