"""A run goes on only with the state, the data, the rewards and the settings with which it stopped, or says what has changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import methods
import pytest
import torch
from datasets import Dataset
from methods import GROUPS, PROMPTS, lora
from transformers import Trainer

from lockstep.engines.protocol import Engine
from lockstep.errors import InputError, ProofError
from lockstep.parity.receipt import RECEIPT, check_receipt, read_receipt
from lockstep.training.trainers.hooks import whole_checkpoints

SAVES = {**GROUPS, "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
Make = Callable[..., Any]


@pytest.fixture
def make(untied_dir: str, hf_engine: Engine) -> Make:
    def made(folder: Path, arguments: dict[str, Any] | None = None, **fields: Any) -> Any:
        return methods.make("GRPO", untied_dir, folder, hf_engine, {**SAVES, **fields}, **(arguments or {}))

    return made


def resume(run: Any, folder: Path, step: int = 2) -> None:
    run.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))


def optimizer_moves(trainer: Trainer) -> None:
    for state in trainer.optimizer.state.values():
        state["exp_avg"].mul_(1.01)


def one_weight_moves(trainer: Trainer) -> None:
    with torch.no_grad():
        next(trainer.model.parameters()).view(-1)[3] += 1e-3


def the_schedule_restarts(trainer: Trainer) -> None:
    trainer.lr_scheduler.last_epoch = 0


AFTER_LOADING = {
    "optimizer.exp_avg of policy.": optimizer_moves,
    r"policy\..*embed_tokens": one_weight_moves,
    "the schedule": the_schedule_restarts,
}


@pytest.mark.parametrize("named", AFTER_LOADING)
def test_what_is_in_memory_after_loading_is_what_was_in_memory_when_it_was_saved(
    make: Make, tmp_path: Path, named: str
) -> None:
    make(tmp_path).train()
    honest = Trainer._load_optimizer_and_scheduler

    def otherwise(self: Trainer, checkpoint: str | None) -> None:
        honest(self, checkpoint)
        AFTER_LOADING[named](self)

    with (
        patch.object(Trainer, "_load_optimizer_and_scheduler", otherwise),
        pytest.raises(ProofError, match=f"differ from checkpoint-2 after it was loaded: {named}"),
    ):
        resume(make(tmp_path, max_steps=3), tmp_path)


def test_an_adapter_goes_on_only_on_its_own_base_model(make: Make, tmp_path: Path, tied_dir: str) -> None:
    make(tmp_path, {"peft_config": lora()}).train()
    again = make(tmp_path, {"peft_config": lora()}, max_steps=3)
    with torch.no_grad():
        next(p for n, p in again.model.named_parameters() if "up_proj.base_layer" in n).mul_(1.01)
    with pytest.raises(ProofError, match=r"after it was loaded: policy.*up_proj\.base_layer"):
        resume(again, tmp_path)


def other_rows() -> Dataset:
    return Dataset.from_dict({"prompt": ["seven", "eight", "nine", "ten"]})


def another(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


CHANGED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "rows": ({"train_dataset": other_rows()}, {}, "train data"),
    "a column": ({"train_dataset": PROMPTS.add_column("answer", [1] * 8)}, {}, "train data"),
    "reward": ({"reward_funcs": another}, {}, "reward another, reward .*"),
    "seed": ({}, {"seed": 9}, "seed"),
    "learning rate": ({}, {"learning_rate": 0.5}, "learning_rate"),
}


@pytest.mark.parametrize("what", CHANGED)
def test_changed_inputs_are_refused_and_taken_where_that_is_asked_for(make: Make, tmp_path: Path, what: str) -> None:
    arguments, fields, named = CHANGED[what]
    make(tmp_path).train()
    with pytest.raises(InputError, match=f"these have changed since: {named}. Put the old ones back"):
        resume(make(tmp_path, arguments, **fields, max_steps=3), tmp_path)
    run = make(tmp_path, arguments, **fields, max_steps=3, resume_with_changes=True)
    resume(run, tmp_path)
    assert run.state.global_step == 3
    starts = [entry["inputs"] for entry in read_receipt(tmp_path / RECEIPT) if entry["kind"] == "start"]
    assert "changed" not in starts[0]
    assert len(starts[1]["changed"]) == named.count(",") + 1


def test_a_longer_run_with_other_bookkeeping_is_the_same_run(make: Make, tmp_path: Path) -> None:
    make(tmp_path).train()
    run = make(tmp_path, max_steps=3, logging_steps=2, token_budget=512)
    resume(run, tmp_path)
    assert run.state.global_step == 3


def test_a_checkpoint_that_was_copied_elsewhere_brings_its_receipt(make: Make, tmp_path: Path) -> None:
    make(tmp_path / "run").train()
    copied = shutil.copytree(tmp_path / "run" / "checkpoint-2", tmp_path / "away" / "checkpoint-2")
    run = make(tmp_path / "new", max_steps=3)
    run.train(resume_from_checkpoint=str(copied))
    kinds = [entry["kind"] for entry in read_receipt(tmp_path / "new" / RECEIPT)]
    assert kinds == ["start", "step", "checkpoint", "step", "checkpoint", "start", "step", "checkpoint"]


def test_a_checkpoint_of_another_run_is_refused(make: Make, tmp_path: Path) -> None:
    for name in ("one", "other"):
        make(tmp_path / name, seed=3 if name == "one" else 4).train()
    here = tmp_path / "one"
    shutil.rmtree(here / "checkpoint-2")
    shutil.copytree(tmp_path / "other" / "checkpoint-2", here / "checkpoint-2")
    with pytest.raises(InputError, match=r"digests.json of checkpoint-2 was changed, or is of another checkpoint"):
        resume(make(here, max_steps=3), here)
    with pytest.raises(InputError, match="checkpoint-2 was written with another receipt"):
        check_receipt(here / RECEIPT)


def test_every_line_of_a_checkpoint_names_its_digests(make: Make, tmp_path: Path) -> None:
    make(tmp_path).train()
    assert check_receipt(tmp_path / RECEIPT) == 5
    digests = json.loads((tmp_path / "checkpoint-2" / "digests.json").read_text())
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"} <= digests["files"].keys()
    trained = [name for name in digests["memory"] if name.startswith("policy.")]
    moments = [name for name in digests["memory"] if name.startswith("optimizer.exp_avg of policy.")]
    assert len(moments) == len(trained) > 20


def test_a_checkpoint_that_was_compared_already_is_not_read_a_second_time(make: Make, tmp_path: Path) -> None:
    """The command line compares it when it opens the run's directory."""
    make(tmp_path).train()
    (start,) = [entry for entry in read_receipt(tmp_path / RECEIPT) if entry["kind"] == "start"]
    run, other = make(tmp_path, max_steps=3), make(tmp_path, {"train_dataset": other_rows()}, max_steps=3)
    for trainer in (run, other):
        trainer.checked = tmp_path / "checkpoint-2", start
    with patch.object(whole_checkpoints, "check_checkpoint", side_effect=AssertionError("read again")):
        with pytest.raises(InputError, match="these have changed since: train data"):
            resume(other, tmp_path)
        resume(run, tmp_path)
        assert run.state.global_step == 3
        with pytest.raises(AssertionError, match="read again"):
            run.check_resume(str(tmp_path / "checkpoint-1"))


def test_a_script_goes_on_past_a_damaged_checkpoint_with_the_figures_that_it_logged(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fixed = {"lr_scheduler_type": "constant"}
    whole, run = make(tmp_path / "whole", max_steps=3, **fixed), tmp_path / "run"
    whole.train()
    make(run, **fixed).train()
    receipt = (run / RECEIPT).read_bytes()
    path = run / "metrics.jsonl"
    honest = path.read_text().splitlines()
    path.write_text(path.read_text().replace('"loss": ', '"loss": 3', 1))
    (run / "checkpoint-2" / "trainer_state.json").unlink()
    (run / "shown_rollouts.jsonl").write_bytes(b"\xff\n")
    again = make(run, max_steps=3, **fixed)
    again.train(resume_from_checkpoint=True)
    said = capsys.readouterr().out
    assert "checkpoint-2 cannot be read" in said
    assert "receipt.jsonl names checkpoint-2" in said
    assert (run / "receipt-until-step-2.jsonl").read_bytes() == receipt
    assert "metrics.jsonl is not what the run has logged up to checkpoint-1; it is now" in said
    assert json.loads(path.read_text().splitlines()[0]) == json.loads(honest[0])
    assert (run / "damaged-checkpoint-2" / "model.safetensors").exists()
    assert (run / "damaged-shown_rollouts.jsonl").read_bytes() == b"\xff\n"
    assert methods.logs(again) == methods.logs(whole)


def test_changed_inputs_of_an_attempt_without_a_checkpoint_do_not_count(make: Make, tmp_path: Path) -> None:
    make(tmp_path).train()

    class Killed(Exception):
        pass

    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    attempt = make(tmp_path, {"train_dataset": other_rows()}, max_steps=4, resume_with_changes=True)
    with patch.object(Trainer, "_save_checkpoint", killed), pytest.raises(Killed):
        resume(attempt, tmp_path)
    with pytest.raises(InputError, match="these have changed since: train data"):
        resume(make(tmp_path, {"train_dataset": other_rows()}, max_steps=4), tmp_path)
    resume(make(tmp_path, max_steps=3), tmp_path)
    check_receipt(tmp_path / RECEIPT)
