"""A run's events come in one order; a proof that fails before the optimizer's step keeps every weight."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from methods import GROUPS, PROMPTS, make, parameters

from lockstep.contract.protocol import Engine
from lockstep.errors import ProofError
from lockstep.learn.events import Watch
from lockstep.models.policy import load_policy
from lockstep.watch import run as watching
from lockstep.watch.custody import SampledTokens
from lockstep.watch.model_gradient import ModelGradient
from lockstep.watch.run import RunWatch
from lockstep.watch.update import UpdateProof

# In the order of a step that is cut into two micro-batches. `backward` is a context: it is noted where it begins.
STEP = [
    "began",
    "pushing",
    "scored",
    "taken",
    "referenced",
    "prepared",
    "beginning",
    *("micro_batch", "backward", "forward", "learned", "aside", "compared") * 2,
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


# What the events call: functions by the name under which the watch has them, and methods of its proofs.
KINDS = [
    kind
    for kind in vars(watching).values()
    if isinstance(kind, type) and kind.__module__.startswith("lockstep.watch.") and kind is not RunWatch
]
# No completion is left aside, and no checkpoint is written.
NOT_IN_THIS_RUN = [(SampledTokens, "check_aside"), (UpdateProof, "check_still")]
CALLED = [
    *((watching, name) for name in vars(watching) if name.startswith("check_")),
    *(
        (k, name)
        for k in KINDS
        for name in vars(k)
        if name.startswith("check") and (k, name) not in NOT_IN_THIS_RUN
    ),
    (ModelGradient, "begin"),
    (ModelGradient, "finish"),
    *((UpdateProof, name) for name in ("begin_step", "gradients", "clipped", "before", "after")),
]


def test_every_proof_of_the_watch_is_made_at_its_event(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With this seed a part of the first step's gradient is compared.
    fields = {
        **FIELDS,
        "gradient_accumulation_steps": 1,
        "num_iterations": 2,
        "max_steps": 2,
        "top_p": 0.9,
        "seed": 10,
        "sync_ref_model": True,
        "ref_model_sync_steps": 2,
    }
    run = make(
        "GRPO",
        untied_dir,
        tmp_path,
        hf_engine,
        fields,
        eval_dataset=PROMPTS,
        ref_model=load_policy(untied_dir),
    )
    calls: Counter[str] = Counter()

    def counting(name: str, real: Any) -> Any:
        def called(*given: Any, **named: Any) -> Any:
            calls[name] += 1
            return real(*given, **named)

        return called

    for owner, name in CALLED:
        monkeypatch.setattr(owner, name, counting(f"{owner.__name__}.{name}", getattr(owner, name)))
    run.train()
    run.evaluate()
    assert [
        f"{owner.__name__}.{name}" for owner, name in CALLED if not calls[f"{owner.__name__}.{name}"]
    ] == []
    # One micro-batch a step; the policy has moved before the second one.
    assert (calls["LossGradient.check"], calls["PlainForward.check"]) == (2, 1)


def test_the_watch_of_a_run_has_every_event() -> None:
    assert [name for name in events() if name not in vars(RunWatch)] == []
