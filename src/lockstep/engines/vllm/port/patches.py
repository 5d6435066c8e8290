"""What Lockstep changes in vLLM, beside the sampler (`kept_ids.py`) and adapters (`lora.py`).

- The compiler on a CPU. vLLM 0.32.0 does two things for it even with `enforce_eager`, which take seconds of its
  start. Its import loads the compiler's table of operations and adds its own operations: `import_without_compiler`
  prevents this. Its sampler computes the rank of each token, the number of tokens that are at least as probable, with
  a function that it compiles at its first call, and again for each new kind of input. Lockstep does not use ranks:
  `count_without_compiling` replaces the function by one of NumPy, which is as fast as the compiled one. PyTorch's own
  operations would take ten times as long.
- Model classes of transformers. For some architectures vLLM has no model of its own (Phi, GPT-NeoX, OLMo 2, …). It
  then makes the model of transformers, and replaces `__init__` and `__call__` of its class, for `torch.compile`. The
  trainer's model has the same class, so that its calls would fail or skip its hooks. After `own_classes_for_vllm`,
  vLLM's model has a new class with the replaced methods, and the class of transformers is as before.
- RMS norms on a CPU. vLLM's default there is about ten of PyTorch's operations for each norm. vLLM has kernels
  (`_C.rms_norm`, `_C.fused_add_rms_norm`) and uses them on GPUs only. `register_norms` adds them to vLLM's list of
  implementations (its IR operations). A norm that they do not support is computed by vLLM's default. On processors
  with AVX-512 and without its BF16 instructions, vLLM's kernels cut bits off where they should round; there they
  compute no bf16.
- Files of a model whose directory has `[`, `*` or `?` in its name. vLLM 0.32.0 joins the directory and a pattern such
  as `*.safetensors`, and reads all of it as a pattern. It then finds no files, or those of another directory.
- Processes: the trainer's process group, threads that end by an error, and the file through which processes meet.
"""

from __future__ import annotations

import glob
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import torch

Result = TypeVar("Result")
_SOCKETS = "VLLM_RPC_BASE_PATH"
_TABLE = "torch._inductor.lowering"


def import_without_compiler() -> None:
    """Import vLLM without the compiler's table of operations. vLLM then skips its own operations too."""
    if _TABLE in sys.modules or "vllm" in sys.modules:
        return
    # If `sys.modules` holds None for a module, Python raises ImportError for its import.
    sys.modules[_TABLE] = None  # type: ignore[assignment]
    try:
        import vllm  # noqa: F401
    finally:
        del sys.modules[_TABLE]


def count_at_least(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """(rows,) int64: how many values of each row of `x` (rows, V) are at least the row's one in `values` (rows, 1)."""
    at_least = (x >= values).numpy()
    return torch.tensor([np.count_nonzero(row) for row in at_least], dtype=torch.int64)


def count_without_compiling() -> None:
    """Let vLLM's sampler count ranks with `count_at_least`, in the process that samples, after vLLM is imported."""
    from vllm.v1.sample import sampler

    sampler.batched_count_greater_than = count_at_least


@contextmanager
def own_classes_for_vllm() -> Iterator[Callable[[torch.nn.Module], None]]:
    """At the end of the context, restore the classes of transformers that vLLM has changed inside it.

    Yields a function to call inside the context: it gives each module of vLLM's model whose class was changed a new
    class.
    """
    from vllm.model_executor.models.transformers.base import Base

    decorate = Base._decorate_cls_for_torch_compile
    before: dict[type, tuple[tuple[type, ...], dict[str, Any]]] = {}

    def record_and_decorate(self: Any, cls: type, *args: Any, **kwargs: Any) -> None:
        before.setdefault(cls, (cls.__bases__, dict(vars(cls))))
        decorate(self, cls, *args, **kwargs)

    def separate(model: torch.nn.Module) -> None:
        own = {cls: _subclass(cls, *kept) for cls, kept in before.items()}
        for module in model.modules():
            module.__class__ = own.get(type(module), type(module))

    with patch.object(Base, "_decorate_cls_for_torch_compile", record_and_decorate):
        try:
            yield separate
        finally:
            for cls, (bases, attributes) in before.items():
                for name in _changed(cls, attributes):
                    if name in attributes:
                        setattr(cls, name, attributes[name])
                    else:
                        delattr(cls, name)
                cls.__bases__ = bases


def _subclass(cls: type, bases: tuple[type, ...], attributes: Mapping[str, Any]) -> type:
    """A subclass of `cls` with the changes that `cls` has had since it had these bases and attributes."""
    added = tuple(base for base in cls.__bases__ if base not in bases)
    return type(cls.__name__, (cls, *added), _changed(cls, attributes))


def _changed(cls: type, attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in vars(cls).items() if attributes.get(name) is not value}


# The name of these implementations in vLLM's `ir_op_priority`.
CPU_NORMS = "lockstep_cpu"
# The kernels read vectors of this many numbers.
_VECTOR = 16


def register_norms() -> None:
    """Register the kernels with vLLM. It may be called several times."""
    from vllm import ir

    if CPU_NORMS in ir.ops.rms_norm.impls:
        return
    usable = not torch.cuda.is_available()
    ir.ops.rms_norm.register_impl(CPU_NORMS, supported=usable, supports_args=_supports_norm)(_norm)
    ir.ops.fused_add_rms_norm.register_impl(
        CPU_NORMS, supported=usable, supports_args=_supports_sum, inplace=True
    )(_norm_of_sum)


def _supports_norm(x: Any, weight: Any, epsilon: float, variance_size: int | None = None) -> bool:
    fits = (
        variance_size is None
        and weight is not None
        and weight.dtype == x.dtype
        and x.shape[-1] % _VECTOR == 0
    )
    return fits and (x.dtype == torch.float32 or kernels_round(x.dtype))


@cache
def kernels_round(dtype: torch.dtype) -> bool:
    """Whether vLLM's kernels round a sum of this dtype to the nearest number on this processor."""
    ones, parts = (
        torch.ones(1, _VECTOR, dtype=dtype),
        torch.full((1, _VECTOR), 0.75 * torch.finfo(dtype).eps, dtype=dtype),
    )
    due = ones + parts
    torch.ops._C.fused_add_rms_norm(parts, ones, torch.ones(_VECTOR, dtype=dtype), 1e-5)
    return torch.equal(ones, due)


def _norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    x = x.contiguous()
    result = torch.empty_like(x)
    torch.ops._C.rms_norm(result, x, weight, epsilon)
    return result


def _supports_sum(
    x: Any, x_residual: Any, weight: Any, epsilon: float, variance_size: int | None = None
) -> bool:
    whole = x.is_contiguous() and x_residual.is_contiguous() and x_residual.dtype == x.dtype
    return whole and _supports_norm(x, weight, epsilon, variance_size)


def _norm_of_sum(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


def find_files_by_name() -> None:
    """Let the modules of vLLM that search a model's directory take its name as it is. Safe to call again."""
    from vllm.model_executor.model_loader import default_loader, weight_utils

    for module in (default_loader, weight_utils):
        module.glob = SimpleNamespace(glob=_in_directory)


def _in_directory(pattern: str) -> list[str]:
    """The files of a directory whose names match the last part of a pattern."""
    directory, names = os.path.split(pattern)
    return glob.glob(os.path.join(glob.escape(directory), names))


def keep_process_group() -> None:
    """Let vLLM leave a process group alone that it has not made.

    When an engine is closed, or could not start, vLLM 0.32.0 destroys the default process group of this process. If
    the model is in worker processes, this is the group of the trainer's ranks.
    """
    from vllm.distributed import parallel_state

    destroy = parallel_state.destroy_distributed_environment
    if hasattr(destroy, "lockstep_keeps"):
        return

    def destroy_own() -> None:
        if parallel_state._WORLD is not None:
            destroy()

    destroy_own.lockstep_keeps = True  # type: ignore[attr-defined]
    parallel_state.destroy_distributed_environment = destroy_own


# Threads of vLLM that carry the messages of a process, by a part of their names.
_CARRIERS = ("process_input_sockets", "process_output_sockets", "WorkerAsyncOutputCopy")


def end_without_carriers() -> None:
    """Let a process of vLLM end when a thread that carries its messages ends by an error, such as a bad answer.

    Otherwise the process would live on and answer nothing, and vLLM's health check would not notice it (vLLM 0.32.0).
    """
    report = threading.excepthook
    if hasattr(report, "lockstep_ends"):
        return

    def end(failed: threading.ExceptHookArgs) -> None:
        report(failed)
        if failed.thread is not None and any(name in failed.thread.name for name in _CARRIERS):
            os.kill(os.getpid(), signal.SIGKILL)

    end.lockstep_ends = True  # type: ignore[attr-defined]
    threading.excepthook = end


def keep_files_together() -> None:
    """Let vLLM put the file through which its processes meet into the engine's private folder, if there is one."""
    from vllm.utils import network_utils

    class Folder:
        @staticmethod
        def gettempdir() -> str:
            return os.environ.get(_SOCKETS) or tempfile.gettempdir()

    # The module uses nothing else of it.
    network_utils.tempfile = Folder


def inspect_classes_here() -> None:
    """Let vLLM inspect a model's class in this process, if this build of PyTorch has no GPU.

    vLLM does it in a separate process, so that CUDA is not started too early. On a build for CPUs that process would
    only import all of vLLM again, without `lockstep.start_up`.
    """
    from vllm.model_executor.models import registry

    if torch.version.cuda is None and torch.version.hip is None:
        registry._run_in_subprocess = _run_in_this_process


def _run_in_this_process(function: Callable[[], Result]) -> Result:
    return function()


def request_amx() -> None:
    """Let the kernel allow AMX, as oneDNN asks and vLLM's own bf16 kernels do not (vLLM 0.32.0).

    Workers of small models, which use only vLLM's kernels, would die of an illegal instruction.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
