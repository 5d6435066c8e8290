"""The model and recipe of `make train`, for a few steps: the run of the README stays within its tolerance."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from conftest import needs_vllm

from lockstep import GRPOConfig, GRPOTrainer
from lockstep.tasks.builtin import arithmetic
from lockstep.tasks.rewards import exact_match

RECIPE = Path(__file__).parents[2] / "recipes" / "arithmetic.yaml"


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.real_model
@needs_vllm
def test_in_fp32_every_sampled_token_of_every_step_agrees_within_1e_3(tmp_path: Path) -> None:
    recipe = yaml.safe_load(RECIPE.read_text())
    train, _ = arithmetic(recipe["dataset_config"], 100, 10, 0)
    fields = {k: recipe[k] for k in ("num_generations", "max_completion_length", "lr_scheduler_type")}
    args = GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=8,
        # The learning rate is much higher than the recipe's, so that one step changes the weights visibly.
        learning_rate=2e-5,
        max_steps=2,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        bf16=False,
        **fields,
    )
    trainer = GRPOTrainer(recipe["model_name_or_path"], exact_match, args, train)
    before = trainer.model.get_input_embeddings().weight.detach().clone()
    trainer.train()
    trainer.close()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 2
    assert all(entry["parity/max_abs_gap"] <= 1e-3 for entry in logs)
    assert all(
        entry["parity/checked_tokens"] == round(8 * entry["completions/mean_length"]) for entry in logs
    )
    # The tied embedding has changed, and so has the head, of which the engine keeps a packed copy.
    assert float((trainer.model.get_input_embeddings().weight.detach() - before).abs().max()) > 1e-5
