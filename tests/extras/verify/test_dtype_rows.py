"""The rows of `lockstep verify` about the dtypes in which the trainer could compute."""

from __future__ import annotations

from pathlib import Path

import torch
from model_families import save_family
from stages import stage_on

from lockstep.extras.verify.logprob_checks import parity_by_dtype


def test_a_model_that_rounds_much_in_bfloat16_passes_in_float32(tmp_path: Path) -> None:
    """The row in bfloat16 then speaks of the model alone, and says so. If the engine differs, both rows fail."""
    model = save_family("zamba2", tmp_path / "model")
    with stage_on(model, tmp_path / "run", use_vllm=False, bf16=False) as stage:
        exact, coarse = parity_by_dtype(stage)
        assert exact.passed
        assert coarse.passed
        assert "this model's own forward rounds that much in bfloat16" in coarse.figure
        assert "this model needs float32" in coarse.limit
        head = stage.engine.model.get_output_embeddings()  # type: ignore[attr-defined]
        with torch.no_grad():
            head.weight += 0.1 * torch.randn_like(head.weight)
        assert not any(row.passed for row in parity_by_dtype(stage))
