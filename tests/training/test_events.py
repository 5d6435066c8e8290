"""The events of a run come in one order, and a proof that fails at an event before the optimizer keeps every weight as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from methods import GROUPS, make, parameters

from lockstep.contract.protocol import Engine
from lockstep.errors import ProofError
from lockstep.training.events import Watch
from lockstep.watch.run import RunWatch

# In the order of a step that is cut into two micro-batches. `backward` is a context: it is noted where it begins.
STEP = [
    "began",
    "pushing",
    "scored",
    "taken",
    "referenced",
    "prepared",
    "beginning",
    *("part", "backward", "forward", "learned", "aside", "compared") * 2,
    "summing",
    "summed",
    "accumulated",
    "figures",
    "clipped",
    "stepping",
    "stepped",
]
FIELDS = {**GROUPS, "gradient_accumulation_steps": 2, "max_steps": 1, "beta": 0.1}
# `figures` proves nothing, and training begins before there is a step.
BEFORE_THE_OPTIMIZER = [name for name in dict.fromkeys(STEP[1:-1]) if name != "figures"]


def events() -> list[str]:
    """The names of all events."""
    return [name for name in dir(Watch) if not name.startswith("_") and name != "evidence"]


def test_the_events_of_a_step_come_in_one_order(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, seen = make("GRPO", untied_dir, tmp_path, hf_engine, FIELDS), []

    def noting(name: str, real: Any) -> Any:
        def event(*given: Any, **named: Any) -> Any:
            seen.append(name)
            return real(*given, **named)

        return event

    for name in events():
        monkeypatch.setattr(run.watch, name, noting(name, getattr(run.watch, name)))
    run.train()
    run.save_model(str(tmp_path / "saved"))
    assert seen == STEP
    assert set(events()) - set(STEP) == {"evaluated", "saving"}


def test_a_proof_that_fails_at_any_event_before_the_optimizer_keeps_the_weights(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    run = make("GRPO", untied_dir, tmp_path, hf_engine, FIELDS)
    before = parameters(run.model)

    def fail(*given: Any, **named: Any) -> Any:
        raise ProofError("gap", "found", "cause", "fix")

    for name in BEFORE_THE_OPTIMIZER:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run.watch, name, fail)
            with pytest.raises(ProofError, match="found"):
                run.train()
        assert all(value.equal(before[key]) for key, value in parameters(run.model).items()), name
        assert run.state.global_step == 0


def test_the_watch_of_a_run_has_every_event() -> None:
    assert [name for name in events() if name not in vars(RunWatch)] == []
