"""Runs with filters and tools, several optimizer steps per generation: the gap is that of a run without filters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from caller import save_caller
from conftest import VLLM
from datasets import Dataset
from tiny import CONTEXT

import lockstep
from lockstep.engines.vllm.in_process import VLLMInProcess
from lockstep.watch.tolerances import tolerance

DATA = Dataset.from_list([{"prompt": [{"role": "user", "content": f"what is {i} + {i}"}]} for i in range(8)])
FILTERS = {"top_p": 0.95, "top_k": 40, "min_p": 0.001, "repetition_penalty": 1.05, "logit_bias": {"7": 1.0}}
FIELDS = {
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "num_iterations": 2,
    "max_completion_length": 120,
}


@pytest.fixture(scope="module")
def caller_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_caller(tmp_path_factory.mktemp("models") / "caller")


def multiply(a: int, b: int) -> int:
    """The product of two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=VLLM)])
def test_the_gap_of_rollouts_with_tools_and_filters_is_within_the_limits(
    engine: str, dtype: torch.dtype, caller_dir: str, tmp_path: Path
) -> None:
    own: dict[str, Any] = (
        {"engine": VLLMInProcess(caller_dir, dtype=dtype, max_model_len=CONTEXT)} if engine == "vllm" else {}
    )
    config = lockstep.GRPOConfig(
        output_dir=str(tmp_path), bf16=dtype == torch.bfloat16, use_vllm=engine == "vllm", max_steps=4, logging_steps=1,
        learning_rate=1e-3, save_strategy="no", report_to=[], disable_tqdm=True, **FIELDS, **FILTERS,
    )  # fmt: skip
    trainer = lockstep.GRPOTrainer(
        caller_dir, lambda completion_ids, **_: [float(len(ids) % 7) for ids in completion_ids], config, DATA,
        tools=[multiply], **own,
    )  # fmt: skip
    try:
        trainer.train()
    finally:
        trainer.close()
        for each in own.values():
            each.close()
    limit, logs = tolerance(dtype, dtype), [line for line in trainer.state.log_history if "loss" in line]
    assert len(logs) == 4
    # Rollouts are made once per generation.
    turns = [log["tools/turns"] for log in logs if "tools/turns" in log]
    assert len(turns) == 2
    assert min(turns) > 1
    for log in logs:
        assert 0.0 < log["parity/mean_abs_gap"] < limit.mean
        assert log["sampling/edge_rounding"] < limit.tail
