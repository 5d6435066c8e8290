"""Entry point that vLLM calls in every process it starts (group `vllm.general_plugins` in pyproject.toml)."""

from collections.abc import Callable
from typing import TypeVar

import torch

from lockstep.engines.vllm.arguments import IN_PROCESS_BACKEND, SERVER_BACKEND
from lockstep.engines.vllm.port.kept_ids import carry_kept_ids
from lockstep.engines.vllm.port.patches import find_files_by_name, register_norms
from lockstep.engines.vllm.workers.environment import (
    end_with_trainer,
    end_without_carriers,
    keep_files_together,
)
from lockstep.models.cuda import prepare_cuda

Result = TypeVar("Result")
_CLASSES = {IN_PROCESS_BACKEND: "InProcessWeightTransfer", SERVER_BACKEND: "ServerWeightTransfer"}


def _run_in_this_process(function: Callable[[], Result]) -> Result:
    return function()


def register() -> None:
    """Register our weight-transfer backends and norms with vLLM, make vLLM pass on the kept ids, and find a model's files by name.
    On a GPU, convolutions round here as they do in the trainer.

    vLLM may call this several times. In a worker process beside a trainer, also let the process end when the trainer dies.
    A process that cannot answer any more ends too.
    """
    prepare_cuda()
    end_with_trainer()
    end_without_carriers()
    keep_files_together()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.models import registry

    # vLLM inspects a model's class in a separate process, so that CUDA is not started too early. A CPU build has no CUDA. There
    # the separate process would import all of vLLM again, without `lockstep.other_builds`.
    if torch.version.cuda is None and torch.version.hip is None:
        registry._run_in_subprocess = _run_in_this_process

    # Linux lets a process use AMX only after the process has requested it. oneDNN makes this request; vLLM's own bf16 kernels do
    # not. Small models use only vLLM's kernels. Without this request their workers die of an illegal instruction (vLLM 0.32.0).
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
    for backend, name in _CLASSES.items():
        if backend not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(backend, "lockstep.engines.vllm.receive", name)
    carry_kept_ids()
    register_norms()
    find_files_by_name()
