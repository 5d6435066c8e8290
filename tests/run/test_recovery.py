"""Work that loses its engine is repeated as a whole, a limited number of times."""

from __future__ import annotations

import pytest

from lockstep.errors import EngineLost, LockstepError
from lockstep.rollouts.recovery import Recovery


def test_work_is_done_again_after_the_engine_came_back_and_the_engine_is_distrusted() -> None:
    events: list[str] = []

    def work() -> int:
        events.append("work")
        if events.count("work") < 3:
            raise EngineLost("gone", lambda: events.append("recovered"))
        return 7

    recovery = Recovery(lambda: events.append("distrusted"))
    assert recovery.run(work) == 7
    assert events == ["work", "recovered", "distrusted"] * 2 + ["work"]
    assert recovery.losses == 2


def test_an_engine_that_does_not_come_back_ends_the_run() -> None:
    def gone() -> None:
        raise LockstepError("did not answer within 3 s")

    def work() -> None:
        raise EngineLost("gone", gone)

    with pytest.raises(LockstepError, match="within 3 s"):
        Recovery(lambda: None).run(work)


def test_work_that_kills_its_engine_every_time_is_given_up() -> None:
    def work() -> None:
        raise EngineLost("gone", lambda: None)

    with pytest.raises(LockstepError, match="lost 4 times"):
        Recovery(lambda: None).run(work)


def test_other_errors_are_not_repeated() -> None:
    calls: list[int] = []

    def work() -> None:
        calls.append(1)
        raise LockstepError("refused")

    with pytest.raises(LockstepError, match="refused"):
        Recovery(lambda: None).run(work)
    assert len(calls) == 1
