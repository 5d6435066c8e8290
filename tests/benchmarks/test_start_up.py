"""The figures of `make start-up` and `make waiting`: stages, and steps after a wait, from what processes noted."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.host import start_up, waiting


def run(*stages: tuple[float, float, str]) -> list[dict[str, Any]]:
    return [{"at": at, "cpu": cpu, "stage": stage} for at, cpu, stage in stages]


def test_a_stage_lasts_until_the_next_one_and_figures_are_medians() -> None:
    runs = [run((0.0, 0.0, "one"), (wait, 2.0, "two"), (wait + 1, 5.0, "first")) for wait in (1.0, 3.0, 9.0)]
    found = start_up.figures(runs)
    assert [(s["stage"], s["at"], s["seconds"], s["cpu"]) for s in found] == [
        ("one", 0, 3, 2), ("two", 3, 1, 3), ("first", 4, 0, 0),
    ]  # fmt: skip


def test_runs_with_other_stages_are_not_compared() -> None:
    with pytest.raises(AssertionError, match="different stages"):
        start_up.figures([run((0, 0, "one"), (1, 1, "two")), run((0, 0, "one"), (1, 1, "other"))])


def test_a_command_that_samples_nothing_stops_the_benchmark() -> None:
    with pytest.raises(SystemExit, match=r"ended with 2 and sampled nothing:\n(.|\n)*no_such_field"):
        start_up.stages(["grpo", "--no_such_field", "1"])


def test_steps_after_a_wait_are_set_beside_the_others() -> None:
    def step(seconds: float, faults: int, after_wait: bool) -> dict[str, Any]:
        memory = {"before": {"faults": 10}, "after": {"faults": 10 + faults}}
        return {"step": seconds, "memory": memory, "after_wait": after_wait, "peak_bytes": int(seconds)}

    usual = [step(s, 5, False) for s in (1.0, 2.0, 90.0)]
    found = waiting.figures([*usual, step(6.0, 50, True)])
    assert found == {
        "after_wait_s": 6, "other_s": 2, "ratio": 3, "after_wait_faults": 50, "other_faults": 5, "peak_bytes": 90,
    }  # fmt: skip
