"""The receipt of a run can be checked again and explained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from conftest import start
from stages import config
from tiny import CONTEXT

from lockstep.cli.main import main
from lockstep.engines.transformers_engine import TransformersEngine
from lockstep.run.trainers.methods import GRPOTrainer
from lockstep.tokens.chat import load_tokenizer
from lockstep.watch.gap import PooledGap


@pytest.fixture(scope="module")
def run_dir(untied_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of a real run with four rollouts per prompt; the trainer learns from each generation twice."""
    folder = tmp_path_factory.mktemp("run")
    engine = start("transformers", untied_dir)
    data = datasets.Dataset.from_dict({"prompt": ["hello", "world", "fox"] * 4})
    fields = {
        "max_steps": 4,
        "num_iterations": 2,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "bf16": False,
        "save_strategy": "steps",
        "save_steps": 4,
    }
    trainer = GRPOTrainer(
        untied_dir, lambda completions, **_: [float(i % 2) for i in range(len(completions))], config(folder, **fields),
        data, engine=engine,
    )  # fmt: skip
    trainer.train()
    with (folder / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in trainer.state.log_history if "loss" in entry)
    engine.close()
    return folder


def test_the_receipt_says_what_the_proofs_stood_on(run_dir: Path) -> None:
    start_line, *lines = [json.loads(line) for line in (run_dir / "receipt.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert start_line["kind"] == "start"
    assert start_line["engine"]["logprobs_mode"] == "processed_logprobs"
    assert start_line["modules"] == {"probed": 21, "unreached": [], "not_to_the_bit": []}
    assert start_line["canary"]["tokens"] == 92
    assert start_line["limits"]["mean"] == 1e-4
    assert [step["version"] for step in steps] == [0, 2]
    # The weights changed between the two lines, and the digest shows it.
    assert steps[0]["digest"] != steps[1]["digest"]
    assert all(step["worst_module"]["error"] <= 1e-4 for step in steps)
    assert all(step["checked_tokens"] == step["sampled_tokens"] > 0 for step in steps)


def test_a_whole_receipt_passes(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--receipt", str(run_dir / "receipt.jsonl")]) == 0
    assert "PASS" in capsys.readouterr().out


def test_a_changed_line_is_found(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (run_dir / "receipt.jsonl").read_text().splitlines()
    entry = json.loads(lines[1])
    entry["max_abs_gap"] = 0.0
    changed = tmp_path / "receipt.jsonl"
    changed.write_text("\n".join([lines[0], json.dumps(entry), *lines[2:]]) + "\n")
    assert main(["verify", "--receipt", str(changed)]) == 1
    assert "line 2" in capsys.readouterr().out


@pytest.mark.parametrize("kept", [1, 2])
def test_a_receipt_that_was_cut_short_does_not_fit_its_checkpoint(
    run_dir: Path, tmp_path: Path, kept: int, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (run_dir / "receipt.jsonl").read_text().splitlines()
    (tmp_path / "receipt.jsonl").write_text("".join(f"{line}\n" for line in lines[:kept]))
    shutil.copytree(run_dir / "checkpoint-4", tmp_path / "checkpoint-4")
    assert main(["verify", "--receipt", str(tmp_path / "receipt.jsonl")]) == 1
    assert "checkpoint-4 was written with another receipt" in capsys.readouterr().out


def test_a_run_is_explained(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--explain", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert "transformers, Qwen2ForCausalLM" in out
    # The trainer learned from each generation twice, with a high learning rate.
    assert "mostly staleness" in out
    assert "semantics 0.0e+00" in out
    assert "defect 0.0e+00" in out
    assert "canary gap mean" in out


def test_a_damaged_line_of_the_metrics_is_left_out_of_an_explanation(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run_dir, folder)
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 5, "parity/gap_semantics": "large"}\n[1]}\n')
    assert main(["verify", "--explain", str(folder)]) == 0
    assert "semantics 0.0e+00" in capsys.readouterr().out


def test_a_broken_receipt_is_not_explained(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (run_dir / "receipt.jsonl").read_text().splitlines()
    (tmp_path / "receipt.jsonl").write_text("\n".join([lines[0], *lines[2:]]) + "\n")
    assert main(["verify", "--explain", str(tmp_path)]) == 2
    assert "does not fit the chain" in capsys.readouterr().err


def test_in_half_precision_the_receipt_has_the_means_that_were_judged_also_after_a_resume(
    untied_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = datasets.Dataset.from_dict({"prompt": ["hello", "world", "fox"] * 4})
    fields = {
        "learning_rate": 1e-6,
        "bf16": True,
        "save_strategy": "steps",
        "save_steps": 2,
        "max_completion_length": 9,
    }

    def run(steps: int, checkpoint: bool) -> list[dict[str, Any]]:
        engine = TransformersEngine(
            untied_dir, load_tokenizer(untied_dir), dtype=torch.bfloat16, max_model_len=CONTEXT
        )
        trainer = GRPOTrainer(
            untied_dir, lambda completions, **_: [float(i % 2) for i in range(len(completions))],
            config(tmp_path, max_steps=steps, **fields), data, engine=engine,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=checkpoint)
        engine.close()
        lines = map(json.loads, (tmp_path / "receipt.jsonl").read_text().splitlines())
        return [line for line in lines if line["kind"] == "step"]

    before = run(2, checkpoint=False)
    tokens = [line["checked_tokens"] for line in before]
    assert sum(tokens) < PooledGap.enough
    assert [line["waiting"]["tokens"] for line in before] == [tokens[0], sum(tokens)]
    assert all("judged" not in line for line in before)
    lines = run(5, checkpoint=True)
    first = next(line for line in lines if "judged" in line)
    pooled = [line for line in lines if line["step"] <= first["step"]]
    judged = first["judged"]
    assert judged["tokens"] == sum(line["checked_tokens"] for line in pooled) >= PooledGap.enough
    assert judged["k3"] == pytest.approx(sum(line["sum_k3"] for line in pooled) / judged["tokens"])
    assert judged["mean_abs_gap"] == pytest.approx(
        sum(line["sum_abs_gap"] for line in pooled) / judged["tokens"]
    )
    # One token may have the largest allowed gap, so the limit on a mean has room for it.
    assert 0.15 < judged["mean_allowed"] < 0.16
    assert judged["k3_allowed"] > 0.02
    assert main(["verify", "--explain", str(tmp_path)]) == 0
    assert f"steps 1 to {first['step']}, {judged['tokens']} tokens" in capsys.readouterr().out
    page = (tmp_path / "report.html").read_text()
    assert f"steps 1 to {first['step']}, {judged['tokens']} tokens" in page
    assert "class='bad'" not in page
