"""For all settings of checkpoints and logs, a checkpoint follows a step from which the run resumes to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from methods import GROUPS, logs, make, parameters

from lockstep.contract.protocol import Engine


def steps_saved(folder: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("fields", "saved", "logged"),
    [
        # `save_steps` is a share of the run: every 3 steps. Step 3 is inside a generation of 2 steps.
        ({"num_iterations": 2, "save_steps": 0.5}, [4, 6], [1, 2, 3, 4, 5, 6]),
        ({"num_iterations": 2, "save_steps": 3, "logging_steps": 0.5}, [4, 6], [3, 4, 6]),
        # A checkpoint does not hold the sums of the next log.
        ({"save_steps": 2, "logging_steps": 5}, [2, 4, 6], [2, 4, 5, 6]),
        ({"save_strategy": "epoch", "logging_steps": 5}, [4, 6], [4, 5, 6]),
    ],
    ids=["a share of the run", "logs at a share", "a log after the checkpoint", "ends of epochs"],
)
def test_a_run_is_resumed_to_the_bit_from_every_checkpoint_that_it_leaves(
    untied_dir: str,
    tmp_path: Path,
    hf_engine: Engine,
    fields: dict[str, Any],
    saved: list[int],
    logged: list[int],
) -> None:
    fields = {**GROUPS, "save_strategy": "steps", "max_steps": 6, **fields}
    whole = make("GRPO", untied_dir, tmp_path, hf_engine, fields)
    whole.train()
    assert steps_saved(tmp_path) == saved
    assert [entry["step"] for entry in logs(whole)] == logged
    for step in saved[:-1]:
        resumed = make("GRPO", untied_dir, tmp_path, hf_engine, fields)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert logs(resumed) == logs(whole)
        for name, expected in parameters(whole.model).items():
            assert torch.equal(parameters(resumed.model)[name], expected), name


def test_a_checkpoint_that_is_moved_is_said(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {**GROUPS, "save_strategy": "steps", "max_steps": 2, "num_iterations": 2}
    make("GRPO", untied_dir, tmp_path, hf_engine, {**fields, "save_steps": 2}).train()
    assert "save_steps" not in capsys.readouterr().out
    make("GRPO", untied_dir, tmp_path, hf_engine, {**fields, "save_steps": 3}).train()
    said = capsys.readouterr().out
    assert "save_steps=3 is a checkpoint every 3 steps" in said
    assert "there is one every 4 instead" in said


def test_a_resumed_run_logs_and_saves_as_it_is_asked_now(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    fields = {**GROUPS, "save_strategy": "steps", "max_steps": 6}
    make("GRPO", untied_dir, tmp_path, hf_engine, {**fields, "save_steps": 2, "max_steps": 2}).train()
    resumed = make("GRPO", untied_dir, tmp_path, hf_engine, {**fields, "save_steps": 3, "logging_steps": 4})
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert steps_saved(tmp_path) == [2, 3, 6]
    assert [entry["step"] for entry in logs(resumed)] == [1, 2, 3, 4, 6]


def test_the_last_steps_of_a_run_are_logged(untied_dir: str, tmp_path: Path, hf_engine: Engine) -> None:
    run = make("GRPO", untied_dir, tmp_path, hf_engine, {**GROUPS, "max_steps": 3, "logging_steps": 2})
    run.train()
    assert [entry["step"] for entry in logs(run)] == [2, 3]
    (
        silent := make(
            "GRPO", untied_dir, tmp_path, hf_engine, {**GROUPS, "max_steps": 1, "logging_strategy": "no"}
        )
    ).train()
    assert logs(silent) == []
