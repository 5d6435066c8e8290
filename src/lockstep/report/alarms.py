"""The alarms of a run: what is most often a user's mistake, while no proof fails and no error ends the run.

`ALARMS` is the table of all of them. An alarm is raised once per run and subject. A user sees it as a line on the
terminal (above a live panel, which keeps a row for it), in the logs of steps (the figure `alarms`), and in receipt,
summary and report. docs/troubleshooting/alarms.md explains each. `learn/` raises them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_logger = logging.getLogger(__name__)

# The kind of a receipt's line.
LINE = "alarm"
# How many subjects an alarm names.
_MOST = 20

ALARMS: Mapping[str, str] = {
    "tool_fails": "{subject} failed at all {calls} calls of a step in the same way, and the model reads this error in "
    "place of results: {error}",
    "tools_in_turn": "plain tools and environments took {seconds:.0f} of the {whole:.0f} s of sampling, one call after "
    "the other; calls that wait for something run at the same time with tool_threads: true, or own_thread = True on "
    "the tool or environment",
    "rollout_failed": "{subject}; nothing is learned from its rollout",
    "reward_none": "reward function {subject} returned None for all {count} completions of a step; if it should have "
    "scored them, look at what it gets",
    "unscored": "none of {subject} scored any of the {count} completions of this generation: no reward is learned from "
    "it (the run ends after {limit} such generations in a row)",
    "rounded_away": "{subject}",
}


@dataclass(frozen=True, slots=True)
class Alarm:
    """One alarm: its row in `ALARMS`, what it is about (such as the name of a tool), and what the user reads."""

    key: str
    subject: str
    text: str


class Alarms:
    """The alarms of one run. One process of it, the owner, says them."""

    def __init__(self, *, owner: bool = True) -> None:
        self._owner = owner
        self._raised: dict[tuple[str, str], Alarm] = {}
        self._write: Callable[[Alarm], None] | None = None
        self._unwritten: list[Alarm] = []

    def tell(self, key: str, subject: str, **found: Any) -> None:
        """Raise an alarm, unless it has been raised about this subject. `found` are the other fields of its text."""
        known = sum(kind == key for kind, _ in self._raised)
        if not self._owner or (key, subject) in self._raised or known >= _MOST:
            return
        alarm = self._raised[key, subject] = Alarm(key, subject, ALARMS[key].format(subject=subject, **found))
        _logger.warning(f"ALARM: {alarm.text}")
        self._unwritten.append(alarm)
        self._flush()

    def go_on(self, lines: Sequence[Mapping[str, Any]], write: Callable[[Alarm], None]) -> None:
        """Continue the alarms in the lines of a receipt, and write others into it, also those raised until now."""
        known = [line for line in lines if line.get("kind") == LINE]
        alarms = [Alarm(line["key"], line["subject"], line["text"]) for line in known]
        written = {(alarm.key, alarm.subject): alarm for alarm in alarms}
        self._unwritten = [alarm for about, alarm in self._raised.items() if about not in written]
        self._raised = written | self._raised
        self._write = write
        self._flush()

    @property
    def texts(self) -> list[str]:
        """The texts of all alarms of the run, in order."""
        return [alarm.text for alarm in self._raised.values()]

    def _flush(self) -> None:
        while self._write is not None and self._unwritten:
            self._write(self._unwritten.pop(0))
