"""What a trainer in a script leaves in its output directory: the files of the command line, also when the run fails."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from tiny import CONTEXT
from transformers import ProgressCallback, TrainerCallback

from lockstep import GRPOConfig, GRPOTrainer
from lockstep.contract.protocol import Engine
from lockstep.engines.transformers_engine import TransformersEngine
from lockstep.errors import ProofError
from lockstep.report.kept_rollouts import rollout_files
from lockstep.report.live import LogLines
from lockstep.report.page.run_record import read_run
from lockstep.run.files.checkpoints import METRICS
from lockstep.run.files.rollouts import evaluation_line, proven_evaluation, save_evaluation
from lockstep.run.trainers import run_files
from lockstep.run.trainers.run_files import RunFiles
from lockstep.tokens.chat import load_tokenizer
from lockstep.watch import inputs as surroundings
from lockstep.watch.receipt import Receipt, read_receipt

PROMPTS = Dataset.from_dict({"prompt": [f"what is {i} + {i}" for i in range(8)]})
HELD_OUT = Dataset.from_dict({"prompt": [f"how much is {i} + {i}" for i in range(3)]})


def by_length(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(len(ids) + ids[0] % 7) for ids in completion_ids]


@pytest.fixture(scope="module")
def engine(untied_dir: str) -> Engine:
    return TransformersEngine(
        untied_dir, load_tokenizer(untied_dir), dtype=torch.float32, max_model_len=CONTEXT
    )


@pytest.fixture
def make(untied_dir: str, tmp_path: Path, engine: Engine) -> Callable[..., GRPOTrainer]:
    def made(data: Any = None, **fields: Any) -> GRPOTrainer:
        base: dict[str, Any] = {
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "max_completion_length": 8,
        }
        base |= {
            "max_steps": 3,
            "logging_steps": 1,
            "save_strategy": "no",
            "bf16": False,
            "learning_rate": 1e-3,
        }
        base |= {"report_to": "none", "num_generations_eval": 2, "recheck_rewards": False}
        config = GRPOConfig(**{"output_dir": str(tmp_path / "run"), **base, **fields})
        return GRPOTrainer(untied_dir, by_length, config, PROMPTS, data, engine=engine)

    return made


class Seen(TrainerCallback):
    """Calls a function after each step."""

    def __init__(self, look: Callable[[int], None]) -> None:
        self._look = look

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._look(state.global_step)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_source_tree_that_is_not_installed_has_no_version_and_trains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version(name: str) -> str:
        if name == "lockstep-rl":
            raise PackageNotFoundError(name)
        return "1.0"

    assert "lockstep" in surroundings.versions()
    # What this process has read stays.
    monkeypatch.setattr(surroundings, "version", version)
    assert surroundings.versions()["torch"] != "1.0"
    monkeypatch.setattr(surroundings, "installed_version", surroundings.installed_version.__wrapped__)
    assert surroundings.versions()["torch"] == "1.0"
    assert "lockstep" not in surroundings.versions()


def test_a_script_leaves_the_files_of_the_command_line(
    make: Callable[..., GRPOTrainer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, folder = make(HELD_OUT), tmp_path / "run"
    before = run.evaluate()
    pages: dict[int, str] = {}
    run.add_callback(
        Seen(lambda step: pages.update({step: (folder / "report.html").read_text()} if step > 1 else {}))
    )
    run.train()
    after = run.evaluate()
    assert names(folder) == {
        ".lock", "about.json", "after.json", "before.json", "end.json", "metrics.jsonl", "receipt.jsonl",
        "report.html", "rollouts",
        "shown_rollouts.jsonl", "summary.json",
    }  # fmt: skip
    record = read_run(folder)
    # From the first log on there is a report.
    assert "Not at its end: step 1 of 3" in pages[2]
    assert [line["step"] for line in record.steps] == [1, 2, 3]
    assert len(record.metrics) == 3
    assert (record.before or {})["metrics"]["eval_reward"] == before["eval_reward"]
    assert record.summary["eval_reward_after"] == after["eval_reward"]
    assert (record.summary["steps"], record.end["ended"]) == (3, "finished")
    assert record.about["rows"] == {"train": 8, "eval": 3}
    assert "learning_rate" in record.about["chosen"]
    assert "All proofs passed; finished after 3 steps" in (folder / "report.html").read_text()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("step ", "held-out"))]
    assert [line.split("  ")[0] for line in lines if "gap" in line] == ["step 1/3", "step 2/3", "step 3/3"]
    assert all(len(line) < 200 for line in lines)
    assert lines[0].startswith(f"held-out reward {before['eval_reward']:.3f}")
    # Trained again in the same directory: the earlier lines are kept beside the new ones.
    again = make(max_steps=1)
    again.train()
    assert len(read_run(folder).steps) == 1
    assert len((folder / "metrics.previous.jsonl").read_text().splitlines()) == 3
    assert [step for step, _ in rollout_files(folder)] == [1]
    assert not (folder / "after.json").exists()
    assert not (folder / "before.json").exists()


def test_an_evaluation_at_the_start_is_in_the_metrics_and_the_report(
    make: Callable[..., GRPOTrainer], tmp_path: Path
) -> None:
    folder, saved = tmp_path / "run", {"save_strategy": "steps", "save_steps": 2}
    for earlier in (0, 2):
        run = make(HELD_OUT, eval_on_start=True, max_steps=2 + earlier, **saved)
        run.train(resume_from_checkpoint=str(folder / "checkpoint-2") if earlier else None)
        record = read_run(folder)
        evaluated = [line["step"] for line in record.metrics if "eval_reward" in line]
        assert evaluated == ([0, 2] if earlier else [0])
        assert [line["step"] for line in record.steps] == list(range(1, 3 + earlier))
    assert "held out" in (folder / "report.html").read_text()
    # The lines of the part before are those of the checkpoint.
    assert not list(folder.glob("damaged-*"))


def test_a_callback_that_changes_the_folder_does_not_split_the_run(
    make: Callable[..., GRPOTrainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    run = make(output_dir="run", save_strategy="steps", save_steps=1)
    run.add_callback(Seen(lambda step: os.chdir(tmp_path / "elsewhere")))
    run.train()
    assert not list((tmp_path / "elsewhere").iterdir())
    assert len(read_run(tmp_path / "run").steps) == 3
    assert {"checkpoint-3", "summary.json", "receipt.jsonl"} <= names(tmp_path / "run")


def strict(text: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_the_files_of_a_run_are_json_where_a_figure_is_nan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = SimpleNamespace(
        args=SimpleNamespace(output_dir=str(tmp_path)), ranks=SimpleNamespace(owner=True)
    )
    files, nan = RunFiles(trainer, 0.0), float("nan")  # type: ignore[arg-type]
    files.on_train_begin(None, None, None)
    monkeypatch.setattr(files, "write_report", lambda: None)
    monkeypatch.setattr(files, "_begin", lambda state: None)
    files.on_log(
        None, SimpleNamespace(global_step=3), None, {"loss": nan, "entropy": 1.0, "eval_reward": float("inf")}
    )
    assert strict((tmp_path / "metrics.jsonl").read_text()) == {
        "step": 3,
        "loss": None,
        "entropy": 1.0,
        "eval_reward": None,
    }
    save_evaluation(tmp_path / "before.json", {"eval_reward": nan, "eval_problems": 2.0}, [])
    assert strict((tmp_path / "before.json").read_text())["metrics"] == {
        "eval_reward": None,
        "eval_problems": 2.0,
    }
    receipt = Receipt(tmp_path / "receipt.jsonl", 0)
    receipt.append(evaluation_line(tmp_path / "before.json", 0) or {})
    assert strict((tmp_path / "receipt.jsonl").read_text())["metrics"]["eval_reward"] is None
    record = read_run(tmp_path)
    assert math.isnan(record.steps[0]["loss"])
    assert math.isnan((record.before or {})["metrics"]["eval_reward"])
    for _ in range(2):
        # The second time, the file is restored from the receipt.
        found = proven_evaluation(tmp_path / "before.json", read_receipt(tmp_path / "receipt.jsonl"))[
            "metrics"
        ]
        assert math.isnan(found["eval_reward"])
        (tmp_path / "before.json").unlink()


def test_a_failed_proof_leaves_its_report_and_its_rollouts(
    make: Callable[..., GRPOTrainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make()

    def fail(*args: Any, **kwargs: Any) -> None:
        if run.state.global_step == 1:
            raise ProofError("gap", "mean 0.5 <b>", "the weights differ", "look")

    monkeypatch.setattr(run.source.proofs, "check", fail)
    with pytest.raises(ProofError, match="the weights differ"):
        run.train()
    record, page = read_run(tmp_path / "run"), (tmp_path / "run" / "report.html").read_text()
    assert (record.end["ended"], record.end["check"], record.end["step"]) == ("failed", "gap", 1)
    assert record.summary == {}
    # The rollouts of the step that was not taken are there, with the trainer's own log-probs.
    assert [step for step, _ in rollout_files(tmp_path / "run")] == [1, 2]
    for words in ("before optimizer step 2 of 3", "mean 0.5 &lt;b&gt;", "The tokens with the largest gaps"):
        assert words in page
    # The next run begins without the failure.
    monkeypatch.undo()
    make(max_steps=1).train()
    assert read_run(tmp_path / "run").end["ended"] == "finished"


def test_an_interrupt_and_another_error_are_named_and_nothing_hides_them(
    make: Callable[..., GRPOTrainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(error: BaseException) -> Callable[[int], None]:
        def look(step: int) -> None:
            if step == 2:
                raise error

        return look

    run = make()
    run.add_callback(Seen(stop(KeyboardInterrupt())))
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert "Interrupted (SIGINT) after step 2 of 3" in (tmp_path / "run" / "report.html").read_text()
    run = make()
    run.add_callback(Seen(stop(ZeroDivisionError("mine"))))
    monkeypatch.setattr(RunFiles, "write_report", lambda self: (_ for _ in ()).throw(OSError("no room")))
    with pytest.raises(ZeroDivisionError, match="mine"):
        run.train()
    # The page could not be written at the log of step 1, and step 2 was still taken.
    record = read_run(tmp_path / "run")
    assert (len(record.steps), record.end["step"], record.end["message"]) == (1, 2, "mine")


def test_the_files_can_be_switched_off_and_the_progress_bar_can_be_asked_for(
    make: Callable[..., GRPOTrainer], tmp_path: Path
) -> None:
    run = make(disable_tqdm=False, max_steps=1)
    kinds = [type(callback) for callback in run.callback_handler.callbacks]
    assert ProgressCallback in kinds
    assert LogLines not in kinds
    run.remove_callback(RunFiles)
    run.train()
    assert names(tmp_path / "run") == {".lock", "receipt.jsonl"}
    kinds = [type(callback) for callback in make().callback_handler.callbacks]
    assert ProgressCallback not in kinds
    assert LogLines in kinds


def test_several_evaluation_sets_are_in_the_summary_by_name(
    make: Callable[..., GRPOTrainer], tmp_path: Path
) -> None:
    run = make({"easy": HELD_OUT, "hard": HELD_OUT}, max_steps=1)
    run.train()
    found = run.evaluate()
    summary = read_run(tmp_path / "run").summary
    assert summary["eval_hard_reward_after"] == found["eval_hard_reward"]
    assert summary["eval_easy_problems"] == 3
    assert METRICS in names(tmp_path / "run")


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), OSError(28, "No space left on device"), KeyError("loss")]
)
def test_a_run_has_its_summary_only_when_it_has_its_report(
    make: Callable[..., GRPOTrainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """A run with a summary is finished: the same command would begin a new one beside it."""
    run, folder = make(max_steps=1), tmp_path / "run"
    real = run_files.render_report

    def fails(record: Any) -> str:
        if record.end.get("ended") == "finished":
            raise error
        return real(record)

    monkeypatch.setattr(run_files, "render_report", fails)
    with nullcontext() if isinstance(error, KeyError) else pytest.raises(type(error)):
        run.train()
    # A page that cannot be made is a warning. Without the warning, the run could never end.
    assert (folder / "summary.json").exists() == isinstance(error, KeyError)
    monkeypatch.undo()
    if not isinstance(error, KeyError):
        run.files.finish()
        assert "tokens per second" in (folder / "report.html").read_text()
        assert (folder / "summary.json").exists()
