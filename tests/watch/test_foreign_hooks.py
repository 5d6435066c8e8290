"""A subclass that overrides a TRL hook which Lockstep never calls is refused when its trainer is constructed."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from conftest import start
from methods import FIELDS, PROMPTS, make
from transformers import Trainer

import lockstep
from lockstep.errors import InputError
from lockstep.run.loop import TrainingLoop
from lockstep.run.trainers.checks import HOOKS
from lockstep.run.trainers.online import OnlineTrainer

# Methods of TRL's trainers that a subclass may override, because Lockstep calls them too.
_CALLED = {
    "__init__",
    "training_step",
    "log",
    "get_train_dataloader",
    "_save_checkpoint",
    "_load_optimizer_and_scheduler",
    "_maybe_log_save_evaluate",
}


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("called")


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_nothing_calls_is_refused_with_what_does_the_same(hook: str) -> None:
    with pytest.raises(InputError, match=rf"Own overrides {hook}\(\), .*never calls.* Instead: "):
        type("Own", (lockstep.GRPOTrainer,), {hook: never})
    mixin = type("Mixin", (), {hook: never})
    with pytest.raises(InputError, match=rf"Mixin overrides {hook}\(\)"):
        type("Own", (mixin, lockstep.RLOOTrainer), {})


def test_what_is_said_to_do_the_same_is_there_to_be_overridden() -> None:
    for name in ("scorer", "evaluate", "log"):
        assert any(f"{name}()" in instead for instead in HOOKS.values())
        type("Own", (lockstep.GRPOTrainer,), {name: never})
    own_loop = type("OwnLoop", (TrainingLoop,), {"rollout": never})
    assert type("Own", (lockstep.GRPOTrainer,), {"loop_class": own_loop}).loop_class.rollout is never


def test_no_run_calls_a_hook_that_is_refused(
    untied_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Lockstep uses some of these names too, with another meaning.
    for hook in set(HOOKS) - set(vars(OnlineTrainer)):
        monkeypatch.setattr(OnlineTrainer, hook, never, raising=False)
    fields = {**FIELDS["GRPO"], "max_steps": 2, "save_strategy": "steps", "save_steps": 1, "beta": 0.1}
    evaluation = PROMPTS.map(lambda row: {"prompt": row["prompt"] + " now"})
    run = make(
        "GRPO", untied_dir, tmp_path, start("transformers", untied_dir), fields, eval_dataset=evaluation
    )
    run.train()
    assert run.state.global_step == 2
    assert run.evaluate()["eval_problems"] == len(evaluation)


def test_every_method_of_trls_trainers_is_called_here_or_refused() -> None:
    trl = pytest.importorskip("trl")
    from trl.experimental.online_dpo import OnlineDPOTrainer

    methods = {
        name
        for trainer in (trl.GRPOTrainer, trl.RLOOTrainer, OnlineDPOTrainer)
        for base in trainer.__mro__[: trainer.__mro__.index(Trainer)]
        for name, value in vars(base).items()
        if inspect.isfunction(value)
    }
    assert methods - set(HOOKS) <= _CALLED | {"create_model_card", "_send_telemetry"}
