"""Faults that begin in the middle of a run that uses its generations in several steps, or some steps later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from conftest import VLLM
from stages import stage_on

from lockstep.errors import ProofError
from lockstep.extras.selftest import self_test
from lockstep.extras.selftest.seams import Fault
from lockstep.extras.selftest.self_test import WAYS, OpenStage, Verdict, Way, faults_of_runs, run_in_runs
from lockstep.extras.verify.stage import Stage
from lockstep.watch.gap import GapStats

# The faults that only the proofs of these runs see, one per proof, and which proof that is.
EVERY_TIME = {"M1": "temperature", "M2": "learned", "M3": "learned", "M5": "learned", "L3": "gap"}


@pytest.fixture(scope="module", params=WAYS, ids=[way.name for way in WAYS])
def way(request: pytest.FixtureRequest) -> Way:
    return request.param


def tried(open_with: OpenStage, way: Way, faults: tuple[Fault, ...]) -> dict[str, Verdict]:
    """The verdicts by fault. Without a fault nothing may stop the run."""
    control, *verdicts = run_in_runs(open_with, way, lambda name: None, faults)
    assert not control.caught_by, control.message
    assert not control.error, control.message
    assert control.steps >= way.steps - way.clean
    return {verdict.id: verdict for verdict in verdicts}


def test_the_proofs_of_these_runs_catch_what_only_they_see(way: Way, untied_dir: str, tmp_path: Path) -> None:
    def open_with(changes: Mapping[str, int | float]) -> AbstractContextManager[Stage]:
        return stage_on(untied_dir, tmp_path, use_vllm=False, bf16=False, **changes)

    found = tried(open_with, way, tuple(fault for fault in faults_of_runs() if fault.id in EVERY_TIME))
    for name, verdict in found.items():
        assert verdict.skipped or verdict.caught_by == EVERY_TIME[name], f"{name}: {verdict}"
    # What enters the loss is compared before the first step that would learn from it.
    assert found["M1"].steps == found["M2"].steps == 0
    assert sum(not verdict.skipped for verdict in found.values()) >= 3


def test_a_fault_that_raises_in_a_run_is_a_row_and_leaves_nothing_behind(
    way: Way, untied_dir: str, tmp_path: Path
) -> None:
    @contextmanager
    def open_with(changes: Mapping[str, int | float]) -> Iterator[Stage]:
        with stage_on(untied_dir, tmp_path, use_vllm=False, bf16=False, **changes) as stage:
            yield stage
            assert "serve" not in vars(stage.engine)

    @contextmanager
    def leaves_gaps(stage: Stage) -> Iterator[None]:
        """Gaps of too few tokens to be judged, which a later run would be judged by."""
        for pool in (stage.trainer.proofs.pool, *stage.trainer.proofs.ahead.pools.values()):
            pool.waiting = GapStats(tokens=250, sum_abs=250.0)
        yield

    def raises(*anything: object) -> Any:
        raise ConnectionError("half-way")

    (empty_load,) = [fault for fault in faults_of_runs() if fault.id == "W4"]
    found = tried(
        open_with,
        way,
        (
            Fault("load", "", lambda stage: patch.object(stage.engine, "load", raises)),
            Fault("answers", "", lambda stage: patch.object(stage.engine, "serve", raises)),
            Fault("gaps", "", leaves_gaps),
            empty_load,
            Fault("none", "", lambda stage: nullcontext()),
        ),
    )
    errors = {name: v.error for name, v in found.items() if v.error}
    assert errors.keys() == {"load", "answers"}
    pushed = (
        "raised LockstepError: the weights could not be pushed into the engine: ConnectionError: half-way"
    )
    assert errors["load"].startswith(pushed)
    assert errors["answers"] == "raised ConnectionError: half-way"
    assert found["W4"].caught_by == "manifest"
    assert (found["none"].caught_by, found["none"].steps) == ("", way.steps - way.clean)


def test_what_stops_a_run_before_the_fault_begins_has_not_caught_it(
    way: Way, untied_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def alarms(*anything: object) -> None:
        raise ProofError("draws", "found", "cause", "fix")

    with stage_on(untied_dir, tmp_path, use_vllm=False, bf16=False, **way.changes) as stage:
        monkeypatch.setattr(stage.trainer.proofs, "check_draws", alarms)
        control, verdict = run_in_runs(
            lambda changes: nullcontext(stage),
            way,
            lambda name: None,
            [f for f in faults_of_runs() if f.id == "W4"],
        )
    assert (control.caught_by, control.error) == ("", "not injected: draws: found")
    assert (verdict.caught_by, verdict.error) == ("", "not injected: draws: found")


ENGINES = [
    ("transformers", False),
    pytest.param("vllm", False, marks=VLLM),
    pytest.param("vllm", True, marks=VLLM),
]


@pytest.mark.release
@pytest.mark.parametrize(("engine", "bf16"), ENGINES, ids=["transformers", "vllm", "vllm-bf16"])
def test_every_fault_of_a_run_is_caught(
    engine: str, bf16: bool, way: Way, tied_dir: str, tmp_path: Path
) -> None:
    def open_with(changes: Mapping[str, int | float]) -> AbstractContextManager[Stage]:
        return stage_on(tied_dir, tmp_path, use_vllm=engine == "vllm", bf16=bf16, **changes)

    found = tried(open_with, way, faults_of_runs())
    missed = [f"{v.id}: {v.what}: {v.error}" for v in found.values() if not v.skipped and not v.caught_by]
    assert missed == []
    assert sum(not v.skipped for v in found.values()) > 40


def test_the_learning_rate_is_one_that_moves_the_policy_visibly(
    untied_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = []

    def open_with(changes: Mapping[str, int | float]) -> AbstractContextManager[Stage]:
        rates.append(changes["learning_rate"])
        return stage_on(untied_dir, tmp_path, use_vllm=False, bf16=False, **changes)

    # The first one moves the policy by less than the limit.
    monkeypatch.setattr(self_test, "RATES", (1e-8, 1e-3, 1e-2))
    (control,) = run_in_runs(open_with, WAYS[0], lambda name: None, ())
    assert rates == [1e-8, 1e-3]
    assert (control.caught_by, control.error) == ("", "")
    assert control.moved > 12 * 1e-4
    assert "learning rate 0.001" in control.message


@pytest.mark.release
def test_in_bf16_a_run_goes_on_until_older_completions_show(untied_dir: str, tmp_path: Path) -> None:
    """At the first learning rate, answers of the generation before have the same log-probs, up to rounding."""
    rates = []

    def open_with(changes: Mapping[str, int | float]) -> AbstractContextManager[Stage]:
        rates.append(changes["learning_rate"])
        return stage_on(untied_dir, tmp_path, use_vllm=False, bf16=True, **changes)

    ahead = WAYS[-1]
    control, verdict = run_in_runs(
        open_with, ahead, lambda name: None, [f for f in faults_of_runs() if f.id == "L5"]
    )
    assert not control.caught_by, control.message
    assert len(rates) > 1
    assert control.moved > 12 * 0.15
    assert f"learning rate {rates[-1]:g}" in control.message
    assert (verdict.caught_by, verdict.error) == ("gap", "")
