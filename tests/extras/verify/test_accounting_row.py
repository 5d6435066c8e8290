"""The row "exact accounting" measures accounting alone: almost 0 for a clean trainer in any dtype, not for a fault."""

from __future__ import annotations

import re
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from stages import stage_on
from tiny import CONTEXT

from lockstep.engines.transformers_engine import TransformersEngine
from lockstep.extras.selftest.optimizer_faults import STEP_FAULTS
from lockstep.extras.verify.logprob_checks import accounting
from lockstep.extras.verify.stage import Stage
from lockstep.tokens.chat import load_tokenizer

SAMPLES = 3


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def stage(
    request: pytest.FixtureRequest, untied_dir: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    engine = TransformersEngine(
        untied_dir, load_tokenizer(untied_dir), dtype=request.param, max_model_len=CONTEXT
    )
    folder = tmp_path_factory.mktemp("stage")
    with stage_on(untied_dir, folder, engine, bf16=request.param == torch.bfloat16) as found:
        yield found


def figures(stage: Stage) -> list[tuple[float, bool]]:
    """The figure and the verdict of the row, for several samples."""
    found = []
    for seed in range(SAMPLES):
        with patch.object(stage.config, "seed", seed):
            (row,) = accounting(stage)
        said = re.search(r"differ by (\S+) of their size", row.figure)
        assert said is not None
        found.append((float(said[1]), row.passed))
    return found


def test_a_clean_trainer_is_orders_of_magnitude_below_the_limit_in_every_dtype(stage: Stage) -> None:
    assert all(figure < 1e-6 and passed for figure, passed in figures(stage))


@pytest.mark.parametrize("id", ["A1", "A2"])
def test_a_wrong_normaliser_is_far_above_the_limit_in_every_dtype(stage: Stage, id: str) -> None:
    (fault,) = [fault for fault in STEP_FAULTS if fault.id == id]
    with fault.inject(stage):
        assert all(figure > 0.05 and not passed for figure, passed in figures(stage))
