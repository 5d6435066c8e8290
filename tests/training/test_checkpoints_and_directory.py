"""Run directories: continued from the last whole checkpoint, or left alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.errors import InputError, LockstepError
from lockstep.training.run_files.checkpoints import (
    checkpoint_step,
    cut_back,
    guarded_save,
    last_checkpoint,
    whole_or_absent,
)
from lockstep.training.run_files.run_directory import RunPlace
from lockstep.training.run_files.run_directory import open_run as locked_run


def open_run(folder: Path, settings: dict[str, object]) -> RunPlace:
    with locked_run(folder, settings) as place:
        return place


def checkpoint(folder: Path, step: int, *, whole: bool = True) -> Path:
    made = folder / f"checkpoint-{step}"
    made.mkdir(parents=True)
    (made / "model.safetensors").write_text("weights")
    if whole:
        (made / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return made


def test_a_checkpoint_that_was_being_written_does_not_count(tmp_path: Path) -> None:
    checkpoint(tmp_path, 5)
    checkpoint(tmp_path, 10, whole=False)
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-5"
    (tmp_path / "checkpoint-10" / "trainer_state.json").write_text('{"global_st')
    assert checkpoint_step(last_checkpoint(tmp_path)) == 5  # type: ignore[arg-type]
    assert last_checkpoint(tmp_path / "nowhere") is None


def test_cutting_back_removes_what_came_after(tmp_path: Path) -> None:
    first = checkpoint(tmp_path, 5)
    later = checkpoint(tmp_path, 7)
    checkpoint(tmp_path, 10, whole=False)
    lines = [json.dumps({"step": step}) for step in (0, 4, 5, 6, 7)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 8, "cut')
    cut_back(tmp_path, first)
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [0, 4, 5]
    assert not (tmp_path / "checkpoint-10").exists()
    assert not later.exists()
    cut_back(tmp_path, None)
    assert not (tmp_path / "metrics.jsonl").exists()
    assert not first.exists()


def test_a_failed_save_leaves_nothing_of_itself_and_names_the_last_good_one(tmp_path: Path) -> None:
    checkpoint(tmp_path, 5)

    def fails_half_way() -> None:
        with whole_or_absent(tmp_path / "checkpoint-10"), guarded_save(tmp_path, 10):
            checkpoint(tmp_path, 10, whole=False)
            raise OSError(28, "No space left on device")

    with pytest.raises(LockstepError, match=r"checkpoint-10 could not be written.*last good one is .*checkpoint-5"):
        fails_half_way()
    assert not (tmp_path / "checkpoint-10").exists()
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-5"


def test_an_interrupted_run_goes_on_only_with_the_same_settings(tmp_path: Path) -> None:
    settings = {"learning_rate": 1e-5, "seed": 1}
    assert open_run(tmp_path / "run", settings).checkpoint is None
    good = checkpoint(tmp_path / "run", 5)
    assert open_run(tmp_path / "run", settings).checkpoint == good
    with pytest.raises(InputError, match=r"other settings \(seed was 1, is 2\)"):
        open_run(tmp_path / "run", {**settings, "seed": 2})


def test_a_finished_run_is_left_alone_and_the_next_goes_beside_it(tmp_path: Path) -> None:
    open_run(tmp_path / "run", {})
    (tmp_path / "run" / "summary.json").write_text("{}")
    assert open_run(tmp_path / "run", {}).folder == tmp_path / "run-2"
    (tmp_path / "run-2" / "summary.json").write_text("{}")
    assert open_run(tmp_path / "run", {"seed": 5}).folder == tmp_path / "run-3"


def test_checkpoints_of_something_else_are_not_touched(tmp_path: Path) -> None:
    other = checkpoint(tmp_path / "run", 5)
    with pytest.raises(InputError, match="checkpoints of something else"):
        open_run(tmp_path / "run", {})
    assert other.exists()


def test_two_processes_cannot_share_a_directory(tmp_path: Path) -> None:
    with locked_run(tmp_path / "run", {}), pytest.raises(InputError, match="another process is running in"):
        open_run(tmp_path / "run", {})
    open_run(tmp_path / "run", {})


def test_a_start_that_failed_does_not_hold_the_directory_for_its_settings(tmp_path: Path) -> None:
    open_run(tmp_path / "run", {"model": "typo"})
    assert open_run(tmp_path / "run", {"model": "right"}).checkpoint is None
