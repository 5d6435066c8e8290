"""The alarms of a run: said once, kept by the receipt, and each in the table of the docs."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from lockstep.report.alarms import ALARMS, LINE, Alarm, Alarms
from lockstep.report.live import About, LiveView

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting" / "alarms.md"


def test_an_alarm_is_said_once_per_subject_and_only_by_the_owner(capsys: pytest.CaptureFixture[str]) -> None:
    alarms, other = Alarms(), Alarms(owner=False)
    for name in ("one", "two", "one"):
        alarms.tell("reward_none", name, count=4)
        other.tell("reward_none", name, count=4)
    said = [line.partition(" returned")[0] for line in capsys.readouterr().out.splitlines()]
    assert said == ["lockstep: ALARM: reward function one", "lockstep: ALARM: reward function two"]
    assert len(alarms.texts) == 2
    assert other.texts == []


def test_a_receipt_gets_earlier_alarms_and_a_resumed_run_says_none_again() -> None:
    written: list[Alarm] = []
    alarms = Alarms()
    alarms.tell("reward_none", "before", count=4)
    alarms.go_on([], written.append)
    alarms.tell("reward_none", "after", count=4)
    assert [alarm.subject for alarm in written] == ["before", "after"]
    lines = [{"kind": LINE, "key": a.key, "subject": a.subject, "text": a.text, "step": 0} for a in written]
    resumed = Alarms()
    resumed.go_on([{"kind": "step"}, *lines], written.append)
    resumed.tell("reward_none", "after", count=4)
    assert len(written) == 2
    assert resumed.texts == alarms.texts


def test_the_live_panel_keeps_a_row_for_every_alarm() -> None:
    console = Console(file=io.StringIO(), width=100)
    about = About("GRPO", "model", "runs")
    view = LiveView(
        about, str, dict, lambda: None, dict, console, alarms=lambda: ["tool look failed at all 8 calls"]
    )
    console.print(view.panel())
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "ALARM" in shown
    assert "tool look failed at all 8 calls" in shown


def test_the_docs_explain_every_alarm() -> None:
    rows = [
        line.split("|")[1].strip(" `") for line in PAGE.read_text().splitlines() if line.startswith("| `")
    ]
    assert rows == list(ALARMS)
