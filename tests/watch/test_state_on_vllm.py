"""A model that keeps a state, on real vLLM: pushed, probed with its convolution, and trained with every proof."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import needs_vllm
from model_families import save_family
from stages import stage_on

pytestmark = [pytest.mark.vllm, pytest.mark.release, needs_vllm]


def test_a_hybrid_of_mamba_and_attention_learns_with_every_proof(tmp_path: Path) -> None:
    model = save_family("granitemoehybrid", tmp_path / "model")
    with stage_on(model, tmp_path / "run", use_vllm=True, bf16=False) as stage:
        assert not stage.engine.settings().prefix_caching
        with stage.moved(0.05, seed=1):
            record = stage.push(every_module=True)
            gap = stage.gap(stage.sample(stage.sampling()), stage.sampling())
        assert "model.layers.0.mamba.conv1d.weight" in record.errors
        assert gap.max_abs < 1e-4
        stage.learn(1)
