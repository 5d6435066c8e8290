"""The calls into DeepSpeed. They import it when the first model is sharded, because the import takes long."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from lockstep.errors import InputError
from lockstep.progress import waiting


def begin(device: torch.device) -> None:
    """Let DeepSpeed use this run's process groups and the device's kind."""
    # DeepSpeed chooses between a CPU and a GPU when it is first imported.
    with _environment("DS_ACCELERATOR", device.type):
        import deepspeed

    chosen = deepspeed.accelerator.get_accelerator().device_name()
    if chosen != device.type:
        raise InputError(
            f"DeepSpeed has chosen {chosen}, and the run computes on {device.type}: set DS_ACCELERATOR={device.type}"
        )
    # DeepSpeed calls functions of torch by names that torch has replaced.
    deprecated = r"`torch\.distributed\.\w+` is deprecated"
    warnings.filterwarnings("ignore", message=deprecated, category=FutureWarning)
    # It would compile a kernel for inference with g++, and open shared memory, neither of which is used here.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.comm.init_distributed(
        dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False, dist_init_required=False
    )


def partition(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[Any]:
    """Partition tensors over the ranks of a group. Rank 0's values count. Every rank calls.

    Args:
        tensors: floating-point ones, whose first dimension is a multiple of the number of ranks, in memory of their
            own.

    Returns:
        DeepSpeed's parameters. They have no memory beside this rank's parts (`part_of`).
    """
    import deepspeed

    parameters = [torch.nn.Parameter(tensor, requires_grad=False) for tensor in tensors]
    # `Init` reads LOCAL_RANK, which launchers set. Left behind, it would make later runs of a process without a
    # launcher wait for other ranks. Without `mem_efficient_linear=False`, `Init` would replace
    # torch.nn.functional.linear in the whole process.
    with _environment("LOCAL_RANK", "0"):
        deepspeed.zero.Init(
            module=torch.nn.ParameterList(parameters),
            data_parallel_group=group,
            mem_efficient_linear=False,
            dtype=torch.float32,
        )
    return parameters


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """In this context, a variable of the environment has a value. If it has one already, that one stays."""
    there = name in os.environ
    os.environ.setdefault(name, value)
    try:
        yield
    finally:
        if not there:
            del os.environ[name]


def part_of(parameter: Any) -> torch.Tensor:
    """This rank's part of a partitioned parameter, flat, in DeepSpeed's own memory."""
    return parameter.ds_tensor


def send_as(parameter: Any, dtype: torch.dtype) -> None:
    """Let gathers of a parameter send its elements in another dtype, as DeepSpeed does for `torch_autocast`."""
    from deepspeed.runtime.torch_autocast import PARAM_COMM_DTYPE_ATTR_NAME

    setattr(parameter, PARAM_COMM_DTYPE_ATTR_NAME, dtype)


def gather(parameters: Sequence[Any]) -> None:
    """Gather parameters from all ranks, so that their `data` is whole. Every rank calls with the same parameters."""
    with waiting("every rank's part of a tensor"):
        parameters[0].all_gather_coalesced(parameters).wait()


def free(parameters: Sequence[Any]) -> None:
    """Free the memory of gathered parameters. Changes of it are lost."""
    parameters[0].partition(list(parameters))


def is_partitioned(parameter: Any) -> bool:
    """Whether a parameter has no memory beside this rank's part."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    return parameter.ds_status is ZeroParamStatus.NOT_AVAILABLE and parameter.numel() == 0


def reduce_scatter(summands: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part of the sum over ranks. Every rank calls.

    Args:
        summands: (ranks × n,) what this rank adds to each rank's part.

    Returns:
        (n,) the sum. DeepSpeed's own `reduce_scatter_coalesced` would divide it by the number of ranks, with a
        rounding.
    """
    from deepspeed import comm

    found = summands.new_empty(summands.numel() // dist.get_world_size(group))
    comm.reduce_scatter_fn(found, summands, group=group)
    return found
