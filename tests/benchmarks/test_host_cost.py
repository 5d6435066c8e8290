"""The host's cost per token: which row counts which work, the table, the plot, and the program at a small size."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from benchmarks.host import cost as host_cost
from benchmarks.host.cost import _IN_PROCESS, ROWS, RowClock, Tokenizer, measured, table, total
from benchmarks.host.cost_plot import drawing

FIGURES = {
    size: {row: (1 + place) * scale for place, row in enumerate(ROWS)}
    for size, scale in (("a", 1.0), ("b", 2.0))
}


def test_a_row_leaves_out_what_a_row_inside_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 7.0])
    monkeypatch.setattr(host_cost.time, "process_time", lambda: next(clock))
    watch = RowClock()
    with watch.row("outer"), watch.row("inner"):
        pass
    assert watch.seconds == {"outer": 1.0 + 4.0, "inner": 2.0}


def test_a_run_gets_its_answers_in_one_way_and_the_dearer_one_is_in_the_sum() -> None:
    every = sum(range(1, len(ROWS) + 1))
    # The first row is the answers of a server, the second the answers of vLLM in process. Here the second is more
    # expensive.
    assert total(FIGURES["a"]) == every - 1
    assert f"**{every - 1:.2f}** | **{2 * (every - 1):.2f}**" in table(FIGURES).splitlines()[-1]


def test_the_plot_is_well_formed_and_as_high_as_the_rows_together() -> None:
    rows = [row for row in ROWS if row != _IN_PROCESS]
    root = ElementTree.fromstring(drawing(FIGURES, rows))
    heights = [float(box.attrib["height"]) for box in root if box.attrib.get("width") == "70"]
    assert len(heights) == 2 * len(rows)
    assert sum(heights[: len(rows)]) * 2 == pytest.approx(sum(heights[len(rows) :]), rel=0.02)


def test_every_row_of_a_small_step_costs_something() -> None:
    """The rest of the program: a change to the code that a run calls must not break it unseen."""
    assert min(measured("8x16", Tokenizer).values()) > 0
