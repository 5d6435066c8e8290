"""vLLM's engine: how its settings are built and its backends registered, and what is read of its state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def build_engine(arguments: Mapping[str, Any]) -> None:
    """Let vLLM build its settings from arguments of `vllm.LLM`, and choose the loader of the weights. No weight is read.

    Raises:
        Exception: of vLLM, about a value that it cannot use.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.usage.usage_lib import UsageContext

    get_model_loader(EngineArgs(**arguments).create_engine_config(UsageContext.LLM_CLASS).load_config)


def register_backends(module: str, classes: Mapping[str, str]) -> None:
    """Register weight-transfer backends. It may be called several times.

    Args:
        module: the module in which the classes stand. vLLM imports it when it uses one of them.
        classes: the name of the class of each backend.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for backend, name in classes.items():
        if backend not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(backend, module, name)


def read_environment_again() -> None:
    """vLLM reads the environment once per process, also that of an earlier engine. Let it read the present one."""
    from vllm import envs

    envs.disable_envs_cache()


def end_steps(engine: Any) -> None:
    """Wait for the steps that an `LLMEngine` in this process has begun ahead of their turn, and drop their results."""
    while engine.engine_core.engine_core.batch_queue:
        engine.step()


def shut_down(engine: Any) -> None:
    """End the processes and release the memory of an `LLMEngine`."""
    engine.engine_core.shutdown()


def has_open_update(worker: Any) -> bool:
    """Whether a worker's weight update has begun and not ended. vLLM would refuse a further one."""
    return worker._weight_update_active
