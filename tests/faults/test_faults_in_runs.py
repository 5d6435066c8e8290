"""Faults that begin in the middle of a run, which uses its generations in several steps, or some steps after they were sampled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import VLLM
from stages import stage_on

from lockstep.verify.faults.seams import Fault
from lockstep.verify.self_test import WAYS, Verdict, Way, faults_of_runs, run_in_runs
from lockstep.verify.stage import Stage

# The faults that only the proofs of these runs see, one per proof, and which proof that is.
EVERY_TIME = {"M1": "temperature", "M2": "learned", "M3": "learned", "M5": "learned", "L3": "gap"}


@pytest.fixture(scope="module", params=WAYS, ids=[way.name for way in WAYS])
def way(request: pytest.FixtureRequest) -> Way:
    return request.param


def tried(stage: Stage, way: Way, faults: tuple[Fault, ...]) -> dict[str, Verdict]:
    """The verdicts by fault. Without a fault nothing may stop the run."""
    control, *verdicts = run_in_runs(stage, way, lambda name: None, faults)
    assert control.caught_by == "", control.message
    assert control.steps == way.steps - way.clean
    return {verdict.id: verdict for verdict in verdicts}


def test_the_proofs_of_these_runs_catch_what_only_they_see(way: Way, untied_dir: str, tmp_path: Path) -> None:
    faults = tuple(fault for fault in faults_of_runs() if fault.id in EVERY_TIME)
    with stage_on(untied_dir, tmp_path, use_vllm=False, bf16=False, **way.changes) as stage:
        found = tried(stage, way, faults)
    for name, verdict in found.items():
        assert verdict.skipped or verdict.caught_by == EVERY_TIME[name], f"{name}: {verdict}"
    # What enters the loss is compared before the first step that would learn from it.
    assert found["M1"].steps == found["M2"].steps == 0
    assert sum(not verdict.skipped for verdict in found.values()) >= 3


@pytest.fixture(scope="module", params=["transformers", pytest.param("vllm", marks=VLLM)])
def runs(
    request: pytest.FixtureRequest, way: Way, shared_dir: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    """A stage whose runs use their generations in this way."""
    folder, uses_vllm = tmp_path_factory.mktemp("runs"), request.param == "vllm"
    with stage_on(shared_dir, folder, use_vllm=uses_vllm, bf16=False, **way.changes) as made:
        yield made


@pytest.mark.release
def test_every_fault_of_a_run_is_caught(runs: Stage, way: Way) -> None:
    found = tried(runs, way, faults_of_runs())
    missed = [f"{v.id}: {v.what}" for v in found.values() if not v.skipped and not v.caught_by]
    assert missed == []
    assert sum(not v.skipped for v in found.values()) > 40
