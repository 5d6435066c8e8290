"""Weights with too few bits for the learning rate: the share that a step can move is right, and 0 is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from methods import GROUPS, lora, make
from tiny import save_model

from lockstep.contract.protocol import Engine
from lockstep.errors import InputError, ProofError
from lockstep.learn.moving_share import moving_share

IN_BF16: dict[str, Any] = {**GROUPS, "model_init_kwargs": {"dtype": "bfloat16"}, "learning_rate": 1e-6}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rate", [1e-9, 1e-6, 1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("fused", [True, False])
def test_the_share_is_that_of_the_elements_which_a_step_of_adamw_moves(
    dtype: torch.dtype, rate: float, fused: bool
) -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter((0.02 * torch.randn(12_000)).to(dtype))
    before = weight.detach().clone()
    expected = moving_share([weight], rate)
    weight.grad = torch.randn(12_000).to(dtype)
    torch.optim.AdamW([weight], lr=rate, weight_decay=0.0, fused=fused).step()
    assert float((weight.detach() != before).double().mean()) == pytest.approx(expected, abs=0.02)


def test_a_large_tensor_counts_by_its_size_and_is_looked_at_in_part() -> None:
    still, moves = torch.ones(300_000, dtype=torch.bfloat16), torch.zeros(100_000, dtype=torch.bfloat16)
    assert moving_share([still, moves], 1e-6) == 0.25
    mixed = torch.cat([still[:100_000], moves])
    assert moving_share([mixed], 1e-6) == pytest.approx(0.5, abs=0.02)
    assert moving_share([], 1e-6) == 1.0


def test_bf16_weights_that_mostly_stand_still_are_said_with_their_share_and_the_cure(
    tmp_path: Path, hf_engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    # Weights as small as those of a pretrained model.
    model = str(save_model(tmp_path / "model", scale=0.02))
    # The engine holds another model. The handshake finds this after the message of this test.
    with pytest.raises(ProofError, match="handshake"):
        make("GRPO", model, tmp_path, hf_engine, IN_BF16)
    said = capsys.readouterr().out
    assert "learning_rate=1e-06 can move 2.00% of the trained weights" in said
    assert "held in bfloat16" in said
    assert "leave dtype out of model_init_kwargs" in said


def test_a_run_of_which_hardly_a_weight_can_move_is_refused(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    with pytest.raises(
        InputError, match=r"can move 0\.\d\d% of the trained weights.* Nothing would be learned"
    ):
        make("GRPO", untied_dir, tmp_path, hf_engine, IN_BF16)


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ({"model_init_kwargs": None}, {}),
        ({"learning_rate": 1e-2}, {}),
        # A learning rate of 0 is accepted: the user asks for no change.
        ({"learning_rate": 0.0}, {}),
        # The learning rate does not bound the steps of SGD.
        ({"optim": "sgd"}, {}),
        # The adapter's own weights are fp32.
        ({}, {"peft_config": lora()}),
        ({}, {"optimizers": (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), None)}),
    ],
    ids=["fp32 weights", "a large step", "no step", "SGD", "an adapter", "an optimizer of the user's"],
)
def test_nothing_is_said_where_steps_are_not_lost(
    untied_dir: str,
    tmp_path: Path,
    hf_engine: Engine,
    fields: dict[str, Any],
    arguments: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    make("GRPO", untied_dir, tmp_path, hf_engine, {**IN_BF16, **fields}, **arguments)
    assert "can move" not in capsys.readouterr().out
