"""A config that asks for DeepSpeed: who shards, what contradicts it, and that transformers makes nothing of it."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from lockstep import GRPOConfig, GRPOTrainer
from lockstep.errors import InputError
from lockstep.run.files.identity import is_bookkeeping

pytest.importorskip("deepspeed")
STAGE = {"zero_optimization": {"stage": 3}, "train_batch_size": "auto"}


def config(folder: Path, **fields: Any) -> GRPOConfig:
    return GRPOConfig(output_dir=str(folder), **{"use_vllm": False} | fields)


def test_the_field_asks_for_shards_also_in_a_copy(tmp_path: Path) -> None:
    first = config(tmp_path, deepspeed=STAGE)
    for one in (first, dataclasses.replace(first)):
        assert one.sharded_by == "DeepSpeed ZeRO-3"
        assert one.deepspeed == STAGE
        assert one.deepspeed_plugin is None


def test_accelerate_s_launcher_asks_for_shards_and_gets_no_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    # It is set where the other one is read; this line removes it after the test.
    monkeypatch.setenv("LOCKSTEP_USE_DEEPSPEED", "false")
    one = config(tmp_path)
    assert one.sharded_by == "DeepSpeed ZeRO-3"
    assert (one.deepspeed, one.deepspeed_plugin) == (None, None)
    assert "DEEPSPEED" not in str(one.distributed_state.distributed_type)
    assert "ACCELERATE_USE_DEEPSPEED" not in os.environ


def test_stage_0_shards_nothing(tmp_path: Path) -> None:
    assert config(tmp_path, deepspeed={"zero_optimization": {"stage": 0}}).sharded_by is None
    assert config(tmp_path).sharded_by is None
    assert config(tmp_path, fsdp=True).sharded_by == "FSDP"


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_change_no_result_and_a_line_says_that_they_save_no_memory(
    tmp_path: Path, stage: int, capsys: pytest.CaptureFixture[str]
) -> None:
    one = config(tmp_path, deepspeed={"zero_optimization": {"stage": stage}})
    assert one.sharded_by is None
    assert one.deepspeed_plugin is None
    said = capsys.readouterr().err
    assert (
        f"zero_optimization.stage={stage} (deepspeed) spreads the optimizer over ranks. Here every rank holds it"
        in said
    )


def test_a_stage_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"zero_optimization\.stage=4 \(deepspeed\); it must be 0, 1, 2 or 3"
    ):
        config(tmp_path, deepspeed={"zero_optimization": {"stage": 4}})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fsdp": True}, "FSDP and DeepSpeed are both asked for"),
        ({"max_grad_norm": 0.5, "deepspeed": STAGE | {"gradient_clipping": 1.0}}, "max_grad_norm is 0.5"),
        ({"bf16": True, "deepspeed": STAGE | {"bf16": {"enabled": False}}}, "bf16 is True"),
        ({"ds3_gather_for_generation": False}, "ds3_gather_for_generation=False is not supported"),
        (
            {"use_vllm": None, "vllm_quantization": "fp8_per_channel", "bf16": True},
            "DeepSpeed ZeRO-3 is not supported with",
        ),
    ],
    ids=str,
)
def test_contradictions_are_named(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        config(tmp_path, **{"deepspeed": STAGE} | fields)


def test_a_run_may_go_on_with_another_configuration_of_deepspeed() -> None:
    assert is_bookkeeping("deepspeed")


def test_a_single_process_is_told_how_to_start(untied_dir: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="DeepSpeed ZeRO-3 is asked for, and this is a single process"):
        GRPOTrainer(
            untied_dir,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config(tmp_path, deepspeed=STAGE, max_completion_length=8),
            train_dataset=Dataset.from_list([{"prompt": "a"}] * 8),
        )
