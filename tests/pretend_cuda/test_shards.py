"""FSDP2 and DeepSpeed ZeRO-3 on two ranks with tensors of the pretend GPU, over gloo. NCCL cannot run here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pretend_cuda
from pretend_cuda import shards

pytestmark = [
    pytest.mark.release,
    pytest.mark.skipif(bool(pretend_cuda.missing()), reason=str(pretend_cuda.missing())),
]


@pytest.mark.parametrize("kind", ["fsdp", "deepspeed"])
def test_gradients_of_a_sharded_model_are_those_of_the_whole_one_on_the_cpu(
    kind: str, tmp_path: Path
) -> None:
    import torch
    from servers import free_port

    from pretend_cuda.gradients import gradients

    words = [sys.executable, str(Path(shards.__file__))]
    port = str(free_port())
    ranks = [
        subprocess.Popen([*words, str(rank), port, kind, str(tmp_path)], stderr=subprocess.PIPE, text=True)
        for rank in range(shards.RANKS)
    ]
    errors = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors[0][-3000:]
    whole = gradients()
    for rank in range(shards.RANKS):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert found.keys() == whole.keys()
        for name, gradient in whole.items():
            torch.testing.assert_close(found[name] / _factor(found, whole), gradient, rtol=1e-4, atol=1e-4)


def _factor(found: dict[str, Any], whole: dict[str, Any]) -> float:
    """1, or the number of ranks: gradients of equal packs are averaged or added."""
    ratio = float(found["lm_head.weight"].norm() / whole["lm_head.weight"].norm())
    assert ratio == pytest.approx(round(ratio), rel=1e-4)
    return ratio
