"""Runs a model's forward in float64 or float32, with weights that are moved a little, and without changing the model.

A weight is widened when an operation reads it, so that only a few wide weights exist at a time, and the live weights
stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_ATEN = torch.ops.aten
# PyTorch compares the dtypes of their arguments before a dispatch mode sees them.
_CONVOLUTIONS = {
    getattr(torch, name)
    for name in ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
}


@dataclass(frozen=True, slots=True)
class Move:
    """A change of one tensor: `size` × rows ⊗ columns. A vector changes by `size` × rows.

    Attributes:
        rows: (R,) float64, along the first dimension.
        columns: (C,) float64, along all others; None for a vector.
    """

    size: float
    rows: torch.Tensor
    columns: torch.Tensor | None

    def add_to(self, wide: torch.Tensor) -> torch.Tensor:
        """Change a contiguous tensor in place."""
        rows = self.rows.to(wide.dtype)
        if self.columns is None:
            return wide.add_(rows.view_as(wide), alpha=self.size)
        wide.view(len(rows), -1).addr_(rows, self.columns.to(wide.dtype), alpha=self.size)
        return wide

    def of_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The change of some rows."""
        assert self.columns is not None
        return self.size * self.rows[ids].unsqueeze(-1) * self.columns


class Widened(TorchDispatchMode):
    """A context in which every operation of PyTorch computes in a wider dtype. Gradients must be off.

    Operations of other libraries, such as those that unpack 4-bit weights, run as they are.

    Args:
        moves: how weights are changed, by the id of the tensor.
        dtype: float64 or float32. Tensors of a wider dtype stay as they are.
    """

    def __init__(self, moves: Mapping[int, Move], dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self._moves, self._dtype = moves, dtype
        self._narrow = _FLOATS[_FLOATS.index(dtype) + 1 :]
        self._functions, self._unmoved = _Functions(self), 0

    def __enter__(self) -> Widened:
        self._functions.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._functions.__exit__(*error)

    def move_of(self, value: torch.Tensor) -> Move | None:
        """How a tensor is changed; None: it stays as it is."""
        return None if id(value) == self._unmoved else self._moves.get(id(value))

    @contextmanager
    def unmoved(self, value: torch.Tensor) -> Iterator[None]:
        """A context in which one tensor is not changed."""
        self._unmoved = id(value)
        try:
            yield
        finally:
            self._unmoved = 0

    def widen(self, value: Any) -> Any:
        """A tensor in the wider dtype. A tensor that has it already is changed only by the operation that reads it."""
        return value.to(self._dtype) if isinstance(value, torch.Tensor) and value.dtype in self._narrow else value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func.namespace != "aten":
            return func(*args, **kwargs)
        if func is _ATEN.embedding.default:
            return self._rows(func, *args, **kwargs)
        if func._schema.is_mutable:
            return func(*self._as_written(func, args), **kwargs)
        if kwargs.get("dtype") in self._narrow:
            kwargs["dtype"] = self._dtype
        args, kwargs = _each(self._wide, args), {name: _each(self._wide, value) for name, value in kwargs.items()}
        if func is _ATEN._grouped_mm.default:
            return _products(*args, **kwargs)
        return func(*args, **kwargs)

    def _wide(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        move = self.move_of(value)
        if move is not None:
            dtype = torch.promote_types(value.dtype, self._dtype)
            return move.add_to(value.to(dtype, memory_format=torch.contiguous_format, copy=True))
        return value.to(self._dtype, memory_format=torch.contiguous_format) if value.dtype in self._narrow else value

    def _rows(self, func: Any, weight: torch.Tensor, ids: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        """An embedding reads a few rows. The whole matrix need not be wide."""
        found = func(weight, ids, *rest, **more)
        found = found.to(torch.promote_types(found.dtype, self._dtype))
        move = self.move_of(weight)
        return found if move is None else found + move.of_rows(ids).to(found.dtype)

    def _as_written(self, func: Any, args: Any) -> list[Any]:
        """The arguments of an operation that writes: what it reads gets the dtype of what it writes."""
        written = [a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments][: len(args)]
        dtypes = [
            value.dtype
            for value, is_written in zip(args, written, strict=True)
            if is_written and isinstance(value, torch.Tensor)
        ]
        target = dtypes[0] if dtypes else self._dtype

        def read(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.is_floating_point() and target.is_floating_point:
                return self._wide(value).to(target)
            return value

        return [value if is_written else _each(read, value) for value, is_written in zip(args, written, strict=True)]


class _Functions(TorchFunctionMode):
    """A context for functions whose arguments are changed before a dispatch mode sees them.

    Convolutions get arguments of one dtype, before PyTorch compares them. The product with a moved matrix is that with the matrix,
    plus that with the move, which is an outer product. So the matrix is not copied.
    """

    def __init__(self, widened: Widened) -> None:
        super().__init__()
        self._widened = widened

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear and len(args) >= 2:
            return self._linear(func, *args, **kwargs)
        if func in _CONVOLUTIONS:
            widen = self._widened.widen
            args, kwargs = [widen(a) for a in args], {name: widen(a) for name, a in kwargs.items()}
        return func(*args, **kwargs)

    def _linear(self, func: Any, rows: torch.Tensor, weight: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        move = self._widened.move_of(weight)
        if move is None or move.columns is None:
            return func(rows, weight, *rest, **more)
        with self._widened.unmoved(weight):
            found = func(rows, weight, *rest, **more)
        along = self._widened.widen(rows) @ move.columns.to(found.dtype)
        return found + along.unsqueeze(-1) * (move.size * move.rows).to(found.dtype)


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    """A value with every leaf changed. Arguments of PyTorch's operations nest in nothing but lists; its own `tree_map` is slow."""
    if isinstance(value, (list, tuple)):
        return [_each(change, part) for part in value]
    return change(value)


def _products(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
    """(T, N) products of groups of rows, each with its own (K, N) matrix. PyTorch's operation takes no float64.

    Args:
        ends: (E,) where each group of rows ends.
    """
    bounds = [0, *ends.tolist()]
    pairs = zip(bounds[:-1], bounds[1:], matrices, strict=True)
    found = rows.new_zeros(len(rows), matrices.shape[-1])
    for start, end, matrix in pairs:
        found[start:end] = rows[start:end] @ matrix
    return found
