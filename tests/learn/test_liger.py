"""Liger's kernels in the trainer's model give the same training, and are refused where they cannot run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tiny import make_model

from lockstep.errors import InputError
from lockstep.learn.methods.grpo import GRPOConfig
from lockstep.models import arithmetic as liger
from lockstep.run.files.directory import RunPlace
from lockstep.run.run import run_method
from lockstep.run.trainers.methods import GRPOTrainer

pytest.importorskip("liger_kernel", reason="Liger is not installed here")


# Triton's interpreter takes its time.
@pytest.mark.release
def test_training_with_the_kernels_of_the_gpu_is_training_without(untied_dir: str, tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).parent / "interpreted_liger.py"), untied_dir, str(tmp_path)]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(module.startswith("liger_kernel.") for module in [*found["kernels"], found["rotary"]]), found
    assert 0 < found["apart"] < 1e-4
    assert found["gap"] < 1e-4


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs them")
def test_without_a_gpu_a_run_is_refused_before_its_model_is_loaded(tmp_path: Path) -> None:
    config = GRPOConfig(output_dir="unused", use_liger_kernel=True)
    with pytest.raises(InputError, match="use_liger_kernel needs a GPU"):
        run_method(GRPOTrainer, config, RunPlace(tmp_path, None, {}), "a model that is not there")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs them")
def test_without_a_gpu_a_trainer_is_made_and_training_is_refused(untied_dir: str, tmp_path: Path) -> None:
    config = GRPOConfig(
        output_dir=str(tmp_path), use_liger_kernel=True, use_vllm=False, use_cpu=True, num_generations=4, max_steps=1,
        max_completion_length=4, per_device_train_batch_size=4, report_to="none",
    )  # fmt: skip
    trainer = GRPOTrainer(
        untied_dir,
        lambda completions, **_: [0.0] * len(completions),
        config,
        Dataset.from_dict({"prompt": ["a"]}),
    )
    try:
        with pytest.raises(InputError, match="use_liger_kernel needs a GPU"):
            trainer.train()
    finally:
        trainer.close()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"liger_kernel_config": {"rope": True}}, "without use_liger_kernel"),
        (
            {"use_liger_kernel": True, "liger_kernel_config": {"fused_linear_cross_entropy": True}},
            "no loss of Lockstep",
        ),
        ({"use_liger_kernel": True, "liger_kernel_config": {"cross_entropy": True}}, "no loss of Lockstep"),
        ({"use_liger_kernel": True, "liger_kernel_config": "rope"}, "must be a mapping"),
    ],
)
def test_kernels_of_no_effect_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        GRPOConfig(output_dir="unused", **fields)


def test_what_liger_would_pass_over_in_silence_is_refused() -> None:
    model = make_model("qwen2")
    liger.check_kernels(model, {"rope": True, "swiglu": False, "fused_linear_cross_entropy": False})
    with pytest.raises(InputError, match="has 'rop', and Liger's kernels for 'qwen2' are rope"):
        liger.check_kernels(model, {"rop": False})
    model.config.model_type = "gpt2"
    with pytest.raises(InputError, match="no kernels for models of type 'gpt2'"):
        liger.check_kernels(model, {})


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(InputError, match=r"pip install 'lockstep-rl\[liger\]'"):
        GRPOConfig(output_dir="unused", use_liger_kernel=True)


def test_ligers_own_loss_stays_out_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    config = GRPOConfig(output_dir="unused", use_liger_kernel=True, liger_kernel_config={"rope": False})
    assert config.liger_kernel_config == {"rope": False, "fused_linear_cross_entropy": False}
