"""Whole outputs from a module that vLLM's tensor parallelism has split over workers.

Called by `engines/vllm_probe.py` in every worker at once, in the same order, since the parts are gathered from each other. With one
worker all of this is the identity.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    QKVParallelLinear,
    RowParallelLinear,
)


def whole_outputs(module: LinearBase) -> int:
    """Outputs of a linear module that are different weights: key and value heads that several workers repeat count once."""
    if isinstance(module, QKVParallelLinear):
        return sum(module.output_sizes) - sum(_repeated(module, part) for part in (1, 2))
    return module.output_size


def own_inputs(module: LinearBase, inputs: torch.Tensor) -> torch.Tensor:
    """The part of (rows, input_size) inputs that this worker's part of the module takes."""
    if not isinstance(module, RowParallelLinear) or module.tp_size == 1 or not module.input_is_parallel:
        return inputs
    size = module.input_size_per_partition
    return inputs[:, module.tp_rank * size : (module.tp_rank + 1) * size]


def gathered(module: LinearBase, outputs: torch.Tensor) -> torch.Tensor:
    """(rows, outputs) of the whole module from this worker's part of them."""
    if not isinstance(module, ColumnParallelLinear) or module.tp_size == 1 or module.gather_output:
        return outputs
    sizes = getattr(module, "output_sizes", None) or [module.output_size]
    parts = outputs.split([size // module.tp_size for size in sizes], dim=-1)
    return torch.cat([_gathered_part(module, i, part) for i, part in enumerate(parts)], dim=-1)


def gathered_vocabulary(module: Any, logits: torch.Tensor) -> torch.Tensor:
    """(rows, vocabulary with its padding) logits of a whole head from this worker's part of them."""
    return logits if module.tp_size == 1 else tensor_model_parallel_all_gather(logits.contiguous(), -1)


def _gathered_part(module: Any, number: int, part: torch.Tensor) -> torch.Tensor:
    found = tensor_model_parallel_all_gather(part.contiguous(), -1)
    if not _repeated(module, number):
        return found
    # Neighbouring workers hold copies of one head.
    by_worker = found.view(len(found), module.tp_size, -1)
    return by_worker[:, :: module.num_kv_head_replicas].flatten(1)


def _repeated(module: Any, number: int) -> int:
    """How many outputs of a part are copies of others."""
    if not isinstance(module, QKVParallelLinear) or number == 0 or module.num_kv_head_replicas == 1:
        return 0
    size = module.output_sizes[number]
    return size - size // module.num_kv_head_replicas
