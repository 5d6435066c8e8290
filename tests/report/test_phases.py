"""Seconds per phase, where the host gives a device its work ahead of time.

The device here is a queue with a clock of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from lockstep.report.phases import PhaseClock


@dataclass
class Device:
    """A device that does its work in order, later than the host asks for it. Times in seconds."""

    now: float = 0.0
    busy_until: float = 0.0

    def launch(self, seconds: float) -> None:
        """Give it work, and do not wait."""
        self.busy_until = max(self.now, self.busy_until) + seconds

    def wait(self) -> None:
        self.now = max(self.now, self.busy_until)

    def mark(self) -> Mark:
        return Mark(self, max(self.now, self.busy_until))


@dataclass
class Mark:
    device: Device
    at: float

    def query(self) -> bool:
        return self.device.now >= self.at

    def elapsed_time(self, end_event: Mark) -> float:
        assert self.query()
        assert end_event.query(), "the device has not come to it, and CUDA would raise an error"
        return 1000 * (end_event.at - self.at)


def test_a_wait_is_booked_on_the_phase_whose_work_it_waits_for() -> None:
    device = Device()
    clock = PhaseClock(device.mark)
    with clock.phase("forward_backward"):
        device.launch(3.0)
    with clock.phase("optimizer"):
        device.launch(0.5)
    with clock.phase("verify"):
        device.launch(0.25)
        device.wait()
    taken = clock.take()
    assert [taken[name] for name in ("forward_backward", "optimizer", "verify")] == pytest.approx(
        [3.0, 0.5, 0.25]
    )


def test_work_of_the_host_while_the_device_is_idle_belongs_to_its_phase() -> None:
    device = Device()
    clock = PhaseClock(device.mark)
    with clock.phase("rewards"):
        device.now += 2.0
    assert clock.take()["rewards"] == pytest.approx(2.0)


def test_a_log_does_not_wait_and_a_later_one_has_the_seconds() -> None:
    device = Device()
    clock = PhaseClock(device.mark)
    with clock.phase("optimizer"):
        device.launch(1.0)
    assert clock.take()["optimizer"] == 0.0
    assert device.now == 0.0
    device.wait()
    assert clock.take()["optimizer"] == pytest.approx(1.0)
    assert clock.take()["optimizer"] == 0.0


def test_an_evaluation_counts_for_no_phase_and_loses_none() -> None:
    device = Device()
    clock = PhaseClock(device.mark)
    with clock.phase("optimizer"):
        device.launch(1.0)
    with clock.aside(), clock.phase("generate"):
        device.launch(4.0)
        device.wait()
    taken = clock.take()
    assert (taken["optimizer"], taken["generate"]) == pytest.approx((1.0, 0.0))


def test_a_device_that_has_failed_does_not_hide_the_error_of_its_phase() -> None:
    marks = iter([Device().mark()])
    clock = PhaseClock(lambda: next(marks))
    with pytest.raises(ValueError, match="the cause"), clock.phase("verify"):
        raise ValueError("the cause")
    assert clock.take()["verify"] > 0
    assert clock.progress() == ""
