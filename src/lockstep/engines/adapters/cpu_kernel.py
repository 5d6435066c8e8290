"""A kernel that computes LoRA on a CPU: one pair of matrix products for each adapter of a step.

It replaces the CPU kernel of vLLM 0.32.0, which has two defects. It copies the matrices A and B once per token, so that a prompt of
a thousand tokens copies them a thousand times. If one token of a step has an adapter, it also applies the adapter of the last slot
to the tokens that have none (fault D6). `engines/adapters/worker.py` installs this kernel where vLLM runs on a CPU. The probes
compute with it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

# One entry per slot of vLLM whose adapter is used in a step: the slot, and the indices of its tokens. None: all tokens use it.
SlotTokens = list[tuple[int, torch.Tensor | None]]


class CPUKernel:
    """Replaces `PunicaWrapperCPU.add_lora_linear`.

    Args:
        wrapper: vLLM's record of which token of a step has which adapter.
    """

    def __init__(self, wrapper: PunicaWrapperCPU) -> None:
        self._wrapper, self._update = wrapper, wrapper.update_metadata
        self._slots: SlotTokens = []
        wrapper.update_metadata, wrapper.add_lora_linear = self.update_metadata, self.add_lora_linear
        if wrapper.indices_len[0] is not None:
            self._slots = tokens_by_slot(wrapper.token_lora_indices)

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Replaces vLLM's `update_metadata`. vLLM calls it before each step that has other requests than the last one."""
        self._update(*args, **kwargs)
        self._slots = tokens_by_slot(self._wrapper.token_lora_indices)

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
        """Add scale × B A x to y in place, with the A and B of each token's adapter.

        As in vLLM's kernel, A x is computed in float32, and the product with B in the dtype of y.

        Args:
            y: (tokens, outputs) outputs of the layer without its adapter.
            x: (tokens, inputs) inputs of the layer.
        """
        for slot, tokens in self._slots:
            inputs = x if tokens is None else x[tokens]
            added = torch.cat(
                [
                    ((inputs.float() @ down[slot, 0].float().T) * scale).to(y.dtype) @ up[slot, 0].to(y.dtype).T
                    for down, up in zip(lora_a_stacked, lora_b_stacked, strict=True)
                ],
                dim=-1,
            )
            if tokens is None:
                y += added
            else:
                y[tokens] += added


def tokens_by_slot(indices: torch.Tensor) -> SlotTokens:
    """The tokens of a step by the slot of their adapter.

    Args:
        indices: (tokens,) slot of each token's adapter; -1 for a token without an adapter.
    """
    found = indices.unique().tolist()
    if len(found) == 1:
        return [(found[0], None)] if found[0] >= 0 else []
    return [(slot, (indices == slot).nonzero()[:, 0]) for slot in found if slot >= 0]


def use_cpu_kernel(manager: Any) -> None:
    """Install the kernel if vLLM uses its own kernel for CPUs. Safe to call again.

    Args:
        manager: vLLM's `LoRAModelManager`.
    """
    for wrapper in manager.punica_wrapper_mapping.values():
        if type(wrapper) is PunicaWrapperCPU and "add_lora_linear" not in vars(wrapper):
            CPUKernel(wrapper)
