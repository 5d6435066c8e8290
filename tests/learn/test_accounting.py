"""For every cut of a step into micro-batches, packs and chunks, every method's gradients are those of the whole step.

CI leaves out the losses that also are part of a case with a correction. Before a release all cases are run, also with
other cuts, and each option of a case is shown to move its gradients: that test guards the cases, not the product.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accounts import CASES, STEP, Steps, difference, gradients, make, norm_in_double, shifted_engine
from drawn import everything_kept
from portions import portion
from transformers import BitsAndBytesConfig
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from lockstep.contract.protocol import Engine
from lockstep.models.quantised import is_quantised
from lockstep.run.trainers.online import OnlineTrainer

# How a step is cut: the size of its micro-batches, and the fields that cut these. In CI one cut parts micro-batches,
# groups, packs and chunks at once.
Cuts = list[tuple[int, dict[str, Any]]]
TOGETHER: Cuts = [(2, {"token_budget": 24, "logits_chunk_size": 5})]
APART: Cuts = [(4, {"token_budget": 48, "logits_chunk_size": 5}), (1, {})]
# Losses that occur in cases with a correction too.
IN_OTHERS = {"grpo-cispo", "grpo-sapo", "grpo-vespo"}
OPTIONS = [(case, option) for case, made in CASES.items() for option in made.without]
Whole = Callable[[str], Steps]


@pytest.fixture(scope="module")
def engine(untied_dir: str) -> Engine:
    return shifted_engine(untied_dir)


@pytest.fixture(autouse=True)
def _double(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Double precision, and no recomputation: it doubles the time of a small step.

    `test_two_ranks.py` has these cases with it.
    """
    monkeypatch.setattr(Qwen2RMSNorm, "forward", norm_in_double)
    with everything_kept():
        yield


@pytest.fixture(scope="module")
def whole(untied_dir: str, engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Gradients of a case whose steps are one micro-batch each."""
    return functools.cache(
        lambda case: gradients(make(case, untied_dir, tmp_path_factory.mktemp("whole"), engine=engine))
    )


def check_cuts(
    whole: Steps, cuts: Cuts, made: Callable[[int, dict[str, Any]], OnlineTrainer], limit: float = 1e-6
) -> None:
    """Check that every cut of a run gives the gradients of the whole."""
    for size, fields in cuts:
        for step, (expected, found) in enumerate(zip(whole, gradients(made(size, fields)), strict=True)):
            worst = difference(expected, found)
            assert worst <= limit, (size, step)


@pytest.mark.parametrize(
    "cuts", [TOGETHER, pytest.param(APART, marks=pytest.mark.release)], ids=["together", "apart"]
)
@pytest.mark.parametrize("case", portion(CASES, lambda case: case not in IN_OTHERS))
def test_the_cut_of_a_step_does_not_change_a_gradient_before_or_after_the_policy_has_moved(
    untied_dir: str, tmp_path: Path, engine: Engine, whole: Whole, case: str, cuts: Cuts
) -> None:
    steps = whole(case)
    assert len(steps) >= 2
    assert all(torch.stack([g.norm() for g in step.values()]).norm() > 0 for step in steps)
    # The second step differs from the first one, so it is a separate check.
    assert difference(steps[0], steps[1]) > 1e-2
    check_cuts(
        steps, cuts, lambda size, fields: make(case, untied_dir, tmp_path, engine=engine, size=size, **fields)
    )


@pytest.mark.release
@pytest.mark.parametrize(("case", "option"), OPTIONS)
def test_what_a_case_is_there_for_moves_its_gradients(
    untied_dir: str, tmp_path: Path, engine: Engine, whole: Whole, case: str, option: str
) -> None:
    # The option must change the gradients; otherwise a wrong computation of it would agree too.
    without = gradients(make(case, untied_dir, tmp_path, engine=engine, **CASES[case].without[option]))
    assert max(difference(*steps) for steps in zip(whole(case), without, strict=True)) > 1e-5


def test_on_quantised_weights_a_cut_adds_no_more_than_the_rounding_of_float32(
    untied_dir: str, tmp_path: Path, engine: Engine
) -> None:
    def made(size: int, fields: dict[str, Any]) -> OnlineTrainer:
        # bitsandbytes does not quantise double precision. Here the difference is about 1e-5.
        init = {"dtype": torch.float32, "quantization_config": BitsAndBytesConfig(load_in_4bit=True)}
        return make(
            "grpo-lora", untied_dir, tmp_path, engine=engine, size=size, model_init_kwargs=init, **fields
        )

    run = made(STEP, {})
    assert any(is_quantised(p) for p in run.model.parameters())
    check_cuts(gradients(run), [*TOGETHER, *APART], made, limit=1e-4)


@pytest.mark.parametrize("case", ["grpo-full", "ppo"])
def test_a_steps_gradient_holds_nothing_of_the_step_before(
    untied_dir: str, tmp_path: Path, engine: Engine, case: str
) -> None:
    # There are two passes over one generation, and the policy does not change.
    first, second = gradients(make(case, untied_dir, tmp_path, engine=engine, size=4, learning_rate=0.0))
    assert difference(first, second) <= 1e-6
