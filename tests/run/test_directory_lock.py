"""One process at a time writes into the directory of a run: commands and trainers of scripts alike."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TextIO

import pytest
from methods import GROUPS, PROMPTS, make
from transformers import TrainerCallback

from lockstep.contract.protocol import Engine
from lockstep.errors import InputError
from lockstep.run.files.directory import LOCK, Occupied, _held, locked


@contextmanager
def forked(begin: Callable[[], object] = lambda: None) -> Iterator[None]:
    """A fork that runs a function, keeps what it returns, and lives as long as the block."""
    (ready, tell), (wait, end) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.close(end)
        kept = begin()
        os.write(tell, b"x")
        os.read(wait, 1)
        del kept
        os._exit(0)
    os.read(ready, 1)
    try:
        yield
    finally:
        os.write(end, b"x")
        os.waitpid(child, 0)
        for handle in (ready, tell, wait, end):
            os.close(handle)


def another_process(folder: Path) -> AbstractContextManager[None]:
    """A process of its own that holds the lock of a directory, as a trainer there does."""

    def take() -> TextIO:
        file = (folder / LOCK).open("a")
        fcntl.flock(file, fcntl.LOCK_EX)
        return file

    folder.mkdir(parents=True, exist_ok=True)
    return forked(take)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_second_script_is_refused_and_changes_nothing(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {**GROUPS, "max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    run = tmp_path / "run"
    make("GRPO", untied_dir, run, hf_engine, fields).train()
    second = make(
        "GRPO", untied_dir, run, hf_engine, {**fields, "max_steps": 2}, eval_dataset=PROMPTS.select(range(2))
    )
    with another_process(run):
        before = contents(run)
        for resume in (None, True, str(run / "checkpoint-1")):
            with pytest.raises(InputError, match="another process is running in"):
                second.train(resume_from_checkpoint=resume)
        assert second.evaluate()["eval_reward"] > 0
        assert (
            "the evaluation is not written to a file: another process is running" in capsys.readouterr().out
        )
        with pytest.raises(InputError, match="no evaluation set"):
            second.evaluate("another")
        assert contents(run) == before
    # The trainer is made anew in one process, as in a notebook.
    for steps in (2, 3):
        make("GRPO", untied_dir, run, hf_engine, {**fields, "max_steps": steps}).train(
            resume_from_checkpoint=True
        )
    assert json.loads((run / "end.json").read_text())["step"] == 3


def test_a_trainer_holds_the_lock_while_it_trains_and_no_longer(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    found: list[str] = []

    class Looks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            found.append(seen_by_another(tmp_path))
            with pytest.raises(Occupied, match="another trainer of this process is running in"):
                other.train()
            raise ZeroDivisionError

    other = make("GRPO", untied_dir, tmp_path, hf_engine, {**GROUPS, "max_steps": 1})
    run = make("GRPO", untied_dir, tmp_path, hf_engine, {**GROUPS, "max_steps": 1}, callbacks=[Looks()])
    with pytest.raises(ZeroDivisionError):
        run.train()
    assert found == ["held"]
    assert seen_by_another(tmp_path) == "free"


def seen_by_another(folder: Path) -> str:
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return "held"
    return "free"


def test_a_process_may_hold_a_directory_several_times_and_under_several_names(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with (
        locked(tmp_path / "run"),
        locked(tmp_path / "link", "trainer"),
        locked(tmp_path / "run" / ".." / "run"),
    ):
        with pytest.raises(Occupied), locked(tmp_path / "run", "trainer"):
            pass
        assert seen_by_another(tmp_path / "run") == "held"
    assert seen_by_another(tmp_path / "run") == "free"


def test_a_forked_process_that_outlives_a_trainer_does_not_hold_its_lock(tmp_path: Path) -> None:
    held = locked(tmp_path)
    held.__enter__()
    with forked():
        # As the kernel does where this process is killed: it closes the file.
        for file in _held.values():
            file.file.close()
        _held.clear()
        assert seen_by_another(tmp_path) == "free"


def test_a_forked_process_is_another_process(tmp_path: Path) -> None:
    with locked(tmp_path):
        child = os.fork()
        if not child:
            try:
                with locked(tmp_path):
                    os._exit(1)
            except Occupied:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert seen_by_another(tmp_path) == "held"


def test_a_file_system_without_locks_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(*_: Any) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with locked(tmp_path), locked(tmp_path, "trainer"):
        pass
    assert "has no locks (No locks available)" in capsys.readouterr().out
