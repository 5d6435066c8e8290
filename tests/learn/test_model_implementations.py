"""A run may ask vLLM for transformers' implementation of the model.

It has every proof, as vLLM's own implementation has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
from conftest import needs_vllm

from lockstep import GRPOConfig, GRPOTrainer
from lockstep.errors import InputError


def by_length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text) % 3) for text in completions]


@pytest.mark.vllm
@needs_vllm
def test_a_run_samples_with_the_implementation_of_transformers(tied_dir: str, tmp_path: Path) -> None:
    config = GRPOConfig(
        output_dir=str(tmp_path),
        vllm_model_impl="transformers",
        bf16=False,
        num_generations=4,
        per_device_train_batch_size=8,
        max_completion_length=12,
        max_steps=2,
        logging_steps=1,
        learning_rate=1e-3,
        report_to=[],
        disable_tqdm=True,
    )
    data = datasets.Dataset.from_dict({"prompt": [f"what is {i}" for i in range(8)]})
    trainer = GRPOTrainer(tied_dir, by_length, config, data)
    try:
        (kind,) = trainer.engine.llm.apply_model(type)  # type: ignore[attr-defined]
        assert kind.__name__.startswith("Transformers")
        trainer.train()
    finally:
        trainer.close()
    logged = [line for line in trainer.state.log_history if "loss" in line]
    assert len(logged) == 2
    assert all(line["parity/checked_tokens"] > 0 and line["parity/max_abs_gap"] < 1e-4 for line in logged)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"vllm_model_impl": "terratorch"}, "it must be vllm, auto, transformers"),
        ({"vllm_model_impl": "transformers", "vllm_mode": "server"}, "give --model-impl to 'lockstep serve'"),
    ],
)
def test_what_the_field_cannot_do_is_one_error(fields: dict[str, str], said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        GRPOConfig(output_dir=str(tmp_path), bf16=False, **fields)
