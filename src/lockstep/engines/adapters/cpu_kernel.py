"""The product with an adapter on CPUs: one matrix product per adapter of a step, instead of a copy of its factors per token.

vLLM 0.32.0's kernel for CPUs copies both factors once for every token, so that a prompt of a thousand tokens copies them a thousand
times. It also takes the last slot's adapter for tokens that have none, if another token of the step has one (fault D6).
`engines/adapters/worker.py` puts this kernel into its place where vLLM runs on a CPU. The probes compute through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

# The slots of a step, each with the places of its tokens; None: all tokens have it.
Rows = list[tuple[int, torch.Tensor | None]]


class CPUKernel:
    """Stands in the place of `PunicaWrapperCPU.add_lora_linear`.

    Args:
        wrapper: vLLM's record of which token of a step has which adapter.
    """

    def __init__(self, wrapper: PunicaWrapperCPU) -> None:
        self._wrapper, self._update = wrapper, wrapper.update_metadata
        self._rows: Rows = []
        wrapper.update_metadata, wrapper.add_lora_linear = self.update_metadata, self.add_lora_linear
        if wrapper.indices_len[0] is not None:
            self._rows = rows_of(wrapper.token_lora_indices)

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's `update_metadata`, before each step with other requests."""
        self._update(*args, **kwargs)
        self._rows = rows_of(self._wrapper.token_lora_indices)

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: Sequence[torch.Tensor],
        lora_b_stacked: Sequence[torch.Tensor],
        scale: float,
        output_slices: Sequence[int],
        **others: Any,
    ) -> None:
        """Add scale × B A x to y (tokens, outputs), for the adapter of each token, where x is (tokens, inputs).

        As in vLLM's kernel, A x is computed in float32, and the product with B in the dtype of y.
        """
        for slot, places in self._rows:
            inputs = x if places is None else x[places]
            added = torch.cat(
                [
                    ((inputs.float() @ down[slot, 0].float().T) * scale).to(y.dtype) @ up[slot, 0].to(y.dtype).T
                    for down, up in zip(lora_a_stacked, lora_b_stacked, strict=True)
                ],
                dim=-1,
            )
            if places is None:
                y += added
            else:
                y[places] += added


def rows_of(indices: torch.Tensor) -> Rows:
    """The slots of the tokens of a step. -1 is the index of a token without an adapter."""
    found = indices.unique().tolist()
    if len(found) == 1:
        return [(found[0], None)] if found[0] >= 0 else []
    return [(slot, (indices == slot).nonzero()[:, 0]) for slot in found if slot >= 0]


def use_cpu_kernel(slots: Any) -> None:
    """Put the kernel into the place of vLLM's, if that is the one for CPUs.

    Args:
        slots: vLLM's `LoRAModelManager`.
    """
    for wrapper in slots.punica_wrapper_mapping.values():
        if type(wrapper) is PunicaWrapperCPU and "add_lora_linear" not in vars(wrapper):
            CPUKernel(wrapper)
