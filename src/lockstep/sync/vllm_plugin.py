"""Entry point that vLLM calls in every process it starts (group `vllm.general_plugins` in pyproject.toml)."""

import torch

from lockstep.engines.vllm_arguments import IN_PROCESS_BACKEND, SERVER_BACKEND

_CLASSES = {IN_PROCESS_BACKEND: "InProcessWeightTransfer", SERVER_BACKEND: "ServerWeightTransfer"}


def register() -> None:
    """Make our weight transfers known to vLLM; safe to call twice, as vLLM does."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    # Linux lets a process use AMX once it has asked. oneDNN asks, vLLM's own bf16 kernels do not: where a model needs
    # nothing but them, as small ones do, the worker died of an illegal instruction (vLLM 0.32.0).
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
    for backend, name in _CLASSES.items():
        if backend not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(backend, "lockstep.sync.vllm_backend", name)
