"""A run directory is continued from the last complete checkpoint, or not changed."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from full_disk import full_disk
from tiny import make_model, make_tokenizer
from transformers import TrainingArguments

from lockstep import GRPOConfig
from lockstep.config.table import INHERITED
from lockstep.errors import InputError, LockstepError, writing
from lockstep.run.files import directory as run_directory
from lockstep.run.files.checkpoints import (
    UNFINISHED,
    checkpoint_step,
    cut_back,
    finish_replacement,
    guarded_save,
    last_checkpoint,
    publish,
    staged_checkpoint,
    staging_place,
)
from lockstep.run.files.directory import RunPlace
from lockstep.run.files.directory import open_run as locked_run
from lockstep.run.files.identity import bookkeeping, changed_fields, curve_settings
from lockstep.watch.receipt import RECEIPT, Receipt
from lockstep.watch.resume import seal


def open_run(folder: Path, settings: dict[str, object]) -> RunPlace:
    with locked_run(folder, settings) as place:
        return place


def checkpoint(folder: Path, step: int, *, whole: bool = True) -> Path:
    made = folder / f"checkpoint-{step}"
    made.mkdir(parents=True)
    (made / "model.safetensors").write_text("weights")
    if whole:
        receipt = Receipt(folder / RECEIPT, step)
        receipt.append({"kind": "start", "step": step})
        state = {"global_step": step}
        receipt.append({"kind": "checkpoint", "step": step, "digests": seal(made, {}, state)})
        (made / "trainer_state.json").write_text(json.dumps(state))
    return made


def unfinished(folder: Path, step: int) -> None:
    """A checkpoint that was being written when the process died."""
    made = staging_place(folder / f"checkpoint-{step}")
    made.mkdir(parents=True, exist_ok=True)
    (made / "model.safetensors").write_text("half")


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
    unfinished(tmp_path, 10)
    lines = [json.dumps({"step": step}) for step in (0, 4, 5, 6, 7)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 8, "cut')
    cut_back(tmp_path, first)
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        0,
        4,
        5,
    ]
    assert not (tmp_path / UNFINISHED).exists()
    assert not later.exists()
    cut_back(tmp_path, None)
    assert not (tmp_path / "metrics.jsonl").exists()
    assert first.exists()


def test_a_failed_save_leaves_nothing_of_itself_and_names_the_last_good_one(tmp_path: Path) -> None:
    checkpoint(tmp_path, 5)

    def fails_half_way() -> None:
        with staged_checkpoint(tmp_path / "checkpoint-10"), guarded_save(tmp_path, 10):
            unfinished(tmp_path, 10)
            raise OSError(28, "No space left on device")

    with pytest.raises(
        LockstepError, match=r"checkpoint-10 could not be written.*last good one is .*checkpoint-5"
    ):
        fails_half_way()
    assert not (tmp_path / "checkpoint-10").exists()
    assert not list((tmp_path / UNFINISHED).rglob("*.*"))
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-5"


WRITERS: dict[str, Callable[[Path], Any]] = {
    # A bare Exception.
    "tokenizers": lambda folder: make_tokenizer().save_pretrained(folder),
    # SafetensorError.
    "safetensors": lambda folder: make_model().save_pretrained(folder),
    # RuntimeError of several lines, which names no file.
    "torch": lambda folder: torch.save({"state": torch.zeros(5000)}, folder / "optimizer.pt"),
    # OSError.
    "text": lambda folder: (folder / "vocab.txt").write_text("word\n" * 1000),
    "arrow": lambda folder: pq.write_table(
        pa.table({"text": [f"{n:050}" for n in range(999)]}), folder / "x.parquet"
    ),
}


@pytest.mark.parametrize("name", WRITERS)
def test_whatever_a_library_raises_on_a_full_disk_is_one_line(name: str, tmp_path: Path) -> None:
    checkpoint(tmp_path, 5)
    staging_place(tmp_path / "checkpoint-10").mkdir(parents=True)
    with (
        pytest.raises(
            LockstepError, match=r"^checkpoint-10 could not be written \(.* GiB free in .*\): .*"
        ) as found,
        guarded_save(tmp_path, 10),
        full_disk(),
    ):
        WRITERS[name](staging_place(tmp_path / "checkpoint-10"))
    assert str(found.value).endswith("checkpoint-5. Make room and start the same command again")
    assert "\n" not in str(found.value)
    assert not (tmp_path / "checkpoint-10").exists()


@pytest.mark.parametrize("error", [KeyError("x"), TypeError("x"), AssertionError("x"), KeyboardInterrupt()])
def test_a_fault_of_a_program_is_no_full_disk(error: BaseException, tmp_path: Path) -> None:
    with pytest.raises(type(error)), writing("the model", tmp_path):
        raise error


def test_an_interrupted_run_goes_on_only_with_the_same_settings(tmp_path: Path) -> None:
    given = {"learning_rate": 1e-5, "seed": 1}
    assert open_run(tmp_path / "run", given).checkpoint is None
    good = checkpoint(tmp_path / "run", 5)
    assert open_run(tmp_path / "run", given).checkpoint == good
    with pytest.raises(InputError, match=r"other settings \(seed was 1, is 2\)"):
        open_run(tmp_path / "run", {**given, "seed": 2})
    sizes = {**given, "per_device_train_batch_size": 4}
    with pytest.raises(
        InputError, match="keep per_device_train_batch_size, and lower token_budget, which a run may"
    ):
        open_run(tmp_path / "run", sizes)


def test_a_run_whose_precision_followed_another_device_is_told_so(tmp_path: Path) -> None:
    open_run(tmp_path / "run", {"bf16": False})
    good = checkpoint(tmp_path / "run", 5)
    # An older version of Lockstep stored these two.
    on_gpu = {"bf16": False, "use_cpu": False, "dataloader_pin_memory": True}
    assert open_run(tmp_path / "run", on_gpu).checkpoint == good
    with pytest.raises(
        InputError, match=r"\(bf16 was False, is True\)\. If the device has changed: .* set it to False"
    ):
        open_run(tmp_path / "run", {**on_gpu, "bf16": True})


def test_a_finished_run_is_left_alone_and_the_next_goes_beside_it(tmp_path: Path) -> None:
    open_run(tmp_path / "run", {})
    (tmp_path / "run" / "summary.json").write_text("{}")
    assert open_run(tmp_path / "run", {}).folder == tmp_path / "run-2"
    (tmp_path / "run-2" / "summary.json").write_text("{}")
    assert open_run(tmp_path / "run", {"seed": 5}).folder == tmp_path / "run-3"


BOOKKEEPING = {
    "token_budget": 512,
    "logits_chunk_size": 64,
    "vllm_gpu_memory_utilization": 0.2,
    "logging_steps": 5,
    "save_steps": 7,
    "output_dir": "elsewhere",
    "report_to": ["tensorboard"],
}


def settings(**fields: Any) -> dict[str, Any]:
    return curve_settings(
        GRPOConfig(**{"output_dir": "out", "bf16": False, "max_steps": 10, "seed": 1, **fields})
    )


@pytest.mark.parametrize("name", BOOKKEEPING)
def test_a_run_goes_on_with_other_bookkeeping(tmp_path: Path, name: str) -> None:
    open_run(tmp_path / "run", settings())
    good = checkpoint(tmp_path / "run", 5)
    assert open_run(tmp_path / "run", settings(**{name: BOOKKEEPING[name]})).checkpoint == good


def test_a_run_whose_settings_were_written_when_bookkeeping_counted_goes_on(tmp_path: Path) -> None:
    open_run(tmp_path / "run", settings())
    good = checkpoint(tmp_path / "run", 5)
    file = tmp_path / "run" / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"token_budget": 2048, "save_steps": 5}))
    assert open_run(tmp_path / "run", settings()).checkpoint == good


def test_every_field_of_transformers_of_which_something_is_said_exists() -> None:
    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    # TrainingArguments had it until transformers 5.
    assert INHERITED.keys() - known <= {"logging_dir"}
    assert "logging_dir" in bookkeeping()


def test_an_interrupted_run_may_become_longer_and_not_shorter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    open_run(tmp_path / "run", settings())
    good = checkpoint(tmp_path / "run", 5)
    assert open_run(tmp_path / "run", settings(max_steps=20)).checkpoint == good
    said = capsys.readouterr().out
    assert "max_steps was 10, is 20" in said
    assert "learning rate (linear) follows the new length from step 6 on" in said
    with pytest.raises(InputError, match=r"other settings \(max_steps was 20, is 10\)"):
        open_run(tmp_path / "run", settings())


def test_a_finished_run_goes_on_in_its_directory_only_where_more_steps_are_asked_for(tmp_path: Path) -> None:
    fixed = {"lr_scheduler_type": "constant"}
    run = open_run(tmp_path / "run", settings(**fixed)).folder
    good = checkpoint(run, 10)
    (run / "summary.json").write_text("{}")
    assert open_run(run, settings(**fixed)).folder == tmp_path / "run-2"
    assert open_run(run, settings(**fixed, max_steps=20, seed=2)).folder == tmp_path / "run-2"
    longer = open_run(run, settings(**fixed, max_steps=20))
    assert (longer.folder, longer.checkpoint) == (run, good)
    assert (run / "summary-at-step-10.json").exists()
    # Killed before its new end, it is an unfinished run as any other.
    assert open_run(run, settings(**fixed, max_steps=20)).checkpoint == good


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff\xfe\x00"])
def test_a_run_none_of_whose_checkpoints_can_be_read_is_refused_and_left_as_it_is(
    tmp_path: Path, content: bytes
) -> None:
    open_run(tmp_path / "run", {})
    for step in (5, 10):
        (checkpoint(tmp_path / "run", step) / "trainer_state.json").write_bytes(content)
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(
        InputError, match=r"no checkpoint in .* can be read: .* in checkpoint-5, checkpoint-10\. Nothing"
    ):
        open_run(tmp_path / "run", {})
    for step in (5, 10):
        assert (tmp_path / "run" / f"checkpoint-{step}" / "model.safetensors").read_text() == "weights"
    assert (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_damaged_checkpoint_beside_a_good_one_is_set_aside_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    open_run(tmp_path / "run", {})
    good = checkpoint(tmp_path / "run", 5)
    # The first lost its state; it cannot have been under way when the run was killed.
    checkpoint(tmp_path / "run", 2, whole=False)
    (checkpoint(tmp_path / "run", 10) / "trainer_state.json").write_text('{"global_st')
    assert open_run(tmp_path / "run", {}).checkpoint == good
    said = capsys.readouterr().out
    for step in (2, 10):
        aside = tmp_path / "run" / f"damaged-checkpoint-{step}"
        assert (aside / "model.safetensors").read_text() == "weights"
        assert f"checkpoint-{step} cannot be read" in said
    assert last_checkpoint(tmp_path / "run") == good


def test_a_run_that_was_killed_in_its_first_save_starts_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    open_run(tmp_path / "run", {})
    # The receipt names the checkpoint before its trainer state is written.
    Receipt(tmp_path / "run" / RECEIPT, 0).append({"kind": "checkpoint", "step": 5, "digests": "0"})
    unfinished(tmp_path / "run", 5)
    assert open_run(tmp_path / "run", {}).checkpoint is None
    assert not (tmp_path / "run" / UNFINISHED).exists()
    assert not list((tmp_path / "run").glob("*until*"))
    assert "names" not in capsys.readouterr().out


def test_settings_that_cannot_be_read_are_one_clear_error(tmp_path: Path) -> None:
    open_run(tmp_path / "run", {})
    checkpoint(tmp_path / "run", 5)
    (tmp_path / "run" / "run.json").write_text('{"seed"')
    with pytest.raises(InputError, match=r"run\.json cannot be read"):
        open_run(tmp_path / "run", {})


def test_checkpoints_of_something_else_are_not_touched(tmp_path: Path) -> None:
    other = checkpoint(tmp_path / "run", 5)
    with pytest.raises(InputError, match="checkpoints of something else"):
        open_run(tmp_path / "run", {})
    assert other.exists()


def test_two_processes_cannot_share_a_directory(tmp_path: Path) -> None:
    with (
        locked_run(tmp_path / "run", {}),
        pytest.raises(InputError, match="another command of this process is running in"),
    ):
        open_run(tmp_path / "run", {})
    open_run(tmp_path / "run", {})


def test_a_run_that_ends_while_another_command_looks_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, real = open_run(tmp_path / "run", {}).folder, run_directory.locked

    @contextmanager
    def ends_first(folder: Path, alone: str) -> Iterator[None]:
        if not (run / "summary.json").exists():
            (run / "summary.json").write_text("{}")
        with real(folder, alone):
            yield

    monkeypatch.setattr(run_directory, "locked", ends_first)
    assert open_run(run, {}).folder == tmp_path / "run-2"


def test_a_start_that_failed_does_not_hold_the_directory_for_its_settings(tmp_path: Path) -> None:
    open_run(tmp_path / "run", {"model": "typo"})
    assert open_run(tmp_path / "run", {"model": "right"}).checkpoint is None


def logs_of(run: Path, *steps: int) -> None:
    for name in ("metrics.jsonl", "shown_rollouts.jsonl"):
        (run / name).write_text("".join(json.dumps({"step": step, "loss": 0.5}) + "\n" for step in steps))


def files_of(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.mark.parametrize("lost", ["trainer_state.json", "every file"])
def test_an_only_checkpoint_that_lost_its_state_is_not_deleted(tmp_path: Path, lost: str) -> None:
    run = open_run(tmp_path / "run", {}).folder
    made = checkpoint(run, 5)
    logs_of(run, 4, 5, 6)
    for path in made.iterdir():
        if lost in (path.name, "every file"):
            path.unlink()
    before = files_of(run)
    with pytest.raises(
        InputError, match=r"no checkpoint in .* in checkpoint-5\. Nothing was changed.* move them away"
    ):
        open_run(run, {})
    assert files_of(run) == before
    # The remedy that the message names.
    made.rename(run / "away")
    assert open_run(run, {}).checkpoint is None


@pytest.mark.parametrize("lost", ["its state", "the folder"])
def test_what_came_after_a_lost_checkpoint_is_kept_beside_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lost: str
) -> None:
    run = open_run(tmp_path / "run", {}).folder
    good, last = checkpoint(run, 5), checkpoint(run, 10)
    logs_of(run, 4, 5, 6, 10, 11)
    receipt = (run / RECEIPT).read_bytes()
    if lost == "its state":
        (last / "trainer_state.json").unlink()
    else:
        last.rename(run / "away")
    # The state of the earlier checkpoint has no history of these logs.
    metrics = (run / "metrics.jsonl").read_bytes()
    assert open_run(run, {}).checkpoint == good
    said = capsys.readouterr().out
    assert "receipt.jsonl names checkpoint-10" in said
    assert "goes on from checkpoint-5" in said
    assert (run / "receipt-until-step-10.jsonl").read_bytes() == receipt
    assert (run / "shown_rollouts-until-step-10.jsonl").read_bytes() == metrics
    assert open_run(run, {}).checkpoint == good
    assert "names checkpoint-10" not in capsys.readouterr().out


def test_logs_that_name_checkpoints_are_kept_where_every_checkpoint_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = open_run(tmp_path / "run", {}).folder
    checkpoint(run, 5).rename(tmp_path / "away")
    logs_of(run, 4, 5)
    receipt = (run / RECEIPT).read_bytes()
    assert open_run(run, {}).checkpoint is None
    assert "names checkpoint-5, which cannot be used or is gone; the run starts from the beginning" in (
        capsys.readouterr().out
    )
    assert (run / "receipt-until-step-5.jsonl").read_bytes() == receipt
    # A kill before the first checkpoint is no loss, and is not said.
    Receipt(run / RECEIPT, 0).append({"kind": "start", "step": 0})
    assert open_run(run, {}).checkpoint is None
    assert "names" not in capsys.readouterr().out


@pytest.mark.parametrize("killed", ["before", "after"])
def test_a_checkpoint_that_is_written_again_is_there_after_a_kill_between_its_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    old = checkpoint(tmp_path, 5)
    with staged_checkpoint(old) as folder:
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text("new")
        (folder / "trainer_state.json").write_text('{"global_step": 5}')

        class Killed(Exception):
            pass

        real, seen = Path.rename, []

        def rename(path: Path, target: Path) -> Path:
            seen.append(path)
            if len(seen) == 2 and killed == "before":
                raise Killed
            return real(path, target)

        monkeypatch.setattr(Path, "rename", rename)
        try:
            publish(old)
        except Killed:
            assert last_checkpoint(tmp_path) is None
    monkeypatch.undo()
    finish_replacement(tmp_path)
    assert (last_checkpoint(tmp_path) / "model.safetensors").read_text() == "new"  # type: ignore[operator]
    assert len(seen) == 2


def test_a_checkpoint_that_could_not_be_replaced_is_there_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = checkpoint(tmp_path, 5)
    (old / "model.safetensors").write_text("old")

    def fail(made: Path, place: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("lockstep.run.files.checkpoints.publish_folder", fail)
    with suppress(OSError), staged_checkpoint(old) as folder:
        folder.mkdir(parents=True)
        (folder / "trainer_state.json").write_text('{"global_step": 5}')
        publish(old)
        pytest.fail("the disk is full")
    finish_replacement(tmp_path)
    assert (old / "model.safetensors").read_text() == "old"
    assert last_checkpoint(tmp_path) == old


def test_every_file_of_a_checkpoint_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[str] = set()
    monkeypatch.setattr("os.fsync", lambda handle: synced.add(os.readlink(f"/proc/self/fd/{handle}")))
    place, made = tmp_path / "checkpoint-5", staging_place(tmp_path / "checkpoint-5")
    with staged_checkpoint(place):
        (made / "shards").mkdir(parents=True)
        for name in ("trainer_state.json", "shards/part-1.safetensors"):
            (made / name).write_text("x")
        real = Path.rename

        def rename(path: Path, target: Path) -> Path:
            wanted = {
                str(made / name) for name in ("", "shards", "trainer_state.json", "shards/part-1.safetensors")
            }
            assert {name.rstrip("/") for name in wanted} <= synced
            return real(path, target)

        monkeypatch.setattr(Path, "rename", rename)
        publish(place)
    assert str(tmp_path) in synced


def test_a_start_after_the_checkpoint_does_not_count(tmp_path: Path) -> None:
    """`resume_with_changes`, a kill, and then the original data."""
    run = open_run(tmp_path / "run", {}).folder
    checkpoint(run, 5)
    Receipt(run / RECEIPT, 5).append({"kind": "start", "step": 5, "inputs": "others"})
    assert open_run(run, {}).start == {**(open_run(run, {}).start or {}), "kind": "start", "step": 5}
    assert "inputs" not in (open_run(run, {}).start or {})


@pytest.mark.parametrize("name", ["shown_rollouts.jsonl", "metrics.jsonl"])
@pytest.mark.parametrize("damage", ["a byte", "a line", "a folder"])
def test_a_log_that_only_the_report_needs_is_set_aside_when_it_is_broken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, damage: str
) -> None:
    run = open_run(tmp_path / "run", {}).folder
    good = checkpoint(run, 5)
    path = run / name
    lines = [
        b'{"step": 4, "loss": 0.5}\n',
        b'{"step": 5, "text": "abc"}\n',
        b'{"step": 5, "loss": 0.5}\n',
        b'{"step',
    ]
    if damage == "a folder":
        path.mkdir()
    else:
        lines[1] = b'{"step": 5, "text": "\xff"}\n' if damage == "a byte" else b"garbage\n"
        path.write_bytes(b"".join(lines))
    assert open_run(run, {}).checkpoint == good
    assert f"it is now {run / f'damaged-{name}'}" in capsys.readouterr().out
    if damage != "a folder":
        assert (run / f"damaged-{name}").read_bytes() == b"".join(lines)
        if name == "shown_rollouts.jsonl":
            assert path.read_bytes() == lines[0] + lines[2]


def test_the_settings_are_whole_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_run(tmp_path / "run", {"seed": 1}).folder
    good, before = checkpoint(run, 5), (run / "run.json").read_text()
    # The disk is full at the first write, at the second, and so on, until it is large enough.
    for whole in itertools.count():
        left = iter(range(whole))

        def full(handle: int, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.fsync", full)
        with suppress(OSError):
            assert open_run(run, {"seed": 1}).checkpoint == good
            break
        assert (run / "run.json").read_text() == before
    assert whole > 1


# For each field that may change, a value that is not the default.
def other(name: str) -> Any:
    default = getattr(GRPOConfig(output_dir="out", bf16=False), name)
    known = {
        "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "logging_strategy": "epoch",
        "hub_strategy": "end",
        "load_best_model_at_end": True, "log_level": "debug", "log_level_replica": "debug", "report_to": "tensorboard",
    }  # fmt: skip
    if name in known:
        return known[name]
    return (
        not default
        if isinstance(default, bool)
        else default + 1
        if isinstance(default, int | float)
        else None
    )


def test_no_field_that_may_change_changes_another_one() -> None:
    """`eval_strategy` sets `do_eval`, for example. A run must go on with it."""
    known, tried = {field.name for field in dataclasses.fields(GRPOConfig)}, []
    for name in sorted(bookkeeping() & known):
        value = other(name)
        if value is None or name in ("fsdp", "deepspeed", "push_to_hub"):
            continue
        more: dict[str, Any] = {"eval_strategy": "steps", "save_strategy": "steps"} if "best" in name else {}
        try:
            changed = settings(**{**more, name: value})
        except (LockstepError, ValueError):
            # The value does not fit the other fields of this run.
            continue
        assert changed_fields(settings(), changed) == [], name
        tried.append(name)
    assert {"eval_strategy", "load_best_model_at_end", "save_steps", "logging_strategy"} <= set(tried), tried
