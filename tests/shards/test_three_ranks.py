"""Three ranks shard a model that cannot be cut evenly: gradients, weights after two steps, rows of each rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accounts import difference
from test_two_ranks import run_ranks

pytestmark = pytest.mark.long
SCRIPT = Path(__file__).parent / "three_ranks.py"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    pytest.importorskip("deepspeed")
    folder = tmp_path_factory.mktemp("three")
    run_ranks([sys.executable, str(SCRIPT)], [str(folder)], folder, [0] * 3, ("0", "1", "2"))
    return [torch.load(folder / f"{rank}.pt") for rank in range(3)]


@pytest.mark.parametrize("kind", ["fsdp", "zero"])
def test_gradients_and_weights_are_those_of_a_whole_model(ranks: list[dict[str, Any]], kind: str) -> None:
    for rank in ranks:
        own, due = rank[kind][None], rank["whole"][None]
        assert difference(due["gradients"], own["gradients"]) <= 1e-12
        assert difference(due["weights"], own["weights"]) <= 1e-12


def test_in_bf16_both_kinds_compute_alike(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        one, other = (rank[kind][torch.bfloat16] for kind in ("fsdp", "zero"))
        assert difference(one["gradients"], other["gradients"]) <= 1e-5
        assert difference(one["weights"], other["weights"]) <= 1e-6


def test_both_kinds_give_a_rank_the_same_rows(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["zero"][None]["rows"] == rank["fsdp"][None]["rows"]
    rows = [rank["zero"][None]["rows"]["model.layers.0.self_attn.q_proj.weight"] for rank in ranks]
    assert rows == [22, 22, 20]
