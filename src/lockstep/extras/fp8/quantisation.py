"""What vLLM's scheme `fp8_per_channel` computes, written a second time: 8-bit codes and one scale per row.

The scheme has no calibration data: codes and scales follow from the numbers alone. vLLM quantises a weight of
(outputs, inputs) with one scale per output when it is loaded, and the inputs of a linear layer with one scale per
token in every forward. A code is a float8_e4m3 number: 4 bits of exponent, 3 bits of mantissa, at most 448. `watch/`
compares an engine with these formulas.

Source: vLLM 0.32.0, the modules `online.fp8` and `input_quant_fp8` of `vllm.model_executor.layers.quantization`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

CODE_DTYPE = torch.float8_e4m3fn
# The largest code. No scale is smaller than the one of a row whose largest number is 1 / 512.
_LARGEST = 448.0
_SMALLEST_SCALE = 1.0 / (_LARGEST * 512.0)
# The largest error of a code, as a share of its number: half of the distance with 3 bits of mantissa.
LARGEST_ERROR = 2.0**-4


class Quantised(NamedTuple):
    """Rows in 8 bits.

    Attributes:
        codes: (rows, columns) float8_e4m3.
        scales: (rows, 1) float32. A number is its code times the scale of its row.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    def values(self) -> torch.Tensor:
        """(rows, columns) float32: the numbers that the codes stand for."""
        return self.codes.float() * self.scales


def quantised_rows(numbers: torch.Tensor) -> Quantised:
    """The codes and scales of (rows, columns) numbers, each row with a scale of its own.

    The result is exact: every program that follows the formula gets the same bytes.

    Args:
        numbers: in the engine's dtype, because the engine quantises what it has cast.
    """
    largest = numbers.abs().amax(dim=-1, keepdim=True).float()
    scales = (largest / torch.tensor(_LARGEST, device=largest.device)).clamp(min=_SMALLEST_SCALE)
    return Quantised((numbers.float() / scales).clamp(-_LARGEST, _LARGEST).to(CODE_DTYPE), scales)


def quantised_linear(inputs: torch.Tensor, weight: Quantised, bias: torch.Tensor | None) -> torch.Tensor:
    """The output of a linear layer whose weight and inputs are in 8 bits, in float32.

    Args:
        inputs: (…, inputs) in the engine's dtype. Each token gets a scale of its own.
        bias: (outputs,), added in float32; None: there is none.
    """
    tokens = quantised_rows(inputs.flatten(0, -2))
    product = tokens.codes.float() @ weight.codes.float().T
    found = product * tokens.scales * weight.scales.T
    found = found if bias is None else found + bias.float()
    return found.view(*inputs.shape[:-1], -1)
