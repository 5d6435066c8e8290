"""The auxiliary loss of a mixture of experts beside TRL's: gradients, loss and the logged figure of whole trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import save_family
from pairs import assert_same_gradients, both, shifted_engine
from transformers.models.mixtral import modeling_mixtral

pytest.importorskip("trl", reason="TRL is not installed here")


@pytest.mark.parametrize("method", ["GRPO", "RLOO"])
def test_a_step_of_one_micro_batch_has_trls_auxiliary_loss(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = modeling_mixtral.load_balancing_loss_func

    def without_last(logits: Any, experts: int, top_k: int, mask: torch.Tensor | None) -> Any:
        # TRL's forward also reads the last id of each completion, from which nothing is predicted.
        if mask is not None:
            behind = torch.nn.functional.pad(mask, (0, 1))[:, 1:].flip(1).cumsum(1).flip(1)
            mask = mask * (behind > 0)
        return usual(logits, experts, top_k, mask)

    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", without_last)
    model = save_family("mixtral", tmp_path / "model", router_aux_loss_coef=0.3)
    fields = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 12,
        "num_iterations": 2,
    }
    fields |= {"vllm_importance_sampling_mode": "token_truncate"} if method == "GRPO" else {}
    # The usual kernel of experts does not take double precision.
    mine, other = both(method, model, tmp_path, shifted_engine(model), fields, dtype=torch.float32)
    assert_same_gradients(mine, other, cancels=0.5)
    for own, theirs in zip(mine.logs, other.logs, strict=True):
        assert own["aux_loss"] == pytest.approx(theirs["aux_loss"], rel=1e-5)
        assert own["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
    assert mine.logs[0]["aux_loss"] > 1
