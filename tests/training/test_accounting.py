"""However a step is cut into micro-batches, packs and chunks, every method's gradients are those of the step as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accounts import CASES, difference, gradients, make, norm_in_double
from conftest import start
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from lockstep.engines.protocol import Engine

CUTS: list[tuple[int, dict[str, Any]]] = [(4, {}), (2, {"token_budget": 48, "logits_chunk_size": 5}), (1, {})]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def engine(untied_dir: str) -> Engine:
    return start("transformers", untied_dir)


@pytest.fixture(autouse=True)
def _double(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Qwen2RMSNorm, "forward", norm_in_double)


@pytest.mark.parametrize("case", CASES)
def test_the_cut_of_a_step_does_not_change_a_gradient_before_or_after_the_policy_has_moved(
    untied_dir: str, tmp_path: Path, engine: Engine, case: str
) -> None:
    whole = gradients(make(case, untied_dir, tmp_path, engine=engine))
    assert len(whole) == 2
    assert all(torch.stack([g.norm() for g in step.values()]).norm() > 0 for step in whole)
    # The second step is another one, so that it proves something of its own.
    assert difference(whole[0], whole[1]) > 1e-2
    for size, fields in CUTS:
        cut = gradients(make(case, untied_dir, tmp_path, engine=engine, size=size, **fields))
        for step, (expected, found) in enumerate(zip(whole, cut, strict=True)):
            worst = difference(expected, found)
            assert worst <= 1e-6, (size, step)


@pytest.mark.parametrize("case", ["grpo-full", "ppo"])
def test_a_steps_gradient_holds_nothing_of_the_step_before(
    untied_dir: str, tmp_path: Path, engine: Engine, case: str
) -> None:
    # Two passes over one generation by a policy that stands still.
    first, second = gradients(make(case, untied_dir, tmp_path, engine=engine, size=4, learning_rate=0.0))
    assert difference(first, second) <= 1e-6
