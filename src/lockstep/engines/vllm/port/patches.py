"""Two functions that stop vLLM from compiling on a CPU although `enforce_eager` is set. They save seconds of its start.

vLLM 0.32.0 does two things for the compiler even with `enforce_eager`:

- Its import loads the compiler's table of operations and adds its own operations. `import_without_compiler` prevents this.
- Its sampler computes the rank of each token: the number of tokens that are at least as probable. Lockstep does not use ranks. vLLM
  compiles the function that computes them at its first call, and again for each new kind of input. `count_without_compiling`
  replaces it by a function of NumPy, which is as fast as the compiled one. PyTorch's own operations would take ten times as long.

Keeps transformers' model classes as they are while vLLM runs a model in the trainer's process.

For some architectures vLLM has no model of its own (Phi, GPT-NeoX, OLMo 2, …). It then uses its Transformers backend: it makes the
model of transformers, and replaces `__init__` and `__call__` of the model's class, for `torch.compile`. The trainer's model has the
same class, so that its calls would fail or skip its hooks. `engines/vllm/in_process.py` starts vLLM inside the context manager of
this module. Afterwards vLLM's model has a new class with the replaced methods, and the class of transformers is as before.

RMS norms of vLLM on a CPU, in one kernel each. vLLM's default there is about ten of PyTorch's operations for each norm.

vLLM has the kernels (`_C.rms_norm`, `_C.fused_add_rms_norm`) and uses them on GPUs only. `register_norms` adds them to
vLLM's list of implementations (vLLM's IR operations), in every process of an engine. An engine asks for them by name.
A norm that they do not support is computed by vLLM's default. On processors with AVX-512 and without its BF16
instructions, vLLM's kernels cut bits off where they should round; there they compute no bf16.

Lets vLLM find the files of a model whose directory has `[`, `*` or `?` in its name.

vLLM 0.32.0 joins the directory and a pattern such as `*.safetensors`, and reads all of it as a pattern. It then finds
no files, or those of another directory. `find_files_by_name` is called in every process of vLLM.
"""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

_TABLE = "torch._inductor.lowering"


def import_without_compiler() -> None:
    """Import vLLM without the compiler's table of operations. vLLM skips its own operations if the table cannot be imported."""
    if _TABLE in sys.modules or "vllm" in sys.modules:
        return
    # If `sys.modules` holds None for a module, Python raises ImportError for its import.
    sys.modules[_TABLE] = None  # type: ignore[assignment]
    try:
        import vllm  # noqa: F401
    finally:
        del sys.modules[_TABLE]


def count_at_least(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """(rows,) int64 number of values in each row of `x` that are at least the row's value in `values`.

    Args:
        x: (rows, V) values on a CPU.
        values: (rows, 1) value of each row.
    """
    at_least = (x >= values).numpy()
    return torch.tensor([np.count_nonzero(row) for row in at_least], dtype=torch.int64)


def count_without_compiling() -> None:
    """Let vLLM's sampler count ranks with `count_at_least`. Called after vLLM is imported, in the process that samples."""
    from vllm.v1.sample import sampler

    sampler.batched_count_greater_than = count_at_least


@contextmanager
def own_classes_for_vllm() -> Iterator[Callable[[torch.nn.Module], None]]:
    """At the end of the context, restore the classes of transformers that vLLM has changed inside it.

    Yields a function. Call it inside the context with vLLM's model: it gives each module whose class was changed a new class.
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
    ir.ops.fused_add_rms_norm.register_impl(CPU_NORMS, supported=usable, supports_args=_supports_sum, inplace=True)(
        _norm_of_sum
    )


def _supports_norm(x: Any, weight: Any, epsilon: float, variance_size: int | None = None) -> bool:
    fits = variance_size is None and weight is not None and weight.dtype == x.dtype and x.shape[-1] % _VECTOR == 0
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


def _supports_sum(x: Any, x_residual: Any, weight: Any, epsilon: float, variance_size: int | None = None) -> bool:
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
    """Let the modules of vLLM that search a model's directory take its name as it is. It may be called several times."""
    from vllm.model_executor.model_loader import default_loader, weight_utils

    for module in (default_loader, weight_utils):
        module.glob = SimpleNamespace(glob=_in_directory)


def _in_directory(pattern: str) -> list[str]:
    """The files of a directory whose names match the last part of a pattern."""
    directory, names = os.path.split(pattern)
    return glob.glob(os.path.join(glob.escape(directory), names))
