"""The scheme `fp8_per_channel`, the trainer's forward in 8 bits, and the limits that follow from what it changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from tiny import make_model
from transformers import PreTrainedModel

from lockstep.contract.probe import quantised_vector
from lockstep.contract.sampling import Sampling
from lockstep.extras.fp8.quantisation import LARGEST_ERROR, quantised_linear, quantised_rows
from lockstep.extras.fp8.quantised_proof import computing_in_8_bits, widened
from lockstep.models.arithmetic import Precision
from lockstep.watch.gap import GapStats, over_limits
from lockstep.watch.plain_forward import completion_logps
from lockstep.watch.tolerances import tolerance

HALF = tolerance(torch.bfloat16, torch.bfloat16)
BF16 = Precision(torch.bfloat16)
LAST = "model.layers.1.mlp.down_proj"


def test_a_code_is_off_by_at_most_half_a_step_and_each_row_has_its_scale() -> None:
    numbers = (
        torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 3, 64)[:, None]
    )
    numbers[5] = 0
    found = quantised_rows(numbers)
    # Smaller numbers have fewer bits of mantissa.
    exact = numbers.abs() >= found.scales * 2.0**-6
    assert ((found.values() - numbers).abs() <= LARGEST_ERROR * numbers.abs() * 1.0001)[exact].all()
    assert found.codes.float().abs().amax(-1)[20:].eq(448).all()
    assert not found.values()[5].any()


def test_the_probes_vector_is_quantised_without_an_error_in_every_part_of_it() -> None:
    vector = quantised_vector(1, "a module", 512)
    for part in (vector[None], vector.view(8, 64), vector.bfloat16()[None]):
        found = quantised_rows(part)
        assert torch.equal(found.values(), part.float())
        assert (found.scales == 1).all()


def test_a_layer_in_8_bits_multiplies_codes_with_a_scale_per_token_and_per_output() -> None:
    draw = torch.Generator().manual_seed(1)
    inputs, weight = torch.randn(2, 3, 32, generator=draw), torch.randn(8, 32, generator=draw)
    bias = torch.randn(8, generator=draw)
    tokens, held = quantised_rows(inputs.flatten(0, 1)), quantised_rows(weight)
    assert (tokens.scales.shape, held.scales.shape) == ((6, 1), (8, 1))
    expected = (tokens.values() @ held.values().T + bias).view(2, 3, 8)
    torch.testing.assert_close(quantised_linear(inputs, held, bias), expected)


def scores(model: PreTrainedModel, ids: tuple[int, ...], precision: Precision = BF16) -> torch.Tensor:
    return completion_logps(model, ids[:1], ids[1:], Sampling(1), precision)


@pytest.mark.parametrize("adapted", [False, True])
def test_a_forward_in_8_bits_leaves_the_model_as_it_was(adapted: bool) -> None:
    model: Any = make_model()
    if adapted:
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        )
    ids, layers = tuple(range(5, 25)), ("self_attn.q_proj", "mlp.down_proj")
    names = [f"model.layers.{i}.{layer}.weight" for i in (0, 1) for layer in layers]
    before = scores(model, ids)
    with computing_in_8_bits(model, names, torch.bfloat16):
        coarse = scores(model, ids)
    assert torch.equal(scores(model, ids), before)
    assert (coarse - before).abs().max() > 0.01
    # The adapter is part of what is quantised: a merged model gives the same.
    merged = model.merge_and_unload() if adapted else model
    with computing_in_8_bits(merged, names, torch.bfloat16):
        torch.testing.assert_close(scores(merged, ids), coarse)


def test_the_limits_grow_by_what_quantisation_changes_and_by_no_more() -> None:
    # The signed gap of 8 bits has no limit.
    assert widened(HALF, GapStats()) == replace(HALF, slope=1.0)
    error = GapStats(
        100, sum_abs=20.0, max_abs=1.0, sum_k3=5.0, sum_cubes=6 * 0.1**3 * 100, sum_fourths=24 * 0.1**4 * 100
    )
    found = widened(HALF, error)
    assert found.mean == pytest.approx(HALF.mean + 1.5 * 0.2)
    assert found.tail == pytest.approx(HALF.tail + 0.1)
    assert not over_limits(GapStats(100, sum_abs=40.0, max_abs=1.0, sum_k3=5.0), found)
    assert over_limits(GapStats(100, sum_abs=50.0, max_abs=1.0, sum_k3=5.0), found)
    assert over_limits(GapStats(100, sum_abs=40.0, max_abs=1.0, sum_k3=20.0), found)
