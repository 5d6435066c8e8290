"""A run that stops before its last step is finished only if somebody asked; anything else interrupts it."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import methods
import pytest
from methods import GROUPS, PROMPTS, StopAfter, by_length
from transformers import EarlyStoppingCallback, TrainerCallback

import lockstep
from lockstep.contract.protocol import Engine
from lockstep.errors import InputError, Interrupted, LockstepError
from lockstep.run.files.checkpoints import last_checkpoint
from lockstep.run.files.directory import RunPlace
from lockstep.run.run import run_method

FIELDS: dict[str, Any] = {
    **GROUPS,
    "max_steps": 4,
    "save_strategy": "steps",
    "save_steps": 1,
    "report_to": "none",
}


@pytest.fixture
def run(untied_dir: str, hf_engine: Engine, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """A whole run, as the command makes it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def made(reward: Callable[..., Any], **arguments: Any) -> Any:
        config = lockstep.GRPOConfig(
            output_dir=str(tmp_path), bf16=False, logging_steps=1, disable_tqdm=True, **FIELDS
        )
        given = {"reward_funcs": reward, "train_dataset": PROMPTS, "engine": hf_engine, **arguments}
        return run_method(lockstep.GRPOTrainer, config, RunPlace(tmp_path, None), untied_dir, **given)

    yield made
    assert {number: signal.getsignal(number) for number in before} == before


def end(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "end.json").read_text())


def test_a_training_that_nobody_has_asked_to_end_is_interrupted(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[Any] = []

    def reward(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float]:
        if trainer_state.global_step == 1:
            stopped[0].control.should_training_stop = True
        return by_length(completion_ids)

    honest = lockstep.GRPOTrainer.__init__

    def noted(self: Any, *given: Any, **named: Any) -> None:
        honest(self, *given, **named)
        stopped.append(self)

    monkeypatch.setattr(lockstep.GRPOTrainer, "__init__", noted)
    with pytest.raises(
        LockstepError, match=r"ended after step 2 of 4, and no signal .* goes on from checkpoint-2"
    ) as caught:
        run(reward)
    assert not isinstance(caught.value, Interrupted)
    assert end(tmp_path) == {
        **end(tmp_path),
        "ended": "interrupted",
        "signal": "nobody has asked for it",
        "step": 2,
    }
    assert "Interrupted (nobody has asked for it) after step 2" in (tmp_path / "report.html").read_text()
    assert not (tmp_path / "summary.json").exists()


class ByLibrary(TrainerCallback):
    """Stands for a callback that a field of transformers adds."""

    __module__ = "transformers.some_feature"

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= 2 or control.should_training_stop


CALLBACKS: dict[str, tuple[Callable[[], Any], str]] = {
    "one of the user's": (lambda: StopAfter(2), "finished"),
    "early stopping": (EarlyStoppingCallback, "finished"),
    "one of a library's": (ByLibrary, "interrupted"),
}


@pytest.mark.parametrize("what", CALLBACKS)
def test_who_has_asked_for_the_end_decides_how_it_is_written_down(
    untied_dir: str, hf_engine: Engine, tmp_path: Path, what: str
) -> None:
    make, ended = CALLBACKS[what]
    callback = make()
    if what == "early stopping":
        # As it stops after an evaluation.
        callback.on_train_begin = lambda *_, **__: None
        callback.on_step_end = StopAfter(2).on_step_end
    trainer = methods.make("GRPO", untied_dir, tmp_path, hf_engine, FIELDS, callbacks=[callback])
    trainer.train()
    assert (end(tmp_path)["ended"], end(tmp_path)["step"]) == (ended, 2)


def test_a_handler_that_something_has_replaced_is_put_back_and_a_signal_still_stops_the_run(
    run: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sent: list[int] = []

    def ignored(number: int, frame: Any) -> None: ...

    def reward(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float]:
        if trainer_state.global_step == 0:
            signal.signal(signal.SIGTERM, ignored)
        elif trainer_state.global_step == 1 and not sent:
            sent.append(1)
            signal.raise_signal(signal.SIGTERM)
        return by_length(completion_ids)

    with pytest.raises(
        Interrupted, match="stopped after step 2; the same command goes on from checkpoint-2"
    ) as caught:
        run(reward)
    assert caught.value.exit_code == 143
    assert end(tmp_path) == {**end(tmp_path), "ended": "interrupted", "signal": "SIGTERM", "step": 2}
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    assert "reward function reward changed handlers of signals" in caplog.text


def test_a_field_whose_callback_replaces_our_handler_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"enable_jit_checkpoint=True is not supported.*as if it were finished"
    ):
        lockstep.GRPOConfig(output_dir=str(tmp_path), enable_jit_checkpoint=True)
