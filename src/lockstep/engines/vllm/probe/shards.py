"""Gathers the outputs of a module that vLLM's tensor parallelism has split over several workers.

`engines/vllm/probe/modules.py` calls these functions in every worker at the same time and in the same order, because they gather
the parts of all workers. With one worker nothing is gathered.
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
    """Number of outputs of a whole linear module. If several workers hold copies of a key or value head, it counts once."""
    return sum(whole_parts(module))


def whole_parts(module: LinearBase) -> list[int]:
    """Number of outputs of each part of a fused linear module. A module that is not fused has one part."""
    sizes = getattr(module, "output_sizes", None) or [module.output_size]
    return [size - _repeated(module, part) for part, size in enumerate(sizes)]


def own_inputs(module: LinearBase, inputs: torch.Tensor) -> torch.Tensor:
    """The columns of the (rows, input_size) inputs that this worker's part of the module uses."""
    if not isinstance(module, RowParallelLinear) or module.tp_size == 1 or not module.input_is_parallel:
        return inputs
    size = module.input_size_per_partition
    return inputs[:, module.tp_rank * size : (module.tp_rank + 1) * size]


def gathered(module: LinearBase, outputs: torch.Tensor) -> torch.Tensor:
    """(rows, outputs) outputs of the whole module, gathered from all workers."""
    if not isinstance(module, ColumnParallelLinear) or module.tp_size == 1 or module.gather_output:
        return outputs
    sizes = getattr(module, "output_sizes", None) or [module.output_size]
    parts = outputs.split([size // module.tp_size for size in sizes], dim=-1)
    return torch.cat([_gathered_part(module, i, part) for i, part in enumerate(parts)], dim=-1)


def gathered_vocabulary(module: Any, logits: torch.Tensor) -> torch.Tensor:
    """(rows, padded vocabulary) logits of the whole head, gathered from all workers."""
    return logits if module.tp_size == 1 else tensor_model_parallel_all_gather(logits.contiguous(), -1)


def _gathered_part(module: Any, number: int, part: torch.Tensor) -> torch.Tensor:
    found = tensor_model_parallel_all_gather(part.contiguous(), -1)
    if not _repeated(module, number):
        return found
    # Workers with consecutive ranks hold copies of the same head.
    by_worker = found.view(len(found), module.tp_size, -1)
    return by_worker[:, :: module.num_kv_head_replicas].flatten(1)


def _repeated(module: Any, number: int) -> int:
    """Number of outputs of a part that are copies of other outputs."""
    if not isinstance(module, QKVParallelLinear) or number == 0 or module.num_kv_head_replicas == 1:
        return 0
    size = module.output_sizes[number]
    return size - size // module.num_kv_head_replicas
